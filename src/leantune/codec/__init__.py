"""How a tensor is kept in few bits: trits, ternary blocks, log-ternary blocks, roundings, counter hash, tiles."""

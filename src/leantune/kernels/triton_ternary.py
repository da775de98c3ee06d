"""One step of a ternary parameter as Triton kernels, and the sums over rows and columns that it needs.

The decisions (what is rounded, when, from which stored value) are those of leantune/codec and
leantune/optim/ternary_adamw.py, which say why. leantune/kernels/gpu.py launches what is here.

A program of `step_kernel` has ``ROWS`` rows of one group: five blocks of ``BLOCK`` columns, whose trits share bytes. It
goes through the group a block at a time, as a tile (ROWS, BLOCK), and reads and writes everything once. Inside a
program a group's trits are always "by block": digit b of number j is the trit of element j of block b. That is how a
full group is stored; the last, partial group of a row is converted at both ends.

Column factors come as two fp32 vectors (cols,), 0 in dead columns: ``times``, f that the stored second moment is
relative to, and ``over``, 1 / f that it is coded relative to now.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(5)
_OCTAVE = tl.constexpr(8388608.0)
_FLOOR = tl.constexpr(2.0**-10)
_TINY = tl.constexpr(2.0**-126)
_LEAST_SPREAD = tl.constexpr(1e-6)
_EMPTY = tl.constexpr(2.0**-124)
_FLOOR_SHIFT = tl.constexpr(2.0**-18 - 0.5)
_ROUNDER = tl.constexpr(12582912.0)
_LARGEST_LEVEL = tl.constexpr((0x7F7F0000 - 8 * (1 << 23)) >> 16)
_LEAST_RAISE = tl.constexpr(8)
_FIRST_STEP = tl.constexpr(1.22)
_THRESHOLD = tl.constexpr(0.612)
RUNTIME = ("rows", "cols", "grad_row", "grad_column", "bytes_per_row", "blocks_per_row", "key", "first_row")
"""Arguments whose value must not make another compiled kernel. ``cols`` and ``grad_row`` are in units of 16 elements
where ``ALIGNED``."""


# -- numbers as bits ------------------------------------------------------------------------------------------------


@triton.jit
def _bf16_bits(value):
    """The bfloat16 nearest to a finite fp32, as the low 16 bits of an int32."""
    bits = value.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int32)


@triton.jit
def _of_bf16_bits(bits):
    """fp32 from the low 16 bits of an int32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _as_bf16(bits):
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _splitmix64(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _random_bits(row_key, block, element):
    """uint32 (rows, BLOCK): bits of the elements of this block; ``row_key`` (rows,) is splitmix64(row ^ key)."""
    seed = _splitmix64(row_key ^ block.to(tl.uint64)).to(tl.uint32)
    word = (element >> 4) * 8 + (element & 7)
    bits = seed[:, None] ^ (word.to(tl.uint32) * 0x9E3779B9)[None, :]
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    return tl.where(((element & 8) == 0)[None, :], bits, (bits << 16) | (bits >> 16))


# -- trits ----------------------------------------------------------------------------------------------------------


@triton.jit
def _digit_of(packed, digit):
    """Digit number ``digit`` (0 to 4) of a byte below 243: floor(b / 3^k) - 3 floor(b / 3^(k + 1)), by products that
    are exact in that range."""
    over = tl.where(digit == 0, 65536, tl.where(digit == 1, 21846, 7282))
    over = tl.where(digit == 3, 2428, tl.where(digit == 4, 810, over))
    next_over = tl.where(digit == 0, 21846, tl.where(digit == 1, 7282, 2428))
    next_over = tl.where(digit == 3, 810, tl.where(digit == 4, 0, next_over))
    return ((packed * over) >> 16) - 3 * ((packed * next_over) >> 16)


@triton.jit
def _stored_digits(trits, at, element, width, present):
    """int32 digits (0, 1, 2; 1 where absent) of ``element`` (BLOCK,) of a group whose bytes start at ``at`` (rows,) and
    that packs ``width`` bytes."""
    digit = (element >= width).to(tl.int32) + (element >= 2 * width).to(tl.int32)
    digit += (element >= 3 * width).to(tl.int32) + (element >= 4 * width).to(tl.int32)
    byte = element - digit * width
    packed = tl.load(trits + at[:, None] + byte[None, :], mask=present, other=121).to(tl.int32)
    return _digit_of(packed, digit[None, :])


@triton.jit
def _load_by_block(trits, at, row_ok, count, width, BLOCK: tl.constexpr):
    """The trits of a group of ``count`` elements "by block", int32 (rows, BLOCK); digit 1 where absent."""
    j = tl.arange(0, BLOCK)
    packed = tl.zeros((at.shape[0], BLOCK), dtype=tl.int32)
    if count == GROUP * BLOCK:
        whole = row_ok[:, None] & (j < BLOCK)[None, :]
        packed += tl.load(trits + at[:, None] + j[None, :], mask=whole, other=121).to(tl.int32)
    else:
        power = 1
        for block in range((count + BLOCK - 1) // BLOCK):
            element = j + block * BLOCK
            present = row_ok[:, None] & (element < count)[None, :]
            packed += _stored_digits(trits, at, element, width, present) * power
            power *= 3
    return packed


@triton.jit
def _store_by_block(trits, at, row_ok, sums, count, width, BLOCK: tl.constexpr):
    """Write trits "by block", given as fp32 sums of trit 3^block (rows, BLOCK), as the group's bytes."""
    j = tl.arange(0, BLOCK)
    packed = sums.to(tl.int32) + 121
    if count != GROUP * BLOCK:
        stored = tl.zeros_like(packed)
        power = 1
        for digit in range(5):
            element = j + digit * width
            block = element // BLOCK
            # What lies past the end of the group is digit 0; of bytes that are not stored, any index will do.
            index = tl.broadcast_to((element % BLOCK)[None, :], packed.shape)
            found = _digit_of(tl.gather(packed, index, 1), block[None, :])
            stored += tl.where((element < count)[None, :], found, 0) * power
            power *= 3
        packed = stored
    mask = row_ok[:, None] & (j < width)[None, :]
    tl.store(trits + at[:, None] + j[None, :], packed.to(tl.uint8), mask=mask)


# -- the rule -------------------------------------------------------------------------------------------------------


@triton.jit
def _carried(row_factors, column_factors, row, row_ok, column, present, cols, RANK: tl.constexpr):
    """C = U V^T of a tile: U bf16 (rows, RANK), V^T bf16 (RANK, cols)."""
    total = tl.zeros(present.shape, dtype=tl.float32)
    # Each row of the tile loads V^T for itself: in the layout of the tile, where a shared load would have to be moved.
    for k in tl.static_range(RANK):
        mine = tl.load(row_factors + row * RANK + k, mask=row_ok, other=0.0).to(tl.float32)
        offset = tl.broadcast_to((k * cols + column)[None, :], present.shape)
        across = tl.load(column_factors + offset, mask=present, other=0.0).to(tl.float32)
        total += mine[:, None] * across
    return total


@triton.jit
def _of_columns(vector, column, present):
    """A fp32 vector (cols,) under a tile, (rows, BLOCK), 0 where absent; each row loads it for itself, as V^T above."""
    return tl.load(vector + tl.broadcast_to(column[None, :], present.shape), mask=present, other=0.0)


@triton.jit
def _variance(x, level, step, factors):
    """v = f L^-1(l + d x) from int32 trits (rows, BLOCK), the stored bf16 level and step (rows,), and f."""
    centre = level.to(tl.float32).to(tl.int32, bitcast=True)
    octaves = (step.to(tl.float32) * _OCTAVE).to(tl.int32)
    pattern = tl.maximum(x * octaves[:, None] + centre[:, None], 0)
    return pattern.to(tl.float32, bitcast=True) * factors


@triton.jit
def _root(value):
    """The square root of a number >= 0, within 2 units in the last place; what is below 2^-126 counts for less."""
    return value * tl.rsqrt(tl.maximum(value, _TINY))


@triton.jit
def _inverse(value):
    """1 / value within 2 units in the last place, for 2^-62 to 2^63: two instructions, where a division has ten."""
    return tl.rsqrt(value * value)


@triton.jit
def _rule(grad, momentum, variance, beta2, rest2, bias, rest1, eps):
    """(u, v) from g, u_prev and v_prev."""
    variance = variance * beta2 + rest2 * grad * grad
    normalised = grad * _inverse(_root(variance * bias) + eps)
    return momentum + rest1 * (normalised - momentum), variance


@triton.jit
def _momentum_of_block(
    q, q2, x, grad, momentum_scale, momentum_scale_2, variance_level, variance_step, carry_rows, carry_columns,
    times, row, row_ok, block, cols, grad_row, grad_column, blocks_per_row, rest1, beta2, rest2, bias, eps, grad_scale,
    BLOCK: tl.constexpr, PLANES: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """u of one block of these rows, fp32 (rows, BLOCK), zeros where absent: what the carry's products need. ``q``,
    ``q2`` (of the second plane) and ``x``: the block's trits, int32."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    present = row_ok[:, None] & (column < cols)[None, :]
    scalar = row * blocks_per_row + block
    g = _gradient(grad, row, column, present, grad_row, grad_column, grad_scale, UNIT)
    u = _carried(carry_rows, carry_columns, row, row_ok, column, present, cols, RANK)
    u += tl.load(momentum_scale + scalar, mask=row_ok, other=0.0).to(tl.float32)[:, None] * q.to(tl.float32)
    if PLANES == 2:
        u += tl.load(momentum_scale_2 + scalar, mask=row_ok, other=0.0).to(tl.float32)[:, None] * q2.to(tl.float32)
    level = tl.load(variance_level + scalar, mask=row_ok, other=0.0)
    step = tl.load(variance_step + scalar, mask=row_ok, other=0.0)
    v = _variance(x, level, step, _of_columns(times, column, present))
    u, v = _rule(g, u, v, beta2, rest2, bias, rest1, eps)
    return u


@triton.jit
def _gradient(grad, row, column, present, grad_row, grad_column, grad_scale, UNIT: tl.constexpr):
    """fp32 tile of the gradient, times ``grad_scale``; UNIT: neighbours of a row are neighbours in memory."""
    if UNIT:
        offset = (row * grad_row)[:, None] + column[None, :]
    else:
        offset = (row * grad_row)[:, None] + (column * grad_column)[None, :]
    return tl.load(grad + offset, mask=present, other=0.0).to(tl.float32) * grad_scale


# -- storing what a block became ------------------------------------------------------------------------------------


@triton.jit
def _encode_variance(v, previous, previous_step, bits, live):
    """(x as fp32, level bits, step bits) of one block from the ratios v / f (0 where absent or dead), its previous
    trits (int32, 0 where absent) and step, random bits, and which of its elements count."""
    # The sums of x, of x^2 and of what counts at once: x is -1, 0 or 1 and a block 2^8 elements at most.
    sums = tl.sum(previous + previous * previous * 4096 + live.to(tl.int32) * (1 << 22), axis=1)
    count = (sums + 2048) >> 22
    sums -= count << 22
    squares = (sums + 2048) >> 12
    once = sums - squares * 4096
    count = tl.maximum(count, 1)
    over = 1.0 / count.to(tl.float32)
    total = tl.sum(v, axis=1)
    mean = total * over
    empty = mean <= _EMPTY
    floored = tl.maximum(v, tl.maximum(mean * _FLOOR, _TINY)[:, None])
    # L(v) - L(mean v) in units of a float's pattern: a few octaves at most, so the sums are exact enough in fp32.
    base = mean.to(tl.int32, bitcast=True)
    offset = (floored.to(tl.int32, bitcast=True) - base[:, None]).to(tl.float32)
    offset = tl.where(live, offset, 0.0)
    middle = tl.sum(offset, axis=1) * over
    upper = tl.minimum((base + middle.to(tl.int32) + (1 << 15)) >> 16, _LARGEST_LEVEL)
    units = 1.0 / (_OCTAVE * _OCTAVE)
    spread = tl.maximum((tl.sum(offset * offset, axis=1) * over - middle * middle) * units, 0.0)
    # The variance of the trits, from integers: exactly 0 where all are equal.
    old = (squares * count - once * once).to(tl.float32) * (over * over)
    shared = tl.sum(offset * previous.to(tl.float32), axis=1) * over - middle * (once.to(tl.float32) * over)
    slope = shared * (1.0 / _OCTAVE) * _inverse(tl.maximum(old, _LEAST_SPREAD))
    followed = tl.where(old > 0.0, slope, previous_step)
    step = tl.where(previous_step == 0.0, _root(spread) * _FIRST_STEP, followed)
    step_bits = tl.where(empty, 0, _bf16_bits(tl.minimum(tl.maximum(step, 0.05), 8.0)))
    step = _of_bf16_bits(step_bits)
    inverse = tl.where(empty, 0.0, _inverse(tl.maximum(step, 0.01)) * (1.0 / _OCTAVE))
    # floor(position + uniform) as a rounding to nearest of that less a half: adding 1.5 2^23 leaves an integer. The
    # 2^-18 is a quarter of the uniform's unit, and keeps integers from being ties.
    shift = ((upper << 16) - base).to(tl.float32) * inverse - _FLOOR_SHIFT
    position = offset * inverse[:, None] - shift[:, None]
    position = tl.minimum(tl.maximum(position, _FLOOR_SHIFT - 1.0), _FLOOR_SHIFT + 1.0)
    uniform = (bits & 0xFFFF).to(tl.int32).to(tl.float32)
    x = tl.where(live, (position + uniform * (1.0 / 65536) + _ROUNDER) - _ROUNDER, 0.0)
    reach = tl.maximum((upper << 16) + (step * _OCTAVE).to(tl.int32), 0).to(tl.float32, bitcast=True)
    kept = tl.sum(tl.minimum(v, reach[:, None]), axis=1)
    missing = (total.to(tl.int32, bitcast=True) - kept.to(tl.int32, bitcast=True) + (1 << 15)) >> 16
    missing = tl.where(missing < _LEAST_RAISE, 0, missing)
    level_bits = tl.where(empty, 0, tl.minimum(upper + missing, _LARGEST_LEVEL))
    return x, level_bits, step_bits


@triton.jit
def _encode_momentum(residual, count):
    """(q as fp32, scale bits, s q) of one block; ``residual`` is 0 where absent."""
    threshold = (_root(tl.sum(residual * residual, axis=1) / count.to(tl.float32)) * _THRESHOLD)[:, None]
    q = tl.where(residual > threshold, 1.0, 0.0) - tl.where(residual < -threshold, 1.0, 0.0)
    number = tl.maximum(tl.sum(q * q, axis=1), 1.0)
    scale_bits = _bf16_bits(tl.sum(residual * q, axis=1) * _inverse(number))
    return q, scale_bits, _of_bf16_bits(scale_bits)[:, None] * q


@triton.jit
def _move(weight, remainder, offset, present, change, bits, decay, STOCHASTIC: tl.constexpr, REMAINDER: tl.constexpr):
    """w <- w decay - change, rounded into the weight's own format."""
    stored = tl.load(weight + offset, mask=present, other=0.0).to(tl.float32)
    if REMAINDER:
        low = tl.load(remainder + offset, mask=present, other=0).to(tl.int32) << 8
        stored = (stored.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
    moved = stored * decay - change
    pattern = moved.to(tl.uint32, bitcast=True)
    if REMAINDER:
        noise = ((bits >> 16) & 0xFF) if STOCHASTIC else 128
        units = (pattern + noise).to(tl.int32, bitcast=True) >> 8
        high = (units + 128) >> 8
        tl.store(weight + offset, _as_bf16(high), mask=present)
        tl.store(remainder + offset, (units - high * 256).to(tl.int8), mask=present)
    elif weight.dtype.element_ty == tl.float32:
        tl.store(weight + offset, moved, mask=present)
    elif STOCHASTIC:
        tl.store(weight + offset, _as_bf16((pattern + (bits >> 16)) >> 16), mask=present)
    else:
        tl.store(weight + offset, _as_bf16(_bf16_bits(moved)), mask=present)


# -- kernels --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=(*RUNTIME, "tiles_each"))
def squares_kernel(
    squares, grad,
    rows: tl.int64, cols: tl.int64, grad_row: tl.int64, grad_column: tl.int64, tiles_each: tl.int64, grad_scale,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sums of g^2 over ``tiles_each`` tiles of ROWS rows, WIDTH columns a program: squares, fp64 (chunks, cols)."""
    if ALIGNED:
        cols *= 16
        grad_row *= 16
    column = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    chunk = tl.program_id(1).to(tl.int64)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float64)
    first = chunk * tiles_each
    for tile in range(first, tl.minimum(first + tiles_each, (rows + ROWS - 1) // ROWS)):
        row = tile * ROWS + tl.arange(0, ROWS)
        present = (row < rows)[:, None] & (column < cols)[None, :]
        g = _gradient(grad, row, column, present, grad_row, grad_column, grad_scale, UNIT)
        total += (g * g).to(tl.float64)
    tl.store(squares + chunk * cols + column, tl.sum(total, axis=0), mask=column < cols)


@triton.jit(do_not_specialize=RUNTIME)
def step_kernel(
    grad, weight, remainder, momentum_trits, momentum_scale, momentum_trits_2, momentum_scale_2, variance_trits,
    variance_level, variance_step, carry_rows, carry_columns, new_rows, new_columns, times, over,
    rows: tl.int64, cols: tl.int64, grad_row: tl.int64, grad_column: tl.int64, bytes_per_row: tl.int64,
    blocks_per_row: tl.int64, key: tl.int64, first_row: tl.int64, sampled, rate, decay, beta1, rest1, beta2,
    rest2, bias, eps, grad_scale,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PLANES: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr,
    ALIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, REMAINDER: tl.constexpr,
):  # fmt: skip
    """Decode, rule, encode, move the weights. Programs: groups of a row first, then rows, ROWS at a time.

    ``rate``: lr / (1 - beta1), by which u - beta1 u_q is lr times the step. ``sampled``: 1.0 where v is stored; else
    0.0, and only blocks are stored that hold nothing yet.
    """
    if ALIGNED:
        cols *= 16
        grad_row *= 16
    groups = (blocks_per_row + GROUP - 1) // GROUP
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    row = (program // groups) * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    row_key = _splitmix64((row + first_row).to(tl.uint64) ^ key.to(tl.uint64))
    j = tl.arange(0, BLOCK)
    left = group * GROUP * BLOCK
    rest = tl.minimum(cols - left, GROUP * BLOCK).to(tl.int32)
    width = (rest + GROUP - 1) // GROUP
    at = row * bytes_per_row + group * BLOCK
    x_from = _load_by_block(variance_trits, at, row_ok, rest, width, BLOCK)
    q_from = _load_by_block(momentum_trits, at, row_ok, rest, width, BLOCK)
    x_to = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    q_to = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if PLANES == 2:
        q2_from = _load_by_block(momentum_trits_2, at, row_ok, rest, width, BLOCK)
        q2_to = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    power = 1.0
    for b in range((rest + BLOCK - 1) // BLOCK):
        block = group * GROUP + b
        column = left + b * BLOCK + j
        present = row_ok[:, None] & (column < cols)[None, :]
        count = tl.minimum(rest - b * BLOCK, BLOCK)
        scalar = row * blocks_per_row + block
        # (b * 171) >> 9 is b / 3, exact below 256.
        x_next = (x_from * 171) >> 9
        x = x_from - 3 * x_next - 1
        x_from = x_next
        q_next = (q_from * 171) >> 9
        q = (q_from - 3 * q_next - 1).to(tl.float32)
        q_from = q_next
        u = _carried(carry_rows, carry_columns, row, row_ok, column, present, cols, RANK)
        u += tl.load(momentum_scale + scalar, mask=row_ok, other=0.0).to(tl.float32)[:, None] * q
        if PLANES == 2:
            q_next = (q2_from * 171) >> 9
            q = (q2_from - 3 * q_next - 1).to(tl.float32)
            q2_from = q_next
            u += tl.load(momentum_scale_2 + scalar, mask=row_ok, other=0.0).to(tl.float32)[:, None] * q
        old_step = tl.load(variance_step + scalar, mask=row_ok, other=0.0)
        level = tl.load(variance_level + scalar, mask=row_ok, other=0.0)
        v = _variance(x, level, old_step, _of_columns(times, column, present))
        g = _gradient(grad, row, column, present, grad_row, grad_column, grad_scale, UNIT)
        # Absent elements have a gradient, trits and a carry of 0, so their u is 0.
        u, v = _rule(g, u, v, beta2, rest2, bias, rest1, eps)
        bits = _random_bits(row_key, block, j)
        stored = row_ok & (level.to(tl.float32) <= sampled * 3e38)
        if tl.max(stored.to(tl.int32), axis=0) != 0:
            inverse = _of_columns(over, column, present)
            new_x, level_bits, step_bits = _encode_variance(
                v * inverse, x, old_step.to(tl.float32), bits, inverse > 0.0
            )
            x_to += tl.where(stored[:, None], new_x, x.to(tl.float32)) * power
            tl.store(variance_level + scalar, _as_bf16(level_bits), mask=stored)
            tl.store(variance_step + scalar, _as_bf16(step_bits), mask=stored)
        else:
            x_to += x.to(tl.float32) * power
        decoded = _carried(new_rows, new_columns, row, row_ok, column, present, cols, RANK)
        new_q, scale_bits, part = _encode_momentum(u - decoded, count)
        q_to += new_q * power
        tl.store(momentum_scale + scalar, _as_bf16(scale_bits), mask=row_ok)
        decoded += part
        if PLANES == 2:
            new_q, scale_bits, part = _encode_momentum(u - decoded, count)
            q2_to += new_q * power
            tl.store(momentum_scale_2 + scalar, _as_bf16(scale_bits), mask=row_ok)
            decoded += part
        power *= 3.0
        offset = (row * cols)[:, None] + column[None, :]
        change = rate * (u - beta1 * decoded)
        _move(weight, remainder, offset, present, change, bits, decay, STOCHASTIC, REMAINDER)
    _store_by_block(variance_trits, at, row_ok, x_to, rest, width, BLOCK)
    _store_by_block(momentum_trits, at, row_ok, q_to, rest, width, BLOCK)
    if PLANES == 2:
        _store_by_block(momentum_trits_2, at, row_ok, q2_to, rest, width, BLOCK)


@triton.jit(do_not_specialize=(*RUNTIME, "groups_each"))
def product_kernel(
    product, basis, grad, momentum_trits, momentum_scale, momentum_trits_2, momentum_scale_2, variance_trits,
    variance_level, variance_step, carry_rows, carry_columns, times,
    rows: tl.int64, cols: tl.int64, grad_row: tl.int64, grad_column: tl.int64, bytes_per_row: tl.int64,
    blocks_per_row: tl.int64, groups_each: tl.int64, rest1, beta2, rest2, bias, eps, grad_scale,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PLANES: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """W = u V, summed over the ``groups_each`` groups of this program: product, fp32 (splits, rows, RANK).

    ``basis``: V, bf16 (cols, RANK).
    """
    if ALIGNED:
        cols *= 16
        grad_row *= 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    split = tl.program_id(1).to(tl.int64)
    rank = tl.arange(0, 16)
    total = tl.zeros((ROWS, 16), dtype=tl.float32)
    first = split * groups_each
    for group in range(first, tl.minimum(first + groups_each, (blocks_per_row + GROUP - 1) // GROUP)):
        rest = tl.minimum(cols - group * GROUP * BLOCK, GROUP * BLOCK).to(tl.int32)
        width = (rest + GROUP - 1) // GROUP
        at = row * bytes_per_row + group * BLOCK
        x_from = _load_by_block(variance_trits, at, row_ok, rest, width, BLOCK)
        q_from = _load_by_block(momentum_trits, at, row_ok, rest, width, BLOCK)
        q2_from = q_from
        if PLANES == 2:
            q2_from = _load_by_block(momentum_trits_2, at, row_ok, rest, width, BLOCK)
        for b in range((rest + BLOCK - 1) // BLOCK):
            block = group * GROUP + b
            # (b * 171) >> 9 is b / 3, exact below 256.
            x_next = (x_from * 171) >> 9
            q_next = (q_from * 171) >> 9
            q2_next = (q2_from * 171) >> 9
            u = _momentum_of_block(
                q_from - 3 * q_next - 1, q2_from - 3 * q2_next - 1, x_from - 3 * x_next - 1, grad, momentum_scale,
                momentum_scale_2, variance_level, variance_step, carry_rows, carry_columns, times, row, row_ok, block,
                cols, grad_row, grad_column, blocks_per_row, rest1, beta2, rest2, bias, eps, grad_scale, BLOCK, PLANES,
                RANK, UNIT,
            )  # fmt: skip
            x_from = x_next
            q_from = q_next
            q2_from = q2_next
            column = block * BLOCK + tl.arange(0, BLOCK)
            mask = (column < cols)[:, None] & (rank < RANK)[None, :]
            directions = tl.load(basis + column[:, None] * RANK + rank[None, :], mask=mask, other=0.0)
            total = tl.dot(u, directions.to(tl.float32), total, input_precision="tf32x3")
    place = (split * rows + row)[:, None] * RANK + rank[None, :]
    tl.store(product + place, total, mask=row_ok[:, None] & (rank < RANK)[None, :])


@triton.jit(do_not_specialize=(*RUNTIME, "tiles_each"))
def columns_kernel(
    columns, product, grad, momentum_trits, momentum_scale, momentum_trits_2, momentum_scale_2, variance_trits,
    variance_level, variance_step, carry_rows, carry_columns, times,
    rows: tl.int64, cols: tl.int64, grad_row: tl.int64, grad_column: tl.int64, bytes_per_row: tl.int64,
    blocks_per_row: tl.int64, tiles_each: tl.int64, rest1, beta2, rest2, bias, eps, grad_scale,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PLANES: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """u^T W of one block of columns, summed over ``tiles_each`` tiles of ROWS rows: columns, fp32 (chunks, cols, RANK).

    ``product``: W, fp32 (rows, RANK).
    """
    if ALIGNED:
        cols *= 16
        grad_row *= 16
    block = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    rank = tl.arange(0, 16)
    column = block * BLOCK + tl.arange(0, BLOCK)
    group = block // GROUP
    width = tl.minimum((cols - group * GROUP * BLOCK + GROUP - 1) // GROUP, BLOCK).to(tl.int32)
    element = ((block - group * GROUP) * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, 16), dtype=tl.float32)
    first = chunk * tiles_each
    for tile in range(first, tl.minimum(first + tiles_each, (rows + ROWS - 1) // ROWS)):
        row = tile * ROWS + tl.arange(0, ROWS)
        row_ok = row < rows
        present = row_ok[:, None] & (column < cols)[None, :]
        at = row * bytes_per_row + group * BLOCK
        x = _stored_digits(variance_trits, at, element, width, present) - 1
        q = _stored_digits(momentum_trits, at, element, width, present) - 1
        q2 = q
        if PLANES == 2:
            q2 = _stored_digits(momentum_trits_2, at, element, width, present) - 1
        u = _momentum_of_block(
            q, q2, x, grad, momentum_scale, momentum_scale_2, variance_level, variance_step, carry_rows, carry_columns,
            times, row, row_ok, block, cols, grad_row, grad_column, blocks_per_row, rest1, beta2, rest2, bias, eps,
            grad_scale, BLOCK, PLANES, RANK, UNIT,
        )  # fmt: skip
        mask = row_ok[:, None] & (rank < RANK)[None, :]
        mine = tl.load(product + row[:, None] * RANK + rank[None, :], mask=mask, other=0.0)
        total = tl.dot(tl.trans(u), mine, total, input_precision="tf32x3")
    place = (chunk * cols + column)[:, None] * RANK + rank[None, :]
    tl.store(columns + place, total, mask=(column < cols)[:, None] & (rank < RANK)[None, :])

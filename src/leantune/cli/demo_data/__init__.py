"""The instruction set of ``leantune demo``: plain sentences about an expense, each with its strict JSON record."""

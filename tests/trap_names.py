"""The faults of tests/test_traps.py that a test is about, by its name."""

import re

_NAME = re.compile(r"test((?:_[agop]\d+)+)_")


def traps_of(test: str) -> list[str]:
    """``test_g1_g5_fused[x]``: G1 and G5."""
    found = _NAME.match(test)
    return found[1].upper().split("_")[1:] if found else []

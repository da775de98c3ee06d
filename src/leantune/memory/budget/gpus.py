"""Memory of common cards by name, as a run may use it."""

import difflib

from leantune.errors import InvalidArgumentError
from leantune.memory.sizes import GIB, MIB

_MIB = {
    "RTX 3060": 12_288,
    "RTX 3080": 10_240,
    "RTX 3090": 24_576,
    "RTX 4060 Ti 16GB": 16_380,
    "RTX 4070": 12_282,
    "RTX 4080": 16_376,
    "RTX 4090": 24_564,
    "RTX 5070 Ti": 16_303,
    "RTX 5080": 16_303,
    "RTX 5090": 32_607,
    "RTX A4000": 16_376,
    "RTX A5000": 24_564,
    "RTX A6000": 49_140,
    "RTX 6000 Ada": 49_140,
    "T4": 15_360,
    "V100 16GB": 16_384,
    "V100 32GB": 32_768,
    "L4": 23_034,
    "L40S": 46_068,
    "A10": 23_028,
    "A10G": 23_028,
    "A30": 24_576,
    "A40": 46_068,
    "A100 40GB": 40_960,
    "A100 80GB": 81_920,
    "H100 80GB": 81_559,
    "H100 NVL": 95_830,
    "H200": 143_771,
    "B200": 183_359,
}
"""What nvidia-smi shows as each card's total, in MiB."""

CONTEXT_BYTES = GIB // 2
"""What a process takes on a GPU before its first tensor: CUDA's context, kernels loaded, cuBLAS's workspace. An
assumption; 0.4 to 0.6 GiB are usual, and a profile's calibration replaces it."""


def card_bytes(name: str) -> int:
    """Memory of a card by name; case, "NVIDIA", "GeForce" and punctuation do not matter.

    Raises InvalidArgumentError for an unknown one, with the nearest names.

    >>> card_bytes("rtx 4090") // MIB, card_bytes("NVIDIA A100-80GB") // MIB
    (24564, 81920)
    """
    known = {_plain(card): size for card, size in _MIB.items()}
    wanted = _plain(name)
    if wanted in known:
        return known[wanted] * MIB
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    near = [card for card in _MIB if _plain(card) in close]
    raise InvalidArgumentError(
        f"gpu {name!r} is not known here; write one of {', '.join(near or _MIB)}, or --memory_budget with its memory"
    )


def _plain(name: str) -> str:
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("tesla", "")
    return "".join(letter for letter in words if letter.isalnum())

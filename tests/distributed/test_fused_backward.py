"""FusedBackward on replicas and on shards: two and four gloo processes, started by torchrun."""

from pathlib import Path

import pytest
from processes import torchrun

CASES = [
    "equal_to_one_process",
    "fifty_steps",
    "accumulation",
    "wrapped_in_ddp",
    "replicated",
    "fully_sharded",
    "offloaded_and_rounded_sums",
    "scaled_shards",
    "what_is_refused",
]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_g4_g15_o10_processes_train_as_one(processes: int) -> None:
    assert torchrun(Path(__file__).with_name("fused_backward.py"), processes, *CASES) == CASES

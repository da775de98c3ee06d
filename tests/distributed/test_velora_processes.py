"""VeLoRA on replicas and on shards: two gloo processes, started by torchrun."""

from pathlib import Path

from processes import torchrun

CASES = [
    "replicas_are_one_process",
    "without_a_group_directions_differ",
    "a_process_without_rows_shares_the_others_direction",
    "factored_replicas",
    "fully_sharded",
    "a_mean_over_processes_decides_who_falls_back",
]


def test_a9_processes_share_one_direction_and_train_as_one() -> None:
    assert torchrun(Path(__file__).with_name("velora.py"), 2, *CASES) == CASES

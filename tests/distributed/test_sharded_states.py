"""Optimizer states under DDP, FSDP2 and DTensor, on two, three and four processes started by torchrun."""

from pathlib import Path

import pytest
from processes import torchrun

SCRIPT = Path(__file__).with_name("sharded_states.py")


def test_o3_o4_o5_o6_o10_states_are_the_same_sharded_and_survive_another_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("4")
    saving = ["same_as_one_process", "other_placements", "save_sharded", "load_sharded"]
    assert torchrun(SCRIPT, 4, str(tmp_path), *saving) == saving
    loading = ["same_as_one_process", "load_sharded", "never_stepped", "replicas_stay_equal"]
    assert torchrun(SCRIPT, 2, str(tmp_path), *loading) == loading


@pytest.mark.slow
def test_o4_1601_rows_on_three_processes(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("3")
    cases = ["same_as_one_process", "save_sharded", "load_sharded"]
    assert torchrun(SCRIPT, 3, str(tmp_path), *cases) == cases

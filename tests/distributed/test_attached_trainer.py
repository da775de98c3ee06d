"""A Trainer that lt.attach has taken, launched by torchrun on two gloo processes."""

from pathlib import Path

import attached_trainer
import pytest
import torch
from processes import torchrun


def test_g4_two_processes_train_as_one_with_the_whole_batch(tmp_path: Path) -> None:
    script = Path(attached_trainer.__file__)
    assert torchrun(script, 2, str(tmp_path)) == list(attached_trainer.RULES)
    for rule in attached_trainer.RULES:
        expected = attached_trainer.train(rule, tmp_path / "alone", 1)
        found = torch.load(tmp_path / f"{rule}.pt")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-6 * value.norm(), name
        assert found["norms"].tolist() == pytest.approx(expected["norms"].tolist(), rel=1e-5)

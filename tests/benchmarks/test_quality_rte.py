"""The RTE benchmark's own arithmetic: search, table, intervals; and its scoring, where data and model are."""

import base64
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LEANTUNE_DATA", "/work/shared/data"))


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def final_row(rows, method, seed, losses, correct):
    from quality.training import to_hex

    rows.append(
        seed=seed,
        method=method,
        lr=1e-3,
        stage="final",
        held_out_loss=losses.mean().item(),
        accuracy=correct.float().mean().item(),
        tokens_per_second=100.0,
        correct=to_hex(correct.tolist()),
        losses=base64.b64encode(losses.half().numpy().tobytes()).decode(),
        **dict.fromkeys(("parameters_bytes", "gradients_bytes", "states_bytes", "activations_bytes"), 2**20),
        peak_bytes=2**22,
    )


def test_the_interval_is_of_paired_rows() -> None:
    """Rows differ far more than methods do: only pairing sees the difference, and its width is that of the gaps."""
    from quality.entailment_table import paired_difference

    generator = torch.Generator().manual_seed(0)
    base = 10 * torch.randn(400, generator=generator)
    gaps = 0.5 + torch.randn(400, generator=generator)
    middle, low, high = paired_difference([base + gaps], [base])
    assert middle == pytest.approx(gaps.mean().item(), abs=1e-5)
    assert high - low == pytest.approx(2 * 1.96 * gaps.std().item() / 20, rel=0.1)
    assert low < middle < high


def test_the_table_holds_every_method_against_adamw(tmp_path) -> None:
    import quality_rte
    from quality.entailment_table import table

    rows = quality_rte.ResultRows("quality_rte", quality_rte.COLUMNS, tmp_path / "rows.csv")
    generator = torch.Generator().manual_seed(0)
    losses, correct = torch.rand(200, generator=generator), torch.rand(200, generator=generator) < 0.5
    for seed in range(3):
        final_row(rows, "adamw", seed, losses, correct)
        final_row(rows, "lomo", seed, losses + 0.25, correct)
    final_row(rows, "adalomo", 0, losses, torch.ones(200, dtype=torch.bool))
    lines = {
        line.split("|")[1].strip(): line for line in table(rows, ["adamw", "lomo", "adalomo", "lora"]).splitlines()
    }
    assert "+0.250 (+0.250 to +0.250)" in lines["lomo"] and "+0.0 (+0.0 to +0.0)" in lines["lomo"]
    assert "one seed" in lines["adalomo"] and f"{100 * (~correct).float().mean():+.1f} (" in lines["adalomo"]
    assert "lora" not in lines


@pytest.mark.parametrize("best", [-7, -4, 0])
def test_the_search_goes_on_until_the_best_is_interior(best, tmp_path, monkeypatch) -> None:
    import quality_rte

    tried = []

    def run(task, method, lr, *rest):
        tried.append(round(torch.log2(torch.tensor(lr / 1e-3)).item()))
        return {"held_out_loss": 1.0 + (tried[-1] - best) ** 2, "seconds": 0.0}

    monkeypatch.setattr(quality_rte, "run", run)
    rows = quality_rte.ResultRows("quality_rte", quality_rte.COLUMNS, tmp_path / "rows.csv")
    assert quality_rte.Benchmark(rows, None).search("adamw") == best
    assert {best - 1, best, best + 1} <= set(tried) and len(tried) == len(set(tried))
    before = len(tried)
    assert quality_rte.Benchmark(rows, None).search("adamw") == best
    assert len(tried) == before  # what is in the rows is not run again


def test_padding_and_order_change_no_score() -> None:
    """A batch of unlike lengths scores each row as it is scored alone."""
    if not (DATA / "rte_train.tsv").is_file():
        pytest.skip(f"{DATA}/rte_train.tsv is not there (GLUE)")
    from quality.entailment import EntailmentTask
    from quality.task import MissingData

    try:
        task = EntailmentTask(DATA)
    except MissingData as missing:
        pytest.skip(str(missing))
    model, rows = task.model().float(), range(1000, 1004)  # bf16 rounds otherwise with the shape of a batch
    together, alone = task.judge(model, rows), [task.judge(model, range(place, place + 1)) for place in rows]
    torch.testing.assert_close(together.losses, torch.cat([one.losses for one in alone]), rtol=1e-3, atol=1e-3)
    assert len(task.held_out) == 1767 and len({len(task.prompts[place]) for place in rows}) > 1
    epoch = task.batches(task.trained, 16, 1, torch.Generator().manual_seed(0))
    assert sorted(place for places in epoch for place in places) == list(task.trained)

"""What a run promises beside learning: nothing is sent, nothing set is ignored, a resumed run is the same run."""

import functools
import io
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM

from leantune.errors import ConfigError, NotEnoughRoomError, StateMismatchError
from leantune.training import run as run_module
from leantune.training.checkpoints import checkpoints
from leantune.training.config import build_config
from leantune.training.run import TrainResult, train
from leantune.training.trainer import LeanTrainer

QUIET = Console(quiet=True)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without plan and pictures, which have tests of their own and take longer than a tiny run."""
    monkeypatch.setattr(run_module, "plan_of_run", lambda *arguments: None)
    without_pictures(monkeypatch)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path, 12)


config = functools.partial(tiny_config, max_length=32, save_steps=100, max_steps=4)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def losses(result: TrainResult) -> list[float]:
    return [row["loss"] for row in result.log if "loss" in row]


def test_p13_resuming_in_a_later_epoch_continues_bit_for_bit_and_is_measured(
    tiny_model_path: str, rows: str, tmp_path: Path
) -> None:
    more = {"max_steps": 9, "save_steps": 5, "save_total_limit": 5}  # three steps an epoch: step 5 is in the second
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(config(tiny_model_path, rows, whole, **more), console=QUIET)
    broken.mkdir()
    shutil.copytree(whole / "checkpoint-5", broken / "checkpoint-5")
    shutil.copy(whole / "run_identity.json", broken)
    result = train(config(tiny_model_path, rows, broken, resume=True, **more), console=QUIET)
    assert result.memory_by_part["weights"] > 0 and (broken / "memory.png").exists()
    expected, resumed = weights(whole), weights(broken)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not list(whole.glob(".saving*"))


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("more", [{}, {"method": "lora", "lora_r": 4, "learning_rate": 1e-2}])
def test_p13_a_resumed_runs_held_out_loss_is_that_of_its_checkpoint_and_says_so(
    tiny_model_path: str, tmp_path: Path, more: dict
) -> None:
    out, rows = tmp_path / "out", write_rows(tmp_path, 16)
    values = {
        "eval_split": 0.25,
        "eval_steps": 2,
        "eval_strategy": "steps",
        "save_steps": 2,
        "dtype": "float32",
        **more,
    }
    first = train(config(tiny_model_path, rows, out, max_steps=4, save_total_limit=5, **values), console=QUIET)
    evaluated = {row["step"]: row["eval_loss"] for row in first.log if "eval_loss" in row}
    assert first.begun_at == 0 and first.held_out_before not in evaluated.values()
    for gone in ("checkpoint-4", "model.safetensors", "adapter_model.safetensors"):
        shutil.rmtree(out / gone) if (out / gone).is_dir() else (out / gone).unlink(missing_ok=True)
    said = Console(record=True, width=200, quiet=False, file=io.StringIO())
    again = train(config(tiny_model_path, rows, out, max_steps=4, resume=True, **values), console=said)
    assert again.begun_at == 2 and again.held_out_before == pytest.approx(evaluated[2], rel=1e-6)
    assert again.held_out_after == first.held_out_after
    assert f"held-out loss {evaluated[2]:.4f} at step 2, where this run went on -> " in said.export_text()
    assert "held-out loss, at step 2, where the run was resumed, and after" in (out / "run_card.md").read_text()
    assert '"begun_at": 2' in (out / "summary.json").read_text()


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("length", [{"max_steps": 5}, {"num_train_epochs": 2, "max_steps": -1}])
def test_p13_resuming_a_finished_run_changes_nothing(tiny_model_path: str, rows: str, tmp_path: Path, length) -> None:
    """In the middle of an epoch, where transformers would take one step more, and at the end of one."""
    out, more = tmp_path / "out", {**length, "save_steps": 5, "lr_scheduler_type": "constant"}
    train(config(tiny_model_path, rows, out, **more), console=QUIET)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    before = files()
    with pytest.raises(ConfigError, match=r"is finished: checkpoint-\d+ is its last step.*Raise max_steps"):
        train(config(tiny_model_path, rows, out, resume=True, **more), console=QUIET)
    assert files() == before
    # Killed between its last checkpoint and the model: only the model is written.
    (out / "model.safetensors").unlink()
    result = train(config(tiny_model_path, rows, out, resume=True, **more), console=QUIET)
    assert (out / "model.safetensors").read_bytes() == before[out / "model.safetensors"]
    assert result.peak_bytes == 0 and "## Memory" not in (out / "run_card.md").read_text()
    assert [path.name for path in checkpoints(out)] == [
        path.name for path in sorted({p.parent for p in before if p.parent.name.startswith("checkpoint")})
    ]


def test_p13_a_run_is_not_resumed_as_another_one(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(config(tiny_model_path, rows, out, save_steps=2, max_steps=2), console=QUIET)
    with pytest.raises(StateMismatchError, match=r"per_device_train_batch_size was 4 and is 2"):
        train(config(tiny_model_path, rows, out, resume=True, per_device_train_batch_size=2), console=QUIET)
    for other in ({"learning_rate": 1e-2}, {"weight_decay": 0.5}, {"lr_scheduler_type": "constant"}):
        with pytest.raises(StateMismatchError, match=r"weight_decay|rate|lr_scheduler_type"):
            train(config(tiny_model_path, rows, out, resume=True, **other), console=QUIET)
    Path(rows).write_text(Path(rows).read_text().replace("Row 3", "Row 33"))
    with pytest.raises(StateMismatchError, match="rows are others"):
        train(config(tiny_model_path, rows, out, resume=True), console=QUIET)


@pytest.mark.usefixtures("light")
def test_g2_accumulated_micro_batches_train_as_one_batch(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    more = {"dtype": "float32", "optim": "adamw", "fused_backward": False, "max_steps": 3}
    one = train(config(tiny_model_path, rows, tmp_path / "one", **more), console=QUIET)
    parts = {**more, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    two = train(config(tiny_model_path, rows, tmp_path / "two", **parts), console=QUIET)
    assert losses(one) == pytest.approx(losses(two), rel=1e-4)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("clip", ["per_tensor", "global", "none"])
def test_g2_a_fused_run_with_sums_trains_as_an_ordinary_one(
    tiny_model_path: str, rows: str, tmp_path: Path, clip: str
) -> None:
    more = {"dtype": "float32", "optim": "adamw", "max_steps": 3, "clip": clip}
    one = train(config(tiny_model_path, rows, tmp_path / "one", **more), console=QUIET)
    parts = {**more, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "accumulate": "float32"}
    two = train(config(tiny_model_path, rows, tmp_path / "two", **parts), console=QUIET)
    assert losses(one) == pytest.approx(losses(two), rel=1e-4)
    assert [row["grad_norm"] for row in one.log if "grad_norm" in row] == pytest.approx(
        [row["grad_norm"] for row in two.log if "grad_norm" in row], rel=1e-3
    )


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("clip", ["per_tensor", "global"])
def test_g3_the_schedule_of_a_fused_run_is_that_of_an_ordinary_one(
    tiny_model_path: str, rows: str, tmp_path: Path, clip: str
) -> None:
    more = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
    fused = train(config(tiny_model_path, rows, tmp_path / "fused", clip=clip, **more), console=QUIET)
    plain = train(config(tiny_model_path, rows, tmp_path / "plain", optim="adamw_torch", **more), console=QUIET)
    rates = [[row["learning_rate"] for row in result.log if "loss" in row] for result in (fused, plain)]
    assert rates[0] == rates[1] and len(set(rates[0])) > 2


@pytest.mark.usefixtures("light")
def test_g1_global_clipping_of_a_fused_run_is_that_of_transformers(
    tiny_model_path: str, rows: str, tmp_path: Path
) -> None:
    more = {"dtype": "float32", "optim": "adamw", "max_grad_norm": 0.05}
    fused = train(config(tiny_model_path, rows, tmp_path / "fused", **more), console=QUIET)
    plain = train(config(tiny_model_path, rows, tmp_path / "plain", fused_backward=False, **more), console=QUIET)
    norms = [[row["grad_norm"] for row in result.log if "loss" in row] for result in (fused, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and min(norms[0]) > 0.05
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.usefixtures("light")
def test_p5_autocast_reaches_the_loss_without_logits(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    step = LeanTrainer.training_step

    def watched(self, model, *arguments, **more):
        layer = self.model.get_decoder().layers[0].mlp.down_proj
        hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        loss = step(self, model, *arguments, **more)
        hook.remove()
        return loss

    monkeypatch.setattr(LeanTrainer, "training_step", watched)
    train(config(tiny_model_path, rows, tmp_path / "out", dtype="float32", bf16=True, max_steps=1), console=QUIET)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "weights bfloat16 (106,816) compute bfloat16 gradients bfloat16, applied and freed inside backward"),
        (
            {"dtype": "float32", "bf16": True, "optim": "adamw_torch"},
            "weights float32 (106,816) compute bfloat16 autocast gradients float32, kept until the step states as "
            "adamw_torch keeps them: the dtype of the weight",
        ),
    ],
)
def test_p5_the_header_says_the_dtypes_there_are(tiny_model_path: str, rows: str, tmp_path: Path, more, said) -> None:
    console = Console(record=True, width=250, file=io.StringIO())
    train(config(tiny_model_path, rows, tmp_path / "out", max_steps=1, **more), console=console)
    assert said in " ".join(console.export_text().replace("│", " ").split())


@pytest.mark.usefixtures("light")
def test_nothing_is_sent(tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.base_trainer

    sent: list[tuple] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(trl.trainer.base_trainer, "send_telemetry", lambda *arguments, **more: sent.append(arguments))
    train(config(tiny_model_path, rows, tmp_path / "out", max_steps=1), console=QUIET)
    assert sent == []


def test_p11_a_bare_no_and_fractions_are_what_people_mean_by_them() -> None:
    made = build_config({"model_name_or_path": "m", "dataset": "d", "save_strategy": False, "logging_steps": 0.25})
    assert made.extra["save_strategy"] == "no" and made.logging_steps == 0.25


@pytest.mark.usefixtures("light")
def test_g1_clipping_can_be_turned_off_for_an_ordinary_backward(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[float] = []
    build = LeanTrainer.__init__

    def watched(self, *arguments, **more):
        bounds.append(more["args"].max_grad_norm)
        build(self, *arguments, **more)

    monkeypatch.setattr(LeanTrainer, "__init__", watched)
    more = {"optim": "adamw_torch", "clip": "none", "max_steps": 1}
    result = train(config(tiny_model_path, rows, tmp_path / "out", **more), console=QUIET)
    assert bounds == [0.0] and [row["grad_norm"] > 0 for row in result.log if "loss" in row] == [True]


def test_a_model_in_the_output_folder_is_never_overwritten(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(tiny_model_path, own)
    before = (own / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="would overwrite it"):
        train(config(str(own), rows, own), console=QUIET)
    with pytest.raises(ConfigError, match="holds a trained model"):
        train(config(tiny_model_path, rows, own), console=QUIET)
    assert (own / "model.safetensors").read_bytes() == before
    file = tmp_path / "file"
    file.write_text("x")
    for place in (file, file / "below" / "it"):
        with pytest.raises(ConfigError, match="file is a file"):
            train(config(tiny_model_path, rows, place), console=QUIET)
    with pytest.raises(ConfigError, match="cannot be written: /proc"):
        train(config(tiny_model_path, rows, Path("/proc/leantune")), console=QUIET)


@pytest.mark.usefixtures("light")
def test_p13_a_checkpoint_that_lacks_a_part_is_not_resumed_from(
    tiny_model_path: str, rows: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = {"save_steps": 2, "max_steps": 4, "velora_target_modules": "down_proj"}
    train(config(tiny_model_path, rows, out, **more, save_total_limit=1), console=QUIET)
    last = out / "checkpoint-4"
    before = (out / "leantune_config.yaml").read_bytes()
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "model.safetensors",
        "velora.safetensors",
    ):
        whole = (last / name).read_bytes()
        (last / name).unlink()
        with pytest.raises(ConfigError, match=rf"not whole.*({name}.* missing|missing \({name})"):
            train(config(tiny_model_path, rows, out, resume=True, **more), console=QUIET)
        (last / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ConfigError, match=f"not whole.*{name} is damaged"):
            train(config(tiny_model_path, rows, out, resume=True, **more), console=QUIET)
        (last / name).write_bytes(whole)
    assert (out / "leantune_config.yaml").read_bytes() == before
    train(config(tiny_model_path, rows, out, resume=True, **{**more, "max_steps": 5}), console=QUIET)


def test_a_run_refused_by_its_budget_leaves_the_folder_as_it_was(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pictures(monkeypatch)
    out = tmp_path / "out"
    train(config(tiny_model_path, rows, out, save_steps=1, max_steps=1), console=QUIET)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(NotEnoughRoomError, match=r"memory_budget is 1MiB, and the plan needs [1-9][\d.]* MiB"):
        small = {"memory_budget": "1MiB", "method": "full"}
        train(config(tiny_model_path, rows, out, max_steps=2, resume=True, **small), console=QUIET)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_what_is_not_installed_is_named(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="report_to: wandb is not installed"):
        train(config(tiny_model_path, rows, tmp_path / "out", report_to="wandb"), console=QUIET)
    with pytest.raises(ConfigError, match="optim: galore_adamw cannot be used here"):
        train(config(tiny_model_path, rows, tmp_path / "out", optim="galore_adamw"), console=QUIET)


def test_p14_one_device_a_process_whatever_is_visible(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain python on a machine with two GPUs: transformers would copy the model to both; here it would be cut, too, by
    device_map auto, as TRL loads. Neither happens, and the header says so."""
    import transformers

    without_pictures(monkeypatch)
    loads, trainers, words = [], [], Console(file=io.StringIO(), width=160)
    load = transformers.AutoModelForCausalLM.from_pretrained.__func__

    def watched(cls, *arguments, **more):
        loads.append(more)
        return load(cls, *arguments, **more)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", classmethod(watched))
    monkeypatch.setattr(
        transformers.TrainingArguments, "n_gpu", property(lambda self: self.__dict__.get("_n_gpu") or 2)
    )
    build = run_module.build_trainer
    monkeypatch.setattr(run_module, "build_trainer", lambda *given: trainers.append(build(*given)) or trainers[-1])
    config = tiny_config(tiny_model_path, write_rows(tmp_path, 8), tmp_path / "out", max_steps=2)
    result = train(config, console=words)
    assert loads and all("device_map" not in more for more in loads)
    assert trainers[0].args.n_gpu == 1
    assert len({param.device for param in result.model.parameters()}) == 1
    assert "one a process" in words.file.getvalue()

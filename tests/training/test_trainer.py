"""What the trainer refuses, checks and logs, beside the whole runs of test_train.py."""

import functools
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM

import leantune as lt
from leantune.errors import BackwardError, ConfigError, NonFiniteError
from leantune.training.attach import Attached
from leantune.training.checkpoints import checkpoints
from leantune.training.log import RunLog
from leantune.training.moved import MovedShare
from leantune.training.run import train
from leantune.training.trainer import LeanTrainer, check_exact_loss

QUIET = Console(quiet=True)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path, 12)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


config = functools.partial(tiny_config, max_length=64, save_strategy="no", max_steps=4)


def test_a1_a_parameter_without_a_gradient_is_named_after_the_first_step(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LeanTrainer.__init__

    def with_an_orphan(self, lean, velora, exact_loss, **arguments):
        arguments["model"].orphan = torch.nn.Parameter(torch.zeros(3))
        create(self, lean, velora, exact_loss, **arguments)

    monkeypatch.setattr(LeanTrainer, "__init__", with_an_orphan)
    with pytest.raises(BackwardError, match="orphan"):
        train(config(tiny_model_path, rows, tmp_path / "out", optim="adamw_torch"), console=QUIET)


@pytest.mark.parametrize("optim", ["ternary_adamw", "adamw_torch"])
def test_g3_the_schedule_moves_once_a_step_and_its_rate_is_used(
    tiny_model_path: str, rows: str, tmp_path: Path, optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []
    step = LeanTrainer.training_step

    def spy(self, *arguments, **more):
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        used.append(optimizer.param_groups[0]["lr"])
        return step(self, *arguments, **more)

    monkeypatch.setattr(LeanTrainer, "training_step", spy)
    train(config(tiny_model_path, rows, tmp_path / "out", optim=optim, lr_scheduler_type="linear"), console=QUIET)
    assert used == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_p6_a_gradient_that_is_not_finite_stops_an_ordinary_optimizer(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = LeanTrainer.training_step

    def spoiled(self, model, *arguments, **more):
        loss = step(self, model, *arguments, **more)
        if self.state.global_step == 2:
            next(model.parameters()).grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(LeanTrainer, "training_step", spoiled)
    with pytest.raises(NonFiniteError, match=r"gradient norm is .* at step 3"):
        train(config(tiny_model_path, rows, tmp_path / "out", optim="adamw_torch"), console=QUIET)


def test_a_model_whose_logits_are_changed_in_an_unknown_way_is_refused(tiny_model_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    check_exact_loss(model)
    forward = model.forward

    def doubled(*arguments, **more):
        out = forward(*arguments, **more)
        out.logits = out.logits * 5 + torch.arange(out.logits.shape[-1]) / 50
        return out

    model.forward = doubled
    with pytest.raises(ConfigError, match="exact_savings: false"):
        check_exact_loss(model)


@pytest.mark.parametrize("model_type", ["granite", "gemma2", "cohere"])
def test_scaled_and_capped_logits_are_those_of_the_model(model_type: str) -> None:
    from transformers import AutoConfig

    torch.manual_seed(0)
    settings = {"granite": {"logits_scaling": 3.0}, "gemma2": {"final_logit_softcapping": 0.2, "head_dim": 16},
                "cohere": {"logit_scale": 4.0}}  # fmt: skip
    made = AutoConfig.for_model(
        model_type, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2, **settings[model_type],
    )  # fmt: skip
    check_exact_loss(AutoModelForCausalLM.from_config(made, dtype=torch.float32))


def test_settings_that_would_be_ignored_are_refused_before_the_model_loads(tmp_path: Path, rows: str) -> None:
    with pytest.raises(ConfigError, match="label_smoothing_factor"):
        train(config("there is no such model", rows, tmp_path, label_smoothing_factor=0.1), console=QUIET)


def test_g9_adams_settings_reach_the_optimizer_or_are_refused(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    from leantune.training.optimizers import build_optimizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    optimizer = build_optimizer(config(tiny_model_path, rows, tmp_path, adam_epsilon=1e-5, adam_beta2=0.95), model)
    assert optimizer.param_groups[0]["eps"] == 1e-5 and optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    with pytest.raises(ConfigError, match="adam_epsilon"):
        build_optimizer(config(tiny_model_path, rows, tmp_path, optim="lomo", adam_epsilon=1e-5), model)


@pytest.mark.parametrize(
    "more",
    [
        {"method": "lora", "lora_r": 4, "lora_dropout": 0.2, "optim": "adamw_torch"},
        {"optim": "adamw", "fused_backward": False, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    ],
)
def test_p13_resuming_inside_a_later_epoch_continues_bit_for_bit(
    tiny_model_path: str, rows: str, tmp_path: Path, more: dict
) -> None:
    """12 rows, 4 a step: an epoch is 3 steps; the run goes on from step 4, in the second epoch, to the third."""
    values = {"max_steps": 7, "save_strategy": "steps", "save_steps": 4, "eval_split": None, **more}
    name = "adapter_model.safetensors" if more.get("method") == "lora" else "model.safetensors"
    out = tmp_path / "out"
    train(config(tiny_model_path, rows, out, **values), console=QUIET)
    whole = (out / name).read_bytes()
    (out / "checkpoint-7").rename(tmp_path / "gone")
    result = train(config(tiny_model_path, rows, out, resume=True, **values), console=QUIET)
    assert (out / name).read_bytes() == whole
    assert [row["step"] for row in result.log if "loss" in row] == list(range(1, 8))


def test_p12_a_checkpoint_still_being_written_or_removed_is_not_taken(tmp_path: Path) -> None:
    for name in ("checkpoint-3", ".saving/checkpoint-6", ".removing-checkpoint-1"):
        (tmp_path / name).mkdir(parents=True)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]


def test_p12_a_log_cut_short_by_a_kill_is_read_and_trimmed(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 3, "lo')
    log = RunLog(tmp_path, MovedShare(), trainer=None, append=True)

    class State:
        global_step = 1

    log.on_train_begin(None, State(), None)
    assert log.path.read_text() == '{"step": 1, "loss": 2}\n'


def test_a_failing_step_leaves_no_tracker_behind(tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch) -> None:
    step = LeanTrainer.training_step

    def failing(self, *arguments, **more):
        if self.state.global_step == 1:
            raise RuntimeError("stopped in the measured step")
        return step(self, *arguments, **more)

    monkeypatch.setattr(LeanTrainer, "training_step", failing)
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with pytest.raises(RuntimeError, match="measured step"):
        train(config(tiny_model_path, rows, tmp_path / "out"), console=QUIET)
    assert _get_current_dispatch_mode() is None


def test_o21_the_log_shows_a_group_whose_weights_stand_still() -> None:
    """bfloat16 weights of 1, steps of 1e-4: to nearest none moves, stochastically a share of them does."""
    groups = [torch.nn.Parameter(torch.ones(300, 400, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = lt.AdamW(
        [{"params": [groups[0]], "rounding": "nearest"}, {"params": [groups[1]], "rounding": "stochastic"}],
        lr=1e-4,
        weight_decay=0.0,
    )

    class State:
        global_step, logging_steps = 0, 5

    moved = MovedShare()
    for number in range(6):
        State.global_step = number
        moved.on_step_begin(None, State(), None, optimizer=optimizer)
        for param in groups:
            param.grad = torch.randn(param.shape).bfloat16()
        optimizer.step()
        State.global_step = number + 1
        moved.on_log(None, State(), None, logs={"loss": 1.0})
        if number == 0:
            first, moved.percent = moved.percent, None
        assert (moved.percent is None) == (number < 4)  # steps 1 and 5 are logged
    # A step of 1e-4 is a share of 1e-4 / 2^-7 (above 1) or 2^-8 (below 1) of a unit.
    assert first[0] == moved.percent[0] == 0 and 0.5 < first[1] < 5


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2, "accumulate": "float32"}])
def test_an_untied_heads_gradient_comes_in_tiles_and_the_first_step_knows_it(
    tiny_model_path: str, rows: str, tmp_path: Path, more: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "untied")
    for file in Path(tiny_model_path).glob("token*"):
        (tmp_path / "untied" / file.name).write_bytes(file.read_bytes())
    reports = []
    run = Attached._backward

    def watched(self: Attached, loss: torch.Tensor, **options: object) -> None:
        run(self, loss, **options)
        reports.append(self.fused.report())

    monkeypatch.setattr(Attached, "_backward", watched)
    values = {"max_steps": 3, "eval_split": None, "optim": "ternary_adamw", **more}
    result = train(config(str(tmp_path / "untied"), rows, tmp_path / "out", **values), console=QUIET)
    assert len([row for row in result.log if "loss" in row]) == 3
    report = reports[-1]
    assert report.startswith("lm_head.weight") and ("accumulated" if more else "in tiles") in report

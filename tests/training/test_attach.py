"""lt.attach: a transformers Trainer or TRL SFTTrainer under fused backward is the plain one with the same optimizer."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_constant_schedule,
)

import leantune as lt
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError, StateMismatchError

VOCABULARY = 48


def tiny(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=32, tie_word_embeddings=tied,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def rows(count: int = 24, length: int = 8) -> list[dict[str, list[int]]]:
    """Rows with different numbers of trained tokens: micro-batches weigh differently."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        masked = number % 5
        made.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return made


def arguments(folder: Path, **more: object) -> TrainingArguments:
    common = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 0.0, "logging_nan_inf_filter": False,
        "dataloader_pin_memory": False, "average_tokens_across_devices": True,
    }  # fmt: skip
    return TrainingArguments(**{**common, **more})


def trainer_of(folder: Path, model: nn.Module | None = None, optimizer=None, kind=Trainer, data=None, **more):
    return kind(
        model=tiny() if model is None else model,
        args=arguments(folder, **more),
        train_dataset=rows() if data is None else data,
        optimizers=(optimizer, None),
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def logged(trainer: Trainer, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if "loss" in row]


RULES = {
    "adamw": lambda model: lt.AdamW(model.parameters(), lr=1e-2),
    "ternary": lambda model: lt.TernaryAdamW(model.parameters(), lr=1e-2),
    "lomo": lambda model: lt.Lomo(model.parameters(), lr=1e-2),
}


# -- equal to the plain trainer --------------------------------------------------------------------------------------


class Weighted(Trainer):
    """A user's own loss, per micro-batch: the trainer divides it by their number."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) * 0.7
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    "case",
    [
        {"rule": "adamw"},
        {"rule": "ternary", "tied": True},
        {"rule": "lomo", "tied": True, "gradient_accumulation_steps": 3},
        {"rule": "ternary", "gradient_accumulation_steps": 3},
        {"rule": "adamw", "gradient_accumulation_steps": 5, "kind": Weighted},  # an epoch's last step has 2 of 5
        {"rule": "adamw", "activation_checkpointing": True, "tied": True},
        {"rule": "ternary", "kind": Weighted},
        {"rule": "adamw", "bf16": True},
    ],
    ids=lambda case: "-".join(str(getattr(value, "__name__", value)) for value in case.values()),
)
def test_g3_g5_weights_rates_and_norms_are_those_of_the_plain_trainer(tmp_path: Path, case: dict) -> None:
    case = dict(case)
    build, tied = RULES[case.pop("rule")], case.pop("tied", False)
    plain_model, model = tiny(tied=tied), tiny(tied=tied)
    plain = trainer_of(tmp_path / "plain", plain_model, build(plain_model), **case)
    plain.train()
    trainer = trainer_of(tmp_path / "fused", model, build(model), **case)
    attached = lt.attach(trainer, accumulate="float32" if "gradient_accumulation_steps" in case else None)
    before = weights(trainer)
    trainer.train()
    assert attached.clip == "none"  # what max_grad_norm=0 asks for
    assert all(not torch.equal(before[name], weight) for name, weight in weights(trainer).items())
    assert_equal(weights(trainer), weights(plain))
    for key in ("loss", "learning_rate"):
        assert logged(trainer, key) == logged(plain, key) and len(logged(plain, key)) == 4
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    assert min(logged(trainer, "grad_norm")) > 0


def test_gradients_are_gone_before_the_optimizer_steps(tmp_path: Path) -> None:
    alive = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **more):
            alive.append(sum(param.grad is not None for param in model.parameters()))

    for fused in (False, True):
        trainer = trainer_of(tmp_path, max_steps=1)
        trainer.add_callback(Look())
        if fused:
            lt.attach(trainer)
        trainer.train()
    assert alive == [len(weights(trainer)), 0]


def test_compute_loss_func_is_used(tmp_path: Path) -> None:
    def loss_func(outputs, labels, num_items_in_batch=None):
        total = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / num_items_in_batch

    ended = []
    for fused in (False, True):
        model = tiny()
        trainer = Trainer(
            model=model,
            args=arguments(tmp_path, gradient_accumulation_steps=2),
            train_dataset=rows(),
            compute_loss_func=loss_func,
            optimizers=(RULES["adamw"](model), None),
        )
        if fused:
            lt.attach(trainer, accumulate="float32")
        trainer.train()
        ended.append(weights(trainer))
    assert_equal(*ended)


# -- which optimizer -------------------------------------------------------------------------------------------------


def test_without_an_optimizer_ternary_adamw_is_built_from_the_arguments(tmp_path: Path) -> None:
    settings = {"weight_decay": 0.2, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    trainer = trainer_of(tmp_path, **settings)
    attached = lt.attach(trainer)
    optimizer = trainer.optimizer
    assert type(optimizer) is lt.TernaryAdamW and attached.report().parameters == sum(
        param.numel() for param in trainer.model.parameters()
    )
    decayed = trainer.get_decay_parameter_names(trainer.model)
    names = {param: name for name, param in trainer.model.named_parameters()}
    for group, decay, chosen in zip(optimizer.param_groups, (0.2, 0.0), (True, False), strict=True):
        assert group["weight_decay"] == decay and group["betas"] == (0.8, 0.95) and group["eps"] == 1e-6
        assert group["lr"] == 1e-2
        expected = [name for name in names.values() if (name in decayed) is chosen]
        assert [names[param] for param in group["params"]] == expected and expected
    trainer.train()
    # The same one, given by hand, ends in the same weights.
    other = tiny()
    params = dict(other.named_parameters())
    groups = [
        {"params": [p for n, p in params.items() if n in decayed], "weight_decay": 0.2},
        {"params": [p for n, p in params.items() if n not in decayed], "weight_decay": 0.0},
    ]
    by_hand = lt.TernaryAdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, seed=42)
    plain = trainer_of(tmp_path, other, by_hand, **settings)
    plain.train()
    assert_equal(weights(trainer), weights(plain))


def test_an_optimizer_given_to_attach_is_used_and_remove_gives_the_trainer_back(tmp_path: Path) -> None:
    model = tiny()
    trainer = trainer_of(tmp_path, model)
    callbacks = list(trainer.callback_handler.callbacks)
    optimizer = RULES["adamw"](model)
    attached = lt.attach(trainer, optimizer)
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    assert int(optimizer.state[model.lm_head.weight]["step"]) == 4
    # After training the next backward is an ordinary one, and a second training goes on.
    assert attached.fused is None and optimizer._fused is None
    trainer.train()
    assert int(optimizer.state[model.lm_head.weight]["step"]) == 8
    attached.remove()
    attached.remove()
    assert trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None
    assert list(trainer.callback_handler.callbacks) == callbacks
    assert {"backward", "clip_grad_norm_"}.isdisjoint(trainer.accelerator.__dict__)
    assert {"create_optimizer", "log"}.isdisjoint(trainer.__dict__)
    trainer.train()  # transformers' own AdamW now
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW


def test_a_subclass_and_optimizer_cls_and_kwargs_choose_the_optimizer(tmp_path: Path) -> None:
    class Mine(Trainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = lt.Lomo(self.model.named_parameters(), lr=1e-2)
            return self.optimizer

    trainer = trainer_of(tmp_path, kind=Mine)
    lt.attach(trainer)
    assert type(trainer.optimizer) is lt.Lomo
    trainer = Trainer(
        model=tiny(),
        args=arguments(tmp_path),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=(lt.AdamW, {"lr": 1e-2}),
    )
    lt.attach(trainer)
    trainer.train()
    assert type(trainer.optimizer.optimizer) is lt.AdamW


def test_model_init_makes_model_and_optimizer_anew_in_each_training(tmp_path: Path) -> None:
    trainer = Trainer(model_init=lambda: tiny(), args=arguments(tmp_path), train_dataset=rows())
    attached = lt.attach(trainer)
    with pytest.raises(BackwardError, match="made in train"):
        attached.report()
    trainer.train()
    first = weights(trainer)
    trainer.train()
    assert_equal(first, weights(trainer))
    assert attached.report().state_bytes > 0


def test_a_schedule_of_the_users_own_drives_the_optimizer(tmp_path: Path) -> None:
    model = tiny()
    optimizer = lt.AdamW(model.parameters(), lr=3e-3)
    schedule = get_constant_schedule(optimizer)
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=rows(), optimizers=(optimizer, schedule))
    lt.attach(trainer)
    trainer.train()
    assert logged(trainer, "learning_rate") == [3e-3] * 4
    other = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=rows(), optimizers=(None, schedule))
    with pytest.raises(InvalidArgumentError, match="schedule for another optimizer"):
        lt.attach(other)
    assert other.optimizer is None and other.optimizer_cls_and_kwargs is None


# -- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "given", "expected"),
    [
        (1.0, {}, ("per_tensor", 1.0)),
        (0.3, {}, ("global", 0.3)),
        (0.0, {}, ("none", 1.0)),
        (1.0, {"max_grad_norm": 0.5}, ("global", 0.5)),
        (1.0, {"clip": "global"}, ("global", 1.0)),
        (0.3, {"clip": "per_tensor"}, ("per_tensor", 0.3)),
        (0.3, {"clip": "none"}, ("none", 1.0)),
        (0.0, {"clip": "global"}, ("global", 1.0)),
    ],
)
def test_g1_clipping_is_what_was_asked_for(tmp_path: Path, bound: float, given: dict, expected: tuple) -> None:
    trainer = trainer_of(tmp_path, max_grad_norm=bound, max_steps=1)
    attached = lt.attach(trainer, **given)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, *arguments, **more):
            seen.append((attached.fused.clip, attached.fused.max_grad_norm))

    trainer.add_callback(Look())
    trainer.train()
    assert seen == [expected]
    assert repr(expected[0]) in repr(attached)


def test_g1_global_clipping_is_the_plain_trainers(tmp_path: Path) -> None:
    bound = 0.05
    plain_model, model = tiny(), tiny()
    plain = trainer_of(tmp_path, plain_model, RULES["lomo"](plain_model), max_grad_norm=bound)
    plain.train()
    trainer = trainer_of(tmp_path, model, RULES["lomo"](model))
    lt.attach(trainer, max_grad_norm=bound)
    trainer.train()
    assert min(logged(plain, "grad_norm")) > bound
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(trainer)[name], weight, rtol=1e-6, atol=1e-7)


# -- loss scale ------------------------------------------------------------------------------------------------------


def test_g8_an_overflow_drops_the_step_and_the_schedule_waits(tmp_path: Path) -> None:
    model = tiny(dtype=torch.float16)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2)
    trainer = trainer_of(tmp_path, model, optimizer, max_steps=6)
    scale = lt.LossScale(initial=2.0**20)
    attached = lt.attach(trainer, loss_scale=scale)
    dropped, rates, still = [], [], []

    class Look(TrainerCallback):
        def on_step_begin(self, *arguments, **more):
            self.before = weights(trainer)

        def on_step_end(self, *arguments, **more):
            dropped.append(attached.fused.dropped)
            rates.append(optimizer.param_groups[0]["lr"])
            still.append(all(torch.equal(self.before[n], w) for n, w in weights(trainer).items()))

    trainer.add_callback(Look())
    trainer.train()
    overflows = sum(dropped)
    assert 0 < overflows < 5 and scale.value == 2.0 ** (20 - overflows)
    assert dropped == [True] * overflows + [False] * (6 - overflows)
    # Warm-up over two steps, then linear to zero at six: after k whole steps.
    expected = [1e-2 * (k / 2 if k < 2 else (6 - k) / 4) for k in range(1, 7 - overflows)]
    assert rates == pytest.approx([0.0] * overflows + expected)
    assert still == [drop or k == overflows for k, drop in enumerate(dropped)]  # the first whole step has a rate of 0


# -- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
def test_g11_resuming_continues_bit_for_bit(tmp_path: Path, half: bool) -> None:
    def build() -> tuple[Trainer, lt.LossScale | None]:
        model = tiny(dtype=torch.float16 if half else torch.float32)
        trainer = trainer_of(tmp_path, model, max_steps=7, save_strategy="steps", save_steps=4, warmup_steps=0)
        scale = lt.LossScale(initial=2.0**20, grow_every=3) if half else None
        lt.attach(trainer, loss_scale=scale)
        return trainer, scale

    whole, scale = build()
    whole.train()
    resumed, second = build()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_equal(weights(resumed), weights(whole))
    assert resumed.state.global_step == 7
    assert str(logged(resumed, "grad_norm")) == str(logged(whole, "grad_norm"))  # nan where a step was dropped
    if half:
        assert second.state_dict() == scale.state_dict() and scale.value < 2.0**20
        model = tiny(dtype=torch.float16)
        without = trainer_of(tmp_path, model, max_steps=7)
        lt.attach(without)
        with pytest.raises(StateMismatchError, match=r"saved with a loss scale.*loss_scale=LossScale"):
            without.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_resuming_with_a_loss_scale_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    lt.attach(trainer)
    trainer.train()
    again = trainer_of(tmp_path, max_steps=2)
    lt.attach(again, loss_scale=lt.LossScale())
    with pytest.raises(StateMismatchError, match=r"without a loss scale.*leave loss_scale out"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# -- what is refused -------------------------------------------------------------------------------------------------


def reentrant() -> nn.Module:
    model = tiny()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def frozen_out() -> tuple[nn.Module, lt.AdamW]:
    model = tiny()
    return model, lt.AdamW([model.lm_head.weight], lr=1e-3)


REFUSED = {
    "g2": ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps is 2.*accumulate='float32'"),
    "sums": ({}, {"accumulate": "int8"}, "accumulate is 'int8'"),
    "optim": ({"optim": "adafactor"}, {}, "optim=.*adafactor.*ignore"),
    "optim_args": ({"optim_args": "foo=1"}, {}, "optim_args='foo=1'"),
    "clip": ({}, {"clip": "sometimes"}, "clip is 'sometimes'"),
    "bound": ({}, {"clip": "none", "max_grad_norm": 1.0}, "max_grad_norm is set but clip='none'"),
    "reentrant": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {},
        "use_reentrant",
    ),
    "auto": ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_g2_g6_g9_arguments_that_cannot_be_honoured_are_refused_at_attach(tmp_path: Path, name: str) -> None:
    settings, given, message = REFUSED[name]
    trainer = trainer_of(tmp_path, **settings)
    before, callbacks = dict(trainer.__dict__), list(trainer.callback_handler.callbacks)
    with pytest.raises(InvalidArgumentError, match=message):
        lt.attach(trainer, **given)
    assert trainer.__dict__ == before and trainer.callback_handler.callbacks == callbacks


def test_g6_g9_models_and_optimizers_that_cannot_work_are_refused(tmp_path: Path) -> None:
    model = tiny()
    foreign = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidTypeError, match=r"not torch.optim.sgd.SGD"):
        lt.attach(trainer_of(tmp_path, model, foreign))
    with pytest.raises(InvalidArgumentError, match="reentrant checkpointing"):
        lt.attach(trainer_of(tmp_path, reentrant()))
    model, part = frozen_out()
    with pytest.raises(InvalidArgumentError, match="no optimizer updates"):
        lt.attach(trainer_of(tmp_path, model, part))
    trainer = trainer_of(tmp_path)
    with pytest.raises(InvalidTypeError, match="takes a transformers Trainer"):
        lt.attach(trainer.model)
    lt.attach(trainer)
    with pytest.raises(InvalidArgumentError, match="attached already"):
        lt.attach(trainer)


def test_g8_foreign_scalers_and_plugins_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(InvalidArgumentError, match=r"bf16=True.*LossScale"):
        lt.attach(trainer)
    trainer.accelerator.scaler = None
    trainer.args.fp16 = True
    with pytest.raises(InvalidArgumentError, match=r"bf16=True.*LossScale"):
        lt.attach(trainer)
    trainer.args.fp16 = False
    kind = type(trainer.accelerator.distributed_type)
    for name in ("DEEPSPEED", "FSDP"):
        with monkeypatch.context() as patch:
            patch.setattr(trainer.accelerator.state, "distributed_type", kind(name))
            with pytest.raises(InvalidArgumentError, match=name):
                lt.attach(trainer)
    trainer.args._n_gpu = 2
    with pytest.raises(InvalidArgumentError, match=r"2 GPUs.*torchrun"):
        lt.attach(trainer)


def test_a1_a_parameter_without_a_gradient_is_named_in_the_first_step(tmp_path: Path) -> None:
    model = tiny()
    model.orphan = nn.Parameter(torch.zeros(3))
    trainer = trainer_of(tmp_path, model)
    attached = lt.attach(trainer)
    with pytest.raises(BackwardError, match=r"1 trainable parameter.*orphan"):
        trainer.train()
    attached.remove()
    assert {"backward", "clip_grad_norm_"}.isdisjoint(trainer.accelerator.__dict__)


def test_a_training_that_failed_can_be_taken_up_again(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_begin(self, args, state, control, **more):
            if state.global_step == 1 and not self.__dict__.get("failed"):
                self.failed = True
                raise RuntimeError("stopped")

    trainer = trainer_of(tmp_path)
    attached = lt.attach(trainer)
    trainer.add_callback(Failing())
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    assert attached.fused is not None
    trainer.train()
    assert attached.fused is None and trainer.state.global_step == 4


def test_options_of_backward_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    class Keeping(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss, retain_graph=True)
            return loss.detach()

    trainer = trainer_of(tmp_path, kind=Keeping)
    lt.attach(trainer)
    with pytest.raises(BackwardError, match="called with retain_graph"):
        trainer.train()


# -- losses that cannot be run backward twice ------------------------------------------------------------------------


class InPlaceLoss(torch.autograd.Function):
    """What some fused losses do: the gradient is made in forward, and scaled in place in backward."""

    @staticmethod
    def forward(ctx, logits, labels, count):
        with torch.enable_grad():
            copy = logits.detach().requires_grad_()
            loss = nn.functional.cross_entropy(copy, labels, reduction="sum")
            ctx.grad = torch.autograd.grad(loss, copy)[0]
        return loss.detach() / count

    @staticmethod
    def backward(ctx, grad):
        return ctx.grad.mul_(grad / 12), None, None


class OnceLoss(InPlaceLoss):
    """And others free it."""

    @staticmethod
    def backward(ctx, grad):
        made = ctx.grad * (grad / 12)
        del ctx.grad
        return made, None, None


def loss_by(function: type[torch.autograd.Function]) -> type[Trainer]:
    class Fused(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = function.apply(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), 12)
            return (loss, outputs) if return_outputs else loss

    return Fused


@pytest.mark.parametrize("function", [InPlaceLoss, OnceLoss])
@pytest.mark.parametrize("two_passes", ["clip", "scale", None])
def test_g14_a_loss_whose_second_backward_is_wrong_is_refused_before_anything_moves(
    tmp_path: Path, function: type, two_passes: str | None
) -> None:
    trainer = trainer_of(tmp_path, kind=loss_by(function))
    given = {"clip": {"clip": "global"}, "scale": {"loss_scale": lt.LossScale(2.0)}, None: {"clip": "none"}}[two_passes]
    lt.attach(trainer, **given)
    before = weights(trainer)
    if two_passes is None:
        trainer.train()
        assert not torch.equal(before["lm_head.weight"], trainer.model.lm_head.weight)
        return
    with pytest.raises(BackwardError, match=r"second backward over one forward.*per_tensor"):
        trainer.train()
    assert_equal(before, weights(trainer))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_g14_an_honest_loss_is_probed_and_changes_nothing(tmp_path: Path, checkpointing: bool) -> None:
    ended = []
    for given in ({"clip": "none"}, {"clip": "global", "max_grad_norm": 1e9}):
        trainer = trainer_of(tmp_path, activation_checkpointing=checkpointing)
        lt.attach(trainer, **given)
        trainer.train()
        ended.append(weights(trainer))
    assert_equal(*ended)


# -- TRL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, "adamw"])
def test_g10_sft_trainer_with_lora_trains_the_adapters_alone(
    tmp_path: Path, tiny_model_path: str, tokenizer, rule: str | None
) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    def build(folder: Path) -> SFTTrainer:
        args = SFTConfig(
            output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none",
            use_cpu=True, save_strategy="no", logging_steps=1, max_length=32, disable_tqdm=True, max_grad_norm=0.0,
            bf16=False, model_init_kwargs={"dtype": "float32"}, dataloader_pin_memory=False,
        )  # fmt: skip
        data = Dataset.from_list([{"text": f"Row {number} says {number * 7 % 11}."} for number in range(8)])
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(0)
        trainer = SFTTrainer(
            model=tiny_model_path, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora
        )
        if rule is not None:
            adapters = [param for param in trainer.model.parameters() if param.requires_grad]
            trainer.optimizer = lt.AdamW(adapters, lr=1e-2)
        return trainer

    trainer = build(tmp_path / "fused")
    before = weights(trainer)
    attached = lt.attach(trainer)
    trainer.train()
    moved = {name for name, weight in weights(trainer).items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    adapters = sum(before[name].numel() for name in moved)
    assert attached.report().parameters == adapters
    assert min(logged(trainer, "grad_norm")) > 0 and len(logged(trainer, "mean_token_accuracy")) == 3
    if rule is not None:
        plain = build(tmp_path / "plain")
        plain.train()
        assert_equal(weights(trainer), weights(plain))


def test_g14_trls_own_loss_may_be_clipped_by_the_global_norm(tmp_path: Path, tiny_model_path: str, tokenizer) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        save_strategy="no", max_length=32, disable_tqdm=True, bf16=False, logging_steps=1,
    )  # fmt: skip
    data = Dataset.from_list([{"text": f"Row {number} says {number * 7 % 11}."} for number in range(8)])
    trainer = SFTTrainer(model=tiny_model_path, args=args, train_dataset=data, processing_class=tokenizer)
    lt.attach(trainer, max_grad_norm=0.5)
    trainer.train()
    assert min(logged(trainer, "grad_norm")) > 0


def test_importing_the_package_does_not_import_transformers() -> None:
    code = "import sys, leantune; assert 'attach' in dir(leantune); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

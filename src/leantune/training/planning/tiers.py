"""The later tiers of a plan: one step of the real architecture on fake tensors, or two real steps with random
weights."""

import warnings
from typing import Any

import psutil
import torch
from torch import nn

from leantune.activations.exact.apply import apply_exact_savings
from leantune.activations.velora.apply import apply_velora
from leantune.backward.fused import FusedBackward
from leantune.errors import InvalidArgumentError
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.sizes import format_bytes
from leantune.memory.traced.plan import Plan, plan_run
from leantune.memory.traced.trace import exact_loss, full_logits_loss, token_batch
from leantune.optim.base import LeanOptimizer
from leantune.training.config import TrainConfig
from leantune.training.optimizers import build_optimizer


def traced(config: TrainConfig, described: Any, settings: RunSettings) -> tuple[Plan, nn.Module]:
    """(a steady step walked on fake tensors, the model on the meta device): no weight exists."""
    with torch.device("meta"):
        model = build_model(config, described, settings)
    plan = plan_run(
        inner(model),
        _optimizer(config, model),
        batch_size=settings.batch_size,
        length=settings.length,
        fused=settings.fused,
        clip="global" if settings.two_passes else "per_tensor",
        loss="exact" if settings.exact_loss else "full_logits",
        micro_batches=settings.micro_batches,
        accumulate=settings.accumulate,
        autocast=torch.bfloat16 if config.bf16 else None,
        padded=settings.padded,
        batch=token_batch(settings.batch_size, settings.length, torch.device("cpu"), padded=settings.padded),
    )
    return plan, model


def measured_peak(config: TrainConfig, described: Any, settings: RunSettings) -> int:
    """The same, tracked in the second of two real steps on this machine's CPU.

    Raises InvalidArgumentError where half of this machine's free memory does not hold the plan.
    """
    need = traced(config, described, settings)[0].total
    free = psutil.virtual_memory().available
    if need > free // 2:
        raise InvalidArgumentError(
            f"tier measured runs two real steps, which need {format_bytes(need)}; this machine has "
            f"{format_bytes(free)} free, and half of it may be used. Write tier traced"
        )
    model = build_model(config, described, settings)
    optimizer = _optimizer(config, model)
    clip = "global" if settings.two_passes else "per_tensor"
    fused = None
    if settings.fused and isinstance(optimizer, LeanOptimizer):
        fused = FusedBackward(optimizer, inner(model), clip, accumulate=settings.accumulate)
    loss_of = exact_loss if settings.exact_loss else full_logits_loss
    batch = token_batch(settings.batch_size, settings.length, torch.device("cpu"), padded=settings.padded)
    generator = torch.Generator().manual_seed(config.seed)
    batch["labels"] = batch["input_ids"].random_(described.vocab_size, generator=generator).clone()
    if settings.padded:
        batch["attention_mask"][0, -1] = 0
    for step in range(2):
        tracker = MemoryTracker(inner(model), optimizer)
        if step == 1:
            tracker.start()
        for micro in range(settings.micro_batches):
            loss = loss_of(inner(model), batch)
            if fused is None:
                loss.backward()
            else:
                fused.backward(loss, last=micro == settings.micro_batches - 1)
            del loss
        optimizer.step()
        optimizer.zero_grad()
    tracker.stop()
    return tracker.timeline().peak_bytes


def build_model(config: TrainConfig, described: Any, settings: RunSettings) -> nn.Module:
    """The model of a config with weights that mean nothing, on the current device, ready to train."""
    from transformers import AutoModelForCausalLM

    if settings.method == "qlora":
        raise InvalidArgumentError("method: qlora is planned in closed form alone: tier closed, and a model it knows")
    model: Any = AutoModelForCausalLM.from_config(described, dtype=getattr(torch, config.dtype))
    if settings.checkpoint_every:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=settings.checkpoint_every)
    if settings.method == "lora":
        from peft import LoraConfig, get_peft_model

        targets = settings.lora_targets
        lora = LoraConfig(
            r=settings.lora_rank,
            lora_dropout=settings.lora_dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
    of_modules = {name: getattr(settings, name) for name in ("swiglu", "dropout", "shared_adapter_input")}
    if any(of_modules.values()):
        apply_exact_savings(model, **of_modules)
    if settings.velora_targets:
        apply_velora(
            model, list(settings.velora_targets), settings.velora_groups, refresh_every=config.velora_refresh_every
        )
    trained: nn.Module = model.train()
    return trained


def inner(model: Any) -> nn.Module:
    """The causal language model without the adapters' wrapper."""
    module: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return module


def _optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    if config.ours:
        return build_optimizer(config, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    known: dict[str, Any] = {
        "adamw_torch": torch.optim.AdamW,
        "adamw_torch_fused": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    if config.optim not in known:
        raise InvalidArgumentError(f"optim {config.optim} can be planned in closed form alone; write tier closed")
    optimizer: torch.optim.Optimizer = known[config.optim](trained, lr=config.rate)
    return optimizer

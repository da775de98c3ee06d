"""The arms of quality_velora.py: what each makes of a model, and the optimizer it trains with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import leantune as lt
from leantune.activations.velora.handle import VeloraHandle
from leantune.kernels.half_linear import needs_fp32_products, use_fp32_products
from quality.methods import BETAS, WEIGHT_DECAY, adamw
from quality.task import MissingData

GALORE_SOURCE = "galore-torch is not importable: pip install --no-deps --target FOLDER galore-torch, and PYTHONPATH"
LORA_RANK, GALORE_RANK, GALORE_GAP = 16, 64, 50


@dataclass(frozen=True)
class Layers:
    """Which layers of a task an arm works on, by the ends of their names."""

    velora: tuple[str, ...]
    groups: int
    """Sub-tokens of a token."""
    adapted: tuple[str, ...] = ()
    """Linear layers that get adapters, or are quantised; none: no such arms."""
    checkpoints: bool = False
    """The model can be told to recompute its blocks."""
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Other sets of layers, by the name their ablation goes under."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    adapters: bool = False
    quantised: bool = False
    velora: bool = False
    factored: bool = False
    refresh_every: int | None = None
    groups: int | None = None
    """None: the task's."""
    targets: str | None = None
    """One of the task's variants."""
    galore: bool = False
    checkpoint: bool = False
    exact: bool = True
    offset: int = 0
    """The search starts this many factors of 2 above the task's rate for full fine-tuning."""
    rate_of: str | None = None
    """Run at the best rate of that arm, without a search."""

    def possible(self, layers: Layers) -> bool:
        """Whether a task has what the arm needs."""
        if (self.adapters and not layers.adapted) or (self.checkpoint and not layers.checkpoints):
            return False
        return self.targets is None or self.targets in layers.variants


_VELORA = Arm(velora=True, rate_of="velora")
ARMS: dict[str, Arm] = {
    "full": Arm(),
    "full-plain": Arm(exact=False, rate_of="full"),
    "checkpoint": Arm(checkpoint=True, rate_of="full"),
    "galore": Arm(galore=True, offset=1),
    "velora": Arm(velora=True),
    "lora": Arm(adapters=True, offset=3),
    "lora+velora": Arm(adapters=True, velora=True, offset=3),
    "qlora": Arm(adapters=True, quantised=True, offset=3),
    "qlora+velora": Arm(adapters=True, quantised=True, velora=True, offset=3),
}
ABLATIONS: dict[str, Arm] = {
    "velora-factored": replace(_VELORA, factored=True),
    **{f"velora-refresh{every}": replace(_VELORA, refresh_every=every) for every in (1, 10)},
    **{f"velora-groups{groups}": replace(_VELORA, groups=groups) for groups in (4, 8, 16, 64, 96, 192)},
    **{f"velora-on-{name}": replace(_VELORA, targets=name) for name in ("paper", "attention", "mlp", "down")},
}
"""M is the features over the groups. Groups that a task's layers cannot be cut into, or that are the task's own, are
left out there."""


@dataclass
class Prepared:
    """A model that an arm trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    velora: VeloraHandle | None


def prepare(model: nn.Module, arm: Arm, layers: Layers, lr: float, weights: str, seed: int) -> Prepared:
    """Put an arm's parts into a fresh model. Raises MissingData where a library is not there."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__dict__.pop("forward", None)  # fp32 products, which come last
    if arm.quantised:
        _quantise(model, layers.adapted)
    if arm.adapters:
        _adapt(model, layers.adapted)
    if arm.checkpoint:
        settings = {"use_reentrant": False}
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing_enable"):
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
                break
    if arm.exact:
        lt.apply_exact_savings(model)
    velora = None
    if arm.velora:
        targets = layers.velora if arm.targets is None else layers.variants[arm.targets]
        velora = lt.apply_velora(
            model,
            list(targets),
            arm.groups or layers.groups,
            refresh_every=arm.refresh_every,
            factored=arm.factored,
        )
        velora.use_fp32_products()
    use_fp32_products(model)
    optimizer = _galore(model, lr) if arm.galore else _adamw(model, lr, weights, seed)
    if velora is not None and arm.factored:
        velora.attach(optimizer)
    return Prepared(model, optimizer, velora)


def _adamw(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    """AdamW over what is trained: adapters are fp32 whatever the weights are."""
    trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    narrow = any(p.dtype != torch.float32 for p in trained)
    return adamw(trained, lr, weights if narrow else "fp32", seed)


def _galore(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """GaLore's own AdamW, its projection on every matrix but embeddings and heads. Narrow weights are rounded to
    nearest, as it does."""
    try:
        from galore_torch import GaLoreAdamW
    except ImportError as error:
        raise MissingData(GALORE_SOURCE) from error
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    projected, others = [], []
    for parameter in (p for p in model.parameters() if p.requires_grad):
        low = parameter.dim() == 2 and id(parameter) not in tables and min(parameter.shape) > GALORE_RANK
        (projected if low else others).append(parameter)
    settings = {"rank": GALORE_RANK, "update_proj_gap": GALORE_GAP, "scale": 0.25, "proj_type": "std"}
    groups = [{"params": others}, *([{"params": projected, **settings}] if projected else [])]
    return GaLoreAdamW(groups, lr=lr, betas=BETAS, eps=1e-8, weight_decay=WEIGHT_DECAY, no_deprecation_warning=True)


def _adapt(model: nn.Module, targets: tuple[str, ...]) -> None:
    """PEFT's LoRA, fp32, in place; what trains beside adapters is what has no name among the targets and is a head."""
    from peft import LoraConfig, inject_adapter_in_model

    head = [p for name, p in model.named_parameters() if name.startswith("head.")]
    lora = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.05, target_modules=list(targets))
    inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    for parameter in head:
        parameter.requires_grad_(True)


def _quantise(model: nn.Module, targets: tuple[str, ...]) -> None:
    """nf4, scales nested, of the layers that get adapters."""
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise MissingData("bitsandbytes is not installed: pip install 'leantune[qlora]'") from error
    for name, layer in _linear(model, targets):
        dtype = layer.weight.dtype
        compute = torch.float32 if needs_fp32_products(dtype) else dtype
        made = bnb.nn.LinearNF4(layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=compute)
        made.weight = bnb.nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=made
        )
        made.support_avx512bf16_for_cpu = False  # as `leantune.training.quantised_base.settle`
        made.bias = layer.bias
        model.set_submodule(name, made.to("cpu").requires_grad_(False))


def _linear(model: nn.Module, targets: tuple[str, ...]) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and any(name == end or name.endswith(f".{end}") for end in targets):
            yield name, module


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Any]:
    """The model in evaluation mode, without gradients."""
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train()

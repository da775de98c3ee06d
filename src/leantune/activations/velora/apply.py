"""apply_velora: put the projection into chosen linear layers of a model, and take it out again."""

import difflib
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from leantune.activations.velora.linear import velora_linear
from leantune.activations.velora.projection import SubTokens, kept_energy, mean_direction
from leantune.activations.velora.report import VeloraReport, VeloraRow
from leantune.errors import InvalidArgumentError, InvalidTypeError, StateMismatchError
from leantune.kernels.half_linear import needs_fp32_products

_MARK = "_leantune_velora"


@dataclass
class _Layer:
    """One linear layer under VeLoRA, its direction, and what its last training forward kept."""

    name: str
    module: nn.Linear
    cut: SubTokens
    v: Tensor | None = None
    wide: bool = False
    tokens: int = 0
    exact_bytes: int = 0
    kept_bytes: int = 0
    energy: Tensor | None = None
    source: StorageWeakRef | None = None  # the input's storage; None where a cast copy would have been kept
    held: bool = False  # something else still held the input when backward came
    recomputed: bool = False  # the last forward was gradient checkpointing's, inside backward

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Layer":
        raise InvalidTypeError(
            "a model under VeLoRA cannot be deep-copied: the copy's layers would write to the original's projection. "
            "Call handle.remove() first, copy, and apply_velora to both."
        )


def apply_velora(model: nn.Module, target_modules: Sequence[str] | str, num_groups: int = 32) -> "VeloraHandle":
    """Make chosen ``nn.Linear`` layers keep a projection of their input for backward instead of the input.

    Args:
        model: its parameters, their names and its state dict stay as they are.
        target_modules: ends of dotted module names (["down_proj"]), or one regular expression over whole names.
        num_groups: sub-tokens a token is cut into; each keeps one number.

    Forward, dX and db are exact; dW is approximate (:mod:`leantune.activations.velora.projection`). A layer's direction
    v is set by its first training forward; evaluation and ``no_grad`` forwards never set it and run the plain layer.

    Returns a handle with ``report()``, ``remove()``, ``state_dict()``, ``load_state_dict()``, ``save()`` and
    ``load()``.

    Raises InvalidArgumentError or InvalidTypeError before anything is changed: a target that matches nothing (with
    close names), a match that is not a plain trainable nn.Linear, VeLoRA applied twice, a num_groups the layer cannot
    be cut into.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> handle = apply_velora(model, ["2"], num_groups=8)
    >>> model(torch.rand(5, 64)).sum().backward()
    >>> handle.report().exact_bytes, handle.report().kept_bytes
    (1280, 160)
    """
    matched = _matches(model, target_modules)
    layers = [
        _Layer(name, _checked(name, module), SubTokens.of(module.in_features, num_groups)) for name, module in matched
    ]
    for layer in layers:
        setattr(layer.module, _MARK, layer)
        layer.module.forward = types.MethodType(_forward, layer.module)  # type: ignore[method-assign]
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return VeloraHandle(layers, {name for name, module in linear if module.weight.requires_grad})


class VeloraHandle:
    """The layers that :func:`apply_velora` changed."""

    def __init__(self, layers: list[_Layer], trained: set[str]) -> None:
        self._layers = layers
        self._trained = trained  # names of linear layers whose weight is not frozen

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return [layer.name for layer in self._layers]

    def predicted_bytes(self, tokens: int) -> tuple[int, int]:
        """(exact, kept) bytes of all layers for a forward over ``tokens`` tokens in the weights' dtype."""
        exact = sum(tokens * layer.cut.features * layer.module.weight.itemsize for layer in self._layers)
        return exact, sum(tokens * layer.cut.groups * layer.module.weight.itemsize for layer in self._layers)

    def report(self) -> VeloraReport:
        """Bytes and kept energy of the last training forward, layer by layer."""
        rows: list[VeloraRow] = []
        counted: set[int] = set()
        for layer in self._layers:
            energy = None if layer.energy is None else float(layer.energy)
            cut = layer.cut
            # Targets that read one tensor would have kept it once: the first of them counts it.
            again = layer.source is not None and layer.source.cdata in counted
            if layer.source is not None:
                counted.add(layer.source.cdata)
            exact = 0 if again else layer.exact_bytes
            sizes = (cut.features, cut.size, cut.groups, layer.tokens, exact, layer.kept_bytes)
            rows.append(VeloraRow(layer.name, *sizes, energy, self._input_kept_anyway(layer)))
        return VeloraReport(rows)

    def use_fp32_products(self) -> None:
        """Multiply narrow operands in fp32, as :mod:`leantune.kernels.half_linear` does for plain layers on such
        CPUs."""
        for layer in self._layers:
            layer.wide = needs_fp32_products(layer.module.weight.dtype) and layer.module.weight.device.type == "cpu"

    def remove(self) -> None:
        """Restore every layer exactly as it was.

        Raises StateMismatchError, nothing changed, where something else has replaced a layer's forward since.
        """
        for layer in self._layers:
            if getattr(layer.module.__dict__.get("forward"), "__func__", None) is not _forward:
                raise StateMismatchError(
                    f"the forward of {layer.name} was replaced after apply_velora (hooks of another library do that); "
                    "restoring it would drop that change. Remove the later change first."
                )
        for layer in self._layers:
            delattr(layer.module, _MARK)
            del layer.module.forward
        self._layers = []

    def state_dict(self) -> dict[str, Tensor]:
        """The direction of every layer that has one, fp32 (sub-token size,), by layer name."""
        return {layer.name: layer.v.clone() for layer in self._layers if layer.v is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore directions; raises StateMismatchError, nothing changed, where a name or size does not fit."""
        by_name = {layer.name: layer for layer in self._layers}
        for name, v in state.items():
            if name not in by_name or tuple(v.shape) != (by_name[name].cut.size,):
                expected = f"({by_name[name].cut.size},)" if name in by_name else "no such layer"
                raise StateMismatchError(
                    f"saved VeLoRA direction {name} has shape {tuple(v.shape)}, here: {expected}. Apply VeLoRA with "
                    "the target_modules and num_groups it was saved with."
                )
        for name, layer in by_name.items():
            layer.v = state[name].to(layer.module.weight.device, torch.float32) if name in state else None

    def save(self, path: str | Path) -> None:
        """Write the directions to a safetensors file."""
        from safetensors.torch import save_file

        save_file(self.state_dict(), str(path))

    def load(self, path: str | Path) -> None:
        """Read what :meth:`save` wrote."""
        from safetensors.torch import load_file

        self.load_state_dict(load_file(str(path)))

    def _input_kept_anyway(self, layer: _Layer) -> bool:
        """Whether the input is kept whatever VeLoRA does: something still held it when backward came (a ReLU keeps its
        output), the block is checkpointed, or a trained sibling outside the targets, by the usual names, reads it."""
        if layer.held or layer.recomputed:
            return True
        parent, _, own = layer.name.rpartition(".")
        siblings = next((family for family in _SHARED_INPUTS if own in family), ())
        ours = {one.name for one in self._layers}
        names = {f"{parent}.{name}".lstrip(".") for name in siblings if name != own}
        return bool((names - ours) & self._trained)


_SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    """What a layer under VeLoRA runs. A batch that trains the weight goes through the projection; any other is
    exact."""
    layer: _Layer = getattr(module, _MARK)
    if not (module.training and torch.is_grad_enabled() and module.weight.requires_grad):
        return nn.functional.linear(x, module.weight, module.bias)
    flat = x.detach().reshape(-1, layer.cut.features)
    if x.is_meta or isinstance(x, FakeTensor):  # a trace must neither set the direction nor leave measurements
        v = flat.new_empty((layer.cut.size,), dtype=torch.float32)
        return velora_linear(x, module.weight, module.bias, v, layer.cut, layer.wide)[0]
    if layer.v is None:
        layer.v = mean_direction(flat, layer.cut)
    elif layer.v.device != x.device:
        layer.v = layer.v.to(x.device)
    v = layer.v if layer.v is not None else flat.new_zeros((layer.cut.size,), dtype=torch.float32)
    # Before the layer runs: checkpointing may end a recomputation at the last tensor saved, inside it.
    layer.recomputed = torch._C._current_graph_task_id() != -1
    y, z = velora_linear(x, module.weight, module.bias, v, layer.cut, layer.wide)
    layer.tokens = z.shape[0]
    layer.exact_bytes, layer.kept_bytes = z.shape[0] * layer.cut.features * z.itemsize, z.nbytes
    layer.energy = kept_energy(x, z)
    layer.source = StorageWeakRef(x.untyped_storage()) if x.dtype == z.dtype else None
    if layer.source is not None:
        y.register_hook(partial(_look_whether_held, layer, layer.source))
    return y


def _look_whether_held(layer: _Layer, source: StorageWeakRef, grad: Tensor) -> None:
    layer.held = not source.expired()


def _matches(model: nn.Module, targets: Sequence[str] | str) -> list[tuple[str, Any]]:
    """Modules the targets name, in the model's order. Every target must match something."""
    named = [(name, module) for name, module in model.named_modules() if name]
    if isinstance(targets, str):
        try:
            found = [pair for pair in named if re.fullmatch(targets, pair[0])]
        except re.error as error:
            raise InvalidArgumentError(
                f"target_modules: {targets!r} is no regular expression ({error}); a list gives ends of names."
            ) from None
        if not found:
            raise InvalidArgumentError(f"the expression {targets!r} matches no module. {_close(targets, named)}")
        return found
    if not isinstance(targets, Sequence) or not all(isinstance(target, str) for target in targets):
        raise InvalidTypeError(
            f'target_modules is {targets!r}; it takes a list of names, for example ["down_proj"], or one regular '
            "expression."
        )
    if not targets:
        raise InvalidArgumentError('target_modules is empty; name at least one, for example ["down_proj"].')
    for target in targets:
        if not any(_ends_with(name, target) for name, _ in named):
            raise InvalidArgumentError(f"target_modules: {target!r} matches no module. {_close(target, named)}")
    return [pair for pair in named if any(_ends_with(pair[0], target) for target in targets)]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _close(target: str, named: list[tuple[str, Any]]) -> str:
    linear = sorted({name.rpartition(".")[2] for name, module in named if isinstance(module, nn.Linear)})
    close = difflib.get_close_matches(target.rpartition(".")[2], linear, n=3, cutoff=0.4)
    return f"Did you mean {', '.join(close)}?" if close else f"Linear layers here: {', '.join(linear[:12]) or 'none'}."


def _checked(name: str, module: Any) -> nn.Linear:
    if hasattr(module, _MARK):
        raise InvalidArgumentError(f"{name} is under VeLoRA already; call remove() on its handle first.")
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        raise InvalidTypeError(
            f"{name} is a {type(module).__name__}; VeLoRA here is for plain nn.Linear layers in full fine-tuning. "
            "Leave it out of target_modules."
        )
    if not module.weight.requires_grad:
        raise InvalidArgumentError(
            f"the weight of {name} is frozen: it keeps no input, so VeLoRA has nothing to save. Leave it out."
        )
    return module

"""PEFT's LoRA layers, on ``nn.Linear``, ``Conv1D`` and bitsandbytes' 4-bit and 8-bit bases.

    h = drop(x) A^T        y = base(x) + s h B^T        dA = dh^T drop(x)  ~  C v^T,  C = dh^T Z  (r, groups)

The base is frozen and keeps no input. What is kept is the input of ``lora_A``: x, or a copy of it in the adapter's
dtype, or its dropped-out copy. Z, the projection of exactly that, is kept instead. Dropout keeps the generator's state
and no mask (`leantune.activations.replayed_dropout`); an 8-bit base lets go of the input that bitsandbytes holds for no
reason (`leantune.activations.int8_input`). Nothing here imports peft or bitsandbytes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from leantune.activations.exact.forwards import SavingForward
from leantune.activations.int8_input import is_int8_linear, release_input
from leantune.activations.random_state import mask_bytes, state_bytes
from leantune.activations.replayed_dropout import replayed_dropout
from leantune.activations.velora.kind import own_type
from leantune.activations.velora.layer import Layer
from leantune.activations.velora.linear import LinearProduct
from leantune.activations.velora.projection import SubTokens
from leantune.activations.velora.site import Site
from leantune.errors import InvalidArgumentError, InvalidTypeError

_PLAIN, _QUANTISED = "Linear", ("Linear4bit", "Linear8bitLt")


class AdapterSite(Site):
    """The input of one adapter's ``lora_A``, dropout included. Called with x in the adapter's dtype."""

    def __init__(self, name: str, lora_a: nn.Linear, dropout: nn.Module, cut: SubTokens) -> None:
        super().__init__(name, lora_a, LinearProduct(cut))
        self.dropout = dropout
        self._state_bytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        p = self.dropout.p if isinstance(self.dropout, nn.Dropout) and self.dropout.training else 0.0
        state = state_bytes(x.device)
        # Under exact savings the module itself keeps no mask.
        saves = p > 0 and state is not None and torch.is_grad_enabled() and x.requires_grad
        if not saves or isinstance(self.dropout.__dict__.get("forward"), SavingForward):
            self.mask_bytes = self._state_bytes = 0
            return super().__call__(self.dropout(x))
        self.mask_bytes, self._state_bytes = mask_bytes(x), state or 0
        return super().__call__(replayed_dropout(x, p))

    def _note(self, x: Tensor, z: Tensor) -> None:
        super()._note(x, z)
        self.kept_bytes += self._state_bytes


class LoraKind:
    """PEFT's ``lora.Linear``, ``lora.Linear4bit`` and ``lora.Linear8bitLt``, one site for each of their adapters.

    The layer's forward is PEFT's own in other words, equal to the bit, where its adapters are active and unmerged; with
    adapters disabled, merged or mixed in a batch (``adapter_names``) it is PEFT's forward itself, and exact. An adapter
    added after `apply_velora` is exact too.
    """

    label = "PEFT's LoRA layers"

    def takes(self, module: nn.Module) -> bool:
        return own_type(module).__module__.startswith("peft.tuners.lora.") and hasattr(module, "lora_A")

    def sites(self, name: str, module: Any, num_groups: int) -> list[Site]:
        _refuse(name, module)
        return [
            AdapterSite(
                f"{name}.lora_A.{adapter}",
                lora_a,
                module.lora_dropout[adapter],
                SubTokens.of(lora_a.in_features, num_groups),
            )
            for adapter, lora_a in module.lora_A.items()
        ]

    def forward(self, layer: Layer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = layer.module
        kind: Any = own_type(module)
        if module.disable_adapters or module.merged or kwargs.get("adapter_names") is not None:
            return kind.forward(module, x, *args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("adapter_names", "alora_offsets")}
        quantised = kind.__name__ in _QUANTISED
        result: Tensor = module.base_layer(x, *args, **kwargs)
        if is_int8_linear(module.base_layer):
            release_input(module.base_layer, x, result)
        if kind.__name__ == "Linear4bit":
            result = result.clone()  # as peft does: backward through a view of a quantised product may fail
        dtype = result.dtype
        # peft leaves the dtypes of adapters on quantised bases to autocast, and casts everywhere else.
        casts = not (quantised and torch.is_autocast_enabled())
        sites = {id(site.module): site for site in layer.sites}
        for adapter in module.active_adapters:
            if adapter not in module.lora_A:
                continue
            lora_a = module.lora_A[adapter]
            if casts:
                x = module._cast_input_dtype(x, lora_a.weight.dtype)
            site = sites.get(id(lora_a))
            hidden = lora_a(module.lora_dropout[adapter](x)) if site is None else site(x)
            output = module.lora_B[adapter](hidden) * module.scaling[adapter]
            result = result + (output.to(dtype) if quantised and casts else output)
        return result if quantised else result.to(dtype)


def _refuse(name: str, module: Any) -> None:
    """Raise where a layer computes something else than base(x) + s B A drop(x), or trains no ``lora_A``."""
    kind = own_type(module).__name__
    if kind != _PLAIN and kind not in _QUANTISED:
        raise InvalidTypeError(
            f"{name} is a LoRA layer of the kind {kind}, on {type(module.get_base_layer()).__name__}; VeLoRA is for "
            "LoRA on nn.Linear, Conv1D and bitsandbytes' 4-bit and 8-bit linear layers. Leave it out of target_modules."
        )
    for adapter, variant in module.lora_variant.items():
        what = type(variant).__name__.removesuffix("Variant").removesuffix("Linear")
        told = {
            "Dora": "use_dora reads the input in other places too. Make the adapter without use_dora",
            "Velora": "it projects its inputs itself. Make the adapter without velora_config",
        }
        why = told.get(what, f"the {what} variant computes something else than plain LoRA. Make the adapter without it")
        raise InvalidArgumentError(f"adapter {adapter!r} of {name}: {why}, or leave the layer out of target_modules.")
    for adapter, lora_a in module.lora_A.items():
        if type(lora_a) is not nn.Linear or lora_a.bias is not None:
            raise InvalidTypeError(
                f"adapter {adapter!r} of {name} has a {type(lora_a).__name__} as lora_A; VeLoRA is for a plain "
                "nn.Linear without bias there. Leave the layer out of target_modules."
            )
    if not any(lora_a.weight.requires_grad for lora_a in module.lora_A.values()):
        raise InvalidArgumentError(
            f"no lora_A of {name} is trained (adapters: {', '.join(module.lora_A) or 'none'}): it keeps no input, so "
            "VeLoRA has nothing to save. Load adapters with is_trainable=True, or leave the layer out."
        )

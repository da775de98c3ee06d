"""What bitsandbytes layers hold and allocate beyond their parameters, for plans and measurements.

A ``Params4bit`` carries its scales in a ``quant_state`` that no ``parameters()`` shows, ``Linear8bitLt`` has them in a
state of its own. Their matrix product dequantises a whole weight inside one operator, where no tracker looks.
bitsandbytes itself is not imported here.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

_INT8_TENSORS = ("CB", "SCB")


def scales(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that quantised layers of ``model`` keep beside their weights: absolute maxima, code books, scales."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            yield from _held(getattr(weight, "quant_state", None))
            yield from _int8_held(weight)
        yield from _int8_held(getattr(module, "state", None))


def fake_scales(module: nn.Module, fake_weight: Tensor, weight: Tensor, fake: Callable[[Tensor], Tensor]) -> None:
    """Give the fake weight of a quantised layer what its forward looks for, fake as well; nothing real is changed.

    ``module.state`` is replaced by a fake copy: the caller restores the attributes of ``module``.
    """
    if getattr(weight, "quant_state", None) is not None:
        fake_weight.quant_state = _fake_copy(weight.quant_state, fake)  # type: ignore[attr-defined]
    if hasattr(weight, "has_fp16_weights"):  # Int8Params
        fake_weight.has_fp16_weights = weight.has_fp16_weights  # type: ignore[attr-defined]
        _fake_int8(weight, fake_weight, fake_weight, fake)
        state = copy.copy(module.state)
        _fake_int8(module.state, state, fake_weight, fake)
        module.__dict__["state"] = state


def elements(parameter: Tensor) -> int:
    """How many weights a parameter stands for; a 4-bit one packs two in a byte.

    >>> elements(__import__('torch').zeros(3, 4))
    12
    """
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def storage(parameter: Tensor) -> str:
    """The dtype of a parameter as a reader knows it: "bfloat16", "int8", and "nf4" or "fp4" for 4-bit weights."""
    state = getattr(parameter, "quant_state", None)
    return str(parameter.dtype).removeprefix("torch.") if state is None else str(state.quant_type)


def hidden_bytes(operator: Any, arguments: tuple[Any, ...]) -> int:
    """Bytes that an operator allocates and frees inside itself: the dequantised weight of a 4-bit product.

    bitsandbytes' ``gemm_4bit`` (A, B, shape, ...) makes the whole weight in A's dtype, and fp32 absolute maxima where
    those are quantised themselves. On CUDA it has kernels without it for few tokens; this counts the general case.
    """
    if getattr(operator, "namespace", "") != "bitsandbytes" or operator.__name__ != "gemm_4bit.default":
        return 0
    a, _, shape, maxima, block_size = arguments[:5]
    weights = math.prod(shape)
    nested = maxima.numel() < -(-weights // block_size)
    return weights * a.element_size() + (4 * -(-weights // block_size) if nested else 0)


def _held(state: Any) -> Iterator[Tensor]:
    """Tensors of a quantisation state and of the state of its scales."""
    for value in vars(state).values() if state is not None else ():
        if isinstance(value, Tensor):
            yield value
        elif type(value) is type(state):
            yield from _held(value)


def _int8_held(holder: Any) -> Iterator[Tensor]:
    found = (getattr(holder, name, None) for name in _INT8_TENSORS) if holder is not None else ()
    yield from (tensor for tensor in found if isinstance(tensor, Tensor))


def _fake_copy(state: Any, fake: Callable[[Tensor], Tensor]) -> Any:
    twin = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(twin, name, fake(value))
        elif type(value) is type(state):
            setattr(twin, name, _fake_copy(value, fake))
    return twin


def _fake_int8(real: Any, twin: Any, fake_weight: Tensor, fake: Callable[[Tensor], Tensor]) -> None:
    """``CB`` is the weight's own data under another name, ``SCB`` its scales."""
    has_data, has_scales = (isinstance(getattr(real, name, None), Tensor) for name in _INT8_TENSORS)
    twin.CB = fake_weight.detach() if has_data else None
    twin.SCB = fake(real.SCB) if has_scales else None

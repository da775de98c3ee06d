"""Which modules exact savings apply to, found by what they are made of and what they do, not by the names of classes.

* An activation is a module without children, parameters and buffers that maps every element on its own, tried on twelve
  numbers; the trial also shows what it keeps for backward.
* Its block is the smallest module around it that holds two projections: there its result, or the product with a gate,
  is read by the second.
* An adapter layer has a ``base_layer`` and ``lora_A``. A dropout is an ``nn.Dropout``.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leantune.activations.exact.forwards import (
    ActivationForward,
    AdapterForward,
    BlockForward,
    DropoutForward,
    FamilyForward,
    Keeps,
    SavingForward,
)
from leantune.activations.exact.region import saved_by

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called themselves."""


@dataclass
class Found:
    """What was found in a model."""

    forwards: list[SavingForward] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    """(module name, why it stays as it is)"""


def find(model: nn.Module, *, swiglu: bool, dropout: bool, shared_adapter_input: bool) -> Found:
    """Everything in ``model`` that the chosen savings apply to. Nothing is changed."""
    found = Found()
    if swiglu:
        _find_blocks(model, found)
    for name, module in model.named_modules():
        if dropout and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            _find_dropout(name, module, found)
        if shared_adapter_input and is_adapter(module):
            found.forwards.append(AdapterForward(name, module))
            _find_family(model, name, found)
    order = {id(module): position for position, module in enumerate(model.modules())}
    found.forwards.sort(key=lambda forward: order[id(forward.module)])
    return found


def is_adapter(module: nn.Module) -> bool:
    """Whether ``module`` is a layer with low-rank adapters, as PEFT builds them."""
    adapters = getattr(module, "lora_A", None)
    return isinstance(adapters, nn.ModuleDict) and len(adapters) > 0 and hasattr(module, "base_layer")


def _find_family(model: nn.Module, name: str, found: Found) -> None:
    """The module around adapter layers, where it can be seen what else keeps their input."""
    parent = name.rpartition(".")[0]
    module = model.get_submodule(parent)
    if not isinstance(module, _CONTAINERS) and all(f.module is not module for f in found.forwards):
        found.forwards.append(FamilyForward(parent, module))


def _find_dropout(name: str, module: nn.Module, found: Found) -> None:
    if type(module) is not nn.Dropout:
        found.left.append((name, f"{type(module).__name__}: only nn.Dropout's mask is drawn again"))
    elif module.inplace:
        found.left.append((name, "a dropout in place overwrites what it would be made again from"))
    elif "forward" in module.__dict__:
        found.left.append((name, "its forward was replaced by something else"))
    else:
        found.forwards.append(DropoutForward(name, module))


def _find_blocks(model: nn.Module, found: Found) -> None:
    blocks: dict[int, BlockForward] = {}
    seen: set[int] = set()
    counts: dict[int, int] = {}
    for path in _paths(model):
        name, module = path[-1]
        if getattr(module, "inplace", False) is True and not isinstance(module, nn.modules.dropout._DropoutNd):
            found.left.append((name, "an activation in place overwrites what it would be made again from"))
            continue
        keeps = _keeps(module)
        if keeps is None:
            continue
        around = [pair for pair in reversed(path[:-1]) if not isinstance(pair[1], _CONTAINERS)]
        block = next((pair for pair in around if _projections(pair[1], counts) >= 2), None)
        if block is None:
            found.left.append((name, "no module around it holds two projections"))
        else:
            if id(module) not in seen:
                found.forwards.append(ActivationForward(name, module, keeps))
            if id(block[1]) not in blocks:
                blocks[id(block[1])] = BlockForward(*block)
            seen.add(id(module))
    found.forwards.extend(blocks.values())


def _paths(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """For every module without children: the (name, module) pairs from the model down to it."""

    def walk(path: list[tuple[str, nn.Module]]) -> Iterator[list[tuple[str, nn.Module]]]:
        name, module = path[-1]
        children = list(module.named_children())
        if not children:
            yield path
        for child, below in children:
            yield from walk([*path, (f"{name}.{child}" if name else child, below)])

    return walk([("", model)])


def _projections(module: nn.Module, counts: dict[int, int]) -> int:
    """Linear maps in ``module``: its own matrices and those of the modules in it, an adapter layer counting as one."""
    if id(module) not in counts:
        if is_adapter(module):
            counts[id(module)] = 1
        else:
            own = sum(parameter is not None and parameter.dim() >= 2 for parameter in module._parameters.values())
            own = own or int(not any(module.children()) and hasattr(module, "in_features"))
            counts[id(module)] = own + sum(_projections(child, counts) for child in module.children())
    return counts[id(module)]


def _keeps(module: nn.Module) -> Keeps | None:
    """What an elementwise activation keeps for backward; None for every other module."""
    if isinstance(module, nn.Identity | nn.modules.dropout._DropoutNd) or not _takes_one_tensor(module):
        return None
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    x = torch.linspace(-3.0, 3.5, 12, device="cpu").view(3, 4)  # a model may be on the meta device
    generator = torch.get_rng_state()
    try:
        return _tried(module, x)
    except Exception:  # whatever a module that is no activation makes of such an input
        return None
    finally:
        torch.set_rng_state(generator)


def _tried(module: nn.Module, x: Tensor) -> Keeps | None:
    run = module.forward  # not the module itself: its hooks must not see a trial
    with torch.no_grad():
        y, other = run(x.clone()), run(torch.cat([x[:1], -x[1:]]))
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            return None
        # Equal runs; elements that do not depend on the others; something done at all.
        if not torch.equal(y, run(x.clone())) or not _close(other[:1], y[:1]) or torch.equal(x, y):
            return None
        alone = torch.stack([run(element.view(1, 1)).view(()) for element in x.flatten()]).view_as(x)
        if not _close(alone, y):
            return None
    results: list[Tensor] = []
    saved = saved_by(lambda tensor: results.append(run(tensor)), x.clone().requires_grad_())
    same = [torch.equal(tensor, x) for tensor in saved]
    if all(same):
        return "input"
    return "result" if len(saved) == 1 and torch.equal(saved[0], results[0]) else "intermediates"


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal, but for the rounding of vectorised and single evaluations (an erf loses digits far from zero)."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def _takes_one_tensor(module: nn.Module) -> bool:
    if any(True for _ in module.children()):
        return False
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 1

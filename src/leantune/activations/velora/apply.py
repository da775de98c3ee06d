"""apply_velora: put the projection into chosen layers of a model."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from leantune.activations.velora.handle import VeloraHandle
from leantune.activations.velora.kinds import layer_of
from leantune.activations.velora.targets import matched_modules
from leantune.errors import InvalidArgumentError


def apply_velora(
    model: nn.Module,
    target_modules: Sequence[str] | str,
    num_groups: int = 32,
    *,
    refresh_every: int | None = None,
    process_group: Any = "auto",
) -> VeloraHandle:
    """Make chosen layers keep a projection of their input for backward instead of the input.

    Args:
        model: its parameters, their names and its state dict stay as they are.
        target_modules: ends of dotted module names (["down_proj"]), or one regular expression over whole names. What
            kinds of layers there are: `leantune.activations.velora.kinds.KINDS`.
        num_groups: sub-tokens a token is cut into; each keeps one number.
        refresh_every: training forwards of a layer after which its direction v is set anew from that batch; None: the
            first one's stays. A refresh breaks a compiled graph.
        process_group: v is the mean over the batches of all its processes, so that they share it. "auto": everybody,
            where torch.distributed runs; None: each for itself. Every process must run the layer in the same forwards.

    Forward, dX and db are exact; dW is approximate (:mod:`leantune.activations.velora.projection`). A layer's direction
    v is set by its first training forward; evaluation and ``no_grad`` forwards never set it and run the plain layer.

    Returns a handle with ``report()``, ``remove()``, ``state_dict()``, ``load_state_dict()``, ``save()`` and
    ``load()``.

    Raises InvalidArgumentError or InvalidTypeError before anything is changed: a target that matches nothing (with
    close names), a match that is not a trained layer of a known kind, VeLoRA applied twice, a num_groups the layer
    cannot be cut into.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> handle = apply_velora(model, ["2"], num_groups=8)
    >>> model(torch.rand(5, 64)).sum().backward()
    >>> handle.report().exact_bytes, handle.report().kept_bytes
    (1280, 160)
    """
    if refresh_every is not None and (not isinstance(refresh_every, int) or refresh_every < 1):
        raise InvalidArgumentError(
            f"refresh_every is {refresh_every!r}; write a number of training forwards of at least 1, or None for a "
            "direction that stays."
        )
    layers = [layer_of(name, module, num_groups) for name, module in matched_modules(model, target_modules)]
    handle = VeloraHandle(model, layers)
    for site in handle.sites:
        site.refresh_every, site.process_group = refresh_every, process_group
    for layer in layers:
        layer.enter()
    return handle

"""apply_exact_savings: keep fewer bytes for backward without changing a number, and put everything back again.

Three savings, each of which makes again in backward what is cheap to make:

* ``swiglu``: in a feed-forward block only what the activation and the gate read is kept (g and u of
  ``down(act(g) * u)``, or the input of ``act`` in ``fc2(act(fc1(x)))``); act(g), the product, and the steps of an
  activation written in Python are made again.
* ``dropout``: instead of a mask the state of torch's generator is kept; the mask is drawn again.
* ``shared_adapter_input``: adapters in another dtype than their base each keep a copy of the input, and with dropout
  another; only the input itself is kept, once for all that read it.

The model's own forward runs; what autograd saves is looked at as it is saved (`leantune.activations.exact.scope`), so
losses and gradients are the plain model's, bit for bit, dropout included.
"""

from collections.abc import Iterable

from torch import nn

from leantune.activations.exact.find import find
from leantune.activations.exact.forwards import SavingForward
from leantune.activations.exact.ledger import Storages
from leantune.activations.exact.report import ExactReport, ExactRow
from leantune.errors import InvalidArgumentError, InvalidTypeError, StateMismatchError


def apply_exact_savings(
    model: nn.Module, *, swiglu: bool = True, dropout: bool = True, shared_adapter_input: bool = True
) -> "ExactSavings":
    """Make ``model`` keep fewer bytes for backward; losses, gradients and the state dict stay as they are.

    Args:
        model: any module. Call this after adapters were added; what is added later is not seen.
        swiglu: activations and gated products are made again in backward (`leantune.activations.exact.apply`).
        dropout: masks of ``nn.Dropout`` are drawn again from the generator's state: 5,056 bytes a dropout on a CPU, 16
            on CUDA. A mask that is smaller is kept.
        shared_adapter_input: one input for adapters that each keep a copy of it. Where the adapters have a dropout,
            the copies are dropped ones, and ``dropout`` must be chosen too for them to go.

    Returns: a handle with ``report()`` and ``remove()``. Where nothing is found, the report says so.

    Costs time in backward: an elementwise product a block, a mask a dropout, a cast an adapter. Under ``torch.compile``
    the plain forward is compiled: the compiler chooses itself what to make again. Forwards without gradients are the
    plain ones.

    Raises InvalidTypeError or InvalidArgumentError before anything is changed: no module, no saving chosen, or savings
    that are applied already.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> handle = apply_exact_savings(model)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> handle.report().plain_bytes, handle.report().kept_bytes
    (1152, 640)
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"exact savings are applied to an nn.Module, not to a {type(model).__name__}.")
    if not (swiglu or dropout or shared_adapter_input):
        raise InvalidArgumentError("no saving is chosen: leave at least one of swiglu, dropout, shared_adapter_input.")
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), SavingForward):
            raise InvalidArgumentError(
                f"{name or 'the model'} is under exact savings already: call remove() on their handle first; for a "
                "copy or an unpickled model, ExactSavings.of(model) gives one."
            )
    found = find(model, swiglu=swiglu, dropout=dropout, shared_adapter_input=shared_adapter_input)
    for forward in found.forwards:
        forward.module.forward = forward
    return ExactSavings(found.forwards, found.left)


class ExactSavings:
    """The modules that :func:`apply_exact_savings` changed."""

    def __init__(self, forwards: Iterable[SavingForward], left: Iterable[tuple[str, str]] = ()) -> None:
        self._forwards = list(forwards)
        self._left = list(left)

    @classmethod
    def of(cls, model: nn.Module) -> "ExactSavings":
        """A handle for savings that came with a deep copy or a pickle of a model under them."""
        forwards = (module.__dict__.get("forward") for module in model.modules())
        return cls(forward for forward in forwards if isinstance(forward, SavingForward))

    def __bool__(self) -> bool:
        """Whether any module is under savings."""
        return bool(self._forwards)

    def report(self) -> ExactReport:
        """What was found, and bytes before and after of each module's last training forward."""
        plain: Storages = {}
        kept: Storages = {}
        rows = [
            ExactRow(
                forward.name,
                forward.saving,
                _new_bytes(forward.ledger.plain, plain),
                _new_bytes(forward.ledger.kept, kept),
                forward.recomputed,
            )
            for forward in self._forwards
        ]
        return ExactReport(rows, list(self._left))

    def remove(self) -> None:
        """Restore every module exactly as it was. A graph made before can still be run backward.

        Raises StateMismatchError, nothing changed, where something else has replaced a module's forward since.
        """
        for forward in self._forwards:
            if forward.module.__dict__.get("forward") is not forward:
                raise StateMismatchError(
                    f"the forward of {forward.name or 'the model'} was replaced after apply_exact_savings; restoring "
                    "it would drop that change. Remove the later change first."
                )
        for forward in self._forwards:
            if forward.replaced is None:
                del forward.module.forward
            else:
                forward.module.forward = forward.replaced
        self._forwards = []


def _new_bytes(storages: Storages, seen: Storages) -> int:
    """Bytes of the storages that are not among ``seen``, which they join."""
    new = {address: entry for address, entry in storages.items() if address not in seen}
    seen.update(new)
    return sum(size for _, size in new.values())

"""Data parallel under a fused backward: each gradient is averaged over the processes before it is applied and freed.

Collectives must run in one order on every process, whatever order gradients come in, and although a process may have no
gradient for a parameter that others used (an expert no token of its batch chose). So all agree before backward which
parameters any of them will reach, gradients wait for their turn, and a parameter that this process does not reach joins
in with zeros. A parameter that nobody reaches is left out, as it would be in one process.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leantune.errors import InvalidArgumentError
from leantune.optim.row_shard import is_sharded


class Reducer:
    """Averages gradients over ``group``.

    Args:
        params: in an order that is the same on every process.
        group: a process group of torch.distributed.
    """

    def __init__(self, params: list[Tensor], group: Any) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        # Backward goes from the end to the beginning; after the first one, process 0's own order is everybody's.
        self._order = list(reversed(params))
        self._places = {param: place for place, param in enumerate(self._order)}
        self._observed: list[int] | None = []
        self._reached: set[Tensor] = set()  # here
        self._agreed: set[Tensor] = set()  # anywhere
        self._mine: set[Tensor] = set()
        self._turns: list[Tensor] = []
        self._waiting: dict[Tensor, Tensor] = {}

    def begin(self, reached: set[Tensor], fine: bool) -> bool:
        """Agree on what any process reaches; False where not all are ``fine``, and nothing is begun."""
        flags = torch.tensor([not fine, *(param in reached for param in self._order)], dtype=torch.uint8)
        flags = flags.to(self._order[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        bad, *somewhere = flags.tolist()
        self._reached = reached
        self._agreed = {param for param, flag in zip(self._order, somewhere, strict=True) if flag}
        self.restart()
        return not bad

    def restart(self) -> None:
        """A backward over the graph of the last one: what was agreed holds."""
        self._mine = self._reached
        # The next one is the last: popped without moving the others.
        self._turns = [param for param in reversed(self._order) if param in self._agreed]
        self._waiting.clear()

    def ready(self, param: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """``grad`` is complete here: gives every (parameter, averaged gradient) whose turn has come."""
        if self._observed is not None:
            self._observed.append(self._places[param])
        self._waiting[param] = grad
        yield from self._in_turn()

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Backward is over: what is left."""
        self._mine = set(self._waiting)
        yield from self._in_turn()
        if self._observed is not None:
            self._adopt_order(self._observed)
            self._observed = None

    def sums(self, sums: Mapping[Tensor, Tensor], dtype: torch.dtype | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for gradients that were all accumulated before, in ``dtype`` (None: the parameters')."""
        self.begin(set(sums), True)
        self._waiting.update(sums)
        yield from self._in_turn(dtype)

    def _in_turn(self, dtype: torch.dtype | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """``dtype``: of zeros; None: the parameter's, which is its gradient's."""
        while self._turns and (self._turns[-1] in self._waiting or self._turns[-1] not in self._mine):
            param = self._turns.pop()
            grad = self._waiting.pop(param, None)
            yield param, self._averaged(torch.zeros_like(param, dtype=dtype) if grad is None else grad)

    def _averaged(self, grad: Tensor) -> Tensor:
        grad = grad.detach()
        dist.all_reduce(grad, group=self.group)
        return grad.div_(self.size)

    def _adopt_order(self, observed: list[int]) -> None:
        """Process 0's order of the first backward, then what it did not reach."""
        seen = dict.fromkeys(observed)
        whole = [[*seen, *(place for place in range(len(self._order)) if place not in seen)]]
        dist.broadcast_object_list(whole, src=dist.get_global_rank(self.group, 0), group=self.group)
        self._order = [self._order[place] for place in whole[0]]


def replicate(model: nn.Module, process_group: Any = None) -> nn.Module:
    """Give every process the parameters and buffers of process 0, in place, and return the model.

    What DistributedDataParallel does when it is built, without the buckets it keeps (as many bytes as all gradients):
    `FusedBackward` averages each gradient itself. ``process_group``: None for all processes; in one process alone
    nothing is done.

    Raises InvalidArgumentError, nothing changed, where the processes hold models of other names, shapes or dtypes.

        model = lt.replicate(build_model())
        fused = lt.FusedBackward(optimizer, model=model)
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    everybody: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everybody, mine, group=process_group)
    for rank, theirs in enumerate(everybody):
        differing = next((pair for pair in zip(everybody[0], theirs) if pair[0] != pair[1]), None)
        if differing is not None or len(theirs) != len(everybody[0]):
            raise InvalidArgumentError(
                f"process {rank} holds another model than process 0 ({len(theirs)} tensors and {len(everybody[0])}"
                + (f"; {differing[1]} where process 0 has {differing[0]}" if differing else "")
                + "): build it from the same config on every process."
            )
    if any(is_sharded(tensor) for tensor in tensors.values()):
        raise InvalidArgumentError("a sharded model (fully_shard) is spread already; replicate is for whole ones.")
    with torch.no_grad():
        for tensor in tensors.values():
            dist.broadcast(tensor.detach(), group_src=0, group=process_group)
    return model


def bucket_bytes(wrapped: nn.parallel.DistributedDataParallel) -> int:
    """Bytes of the buckets that DistributedDataParallel keeps for gradients, whether it reduces them or not."""
    left_out = wrapped.parameters_to_ignore
    named = wrapped.module.named_parameters()
    return sum(param.nbytes for name, param in named if param.requires_grad and name not in left_out)


def replicas(model: nn.Module | None, wanted: Any) -> Any:
    """The process group whose members hold the same parameters, or None where this process is alone.

    ``wanted``: a group, None, or "auto" (see `FusedBackward`). A DistributedDataParallel model's own reduction, which
    would come after the update, is turned off.
    """
    wrapped = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
    group = wanted
    if group == "auto":
        everybody = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        group = everybody if wrapped is None else wrapped.process_group
    if wrapped is not None and group is not None:
        wrapped.require_backward_grad_sync = False
    if group is None and wrapped is not None:
        raise InvalidArgumentError(
            "model is DistributedDataParallel but process_group is None: every process would train by itself. Leave "
            "process_group out, or give the module inside (model.module)."
        )
    return None if group is None or dist.get_world_size(group) == 1 else group

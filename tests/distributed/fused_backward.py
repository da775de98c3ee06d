"""Cases of test_fused_backward.py, run by torchrun: replicas of a model, and one sharded by fully_shard; each process
has a part of the batch."""

import sys

import torch
import torch.distributed as dist
from processes import run_cases
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import leantune as lt
from leantune.errors import BackwardError, InvalidArgumentError, NonFiniteError

RULES = {
    "lomo": lambda p: lt.Lomo(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: lt.AdamW(p, lr=1e-3, eps=1e-3),
    "ternary": lambda p: lt.TernaryAdamW(p, lr=1e-3),
}
ROWS = 8


class Experts(nn.Module):
    """A tied head, and experts each of which sees the rows that choose it: one is never chosen, others by some
    processes alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, choice: Tensor) -> Tensor:
        x = self.embed(ids)
        parts = [self.experts[int(e)](x[choice == e]) for e in choice.unique()]
        order = torch.cat([torch.nonzero(choice == e)[:, 0] for e in choice.unique()])
        return self.head(torch.tanh(torch.cat(parts)[order.argsort()]) + x)


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids, targets = torch.randint(0, 40, (2, ROWS, 6), generator=generator)
    # Rows are shared out in order, so an expert is chosen by some processes alone; number 4 never is.
    return ids, targets, torch.arange(ROWS) * 4 // ROWS


def loss_of(model: nn.Module, number: int, rows: slice = slice(None)) -> Tensor:
    ids, targets, choice = (part[rows] for part in batch(number))
    return functional.cross_entropy(model(ids, choice).flatten(0, 1), targets.flatten())


def mine() -> slice:
    each = ROWS // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def same_everywhere(model: nn.Module) -> None:
    everybody = [torch.empty_like(flat(model)) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat(model))
    assert all(torch.equal(everybody[0], other) for other in everybody[1:])


def equal_to_one_process() -> None:
    for rule, build in RULES.items():
        for clip in ("per_tensor", "global", "none"):
            model, alone = Experts(), Experts()
            optimizer, reference = build(model.named_parameters()), build(alone.named_parameters())
            bound = None if clip == "none" else 0.3
            fused = lt.FusedBackward(optimizer, model, clip, bound)
            plain = lt.FusedBackward(reference, alone, clip, bound, process_group=None)
            for number in range(4):
                fused.backward(loss_of(model, number, mine()))
                optimizer.step()
                plain.backward(loss_of(alone, number))
                reference.step()
                assert abs(fused.grad_norm - plain.grad_norm) < 1e-5 * plain.grad_norm
            # A ternary state may round an element the other way for a last bit of its gradient.
            tolerance = 2e-2 if rule == "ternary" else 1e-6
            torch.testing.assert_close(flat(model), flat(alone), rtol=1e-5, atol=tolerance)
            same_everywhere(model)
            assert not optimizer.state[model.experts[4].weight] and optimizer.state[model.experts[0].weight]


def fifty_steps() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Experts().to(dtype)
        optimizer = RULES["ternary"](model.named_parameters())
        fused = lt.FusedBackward(optimizer, model, "global", 0.3)
        for number in range(50):
            fused.backward(loss_of(model, number, mine()))
            optimizer.step()
        same_everywhere(model)


def accumulation() -> None:
    # Sums may be wider than weights, also where a process reaches only some of them.
    cases = (("per_tensor", torch.float32), ("global", torch.float32), ("global", torch.bfloat16))
    for clip, dtype in cases:
        model, alone = Experts().to(dtype), Experts().to(dtype)
        optimizer, reference = RULES["lomo"](model.named_parameters()), RULES["lomo"](alone.named_parameters())
        fused = lt.FusedBackward(optimizer, model, clip, 0.3, accumulate="float32")
        plain = lt.FusedBackward(reference, alone, clip, 0.3, accumulate="float32", process_group=None)
        for number in range(3):
            for micro in range(2):
                fused.backward(loss_of(model, 2 * number + micro, mine()) / 2, last=micro == 1)
                plain.backward(loss_of(alone, 2 * number + micro) / 2, last=micro == 1)
            optimizer.step()
            reference.step()
        tolerance = 1e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(flat(model), flat(alone), rtol=1e-5, atol=tolerance)
        same_everywhere(model)


def wrapped_in_ddp() -> None:
    """DistributedDataParallel's own reduction is off; the step is that of the lean path, bit for bit. Its buckets, as
    large as all gradients, are told."""
    ends = []
    for wrap in (False, True):
        model = Experts()
        outer = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
        optimizer = RULES["lomo"](model.named_parameters())
        fused = lt.FusedBackward(optimizer, outer, "global", 0.3)
        for number in range(3):
            fused.backward(loss_of(outer, number, mine()))
            optimizer.step()
        same_everywhere(model)
        ends.append(flat(model))
        held = f"keeps {sum(param.nbytes for param in model.parameters()):,} bytes of buckets"
        assert (held in fused.report()) == wrap
    assert torch.equal(*ends)


def replicated() -> None:
    """Every process ends with process 0's parameters and buffers; a model of another shape is told before."""
    model = Experts()
    model.register_buffer("seen", torch.full((3,), float(dist.get_rank())))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank())
    mine = flat(model)
    assert lt.replicate(model) is model
    same_everywhere(model)
    assert torch.equal(model.seen, torch.zeros(3)) and torch.equal(mine, flat(model)) == (dist.get_rank() == 0)
    other = nn.Linear(4, 5 if dist.get_rank() == 1 else 4)
    before = flat(other)
    try:
        lt.replicate(other)
    except InvalidArgumentError as error:
        assert "process 1 holds another model than process 0" in str(error) and "(5, 4)" in str(error)
    else:
        raise AssertionError("models of two shapes were taken for one")
    assert torch.equal(before, flat(other))


class Layers(nn.Module):
    """Two blocks and a head, of rows that two and four processes share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 45), nn.Tanh(), nn.Linear(45, 32)) for _ in range(2))
        self.head = nn.Linear(32, 40, bias=False)

    def forward(self, ids: Tensor, choice: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def whole(model: nn.Module) -> Tensor:
    return torch.cat([param.full_tensor().detach().flatten() for param in model.parameters()])


def fully_sharded() -> None:
    for rule, build in RULES.items():
        for clip, micro_batches in (("per_tensor", 1), ("global", 1), ("none", 1), ("global", 2), ("per_tensor", 2)):
            model, alone = sharded(Layers()), Layers()
            optimizer, reference = build(model.named_parameters()), build(alone.named_parameters())
            bound = None if clip == "none" else 0.3
            fused = lt.FusedBackward(optimizer, model, clip, bound, accumulate="float32")
            plain = lt.FusedBackward(reference, alone, clip, bound, accumulate="float32", process_group=None)
            for number in range(3):
                for micro in range(micro_batches):
                    last = micro == micro_batches - 1
                    fused.backward(loss_of(model, 2 * number + micro, mine()) / micro_batches, last=last)
                    plain.backward(loss_of(alone, 2 * number + micro) / micro_batches, last=last)
                optimizer.step()
                reference.step()
                assert abs(fused.grad_norm - plain.grad_norm) < 1e-5 * plain.grad_norm
            tolerance = 2e-2 if rule == "ternary" else 1e-6
            torch.testing.assert_close(whole(model), flat(alone), rtol=1e-5, atol=tolerance)


def offloaded_and_rounded_sums() -> None:
    """Shards kept in host memory between uses; sums of gradients in bfloat16."""
    for accumulate, tolerance in (("float32", 1e-6), ("bfloat16", 2e-3)):
        model, alone = sharded(Layers(), offload_policy=CPUOffloadPolicy(pin_memory=False)), Layers()
        optimizer, reference = RULES["lomo"](model.named_parameters()), RULES["lomo"](alone.named_parameters())
        fused = lt.FusedBackward(optimizer, model, "global", 0.3, accumulate=accumulate)
        plain = lt.FusedBackward(reference, alone, "global", 0.3, accumulate="float32", process_group=None)
        for number in range(3):
            for micro in range(2):
                fused.backward(loss_of(model, 2 * number + micro, mine()) / 2, last=micro == 1)
                plain.backward(loss_of(alone, 2 * number + micro) / 2, last=micro == 1)
            optimizer.step()
            reference.step()
        torch.testing.assert_close(whole(model), flat(alone), rtol=1e-5, atol=tolerance)


def scaled_shards() -> None:
    """With a loss scale the norm of a sharded gradient is that of all its rows, and all drop the same steps."""
    model, alone = sharded(Layers()), Layers()
    optimizer, reference = RULES["lomo"](model.named_parameters()), RULES["lomo"](alone.named_parameters())
    fused = lt.FusedBackward(optimizer, model, "global", 0.3, loss_scale=lt.LossScale(initial=1024.0))
    plain = lt.FusedBackward(reference, alone, "global", 0.3, process_group=None)
    for number in range(3):
        fused.backward(loss_of(model, number, mine()))
        optimizer.step()
        plain.backward(loss_of(alone, number))
        reference.step()
        assert abs(fused.grad_norm - plain.grad_norm) < 1e-5 * plain.grad_norm
    torch.testing.assert_close(whole(model), flat(alone), rtol=1e-5, atol=1e-6)


def what_is_refused() -> None:
    model = Experts()
    optimizer = RULES["lomo"](model.named_parameters())
    fused = lt.FusedBackward(optimizer, model)
    before = flat(model)
    # One process alone has a bad loss: nobody moves, nobody waits for ever, and the next batch trains.
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    try:
        fused.backward(loss_of(model, 0, mine()) * factor)
    except NonFiniteError as error:
        assert ("another process" in str(error)) == (dist.get_rank() != 1)
    else:
        raise AssertionError("a loss that is not finite was taken")
    assert torch.equal(before, flat(model))
    fused.backward(loss_of(model, 1, mine()))
    optimizer.step()
    same_everywhere(model)
    # So it is with a gradient.
    hook = model.experts[0].weight.register_hook(lambda grad: grad * float("inf"))
    try:
        fused.backward(loss_of(model, 2, mine()))
    except NonFiniteError as error:
        assert "experts.0.weight" in str(error)
    else:
        raise AssertionError("a gradient that is not finite was taken")
    hook.remove()
    fused.remove()
    lt.FusedBackward(optimizer, model)
    try:
        loss_of(model, 3, mine()).backward()
    except BackwardError as error:
        assert "a process group needs fused.backward" in str(error)
    else:
        raise AssertionError("a plain backward was taken")
    try:
        other = Experts()
        wrapped = DistributedDataParallel(other)
        lt.FusedBackward(RULES["lomo"](other.parameters()), wrapped, process_group=None)
    except InvalidArgumentError as error:
        assert "train by itself" in str(error)
    else:
        raise AssertionError("a replica without a group was taken")


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])

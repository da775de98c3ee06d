"""Cases of test_velora_processes.py, run by torchrun: replicas of a model under VeLoRA, and one sharded by fully_shard;
each process has a part of the batch."""

import sys

import torch
import torch.distributed as dist
from processes import run_cases
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import leantune as lt
from leantune.errors import InvalidTypeError

WIDTH, GROUPS = 48, 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))


def rows(number: int) -> Tensor:
    return torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(number)) * (1 + torch.arange(8)[:, None])


def mine(number: int) -> Tensor:
    each = 8 // dist.get_world_size()
    return rows(number)[dist.get_rank() * each :][:each]


def gathered(value: Tensor) -> list[Tensor]:
    everybody = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, value.contiguous())
    return everybody


def whole(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def same_everywhere(values: list[Tensor]) -> None:
    for value in values:
        assert all(torch.equal(value, other) for other in gathered(value))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, part, numbers: range = range(4)) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(part(number)).square().mean().backward()
        optimizer.step()


def alone() -> tuple[nn.Module, dict[str, Tensor]]:
    """One process with the whole batch."""
    model = network()
    handle = lt.apply_velora(model, ["0", "2"], num_groups=GROUPS, process_group=None)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.01), rows)
    return model, handle.state_dict()


def replicas_are_one_process() -> None:
    model = network()
    handle = lt.apply_velora(model, ["0", "2"], num_groups=GROUPS)
    wrapped = DistributedDataParallel(model)
    steps(wrapped, torch.optim.SGD(model.parameters(), lr=0.01), mine)
    expected, directions = alone()
    same_everywhere([*whole(model), *handle.state_dict().values()])
    for name, v in handle.state_dict().items():
        torch.testing.assert_close(v, directions[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole(model), whole(expected), rtol=1e-4, atol=1e-6)


def without_a_group_directions_differ() -> None:
    model = network()
    handle = lt.apply_velora(model, ["0"], num_groups=GROUPS, process_group=None)
    model(mine(0))
    assert not all(torch.equal(handle.state_dict()["0"], other) for other in gathered(handle.state_dict()["0"]))


def a_process_without_rows_shares_the_others_direction() -> None:
    model = network()
    handle = lt.apply_velora(model, ["0"], num_groups=GROUPS)
    x = mine(0) if dist.get_rank() else torch.zeros(0, WIDTH)
    model[0](x)
    same_everywhere([handle.state_dict()["0"]])


def factored_replicas() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = network().to(dtype)
        handle = lt.apply_velora(model, ["0", "2"], num_groups=GROUPS, factored=True)
        optimizer = lt.AdamW(model.parameters(), lr=1e-3)
        handle.attach(optimizer)
        fused = lt.FusedBackward(optimizer, model, "global", 0.5)
        before = model[0].weight.detach().clone()
        for number in range(4):
            fused.backward(model(mine(number).to(dtype)).float().square().mean())
            optimizer.step()
        same_everywhere([*whole(model), *handle.state_dict().values()])
        assert not torch.equal(before, model[0].weight)


def fully_sharded() -> None:
    model = network()
    handle = lt.apply_velora(model, ["0", "2"], num_groups=GROUPS)
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = lt.Lomo(model.named_parameters(), lr=0.01)
    steps(model, optimizer, mine)
    expected, directions = alone()
    for name, v in handle.state_dict().items():
        torch.testing.assert_close(v, directions[name], rtol=1e-5, atol=1e-6)
    same_everywhere(list(handle.state_dict().values()))
    torch.testing.assert_close(whole(model), whole(expected), rtol=1e-4, atol=1e-6)
    assert handle.report().rows[1].exact_bytes == 8 // dist.get_world_size() * WIDTH * 4
    later = network()
    fully_shard(later[0])
    lt.apply_velora(later, ["0"], num_groups=GROUPS)
    steps(later, torch.optim.SGD(later.parameters(), lr=0.01), mine, range(1))
    try:
        lt.apply_velora(sharded(), ["0"], num_groups=GROUPS, factored=True)
    except InvalidTypeError as error:
        assert "DTensor" in str(error)
    else:
        raise AssertionError("a sharded weight was taken for factored training")


def sharded() -> nn.Module:
    model = network()
    fully_shard(model[0])
    return model


def a_mean_over_processes_decides_who_falls_back() -> None:
    model = network()
    handle = lt.apply_velora(model, ["0", "2"], num_groups=GROUPS)
    model(mine(0))
    found = handle.probe(model, mine(1), lambda model, x: model(x).square().mean())
    cosines = torch.tensor([row.cosine for row in found.rows])
    mean = sum(gathered(cosines)) / dist.get_world_size()
    handle.probe(model, mine(1), lambda model, x: model(x).square().mean(), min_cosine=float(mean.mean()))
    assert [row.exact for row in handle.report().rows] == (mean < mean.mean()).tolist()


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])

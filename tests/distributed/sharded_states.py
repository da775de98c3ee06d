"""What torchrun starts in every process of test_sharded_states.py: one function a case, on gloo.

torchrun --nproc_per_node 3 sharded_states.py FOLDER CASE...
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from processes import run_cases
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import leantune as lt
from leantune.errors import InvalidTypeError

SHAPES = {"wide": (1601, 96), "short": (3, 64), "expert": (5, 16, 40), "vector": (7,), "even": (64, 96)}
RULES = {
    "ternary_r0": lambda p: lt.TernaryAdamW(p, lr=1e-2, carry_rank=0),
    "ternary": lambda p: lt.TernaryAdamW(p, lr=1e-2),
    "two_planes": lambda p: lt.TernaryAdamW(p, lr=1e-2, momentum_planes=2, master_bits=24, carry_rank=0),
    "adamw": lambda p: lt.AdamW(p, lr=1e-2),
    "lomo": lambda p: lt.Lomo(p, lr=1e-2),
    "adalomo": lambda p: lt.AdaLomo(p, lr=1e-2),
}
EXACT = ("ternary_r0", "two_planes", "adamw", "lomo")
"""Rules without a sum over rows: the same bits on any number of processes."""


def tensor(name: str, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator) * 0.1


def parameters(dtype: torch.dtype, place=lambda value: value, names=tuple(SHAPES)) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(place(tensor(name, 0).to(dtype))) for name in names}


def step(optimizer, params: dict[str, nn.Parameter], number: int, place=lambda value: value) -> None:
    for name, param in params.items():
        param.grad = place(tensor(name, number).to(param.dtype))
    optimizer.step()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def compare(optimizer, params, plain, plain_params, exact: bool, what: str) -> None:
    for name in params:
        here, there = whole(params[name].detach()), plain_params[name].detach()
        assert torch.equal(here, there) if exact else torch.allclose(here, there, atol=2e-3), f"{what}: {name}"
        mine, theirs = optimizer.state[params[name]], plain.state[plain_params[name]]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            value, other = whole(value), theirs[key]
            assert value.shape == other.shape and value.dtype == other.dtype, f"{what}: {name}.{key}"
            if exact:
                assert torch.equal(value, other), f"{what}: {name}.{key}"
            elif key.endswith("trits"):
                assert (value != other).float().mean() < 5e-3, f"{what}: {name}.{key}"


def same_as_one_process(folder: Path, mesh: DeviceMesh) -> None:
    def place(value: Tensor) -> Tensor:
        return distribute_tensor(value, mesh, [Shard(0)])

    for rule, build in RULES.items():
        for dtype in (torch.float32, torch.bfloat16):
            params, plain_params = parameters(dtype, place), parameters(dtype)
            optimizer, plain = build(params.items()), build(plain_params.items())
            for number in range(1, 4):
                step(optimizer, params, number, place)
                step(plain, plain_params, number)
            compare(optimizer, params, plain, plain_params, rule in EXACT, f"{rule} {dtype}")
            report = [(row.name, row.storage, row.state_bytes) for row in optimizer.report().rows]
            assert report == [(row.name, row.storage, row.state_bytes) for row in plain.report().rows]


def other_placements(folder: Path, mesh: DeviceMesh) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # The second is what fully_shard makes of a parameter that tensor parallelism has cut; it takes even rows alone.
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    for placements, names in (([Replicate(), Shard(0)], tuple(SHAPES)), (strided, ("even",))):

        def place(value: Tensor, placements=placements) -> Tensor:
            return distribute_tensor(value, grid, placements)

        params, plain_params = parameters(torch.bfloat16, place, names), parameters(torch.bfloat16, names=names)
        optimizer, plain = RULES["ternary_r0"](params.items()), RULES["ternary_r0"](plain_params.items())
        for number in range(1, 4):
            step(optimizer, params, number, place)
            step(plain, plain_params, number)
        compare(optimizer, params, plain, plain_params, True, str(placements))
    columns = nn.Parameter(distribute_tensor(tensor("wide", 0), mesh, [Shard(1)]))
    try:
        lt.TernaryAdamW([columns])
    except InvalidTypeError as error:
        assert "whole rows" in str(error)
    else:
        raise AssertionError("Shard(1) was taken")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 1601), nn.Tanh(), nn.Linear(1601, 24)).bfloat16()


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer, first: int, last: int) -> None:
    """The same rows in every process, so that any number of them trains the same."""
    for number in range(first, last):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(number)).bfloat16()
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param.detach()) for name, param in model.named_parameters()}


def save_sharded(folder: Path, mesh: DeviceMesh) -> None:
    """A run of five steps; its state after three, by DCP, and its weights after four and five."""
    model = sharded(mesh)
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, 0, 3)
    before = copy.deepcopy({n: whole(v) for n, v in optimizer.state[model[0].weight].items()})
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=str(folder / "checkpoint"))
    assert all(torch.equal(whole(optimizer.state[model[0].weight][name]), value) for name, value in before.items())
    results = {"state": before}
    for number in (3, 4):
        train(model, optimizer, number, number + 1)
        results[f"after {number}"] = weights(model)
    if dist.get_rank() == 0:
        torch.save(results, folder / "expected.pt")


def load_sharded(folder: Path, mesh: DeviceMesh) -> None:
    """Goes on from save_sharded's checkpoint: bit for bit on as many processes, else the same to rounding."""
    model = sharded(mesh)
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1.0)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    dcp.load(saved, checkpoint_id=str(folder / "checkpoint"))
    model.load_state_dict(saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    expected = torch.load(folder / "expected.pt", weights_only=True)
    for name, value in expected["state"].items():
        assert torch.equal(whole(optimizer.state[model[0].weight][name]), value), name
    assert optimizer.param_groups[0]["lr"] == 1e-2
    same_number = (folder / "processes").read_text() == str(dist.get_world_size())
    for number in (3, 4):
        train(model, optimizer, number, number + 1)
        for name, value in weights(model).items():
            there = expected[f"after {number}"][name]
            if same_number:
                assert torch.equal(value, there), f"{name} after step {number}"
            else:
                # A trit that falls on the other side of its threshold moves its weight by a few steps of lr.
                assert (value.float() - there.float()).square().mean().sqrt() < 2e-3, f"{name} after step {number}"


def never_stepped(folder: Path, mesh: DeviceMesh) -> None:
    """Saving before the first step changes nothing that follows."""
    fresh, looked_at = sharded(mesh), sharded(mesh)
    first = lt.TernaryAdamW(fresh.named_parameters(), lr=1e-2)
    second = lt.TernaryAdamW(looked_at.named_parameters(), lr=1e-2)
    set_optimizer_state_dict(looked_at, second, get_optimizer_state_dict(looked_at, second))
    train(fresh, first, 0, 2)
    train(looked_at, second, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(fresh).values(), weights(looked_at).values(), strict=True))


def replicas_stay_equal(folder: Path, mesh: DeviceMesh) -> None:
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-2)
    for number in range(50):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 96, generator=generator).bfloat16()).float().square().mean().backward()
        optimizer.step()
    held = [value.double().sum() for state in optimizer.state.values() for value in state.values()]
    checksum = torch.stack([param.detach().double().square().sum() for param in model.parameters()] + held)
    every = [torch.empty_like(checksum) for _ in range(dist.get_world_size())]
    dist.all_gather(every, checksum)
    assert all(torch.equal(every[0], other) for other in every)


if __name__ == "__main__":
    run_cases(globals(), sys.argv[2:], lambda: (Path(sys.argv[1]), init_device_mesh("cpu", (dist.get_world_size(),))))

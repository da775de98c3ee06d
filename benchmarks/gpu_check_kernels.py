"""Parts of gpu_check about TernaryAdamW's Triton kernels: compilation, equality with the plain rule, step times."""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_check_machine import Case, Machine
from torch import Tensor, nn

import leantune as lt
from leantune.codec.trits import unpack_trits
from leantune.kernels import gpu, native

BF16, FP32 = torch.bfloat16, torch.float32
LR = 1e-3
KERNEL_CASES = [
    ((4096, 4096), BF16, BF16, {}),
    ((4096, 14336), BF16, BF16, {}),
    ((300, 576), BF16, BF16, {}),
    ((1024, 4096), BF16, BF16, {"carry_rank": 0}),
    ((65, 641), BF16, BF16, {}),
    ((4097, 1000), FP32, FP32, {}),
    ((1, 1_048_577), BF16, BF16, {"carry_rank": 0}),
    ((2048, 2048), BF16, BF16, {"momentum_planes": 2}),
    ((2048, 2048), BF16, BF16, {"master_bits": 24, "carry_rank": 0}),
    ((2048, 2048), BF16, BF16, {"carry_rank": 16}),
    ((2048, 1024), BF16, FP32, {"rounding": "nearest", "carry_rank": 0}),
    ((1024, 2048), BF16, BF16, {"transposed gradient": True}),
    ((1024, 4100), BF16, BF16, {"dead columns": True}),
]
SMALL_KERNEL_CASES = [
    ((24, 130), BF16, BF16, {"carry_rank": 1}),
    ((2, 40), FP32, FP32, {"carry_rank": 0, "transposed gradient": True}),
    ((24, 400), BF16, BF16, {"carry_rank": 1, "dead columns": True}),
]


def noise(machine: Machine, shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(machine.device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=machine.device) * scale).to(dtype)


def parameter(machine: Machine, shape: tuple[int, int], dtype: torch.dtype, grad_dtype: torch.dtype) -> nn.Parameter:
    """A weight of std 0.02 with a gradient; some columns nearly dead."""
    param = nn.Parameter(noise(machine, shape, dtype, 0, 0.02))
    param.grad_dtype = grad_dtype
    param.grad = noise(machine, shape, grad_dtype, 1)
    param.grad[:, : shape[1] // 8] *= 1e-3
    return param


def tensors(param: nn.Parameter, optimizer: lt.TernaryAdamW) -> dict[str, Tensor]:
    return {"weight": param.detach(), **optimizer.state[param]}


# -- compile --------------------------------------------------------------------------------------------------------


def compile(machine: Machine) -> Iterator[Case]:
    """Seconds that a first step takes more than a second one, and that other shapes, rates and steps cost nothing."""

    def first() -> tuple[bool, dict[str, Any]]:
        shape, other = ((24, 130), (20, 131)) if machine.small else ((4096, 4096), (1024, 14336))
        figures = {}
        with machine.kernels():
            for name, size, lr in (("first", shape, 1e-3), ("other shape and rate", other, 1e-4)):
                param = parameter(machine, size, BF16, BF16)
                optimizer = lt.TernaryAdamW([param], lr=lr, carry_rank=1 if machine.small else 4)
                figures[f"{name}, step 1"] = round(machine.seconds(optimizer.step), 4)
                figures[f"{name}, step 2"] = round(machine.seconds(optimizer.step), 4)
        compiled = figures["first, step 1"] - figures["first, step 2"]
        again = figures["other shape and rate, step 1"] - figures["other shape and rate, step 2"]
        return compiled < 30 and (again < 0.5 or machine.small), figures

    yield Case("first step, then another shape, rate and step", first, "under 30 s, then no compilation")


# -- kernels --------------------------------------------------------------------------------------------------------


def kernels(machine: Machine) -> Iterator[Case]:
    """One step from equal state, by the kernels and by the plain rule, both on this device."""
    for shape, dtype, grad_dtype, options in SMALL_KERNEL_CASES if machine.small else KERNEL_CASES:
        name = f"{shape[0]} x {shape[1]} {str(dtype)[6:]}, gradient {str(grad_dtype)[6:]}, {options or 'defaults'}"
        yield Case(
            name, lambda case=(shape, dtype, grad_dtype, options): _against_plain(machine, *case), "1e-4 of trits"
        )
    yield Case("the same bits every time", lambda: _repeats(machine))
    if not machine.small:
        yield Case("more than 2^31 elements", lambda: _beyond_32_bits(machine))


def _against_plain(
    machine: Machine, shape: tuple[int, int], dtype: torch.dtype, grad_dtype: torch.dtype, options: dict[str, Any]
) -> tuple[bool, dict[str, Any]]:
    param = parameter(machine, shape, dtype, grad_dtype)
    options = dict(options)
    if options.pop("transposed gradient", False):
        param.grad = param.grad.t().contiguous().t()
    dead = options.pop("dead columns", False)
    optimizer = lt.TernaryAdamW([param], lr=LR, **options)
    with native.reference_rule():
        for seed in range(3):
            if dead:
                _silence(param.grad, blocks=2)
            optimizer.step()
            param.grad.mul_(0.7).add_(noise(machine, shape, grad_dtype, seed + 2))
        if dead:  # the second block wakes up in the step that is compared
            _silence(param.grad, blocks=1)
        start = {name: value.clone() for name, value in tensors(param, optimizer).items()}
        optimizer.step()
    theirs = {name: value.clone() for name, value in tensors(param, optimizer).items()}
    with torch.no_grad():
        for name, value in tensors(param, optimizer).items():
            value.copy_(start[name])
    with machine.kernels():
        optimizer.step()
    return _compare(tensors(param, optimizer), theirs)


def _silence(grad: Tensor, blocks: int) -> None:
    """No gradient in the first blocks of 128 columns, nor in every third column."""
    grad[:, : 128 * blocks] = 0
    grad[:, ::3] = 0


def _compare(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[bool, dict[str, Any]]:
    weight = theirs["weight"].float()
    figures: dict[str, Any] = {}
    good, differing = True, 0
    for name in mine:
        if name.endswith(("trits", "trits_2")):
            apart = 0
            for one, other in zip(mine[name].split(1024), theirs[name].split(1024)):
                digits = unpack_trits(one, weight.shape[1], 128) != unpack_trits(other, weight.shape[1], 128)
                apart += int(digits.sum())
            figures[name] = apart / weight.numel()
            differing += apart
            good &= apart <= max(1.0, 1e-4 * weight.numel())
        elif mine[name].dtype is BF16 and name != "weight":
            # Units in the last place of bfloat16; values beside 0 differ in sign and many units, and do not matter.
            units = (mine[name].view(torch.int16).int() - theirs[name].view(torch.int16).int()).abs()
            small = (mine[name].float() - theirs[name].float()).abs() <= 1e-5
            figures[f"{name}, beyond 1 unit"] = int(((units > 1) & ~small).sum())
            figures[f"{name}, any"] = round(float((units > 0).float().mean()), 6)
            allowed = 1e-3 * units.numel() if name.startswith("carry") else 1e-4 * units.numel()
            good &= figures[f"{name}, beyond 1 unit"] <= allowed
    distance = (mine["weight"].float() - weight).abs()
    figures["weights beyond rounding"] = int((distance > 2**-7 * weight.abs() + 0.5 * LR).sum())
    # A row whose scale differs by more than a unit moves as a whole: allow a block for each.
    good &= figures["weights beyond rounding"] <= differing + 1e-5 * weight.numel()
    return bool(good and torch.isfinite(mine["weight"]).all()), figures


def _repeats(machine: Machine) -> tuple[bool, dict[str, Any]]:
    shape = (24, 130) if machine.small else (4096, 4096)
    gradient = noise(machine, shape, BF16, 5)
    ends = []
    for _ in range(2):
        param = parameter(machine, shape, BF16, BF16)
        optimizer = lt.TernaryAdamW([param], lr=LR, carry_rank=1 if machine.small else 4)
        with machine.kernels():
            for _ in range(1 if machine.small else 3):
                param.grad = gradient
                optimizer.step()
        ends.append(tensors(param, optimizer))
    return all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]), {}


def _beyond_32_bits(machine: Machine) -> tuple[bool, dict[str, Any]]:
    """The last rows of a huge matrix at its first step are those of a small matrix of these rows: momentum and weights
    do not depend on random bits where weights are rounded to nearest."""
    rows, cols, last = (1 << 19) + 8, 4112, 8
    big = nn.Parameter(torch.empty((rows, cols), dtype=BF16, device=machine.device).normal_(0, 0.02))
    big.grad = torch.empty_like(big).normal_()
    little = nn.Parameter(big.detach()[-last:].clone())
    little.grad = big.grad[-last:].clone()
    ends = []
    for param in (big, little):
        optimizer = lt.TernaryAdamW([param], lr=LR, carry_rank=0, rounding="nearest")
        optimizer.update(param, param.grad, optimizer.param_groups[0], optimizer.state[param])
        ends.append(tensors(param, optimizer))
    names = ("weight", "momentum_trits", "momentum_scale", "variance_level", "variance_step")
    apart = {name: int((ends[0][name][-last:] != ends[1][name]).sum()) for name in names}
    return not any(apart.values()), {"elements": rows * cols, **apart}


# -- speed ----------------------------------------------------------------------------------------------------------


def shapes(machine: Machine) -> list[tuple[int, int]]:
    """Two layers of Llama 3 8B and its embedding: 0.96 billion elements."""
    if machine.small:
        return [(24, 130)]
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    return [*layer, *layer, (128256, 4096)]


def speed(machine: Machine) -> Iterator[Case]:
    """Step times, all sides in one process and interleaved; "update" leaves out the check of the gradients."""
    yield Case(
        "copy bandwidth, then steps", lambda: _step_times(machine), ">= 2.5 times fused AdamW, >= 80 % of a copy"
    )


def _step_times(machine: Machine) -> tuple[bool, dict[str, Any]]:
    bandwidth = _copy_bandwidth(machine)
    sizes = shapes(machine)
    rounds = 1 if machine.small else 7
    # Foreach over all matrices: the same bytes, few launches.
    wide = [parameter(machine, shape, FP32, FP32) for shape in sizes]
    steps: dict[str, Callable[[], Any]] = {"torch AdamW fused": torch.optim.AdamW(wide, fused=True).step}
    moved = {"torch AdamW fused": sum(28 * param.numel() for param in wide)}
    narrow = [parameter(machine, shape, BF16, BF16) for shape in sizes]
    ranks = (0, 1) if machine.small else (0, 4)
    for rank, planes in [(rank, planes) for planes in (1, 2) for rank in ranks]:
        optimizer = lt.TernaryAdamW(narrow, lr=1e-6, carry_rank=rank, momentum_planes=planes)
        name = f"rank {rank}, planes {planes}"

        def update(optimizer: lt.TernaryAdamW = optimizer) -> None:
            group = optimizer.param_groups[0]
            for param in narrow:
                optimizer.update(param, param.grad, group, optimizer.state[param])

        with machine.kernels():
            update()
        steps[f"{name}, update"], steps[f"{name}, step"] = update, optimizer.step
        moved[f"{name}, update"] = moved[f"{name}, step"] = sum(_bytes_moved(param, optimizer) for param in narrow)
    times: dict[str, list[float]] = {name: [] for name in steps}
    with machine.kernels():
        for number in range(rounds + 1):
            for name, step in steps.items():
                seconds = machine.seconds(step)
                if number or machine.small:
                    times[name].append(seconds)
    figures: dict[str, Any] = {"copy GB/s": round(bandwidth / 1e9, 1), "elements": sum(math.prod(s) for s in sizes)}
    fused_seconds = statistics.median(times["torch AdamW fused"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        figures[name] = {
            "ms": round(1e3 * median, 3),
            "spread": [round(1e3 * min(seconds), 3), round(1e3 * max(seconds), 3)],
            "bytes": moved[name],
            "of copy": round(moved[name] / median / bandwidth, 3),
            "times as fast": round(fused_seconds / median, 2),
        }
    best = figures["rank 0, planes 1, update"]
    return bool(best["times as fast"] >= 2.5 and best["of copy"] >= 0.8) or machine.small, figures


def _bytes_moved(param: Tensor, optimizer: lt.TernaryAdamW) -> int:
    """Bytes that must cross memory in one update: the gradient read for its squares; the gradient read, the weight and
    the states read and written in the step; with a carry, the gradient and what u decodes from read twice more."""
    state = {name: value.nbytes for name, value in optimizer.state[param].items() if name != "step"}
    total = 2 * param.nbytes + 2 * param.grad.nbytes + 2 * sum(state.values())
    if "carry_rows" in state:
        decoded = sum(size for name, size in state.items() if name not in ("weight_remainder", "carry_basis"))
        total += 2 * (param.grad.nbytes + decoded)
    return total


def _copy_bandwidth(machine: Machine) -> float:
    source = torch.zeros(1 << (16 if machine.small else 30), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / machine.median_seconds(lambda: target.copy_(source), 5)


# -- tuning ---------------------------------------------------------------------------------------------------------


def tuning(machine: Machine) -> Iterator[Case]:
    """An update's time for other tiles of the step kernel and other warps, without and with a carry: a hint for whoever
    sets gpu.py's sizes."""
    for tile, warps in (
        ((1024, 4),) if machine.small else ((1024, 4), (1024, 8), (2048, 4), (512, 2), (512, 4), (1024, 2))
    ):
        yield Case(f"tile {tile}, {warps} warps", lambda tile=tile, warps=warps: _tuned(machine, tile, warps))


def _tuned(machine: Machine, tile: int, warps: int) -> tuple[bool, dict[str, Any]]:
    before = gpu._STEP_TILE, dict(gpu._OPTIONS)
    figures = {}
    try:
        gpu._STEP_TILE, gpu._OPTIONS["num_warps"] = tile, warps
        for rank in (0,) if machine.small else (0, 4):
            param = parameter(machine, (24, 130) if machine.small else (4096, 14336), BF16, BF16)
            optimizer = lt.TernaryAdamW([param], lr=LR, carry_rank=rank)

            def update(param: nn.Parameter = param, optimizer: lt.TernaryAdamW = optimizer) -> None:
                optimizer.update(param, param.grad, optimizer.param_groups[0], optimizer.state[param])

            with machine.kernels():
                update()
                seconds = machine.median_seconds(update, 1 if machine.small else 9)
            figures[f"rank {rank}, us"] = round(1e6 * seconds, 1)
            figures[f"rank {rank}, ps an element"] = round(1e12 * seconds / param.numel(), 3)
    finally:
        gpu._STEP_TILE = before[0]
        gpu._OPTIONS.update(before[1])
    return True, figures

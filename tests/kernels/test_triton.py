"""The Triton kernels of TernaryAdamW decide as the plain torch rule does, on a GPU or in Triton's interpreter."""

import contextlib
import itertools
import sys

import pytest
import torch

import leantune as lt
from leantune.codec.ternary_state import TernaryState, tensor_specs
from leantune.codec.tiles import BlockGrid, Tile
from leantune.codec.trits import unpack_trits
from leantune.kernels import gpu, native
from leantune.optim.gradient import TiledGradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    not (gpu.status().startswith("triton") and (DEVICE == "cuda" or gpu.interpreted())),
    reason=f"the Triton kernels cannot run here: {gpu.status()}, device {DEVICE}, interpreter {gpu.interpreted()}",
)
LR = 1e-3
BF16, FP32 = torch.bfloat16, torch.float32
RULE = {**dict.fromkeys(("lr", "beta1", "beta2", "bias", "eps", "decay"), 0.5), "grad_scale": 0.3}
RULE |= {"stochastic": True, "refresh": True, "sampled": True}
# One case a kind of tail, dtype, rank, plane count and rounding: the interpreter takes a second for each.
CASES = {
    "defaults": ((40, 300), BF16, BF16, {}),
    "one full group, fp32": ((24, 640), FP32, FP32, {"carry_rank": 1}),
    "two groups, no carry": ((9, 641), BF16, FP32, {"carry_rank": 0}),
    "one row, two planes": ((1, 1281), BF16, BF16, {"momentum_planes": 2, "carry_rank": 0}),
    "16 columns, 24 bits": ((50, 16), BF16, BF16, {"master_bits": 24}),
    "129 columns, nearest": ((33, 129), BF16, FP32, {"rounding": "nearest", "momentum_planes": 2, "carry_rank": 3}),
    "as many bytes as a full group, two trits fewer": (
        (24, 78),
        BF16,
        BF16,
        {"block_size": 16, "carry_rank": 2, "momentum_planes": 2},
    ),
    "24 bits nearest, blocks of 32": (
        (20, 170),
        BF16,
        BF16,
        {"master_bits": 24, "rounding": "nearest", "block_size": 32, "carry_rank": 0},
    ),
    "products summed in several parts": ((130, 1290), BF16, BF16, {"block_size": 256, "carry_rank": 2}),
}


def forced() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if DEVICE == "cuda" else gpu.on_cpu()


def tensors(param: torch.nn.Parameter, optimizer: lt.TernaryAdamW) -> dict[str, torch.Tensor]:
    return {"weight": param.detach(), **optimizer.state[param]}


def both_ways(
    shape: tuple[int, int],
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    steps: int = 3,
    wakes: torch.Tensor | None = None,
    next_step: int | None = None,
    **options: object,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(by the kernels, by the plain rule) after one step from equal state, ``steps`` steps into training.

    ``wakes``: the step (0 to ``steps``) at which each column first has a gradient. ``next_step``: what the compared
    step is numbered; every fourth row has its first gradient in it.
    """
    generator = torch.Generator().manual_seed(7)
    param = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(DEVICE, dtype))
    optimizer = lt.TernaryAdamW([param], lr=LR, **options)
    steady = torch.randn(shape, generator=generator) * torch.rand(shape[1], generator=generator)
    steady[:, : shape[1] // 3] *= torch.rand((shape[0], shape[1] // 3), generator=generator) > 0.9
    param.grad_dtype = grad_dtype  # torch refuses a gradient of another dtype otherwise
    with native.reference_rule():
        for step in range(steps + 1):
            noise = torch.randn(shape, generator=generator) * 0.3
            awake = 1.0 if wakes is None else (wakes <= step).float()
            param.grad = ((noise + 1) * steady * awake).to(DEVICE, grad_dtype)
            if step < steps:
                if next_step is not None:
                    param.grad[1::4] = 0
                optimizer.step()
        if next_step is not None:
            optimizer.state[param]["step"].fill_(next_step - 1)
        start = {name: value.clone() for name, value in tensors(param, optimizer).items()}
        optimizer.step()
    theirs = {name: value.clone() for name, value in tensors(param, optimizer).items()}
    with torch.no_grad():
        for name, value in tensors(param, optimizer).items():
            value.copy_(start.get(name, torch.zeros_like(value)))
    with forced():
        assert gpu.takes(param.detach(), param.grad, int(options.get("block_size", 128)), 0)
        optimizer.step()
    return tensors(param, optimizer), theirs


def compare(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], block: int) -> None:
    weight = theirs["weight"]
    differing = 0.0
    for name in mine:
        if name.endswith(("trits", "trits_2")):
            one, other = (unpack_trits(side[name], weight.shape[1], block) for side in (mine, theirs))
            apart = one != other
            # A trit differs where a value sits within rounding of a threshold; in a small matrix one may.
            assert apart.sum() <= max(1.0, 1e-4 * weight.numel()), name
            assert (mine[name] != theirs[name]).sum() <= apart.sum(), f"{name}: absent trits"
            differing += apart.sum().item()
        elif name == "variance_step":
            # The slope on a few trits that are not 0 is a small number over a small one.
            # Where nothing is stored both are 0.
            apart = (mine[name].float() - theirs[name].float()).abs() / theirs[name].float().clamp(min=0.01)
            assert (apart > 2**-7).float().mean() <= 2e-3 and apart.max() < 0.05
        elif name.endswith(("scale", "scale_2")) or name.startswith(("carry", "variance_columns")):
            # bfloat16, rounded from sums in another order: one unit in the last place.
            torch.testing.assert_close(mine[name].float(), theirs[name].float(), rtol=2**-7, atol=1e-5)
    levels = (mine["variance_level"].view(torch.int16).int() - theirs["variance_level"].view(torch.int16).int()).abs()
    assert levels.max() <= 1
    # A scale or a carry one unit (2^-8) away moves a weight by a small part of lr; a trit that differs, by several lr.
    distance = (mine["weight"].float() - weight.float()).abs()
    assert (distance > 2**-7 * weight.float().abs() + 0.5 * LR).sum() <= round(differing)


@runs
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_step_from_equal_state_equals_the_reference(case) -> None:
    shape, dtype, grad_dtype, options = case
    compare(*both_ways(shape, dtype, grad_dtype, **options), int(options.get("block_size", 128)))


@runs
def test_the_first_step_equals_the_reference() -> None:
    compare(*both_ways((40, 140), BF16, BF16, steps=0, carry_rank=2), 128)


@runs
@pytest.mark.parametrize("next_step", [1001, 1004])
def test_steps_whose_second_moment_is_not_stored_equal_the_reference(next_step: int) -> None:
    compare(*both_ways((24, 410), BF16, BF16, next_step=next_step, carry_rank=2, block_size=64), 64)


@runs
@pytest.mark.parametrize("planes, rank", [(1, 2), (2, 0)])
def test_dead_and_waking_columns_equal_the_reference(planes: int, rank: int) -> None:
    """A block of dead columns, dead columns here and there, and columns that wake up before or in the compared step."""
    cols, block, steps = 410, 64, 2
    wakes = torch.zeros(cols, dtype=torch.int64)
    wakes[::7], wakes[1::5], wakes[2::9] = steps + 1, steps, steps - 1
    wakes[64:128] = steps + 1  # the second block is dead
    wakes[192:256] = steps  # the fourth wakes up as a whole
    wakes[330:] = steps + 1  # the last group, which is not full, is dead but for three columns
    wakes[335], wakes[400], wakes[409] = 0, steps, 0
    mine, theirs = both_ways(
        (24, cols), BF16, FP32, steps=steps, wakes=wakes, carry_rank=rank, momentum_planes=planes, block_size=block
    )
    compare(mine, theirs, block)
    dead = theirs["variance_columns"] == 0
    assert dead[(wakes > steps).to(DEVICE)].all() and dead.float().mean() < 0.6
    assert torch.equal(mine["variance_columns"] == 0, dead)
    assert (unpack_trits(mine["variance_trits"], cols, block)[:, dead] == 0).all()
    assert (mine["variance_level"][:, 1] == 0).all() and (mine["variance_step"][:, 1] == 0).all()
    assert (mine["variance_step"][:, [0, 2, 3, 4, 6]] != 0).all()
    grid, tile = BlockGrid(cols, block, dead.device), Tile(0, 24, 0, cols)
    both = [grid.join(TernaryState(side, block).variance(tile, grid)[0]) for side in (mine, theirs)]
    assert (both[0][:, dead] == 0).all()
    # A level is within a unit, 2^-7 octave; a trit that differs is a step of up to 8 octaves.
    far = (both[0][:, ~dead] / both[1][:, ~dead]).log2().abs() > 2**-5
    assert far.sum() <= max(1.0, 1e-4 * far.numel())


@runs
def test_columns_that_fall_silent_without_memory_equal_the_reference() -> None:
    """With beta2 of 0 a column whose gradient ends is dead at once, and leaves its old trits to the step's fit."""
    shape, block, ends = (24, 200), 64, []
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(shape, generator=generator) for _ in range(3)]
    grads[2][:, ::3] = 0
    for tool in (forced(), native.reference_rule()):
        param = torch.nn.Parameter(torch.zeros(shape, device=DEVICE))
        optimizer = lt.TernaryAdamW([param], lr=LR, betas=(0.9, 0.0), carry_rank=0, block_size=block)
        with tool:
            for grad in grads:
                param.grad = grad.to(DEVICE)
                optimizer.step()
        ends.append(tensors(param, optimizer))
    compare(ends[0], ends[1], block)
    assert (unpack_trits(ends[0]["variance_trits"], shape[1], block)[:, ::3] == 0).all()


@runs
def test_square_sums_of_scaled_gradients() -> None:
    for shape, transposed in (((37, 130), False), ((300, 48), True), ((1, 1000), False)):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, BF16)
        grad = grad.t().contiguous().t() if transposed else grad
        param = torch.nn.Parameter(torch.zeros(shape, dtype=BF16, device=DEVICE))
        optimizer = lt.TernaryAdamW([param], carry_rank=0)
        param.grad = torch.zeros_like(param)
        with native.reference_rule():
            optimizer.step()
        with forced():
            sums = gpu.TernaryCall(param.detach(), grad, optimizer.state[param], 128, 1, **RULE).square_sums()
        expected = (grad.float() * 0.3).square().double().sum(0)
        assert sums.dtype is torch.float64
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)


@runs
@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_without_rows_adds_nothing_to_the_sums(rank: int) -> None:
    cols, specs = 200, tensor_specs((0, 200), 128, 1, rank)
    state = {name: torch.zeros(shape, dtype=dtype, device=DEVICE) for name, (shape, dtype) in specs.items()}
    weight = torch.zeros((0, cols), dtype=BF16, device=DEVICE)
    means, basis = torch.ones(cols, device=DEVICE), torch.ones((cols, 2), dtype=BF16, device=DEVICE)
    with forced():
        call = gpu.TernaryCall(weight, weight.clone(), state, 128, 1, **RULE)
        sums, products = call.square_sums(), call.step(means, basis if rank else None)
    assert torch.equal(sums, torch.zeros(cols, dtype=torch.float64, device=DEVICE))
    assert (products is None) if rank == 0 else torch.equal(products, torch.zeros((cols, 2), device=DEVICE))


@runs
def test_empty_blocks_and_transposed_gradients() -> None:
    """A block without gradients keeps no momentum and the smallest second moment, whatever the gradient's strides."""
    grad = torch.randn((300, 24), generator=torch.Generator().manual_seed(1))
    grad[128:256] = 0
    ends = []
    for layout, tool in ((grad.t(), forced()), (grad.t(), native.reference_rule())):
        param = torch.nn.Parameter(torch.zeros((24, 300), device=DEVICE))
        optimizer = lt.TernaryAdamW([param], lr=LR, carry_rank=0)
        param.grad = layout.to(DEVICE)
        with tool:
            optimizer.step()
        ends.append(tensors(param, optimizer))
    compare(ends[0], ends[1], 128)
    state = ends[0]
    assert (state["momentum_scale"][:, 1] == 0).all() and (state["momentum_scale"][:, [0, 2]] != 0).all()
    assert (state["variance_level"][:, 1] == 0).all() and (state["variance_step"][:, 1] == 0).all()
    assert (unpack_trits(state["variance_trits"], 300, 128)[:, 128:256] == 0).all()
    assert (state["weight"][:, 128:256] == 0).all()


@runs
def test_sum_rule() -> None:
    """sum(step) = sum(n) - beta1 / (1 - beta1) u_q, from the kernels' own states and fp32 weights."""
    shape, block, rank, steps, lr = (40, 70), 64, 2, 4, 2.0**-10
    param = torch.nn.Parameter(torch.zeros(shape, device=DEVICE))
    optimizer = lt.TernaryAdamW([param], lr=lr, carry_rank=rank, weight_decay=0.0, block_size=block)
    grid, tile = BlockGrid(shape[1], block, param.device), Tile(0, shape[0], 0, shape[1])
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    for number in range(1, steps + 1):
        grad = torch.randn(shape, generator=generator).to(DEVICE)
        v = torch.zeros(shape, device=DEVICE)
        if optimizer.state[param]:
            v = grid.join(TernaryState(optimizer.state[param], block).variance(tile, grid)[0])
        v = v.mul(0.999).addcmul_(grad, grad, value=0.001).double()
        total += grad.double() / ((v / (1 - 0.999**number)).sqrt() + 1e-8)
        param.grad = grad
        with forced():
            optimizer.step()
    assert "carry_rows" in optimizer.state[param]
    decoded = grid.join(TernaryState(optimizer.state[param], block).momentum(tile, grid)).double()
    released = -param.detach().double() / lr
    assert (released - (total - 9 * decoded)).abs().max() / total.abs().max() < 1e-5


@runs
def test_version_counters_notice_the_kernel() -> None:
    param = torch.nn.Parameter(torch.zeros((2, 16), device=DEVICE))
    optimizer = lt.TernaryAdamW([param], lr=LR)
    param.grad = torch.ones_like(param)
    before = param._version
    with forced():
        optimizer.step()
    assert param._version > before and optimizer.state[param]["momentum_trits"]._version > 0


@runs
def test_what_the_kernels_do_not_take_runs_elsewhere() -> None:
    weight = torch.zeros((8, 128), device=DEVICE)
    with forced():
        assert gpu.takes(weight, weight, 128, 16)
        assert not gpu.takes(weight, weight, 128, 17)
        assert not gpu.takes(weight.half(), weight, 128, 0)
        assert not gpu.takes(weight, weight.half(), 128, 0)
        assert not gpu.takes(weight, weight, 24, 0)
        assert not gpu.takes(weight, weight, 512, 0)
        with native.reference_rule():
            assert not gpu.takes(weight, weight, 128, 0)
            assert "plain torch" in gpu.status()
    assert not gpu.takes(weight.cpu(), weight.cpu(), 128, 0)


def test_a_missing_triton_is_said_and_does_not_stop_training(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    gpu._kernels.cache_clear()
    try:
        assert "cannot be imported" in gpu.status() and "plain torch" in gpu.status()
        assert not gpu.interpreted()
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), gpu.on_cpu():
            pass
        param = torch.nn.Parameter(torch.zeros((8, 128), device=DEVICE))
        optimizer = lt.TernaryAdamW([param])
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert (param != 0).all()
    finally:
        gpu._kernels.cache_clear()


def test_offsets_and_shares_hold_beyond_2_to_the_31() -> None:
    """Shares cover everything, within their bounds; the kernels' sizes are 64-bit whatever their value."""
    for items, wanted, allowed in ((7, 1024, 40), (112, 9, 4), (1, 5, 0), (100_000, 1024, 1024)):
        each, shares = gpu._shares(items, wanted, allowed)
        assert each * shares >= items and each * (shares - 1) < items
        assert shares <= max(1, min(items, wanted, allowed))
    if not gpu.status().startswith("triton"):
        pytest.skip(gpu.status())
    from leantune.kernels import triton_ternary

    for name in ("squares_kernel", "step_kernel", "product_kernel", "columns_kernel"):
        function = getattr(triton_ternary, name).fn
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        sizes = [size for size in triton_ternary.RUNTIME if size in arguments]
        assert len(sizes) >= (4 if name == "squares_kernel" else 6)
        assert all(str(function.__annotations__.get(size)) == "int64" for size in sizes), name


@runs
def test_a_gradient_in_tiles_is_taken_as_a_whole_one() -> None:
    """What crosses rows, and a row's place in a matrix product, are summed in another order: the carry may differ in
    the last bit of its bf16, and the weight by as little as fp32 holds."""
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(150, 64, generator=generator).to(DEVICE) for _ in range(2))
    ends = []
    with forced():
        for cuts in (None, (0, 64, 128, 150)):
            param = torch.nn.Parameter(values.clone())
            optimizer = lt.TernaryAdamW([param], lr=LR)
            group, state = optimizer.param_groups[0], optimizer.state[param]
            if cuts is None:
                optimizer.update(param, gradient, group, state, 0.3)
            else:
                pairs = list(itertools.pairwise(cuts))
                tiled = TiledGradient(
                    (150, 64),
                    gradient.dtype,
                    gradient.device,
                    lambda pairs=pairs: ((top, gradient[top:end]) for top, end in pairs),
                )
                optimizer.update_in_tiles(param, tiled, group, state, 0.3)
            ends.append(tensors(param, optimizer))
    for name, value in ends[0].items():
        if name.startswith("carry") or name == "weight":
            tolerance = 1e-6 if name == "weight" else 2.0**-8
            torch.testing.assert_close(value, ends[1][name], rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(value, ends[1][name]), name

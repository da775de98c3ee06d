"""The C++ kernel of TernaryAdamW makes the decisions of the plain torch rule, whatever the instruction set or thread
count."""

import contextlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import leantune as lt
from leantune.codec.low_rank import initial_basis, next_basis
from leantune.codec.ternary_state import TernaryState
from leantune.codec.tiles import BlockGrid, Tile
from leantune.codec.trits import unpack_trits
from leantune.errors import StateMismatchError
from leantune.kernels import native
from leantune.optim.sampling import sampling

built = pytest.mark.skipif(not native.status().startswith("native"), reason=f"the CPU kernel is {native.status()}")
SHAPES = [(64, 128), (37, 640), (33, 700), (5, 130), (50, 17), (1, 640), (300, 1), (401, 576)]
LR = 1e-3
OPTIONS = {
    "default": {},
    "no carry": {"carry_rank": 0},
    "rank 3": {"carry_rank": 3},
    "two planes": {"momentum_planes": 2},
    "nearest": {"rounding": "nearest"},
    "24 bits": {"master_bits": 24},
    "24 bits, nearest": {"master_bits": 24, "rounding": "nearest"},
    "block 64": {"block_size": 64},
}


def prepared(
    shape: tuple[int, int], dtype: torch.dtype, steps: int = 3, next_step: int | None = None, **options: object
) -> tuple[torch.nn.Parameter, lt.TernaryAdamW]:
    """A parameter a few reference steps into training, its gradient set for the next one.

    ``next_step``: what the next is numbered; every fourth row has its first gradient in it."""
    generator = torch.Generator().manual_seed(7)
    param = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))
    optimizer = lt.TernaryAdamW([param], lr=LR, **options)
    steady = torch.randn(shape, generator=generator) * torch.rand(shape[1], generator=generator)
    with native.reference_rule():
        for step in range(steps + 1):
            param.grad = (torch.randn(shape, generator=generator) * 0.3 + steady).to(dtype)
            if step < steps:
                if next_step is not None:
                    param.grad[1::4] = 0
                optimizer.step()
    if next_step is not None:
        optimizer.state[param]["step"].fill_(next_step - 1)
    return param, optimizer


def tensors(param: torch.nn.Parameter, optimizer: lt.TernaryAdamW) -> dict[str, torch.Tensor]:
    return {"weight": param.detach(), **optimizer.state[param]}


def fraction_of_trits_differing(a: torch.Tensor, b: torch.Tensor, cols: int, block: int) -> float:
    return (unpack_trits(a, cols, block) != unpack_trits(b, cols, block)).float().mean().item()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def instructions_kept() -> Iterator[None]:
    before = native.status().removeprefix("native (").removesuffix(")")
    yield
    native.use_instructions(before)


@built
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_step_from_equal_state_equals_the_reference(shape, dtype, options) -> None:
    check_against_the_reference(shape, dtype, options)


@built
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_portable_instructions_equal_the_reference(options, instructions_kept: None) -> None:
    native.use_instructions("portable")
    check_against_the_reference((37, 700), torch.bfloat16, options)


@built
@pytest.mark.parametrize("next_step", [65, 66, 131, 132, 1001, 1004])
@pytest.mark.parametrize("options", [{}, {"carry_rank": 0, "momentum_planes": 2}, {"block_size": 64}], ids=str)
def test_steps_whose_second_moment_is_not_stored_equal_the_reference(options, next_step: int) -> None:
    """Nor is anything of it then touched, but for the blocks that were empty."""
    shape = (37, 700)
    param, optimizer = prepared(shape, torch.bfloat16, next_step=next_step, **options)
    names = ("variance_trits", "variance_level", "variance_step", "variance_columns")
    before = {name: optimizer.state[param][name].clone() for name in names}
    stored = sampling(next_step, 0.999).stored
    assert stored == (next_step in (66, 132, 1004))
    check_against_the_reference(shape, torch.bfloat16, options, next_step)
    _, optimizer = prepared(shape, torch.bfloat16, next_step=next_step, **options)
    optimizer.step()
    [after] = optimizer.state.values()
    assert not before["variance_level"][1::4].any() and after["variance_level"][1::4].all()
    for name in names:
        now, then = after[name].clone(), before[name]
        if name != "variance_columns":
            now[1::4], then[1::4] = 0, 0
        assert torch.equal(now, then) != stored, name


def check_against_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, options: dict[str, object], next_step: int | None = None
) -> None:
    param, optimizer = prepared(shape, dtype, next_step=next_step, **options)
    start = {name: value.clone() for name, value in tensors(param, optimizer).items()}
    with native.reference_rule():
        optimizer.step()
    theirs = {name: value.clone() for name, value in tensors(param, optimizer).items()}
    with torch.no_grad():
        for name, value in tensors(param, optimizer).items():
            value.copy_(start[name])
    optimizer.step()
    mine = tensors(param, optimizer)
    differing = 0
    for name in mine:
        if name.endswith(("trits", "trits_2")):
            block = options.get("block_size", 128)
            share = fraction_of_trits_differing(mine[name], theirs[name], shape[1], block)
            differing += share * param.numel()
            # A trit differs where a value sits within rounding of a threshold; in a small matrix one may.
            assert share * param.numel() <= max(1.0, 1e-4 * param.numel()), name
    if "variance_columns" in mine:
        torch.testing.assert_close(mine["variance_columns"], theirs["variance_columns"])
        # The slope on a few trits that are not 0 is a small number over a small one.
        mine_step, their_step = mine["variance_step"].float(), theirs["variance_step"].float()
        apart = (mine_step - their_step).abs() / their_step
        assert (apart > 2**-7).float().mean() <= 2e-3 and apart.max() < 0.05
    for name in ("momentum_scale", "carry_rows", "carry_columns", "carry_basis"):
        if name in mine:  # bfloat16, rounded from sums in another order: one unit, but where a trit differs
            near = torch.isclose(mine[name].float(), theirs[name].float(), rtol=2**-7, atol=1e-5)
            assert (~near).sum() <= round(differing), name
    # A scale or a carry one unit (2^-8) away moves a weight by a small part of lr; a trit that differs, by several lr.
    distance = (mine["weight"].float() - theirs["weight"].float()).abs()
    far = distance > 2**-7 * theirs["weight"].float().abs() + 0.5 * LR
    assert far.sum() <= round(differing)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_instruction_sets_that_fuse_give_the_same_bits(dtype: torch.dtype, instructions_kept: None) -> None:
    ends = []
    for name in ("avx512", "avx2"):
        try:
            native.use_instructions(name)
        except ValueError:
            pytest.skip(f"this CPU has no {name}")
        param, optimizer = prepared((401, 700), dtype, momentum_planes=2)
        optimizer.step()
        ends.append(tensors(param, optimizer))
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@built
def test_thread_count_does_not_change_a_bit(threads: None) -> None:
    ends = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        param, optimizer = prepared((1000, 576), torch.bfloat16)
        optimizer.step()
        ends.append(tensors(param, optimizer))
    assert all(torch.equal(ends[0][key], end[key]) for end in ends[1:] for key in end)


@built
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_step_of_many_gives_the_bits_of_one_at_a_time(count: int, threads: None) -> None:
    """step() hands all to the kernel at once, and threads then take whole parameters; update() is one by one."""
    shapes = [(40, 96), (1000, 576), (96,), (7, 640), (576, 96), (300, 3), (64, 4, 32), (30,), (2, 17)]
    ends = []
    for together in (True, False):
        torch.set_num_threads(count)
        generator = torch.Generator().manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
        optimizer = lt.TernaryAdamW(params, lr=LR)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            if together:
                optimizer.step()
            else:
                for param in params:
                    optimizer.update(param, param.grad, optimizer.param_groups[0], optimizer.state[param])
        ends.append([tensors(param, optimizer) for param in params])
    for mine, theirs in zip(*ends, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@built
def test_updates_that_wait_are_run_whatever_ends_the_loop() -> None:
    """The second parameter was resized behind the optimizer's back: it is refused, and the first has moved, whole."""
    moved, resized = (torch.nn.Parameter(torch.zeros(32, 64)) for _ in range(2))
    optimizer = lt.TernaryAdamW([moved, resized], lr=LR)
    for number in range(2):
        moved.grad, resized.grad = torch.ones_like(moved), torch.ones_like(resized)
        if number == 1:
            before = moved.detach().clone()
            resized.data = torch.zeros(16, 64)
            resized.grad = torch.ones(16, 64)
            with pytest.raises(StateMismatchError, match="was replaced or resized"):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.state[moved]["step"] == 2 and (moved < before).all()


@built
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and glibc's allocator")
@pytest.mark.parametrize("shape", [(8192, 8192), (512, 65536)])
def test_o18_a_step_in_the_kernel_takes_less_than_8_mib(shape: tuple[int, int], tmp_path: Path) -> None:
    counter = tmp_path / "count_memory.so"
    source = Path(__file__).parent / "count_memory.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", counter, source], check=True, timeout=60)
    program = f"""
import ctypes, torch, leantune as lt
from leantune.codec.low_rank import initial_basis
from leantune.optim.row_shard import row_shard
torch.set_num_threads(2)
counter = ctypes.CDLL({str(counter)!r})
counter.count_memory_start.restype = counter.count_memory_peak.restype = ctypes.c_long
param = torch.nn.Parameter(torch.zeros({shape}, dtype=torch.bfloat16))
param.grad = torch.full_like(param, 1e-3)
optimizer = lt.TernaryAdamW([param], lr=1e-3)
optimizer._allocate(param, optimizer.param_groups[0], optimizer.state[param], row_shard(param))
initial_basis(param.shape[1], 4, 0, param.device)  # a BLAS keeps some MiB of its own from its first product on
for _ in range(3):  # the first has a carry to begin, the second keeps the basis it has
    held = counter.count_memory_start()
    optimizer.step()
    print(counter.count_memory_peak() - held)
"""
    preloaded = os.environ | {"LD_PRELOAD": str(counter)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=preloaded)
    assert ran.returncode == 0, ran.stderr[-2000:]
    peaks = [int(line) for line in ran.stdout.split()]
    assert len(peaks) == 3
    assert all(2**16 < peak < 8 * 2**20 for peak in peaks), f"{peaks} bytes"


@built
def test_any_gradient_layout_gives_the_same_bits() -> None:
    grad = torch.randn(576, 300)
    ends = []
    for make in (lambda g: g.t().contiguous(), lambda g: g.t(), lambda g: g.t().repeat_interleave(2, 1)[:, ::2]):
        param = torch.nn.Parameter(torch.zeros(300, 576))
        optimizer = lt.TernaryAdamW([param], lr=1e-3)
        param.grad = make(grad)
        optimizer.step()
        ends.append(tensors(param, optimizer))
    assert all(torch.equal(ends[0][key], end[key]) for end in ends[1:] for key in end)


@built
@pytest.mark.parametrize("rank", [0, 4])
def test_sum_rule_in_the_kernel(rank: int) -> None:
    """sum(step) = sum(n) - beta1 / (1 - beta1) u_q over 200 steps, from the kernel's own states and fp32 weights."""
    shape, lr = (64, 200), 2.0**-10
    param = torch.nn.Parameter(torch.zeros(shape))
    optimizer = lt.TernaryAdamW([param], lr=lr, carry_rank=rank, weight_decay=0.0)
    grid, tile = BlockGrid(shape[1], 128, torch.device("cpu")), Tile(0, shape[0], 0, shape[1])
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros(shape, dtype=torch.float64)
    for number in range(1, 201):
        grad = torch.randn(shape, generator=generator)
        v = torch.zeros(shape)
        if optimizer.state[param]:
            v = grid.join(TernaryState(optimizer.state[param], 128).variance(tile, grid)[0])
        _, beta2, bias = sampling(number, 0.999)
        v = v.mul(beta2).addcmul_(grad, grad, value=1 - beta2).double()
        total += grad.double() / ((v * bias).sqrt() + 1e-8)
        param.grad = grad
        optimizer.step()
    decoded = grid.join(TernaryState(optimizer.state[param], 128).momentum(tile, grid)).double()
    steps = -param.detach().double() / lr
    assert (steps - (total - 9 * decoded)).abs().max() / total.abs().max() < 1e-5


@built
@pytest.mark.parametrize("cols", [17, 576])
def test_the_next_basis_equals_the_reference(cols: int) -> None:
    generator = torch.Generator().manual_seed(2)
    basis = initial_basis(cols, 4, 3, torch.device("cpu"))
    graded = torch.randn(cols, 4, generator=generator) * torch.tensor([1.0, 1e-2, 1e-4, 0.0])
    for products in (graded, torch.zeros(cols, 4), 1e6 * graded):
        mine, theirs = native.TernaryCall.next_basis(products, basis).float(), next_basis(products, basis).float()
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-4)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 1_000_003])
def test_squared_norms_equal_torch_s_and_show_what_is_not_finite(count: int, dtype: torch.dtype) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    [norm] = native.squared_norms([values])
    assert norm == pytest.approx(values.double().square().sum().item(), rel=1e-5)
    for wrong in (float("nan"), float("inf"), 3e38):
        if count:
            values[count // 2] = wrong
            assert not math.isfinite(native.squared_norms([values])[0])
    others = [values.half(), torch.zeros(4, 4).t()[1:], torch.ones(5), torch.zeros(3, 3).to_sparse()]
    assert native.squared_norms(others) == [None, None, 5.0, None]
    assert native.squared_norms([]) == []


@built
def test_version_counters_notice_the_kernel() -> None:
    param, optimizer = prepared((64, 128), torch.bfloat16)
    before = param._version, optimizer.state[param]["momentum_trits"]._version
    read = param.grad._version
    optimizer.step()
    assert param.grad._version == read
    assert param._version > before[0]
    assert optimizer.state[param]["momentum_trits"]._version > before[1]


@built
def test_what_the_kernel_does_not_take_runs_in_plain_torch() -> None:
    weight = torch.zeros(8, 128)
    assert native.takes(weight, weight, 128)
    assert not native.takes(weight.half(), weight, 128)
    assert not native.takes(weight, weight, 24)
    with native.reference_rule():
        assert not native.takes(weight, weight, 128)
        assert "plain torch" in native.status()


def test_a_missing_or_foreign_library_is_said_and_does_not_stop_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    try:
        native._load.cache_clear()
        assert "not built" in native.status()
        _, optimizer = prepared((64, 128), torch.bfloat16)
        optimizer.step()
        native._load.cache_clear()
        (tmp_path / "_native.so").write_bytes(b"not a library")
        assert "could not be loaded" in native.status()
        with pytest.raises(ValueError, match="cannot run here"):
            native.use_instructions("avx2")
    finally:
        native._load.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_access_outside_an_array(tmp_path: Path) -> None:
    """Every entry, awkward shapes, arrays of exact size, under the address and undefined-behaviour sanitizers."""
    sources, driver = Path(native.__file__).parent / "native", Path(__file__).parent / "native_shapes.cpp"
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-w",
        "-ffp-contract=off",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover",
    ]
    program = tmp_path / "shapes"
    build = ["g++", *flags, f"-I{sources}", str(driver), str(sources / "ternary.cpp"), "-o", str(program)]
    subprocess.run(build, check=True, timeout=300)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]


@built
@pytest.mark.parametrize("shape", [(37, 700), (3, 5), (300,), (513, 1025), (70_000, 3)])
@pytest.mark.parametrize(
    ("rule", "options"), [(lt.Lomo, {}), (lt.AdaLomo, {}), (lt.AdamW, {}), (lt.AdamW, {"master_bits": 24})]
)
def test_stochastic_writes_of_other_rules_equal_the_reference_bit_for_bit(rule, options, shape) -> None:
    ends = []
    for reference in (True, False):
        generator = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
        optimizer = rule([param], lr=1e-3, **options)
        for _ in range(2):
            param.grad = torch.randn(shape, generator=generator).bfloat16()
            before = param._version
            with native.reference_rule() if reference else contextlib.nullcontext():
                optimizer.step()
            assert param._version > before
        ends.append([param.detach(), *optimizer.state[param].values()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))

"""TacoOneSparse against its oracle, its bytes, and what it promises about the elements that do not move."""

import copy
from pathlib import Path

import pytest
import torch
from reference.taco_one_sparse import TacoOneSparse as Oracle
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import leantune as lt
from leantune.codec.float8 import decode_columns, encode_columns
from leantune.errors import InvalidArgumentError, InvalidTypeError, StateMismatchError
from leantune.memory.measured import tracker
from leantune.optim import taco_one_sparse as rule
from leantune.optim.base import LeanOptimizer
from leantune.optim.row_shard import row_shard
from leantune.optim.weights import WeightMatrix


def random(shape: tuple[int, ...], number: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def one_hot(shape: tuple[int, ...], number: int) -> Tensor:
    """One entry a column, which wanders: every step wants another slot."""
    row = torch.randint(0, shape[0], (1, shape[1]), generator=torch.Generator().manual_seed(number))
    return torch.zeros(shape).scatter_(0, row, random((1, shape[1]), number))


def with_dead_parts(shape: tuple[int, ...], number: int) -> Tensor:
    grad = random(shape, number)
    grad[:, ::3] = 0
    grad[::2] = 0
    return grad


GRADIENTS = {
    "random": random,
    "ties": lambda shape, number: random(shape, number).round(),
    "all equal": lambda shape, number: torch.ones(shape),
    "constant": lambda shape, number: random(shape, 0),
    "zeros": lambda shape, number: torch.zeros(shape),
    "dead parts": with_dead_parts,
    "one hot": one_hot,
    "tiny": lambda shape, number: random(shape, number) * 1e-37,
    "growing": lambda shape, number: random(shape, number) * 2.0**number,
    "vanishing": lambda shape, number: random(shape, number) * 0.05**number,
}


def drive(optimizer: LeanOptimizer, param: Tensor, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()


def decoded(optimizer: LeanOptimizer, param: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and values of the slots."""
    state = optimizer.state[param]
    return state["slot_rows"].to(torch.int64) & 0xFFFF, decode_columns(state["slot_values"], state["slot_exponents"])


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize(("shape", "slots", "steps"), [((40, 7), 3, 50), ((33, 5), 28, 50), ((30, 130), 1, 6)])
def test_equals_the_oracle_bit_for_bit(kind: str, shape: tuple[int, int], slots: int, steps: int) -> None:
    param = nn.Parameter(random(shape, 99))
    optimizer = lt.TacoOneSparse([param], lr=1e-2, beta=0.8, weight_decay=0.1, slots=slots)
    oracle = Oracle(param.detach().clone(), 1e-2, 0.8, slots, 0.1)
    for number in range(steps):
        grad = GRADIENTS[kind](shape, number)
        drive(optimizer, param, [grad])
        oracle.step(grad)
        assert torch.equal(param, torch.from_numpy(oracle.weight))
    rows, values = decoded(optimizer, param)
    for j, column in enumerate(oracle.columns):
        assert values[:, j].tolist() == [float(value) for _, value in column]
        assert [row for row, value in zip(rows[:, j].tolist(), values[:, j]) if value] == [r for r, v in column if v]
    if slots < 28 and kind in ("random", "growing"):
        assert oracle.evictions > 0


def test_one_entry_a_column_moves_by_lr_m_over_n() -> None:
    param = nn.Parameter(torch.zeros(64, 32))
    optimizer = lt.TacoOneSparse([param], lr=0.25)
    grad = random((64, 32), 0)
    drive(optimizer, param, [grad])
    row = grad.abs().argmax(0, keepdim=True)
    expected = torch.zeros(64, 32).scatter_(0, row, -0.25 * 64 / 32 * grad.gather(0, row).sign())
    assert torch.equal(param, expected)


@pytest.mark.parametrize("shape", [(40, 300), (700, 40), (3, 40, 20), (25, 3, 3, 3), (5, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    ends = []
    for columns, elements in ((2048, 1 << 17), (128, 1), (256, 1000)):
        monkeypatch.setattr(rule, "PANEL_COLUMNS", columns)
        monkeypatch.setattr(rule, "TILE_ELEMENTS", elements)
        param = nn.Parameter(random(shape, 99).to(dtype))
        optimizer = lt.TacoOneSparse([param], lr=1e-3, weight_decay=0.1)
        drive(optimizer, param, [random(shape, number).mul(4).round() for number in range(4)])
        ends.append((param, optimizer.state[param]))
    for param, state in ends[1:]:
        assert torch.equal(param, ends[0][0])
        assert all(torch.equal(as_bytes(state[name]), as_bytes(value)) for name, value in ends[0][1].items())


def as_bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dim() and value.numel() else value


def test_a_stack_of_matrices_is_each_of_them() -> None:
    stacked = nn.Parameter(random((3, 64, 20), 99))
    together = lt.TacoOneSparse([stacked], lr=1e-2, slots=2)
    alone = [nn.Parameter(part.clone()) for part in stacked.detach()]
    each = [lt.TacoOneSparse([part], lr=1e-2, slots=2) for part in alone]
    drive(together, stacked, [random((3, 64, 20), 0)])
    for optimizer, part, grad in zip(each, alone, random((3, 64, 20), 0)):
        drive(optimizer, part, [grad])
    assert torch.equal(stacked, torch.stack([part.detach() for part in alone]))


@pytest.mark.parametrize("rows", [22, 40, 4096, 65_536, 65_537, 200_000])
def test_a_column_takes_at_most_90_bytes(rows: int) -> None:
    param = nn.Parameter(torch.zeros(rows, 5, dtype=torch.bfloat16))
    optimizer = lt.TacoOneSparse([param], lr=1e-3)
    predicted = optimizer.report().state_bytes
    drive(optimizer, param, [random((rows, 5), 0)] * 2)
    kept = sum(value.nbytes for name, value in optimizer.state[param].items() if name != "step")
    assert kept == predicted and kept / 5 <= 90


def test_short_matrices_and_vectors_keep_momentum_and_say_so() -> None:
    shapes = {"short": (21, 50), "high enough": (22, 50), "vector": (50,), "experts": (4, 64, 16)}
    optimizer = lt.TacoOneSparse([(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()], lr=1e-3)
    report = {row.name: row for row in optimizer.report().rows}
    assert [row.storage for row in report.values()] == ["exact fp32", "one-sparse", "exact fp32", "one-sparse"]
    assert "21 rows" in report["short"].reason and report["vector"].reason == "vector"
    assert report["experts"].state_bytes == 4 * 16 * 85 and "4 matrices" in report["experts"].reason
    assert report["short"].state_bytes / 50 <= 90


def test_opt_13b_keeps_at_most_170_megabytes() -> None:
    """OPT-13B: 50,272 tokens (head tied), 2,050 positions, width 5,120, feed-forward 20,480, 40 layers."""
    width, wide = 5120, 20480
    matrices = [(width, width)] * 4 + [(wide, width), (width, wide)]
    layer = [*matrices, *[(rows,) for rows, _ in matrices], *[(width,)] * 4]
    shapes = [(50_272, width), (2050, width), *layer * 40, (width,), (width,)]
    params = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in shapes]
    report = lt.TacoOneSparse(params, lr=1e-3).report()
    assert 12.8e9 < report.parameters < 12.9e9
    assert 0.16e9 < report.state_bytes <= 0.17e9


def test_o13_what_never_gets_a_gradient_does_not_move() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        param = nn.Parameter(random((48, 96), 99).to(dtype))
        before = param.detach().clone()
        optimizer = lt.TacoOneSparse([param], lr=1.0, slots=4)
        for number in range(80):
            grad = random((48, 96), number)
            grad[7] = 0
            grad[:, 33] = 0
            grad[20, 50] = 0
            drive(optimizer, param, [grad])
        assert torch.equal(param[7], before[7]) and torch.equal(param[:, 33], before[:, 33])
        assert param[20, 50] == before[20, 50] and not torch.equal(param, before)


def test_history_forgets_a_gradient_that_stopped() -> None:
    """Stored numbers decay although 0.9 of one is less than half a step of float8 away."""
    param = nn.Parameter(torch.zeros(64, 128))
    optimizer = lt.TacoOneSparse([param], lr=1.0, beta=0.99)
    drive(optimizer, param, [torch.eye(64, 128) + torch.eye(64, 128).roll(64, 1)] * 20)
    start = decoded(optimizer, param)[1].sum().item()
    drive(optimizer, param, [torch.zeros(64, 128)] * 100)
    assert decoded(optimizer, param)[1].sum().item() / start == pytest.approx(0.99**100, rel=0.05)


def test_columns_in_float8_are_unbiased_and_exact_where_they_can_be() -> None:
    values = random((28, 4), 0) * torch.tensor([1.0, 1e-30, 1e30, 1e-37])
    total, generator = torch.zeros(28, 4).double(), torch.Generator().manual_seed(1)
    for _ in range(2000):
        noise = torch.randint(0, 1 << 16, values.shape, generator=generator, dtype=torch.int32)
        total += decode_columns(*encode_columns(values.clone(), noise)).double()
    assert ((total / 2000 - values)[:, :3] / values[:, :3]).abs().max() < 0.005
    assert total[:, 3].abs().max() == 0
    codes, exponents = encode_columns(values.clone(), torch.zeros(28, 4).int())
    exact = decode_columns(codes, exponents)
    again = encode_columns(exact.clone(), torch.full((28, 4), 65535, dtype=torch.int32))
    assert torch.equal(decode_columns(*again), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_single_elements_are_rounded_as_a_tile_is(dtype: torch.dtype) -> None:
    values = random((9, 300), 0)
    whole, single = (nn.Parameter(torch.zeros(9, 300, dtype=dtype)) for _ in range(2))
    WeightMatrix(row_shard(whole), None, None, 12345).write(rule.Tile(0, 9, 0, 300), values.clone())
    rows, columns = (index.flatten() for index in torch.meshgrid(torch.arange(9), torch.arange(300), indexing="ij"))
    WeightMatrix(row_shard(single), None, None, 12345).write_at(rows, columns, values.flatten().clone())
    assert torch.equal(whole, single) and not torch.equal(whole, values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_o21_small_steps_reach_narrow_weights(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = lt.TacoOneSparse([param], lr=1e-5)
    grad = torch.zeros(64, 64)
    grad[5] = 1
    drive(optimizer, param, [grad] * 200)
    assert (1 - param[5].float().mean().item()) / 2e-3 == pytest.approx(1, abs=0.35)
    assert param[6].eq(1).all()


def test_a_resumed_run_through_safetensors_and_a_copy_go_on_bit_for_bit(tmp_path: Path) -> None:
    shapes = [(64, 72), (8, 72), (72,), (3, 40, 9)]
    params = [nn.Parameter(random(shape, 99).bfloat16()) for shape in shapes]
    optimizer = lt.TacoOneSparse(params, lr=1e-2)

    def advance(which: list[nn.Parameter], stepped: LeanOptimizer, number: int) -> None:
        for param in which:
            param.grad = random(tuple(param.shape), number).to(param.dtype)
        stepped.step()

    for number in range(5):
        advance(params, optimizer, number)
    saved = optimizer.state_dict()
    flat = {f"{i}.{name}": value for i, state in saved["state"].items() for name, value in state.items()}
    save_file(flat, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    state = {i: {name: loaded[f"{i}.{name}"] for name in names} for i, names in saved["state"].items()}
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = lt.TacoOneSparse(twins, lr=1.0)
    resumed.load_state_dict({"state": state, "param_groups": copy.deepcopy(saved["param_groups"])})
    assert resumed.state[twins[0]]["slot_values"].dtype is torch.uint8
    copies, copied = copy.deepcopy((params, optimizer))
    for number in (5, 6):
        for which, stepped in ((params, optimizer), (twins, resumed), (copies, copied)):
            advance(which, stepped, number)
        for mine, twin, other in zip(params, twins, copies):
            assert torch.equal(mine, twin) and torch.equal(mine, other)
    with pytest.raises(StateMismatchError, match="slots=28"):
        lt.TacoOneSparse(twins, lr=1.0, slots=4).load_state_dict(saved)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0}, {"lr": None}, {"lr": float("inf")}, {"beta": 1.0}, {"beta": -0.1}, {"beta": (0.9, 0.99)},
        {"beta": True}, {"slots": 0}, {"slots": 29}, {"slots": 4.0}, {"weight_decay": -0.1}, {"rounding": "up"},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(InvalidArgumentError):
        lt.TacoOneSparse([nn.Parameter(torch.zeros(40, 40))], **{"lr": 1e-3, **settings})


def test_wrong_parameters_and_a_missing_rate_are_refused() -> None:
    param = nn.Parameter(torch.zeros(40, 40))
    with pytest.raises(TypeError, match="lr"):
        lt.TacoOneSparse([param])  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="twice"):
        lt.TacoOneSparse([param, param], lr=1e-3)
    with pytest.raises(InvalidTypeError, match="trains float32"):
        lt.TacoOneSparse([torch.zeros(40, 40, dtype=torch.int64)], lr=1e-3)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 50), (50, 1), (1, 1), (0, 5), (50, 0), (0, 30, 4), (2, 30, 0)])
def test_o20_shapes_at_the_edge(shape: tuple[int, ...]) -> None:
    param = nn.Parameter(torch.ones(shape))
    optimizer = lt.TacoOneSparse([param], lr=1e-2, weight_decay=0.1)
    drive(optimizer, param, [torch.ones(shape)] * 3)
    assert optimizer.report().state_bytes == sum(
        value.nbytes for name, value in optimizer.state[param].items() if name != "step"
    )
    assert bool((param < 1).any()) or param.numel() == 0


def test_where_every_row_is_remembered_none_enters_twice() -> None:
    param = nn.Parameter(torch.zeros(24, 6))
    optimizer = lt.TacoOneSparse([param], lr=1e-2)
    drive(optimizer, param, [random((24, 6), number) + 3 for number in range(60)])
    rows, values = decoded(optimizer, param)
    for j in range(6):
        kept = rows[:, j][values[:, j] != 0].tolist()
        assert sorted(kept) == list(range(24))


@pytest.mark.parametrize("shape", [(4096, 4096), (200_000, 84), (84, 200_000), (64, 512, 512), (20, 800_000)])
def test_o18_temporaries_stay_under_8_mib_at_16_million_elements(shape: tuple[int, ...]) -> None:
    param = nn.Parameter(torch.zeros(shape))
    optimizer = lt.TacoOneSparse([param], lr=1e-3, weight_decay=0.1)
    param.grad = torch.full_like(param, 1e-3)
    state = optimizer.state[param]
    state["step"] = torch.zeros((), dtype=torch.int64)
    for name, (size, kind) in optimizer._layout(param, optimizer.param_groups[0]).tensors.items():
        state[name] = torch.zeros(size, dtype=kind)
    with tracker.track() as tracked:
        optimizer.step()
    assert 0 < tracked.peak_temporary_bytes < 8 << 20


def test_the_history_finds_the_direction_that_single_gradients_hide() -> None:
    """Noise ten times the signal: the remembered entry is the true one more often than the last gradient's is."""
    signal = torch.zeros(64, 128)
    signal[3] = 1.0
    hits = {}
    for slots, beta in ((1, 0.0), (28, 0.9)):
        param = nn.Parameter(torch.zeros(64, 128))
        optimizer = lt.TacoOneSparse([param], lr=1e-3, beta=beta, slots=slots)
        drive(optimizer, param, [signal + 0.7 * random((64, 128), number) for number in range(60)])
        hits[slots] = -param.detach()[3].mean().item()
    assert hits[28] > 3 * hits[1] > 0

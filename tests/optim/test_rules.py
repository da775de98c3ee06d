"""The update rules against their oracles, and the properties the ternary scheme promises."""

import pytest
import torch
from reference import optimizers as oracle
from torch import Tensor

import leantune as lt
from leantune.kernels import native
from leantune.memory.measured import tracker
from leantune.optim import ternary_adamw
from leantune.optim.base import LeanOptimizer


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def drive(optimizer: LeanOptimizer, param: Tensor, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()


def state_bytes(optimizer: LeanOptimizer, param: Tensor) -> int:
    return sum(value.nbytes for name, value in optimizer.state[param].items() if name != "step")


@pytest.mark.parametrize(("planes", "limit"), [(1, 0.46), (2, 0.68)])
def test_state_bytes_of_a_4096_square(planes: int, limit: float) -> None:
    param = torch.nn.Parameter(torch.zeros(4096, 4096, dtype=torch.bfloat16))
    optimizer = lt.TernaryAdamW([param], momentum_planes=planes)
    predicted = optimizer.report().state_bytes
    drive(optimizer, param, [torch.zeros(4096, 4096)])
    assert state_bytes(optimizer, param) == predicted
    assert predicted / param.numel() <= limit


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("rank", [0, 4])
def test_sum_rule(monkeypatch: pytest.MonkeyPatch, rank: int, planes: int) -> None:
    """sum(step) = sum(n) - beta1 / (1 - beta1) u_q: what the quantiser drops reaches the weights."""
    total_n, total_step, last = torch.zeros(64, 200).double(), torch.zeros(64, 200).double(), {}
    rule, release = ternary_adamw.normalised_momentum, ternary_adamw.released_step

    def recording_rule(*arguments):
        last["n"], *rest = rule(*arguments)
        return last["n"], *rest

    def recording_release(momentum, decoded, beta1):
        step = release(momentum, decoded, beta1)
        last["u_q"] = decoded.flatten(1)[:, :200].clone()
        total_n.add_(last["n"].flatten(1)[:, :200])
        total_step.add_(step.flatten(1)[:, :200])
        return step

    monkeypatch.setattr(ternary_adamw, "normalised_momentum", recording_rule)
    monkeypatch.setattr(ternary_adamw, "released_step", recording_release)
    param = torch.nn.Parameter(torch.zeros(64, 200))
    optimizer = lt.TernaryAdamW([param], carry_rank=rank, momentum_planes=planes, weight_decay=0.0)
    with native.reference_rule():  # the kernel's own: tests/kernels/test_native.py
        drive(optimizer, param, gradients((64, 200), 200))
    error = total_step - (total_n - 9 * last["u_q"].double())
    # n is of size 1 and its sum of size 15; fp32 rounds each step by 1e-7 of up to 20.
    assert error.abs().max() / total_n.abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(300,), (40, 50), (6, 3, 5), ()])
def test_exact_states_match_laprop_in_float64(shape: tuple[int, ...]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    param = torch.nn.Parameter(start.clone())
    optimizer = lt.TernaryAdamW([param], lr=1e-2, weight_decay=0.1, states="exact")
    reference = oracle.LaProp(start, 1e-2, (0.9, 0.999), 1e-8, 0.1)
    for grad in gradients(shape, 100):
        drive(optimizer, param, [grad])
        reference.step(grad)
    torch.testing.assert_close(param.double(), reference.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(300,), (40, 50)])
def test_adamw_matches_torch(shape: tuple[int, ...]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a = lt.AdamW([ours], lr=1e-2, weight_decay=0.1)
    b = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    for grad in gradients(shape, 100):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lomo_is_gradient_descent_with_decoupled_decay() -> None:
    param = torch.nn.Parameter(torch.ones(5, 7))
    optimizer = lt.Lomo([param], lr=0.1, weight_decay=0.5)
    grad = gradients((5, 7), 1)[0]
    drive(optimizer, param, [grad])
    torch.testing.assert_close(param.detach(), torch.ones(5, 7) * (1 - 0.05) - 0.1 * grad)


def test_adalomo_matches_its_oracle() -> None:
    start = torch.randn(40, 50, generator=torch.Generator().manual_seed(5))
    param = torch.nn.Parameter(start.clone())
    optimizer, reference = lt.AdaLomo([param], lr=1e-2), oracle.AdaLomo(start, 1e-2)
    for grad in gradients((40, 50), 50):
        drive(optimizer, param, [grad])
        reference.step(grad)
    torch.testing.assert_close(param.double(), reference.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_o21_small_updates_reach_narrow_weights(dtype: torch.dtype) -> None:
    """A relative update of 1e-4 a step: to nearest it is lost, stochastically it lands."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        param = torch.nn.Parameter(torch.full((64, 64), 0.02, dtype=dtype))
        optimizer = lt.Lomo([param], lr=2e-6, rounding=rounding)
        start = param.float().mean().item()
        drive(optimizer, param, [torch.ones(64, 64)] * 100)
        moved[rounding] = (start - param.float().mean().item()) / 2e-4
    assert moved["stochastic"] == pytest.approx(1, abs=0.06)  # 64 x 64 x 100 roundings: a standard error of 0.012
    assert moved["nearest"] < 0.1


@pytest.mark.parametrize("make", [lt.AdamW, lt.TernaryAdamW])
def test_master_bits_follow_fp32_weights(make) -> None:
    start = torch.randn(32, 128, generator=torch.Generator().manual_seed(5)) * 0.02
    ends = {}
    for dtype, bits in ((torch.float32, None), (torch.bfloat16, 24), (torch.bfloat16, None)):
        param = torch.nn.Parameter(start.to(torch.bfloat16).to(dtype))
        optimizer = make([param], lr=1e-4, master_bits=bits)
        grads = [grad.bfloat16().float() for grad in gradients((32, 128), 50)]
        drive(optimizer, param, grads)
        ends[dtype, bits] = param.detach().float()
    true = ends[torch.float32, None]
    error = {key: (end - true).abs().mean().item() for key, end in ends.items()}
    assert error[torch.bfloat16, 24] < 0.5 * error[torch.bfloat16, None]


def test_o13_never_touched_rows_columns_and_elements() -> None:
    """Untouched rows and columns never move. An untouched element among touched ones never moves without a carry; with
    one it stays within the bound of one stored momentum, without trend."""
    for rank in (0, 4):
        param = torch.nn.Parameter(torch.zeros(48, 256))
        optimizer = lt.TernaryAdamW([param], lr=1.0, weight_decay=0.0, carry_rank=rank)
        early = None
        for number, grad in enumerate(gradients((48, 256), 500)):
            grad[7] = 0
            grad[:, 33] = 0
            grad[20, 100] = 0
            drive(optimizer, param, [grad])
            if number == 249:
                early = param[20, 100].item()
            assert not param[7].any() and not param[:, 33].any()
        bound = 0.0 if rank == 0 else 9.0
        assert abs(param[20, 100].item()) <= bound and abs(early) <= bound


@pytest.mark.parametrize(
    "options", [{}, {"carry_rank": 0, "momentum_planes": 2}, {"states": "exact"}, {"master_bits": 24}]
)
def test_a_stack_of_experts_is_its_matrices_one_below_the_other(options) -> None:
    """(E, m, n): rows of n inputs, column means shared by the experts, a carry where their matrices have one."""
    ends = []
    for shape in ((4, 64, 256), (256, 256)):
        param = torch.nn.Parameter(torch.full(shape, 0.02, dtype=torch.bfloat16))
        optimizer = lt.TernaryAdamW([param], lr=1e-2, **options)
        for grad in gradients((256, 256), 5):
            drive(optimizer, param, [grad.view(shape).bfloat16()])
        assert (
            all(value.shape[0] == 4 for name, value in optimizer.state[param].items() if "trits" in name)
            or shape[0] > 4
        )
        again = lt.TernaryAdamW([param], lr=1e-2, **options)
        again.load_state_dict(optimizer.state_dict())
        ends.append((param.detach().view(256, 256), optimizer.report().state_bytes))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


@pytest.mark.parametrize(("options", "most"), [({}, 80), ({"carry_rank": 0}, 50), ({"states": "exact"}, 15)])
def test_columns_that_wake_late_take_large_steps_within_a_bound(options: dict[str, object], most: float) -> None:
    """Silent for 1,400 steps, then a gradient: single steps of many lr, the same way over a hundred steps."""
    param = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = lt.TernaryAdamW([param], lr=1.0, weight_decay=0.0, **options)
    largest = 0.0
    for number, grad in enumerate(gradients((64, 128), 1500)):
        woken, before = number >= 1400, param.detach().clone()
        grad[:, ::3] = grad[:, ::3] + 0.5 if woken else 0.0
        drive(optimizer, param, [grad])
        if woken:
            largest = max(largest, (param.detach() - before)[:, ::3].abs().max().item())
    assert largest < most
    assert 150 < -param[:, ::3].mean() < 250  # torch AdamW: about 180


@pytest.mark.parametrize("rank", [0, 4])
def test_o13_a_stopped_element_stays_bounded_without_trend(rank: int) -> None:
    param = torch.nn.Parameter(torch.zeros(48, 256))
    optimizer = lt.TernaryAdamW([param], lr=1.0, weight_decay=0.0, carry_rank=rank)
    trace = []
    for number, grad in enumerate(gradients((48, 256), 600)):
        if number >= 100:
            grad[:, ::16] = 0
        drive(optimizer, param, [grad])
        trace.append(param[:, ::16].detach().clone())
    after = torch.stack(trace[150:])
    assert (after - after[0]).abs().max() <= 18  # twice beta1 / (1 - beta1) of |u_q| <= 1
    assert (after[-200:].mean(0) - after[:200].mean(0)).mean().abs() < 0.2


@pytest.mark.parametrize("rank", [0, 4])
def test_o13_a_stopped_block_pays_out_its_momentum_and_stops(rank: int) -> None:
    param = torch.nn.Parameter(torch.zeros(16, 256))
    optimizer = lt.TernaryAdamW([param], lr=1.0, weight_decay=0.0, carry_rank=rank)
    drive(optimizer, param, gradients((16, 256), 50))
    at_stop = param.detach().clone()
    drive(optimizer, param, [torch.zeros(16, 256)] * 300)
    paid = param.detach().clone()
    drive(optimizer, param, [torch.zeros(16, 256)] * 100)
    assert (paid - at_stop).abs().max() <= 9.5
    assert (param.detach() - paid).abs().max() < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda p: lt.TernaryAdamW(p),
        lambda p: lt.TernaryAdamW(p, momentum_planes=2, master_bits=24),
        lambda p: lt.AdamW(p),
        lambda p: lt.Lomo(p, lr=0.1),
        lambda p: lt.AdaLomo(p),
        lambda p: lt.TacoOneSparse(p, lr=0.1, weight_decay=0.1),
    ],
    ids=["ternary", "ternary-2-planes-24-bits", "adamw", "lomo", "adalomo", "taco_one_sparse"],
)
def test_o18_temporaries_stay_under_8_mib_at_64_million_elements(make) -> None:
    param = torch.nn.Parameter(torch.zeros(8192, 8192, dtype=torch.bfloat16))
    optimizer = make([param])
    param.grad = torch.full_like(param, 1e-3)
    group, state = optimizer.param_groups[0], optimizer.state[param]
    state["step"] = torch.zeros((), dtype=torch.int64)
    for name, (shape, dtype) in optimizer._layout(param, group).tensors.items():
        state[name] = torch.zeros(shape, dtype=dtype)
    with tracker.track() as tracked:
        optimizer.step()
    assert 0 < tracked.peak_temporary_bytes < 8 << 20


@pytest.mark.parametrize(
    ("lines", "dead", "most"),
    [(1, 0.0, 1.1), (1, 0.5, 1.1), (1, 0.9, 1.1), (1, 0.98, 1.1), (32, 0.5, 1.4), (32, 0.9, 2.5)],
)
def test_dead_elements_do_not_blow_up_the_steps_of_live_ones(lines: int, dead: float, most: float) -> None:
    """Elements that never get a gradient share blocks with live ones, whose v must not be cut off at every encode. Dead
    inputs are whole columns, which the factors know; dead elements anywhere are harder."""
    ends = []
    for states in ("ternary", "exact"):
        generator = torch.Generator().manual_seed(0)
        mask = (torch.rand(lines, 784, generator=generator) >= dead).float().expand(32, 784)
        drift = torch.randn(32, 784, generator=generator)
        param = torch.nn.Parameter(torch.zeros(32, 784))
        optimizer = lt.TernaryAdamW([param], lr=1.0, weight_decay=0.0, states=states)
        drive(optimizer, param, [(drift + 0.5 * torch.randn(32, 784, generator=generator)) * mask for _ in range(200)])
        ends.append(param.detach()[mask == 1].square().mean().sqrt())
    assert ends[0] / ends[1] < most

"""Gradient accumulation and loss scaling under FusedBackward: what they hold, refuse and forget.

That accumulation equals the ordinary loop, for every rule and clip mode, is in test_matrix.py.
"""

import itertools

import pytest
import torch
from test_fused import Model, clip_ordinary, loss_of
from torch import nn

import leantune as lt
from leantune.backward.accumulation import Accumulator
from leantune.backward.scaling import LossScale
from leantune.errors import BackwardError, InvalidArgumentError, NonFiniteError, StateMismatchError


@pytest.mark.parametrize("clip", ["per_tensor", "global", "none"])
def test_g15_a_parameter_used_in_an_earlier_micro_batch_alone_is_updated(clip: str) -> None:
    """As an expert that no token of the last micro-batch chose."""
    ends = []
    for fuse in (False, True):
        torch.manual_seed(0)
        experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        optimizer = lt.AdamW(experts.named_parameters(), lr=1e-2)
        fused = lt.FusedBackward(optimizer, experts, clip, accumulate="float32") if fuse else None
        for _ in range(3):
            for place in (0, 1):
                loss = experts[place](torch.ones(4, 32)).square().mean() / 2
                if fused is not None:
                    fused.backward(loss, last=place == 1)
                else:
                    loss.backward()
            if fused is None:
                clip_ordinary([p for p in experts.parameters() if p.grad is not None], clip, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert not optimizer.state[experts[2].weight]
        ends.append(torch.cat([p.detach().flatten() for p in experts.parameters()]))
    assert torch.equal(*ends)


def test_sums_of_bfloat16_gradients() -> None:
    """float32 holds the sum of what backward gave, bit for bit; bfloat16 has that expectation, at half the bytes."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(64, 50, dtype=torch.bfloat16))
    grads = [torch.randn(64, 50, generator=generator).bfloat16() for _ in range(4)]
    exact = sum(grad.float() for grad in grads)
    sums = Accumulator("float32")
    for key, grad in enumerate(grads):
        sums.add(param, grad.clone(), key)
    assert torch.equal(sums.sums[param], exact)
    total = torch.zeros(64, 50)
    for trial in range(400):
        rounded = Accumulator("bfloat16")
        for key, grad in enumerate(grads):
            rounded.add(param, grad.clone(), 10 * trial + key)
        assert rounded.sums[param].dtype is torch.bfloat16
        total += rounded.sums[param].float()
    # One rounding's standard deviation is at most half a unit, 2^-8 of the value; three of them, 400 trials.
    unit = exact.abs().clamp(min=1.0) * 2**-7
    assert ((total / 400 - exact).abs() / unit).max() < 5 * 3**0.5 * 2 / 2 / 400**0.5
    assert ((total / 400 - exact) / unit).mean().abs() < 0.005
    naive = sum(grads[1:], grads[0]).float()
    assert (naive - exact).abs().mean() > 2 * (total / 400 - exact).abs().mean()


def test_g2_a_larger_sum_is_added_in_pieces() -> None:
    param = nn.Parameter(torch.zeros(3, 100_003))
    sums = Accumulator("bfloat16")
    for key in range(3):
        sums.add(param, torch.full_like(param, 1.0), key)
    assert torch.equal(sums.sums[param], torch.full((3, 100_003), 3.0, dtype=torch.bfloat16))


def test_g2_what_accumulation_refuses_or_forgets() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(BackwardError, match=r"larger micro-batch.*accumulate='float32'"):
        fused.backward(loss_of(model, 0), last=False)
    fused.remove()
    with pytest.raises(InvalidArgumentError, match="accumulate"):
        lt.FusedBackward(optimizer, model, accumulate="float16")
    fused = lt.FusedBackward(optimizer, model, accumulate="float32")
    fused.backward(loss_of(model, 0), last=False)
    with pytest.raises(BackwardError, match=r"after 1 micro-batch"):
        optimizer.step()
    with pytest.raises(BackwardError, match=r"accumulation needs fused\.backward"):
        loss_of(model, 1).backward()
    assert all(map(torch.equal, before, model.parameters()))
    # The failed backward dropped the sums, and so does zero_grad(): the next step is of its own batch alone.
    fused.backward(loss_of(model, 0), last=False)
    optimizer.zero_grad()
    fused.backward(loss_of(model, 2))
    optimizer.step()
    other = Model()
    reference = lt.Lomo(other.parameters(), lr=0.1)
    lt.FusedBackward(reference, other)
    loss_of(other, 2).backward()
    reference.step()
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def half_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 8)).half()


def half_loss(model: nn.Module, number: int, size: float = 1.0) -> torch.Tensor:
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(number)).half()
    return size * (model(x).float() - 1).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("clip", ["per_tensor", "global", "none"])
def test_g8_an_overflow_drops_the_whole_step_and_the_run_recovers(clip: str, micro_batches: int) -> None:
    model = half_model()
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    fused = lt.FusedBackward(
        optimizer, model, clip, accumulate="float32", loss_scale=LossScale(initial=2.0**24, grow_every=3)
    )
    dropped, scales, losses = [], [], []
    for number in range(40):
        before = [param.detach().clone() for param in model.parameters()]
        for micro in range(micro_batches):
            loss = half_loss(model, number, 60.0)
            fused.backward(loss / micro_batches, last=micro == micro_batches - 1)
        optimizer.step()
        losses.append(loss.item())
        dropped.append(fused.dropped)
        scales.append(fused.loss_scale.value)
        if fused.dropped:
            assert all(map(torch.equal, before, model.parameters()))
        else:
            scheduler.step()
            assert fused.grad_norm < 1e4
    assert dropped[0] and not all(dropped) and scales[0] == 2.0**23
    taken = dropped.count(False)
    assert scheduler.last_epoch == taken and all(state["step"] == taken for state in optimizer.state.values())
    assert any(after > before for before, after in itertools.pairwise(scales))
    assert losses[-1] < 0.95 * losses[0]


def test_g8_scaled_steps_equal_steps_on_exact_gradients() -> None:
    """Where nothing underflows, a scale of a power of two changes no bit of a float32 model's step."""
    ends = []
    for scale in (None, LossScale(initial=2.0**10)):
        model = Model()
        optimizer = lt.AdamW(model.parameters(), lr=1e-2)
        fused = lt.FusedBackward(optimizer, model, "global", 0.2, loss_scale=scale)
        norms = []
        for number in range(8):
            fused.backward(loss_of(model, number))
            optimizer.step()
            norms.append(fused.grad_norm)
        ends.append((torch.cat([p.detach().flatten() for p in model.parameters()]), norms))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-6, atol=1e-7)
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)


def test_g8_small_gradients_reach_float16_through_the_scale() -> None:
    """A loss of 1e-7 underflows in float16 gradients; scaled by 2^16 it trains as the same loss unscaled does."""
    moved = {}
    for scale in (None, LossScale()):
        model = half_model()
        before = torch.cat([param.detach().flatten().float() for param in model.parameters()])
        optimizer = lt.AdamW(model.named_parameters(), lr=1e-3, eps=1e-12, weight_decay=0.0)
        fused = lt.FusedBackward(optimizer, model, "none", loss_scale=scale)
        fused.backward(half_loss(model, 0, 1e-7))
        optimizer.step()
        after = torch.cat([param.detach().flatten().float() for param in model.parameters()])
        moved[scale is None] = (after != before).float().mean().item()
    assert moved[True] < 0.3 < 0.7 < moved[False]


def test_g8_the_scale_is_saved_restored_and_has_an_end() -> None:
    model = half_model()
    optimizer = lt.Lomo(model.named_parameters(), lr=1e-3)
    fused = lt.FusedBackward(optimizer, model, loss_scale=LossScale(initial=4.0, grow_every=5))
    for number in range(7):
        fused.backward(half_loss(model, number))
        optimizer.step()
    assert fused.state_dict() == {"scale": 8.0, "clean_steps": 2}
    fused.remove()
    other = lt.FusedBackward(optimizer, model, loss_scale=LossScale())
    other.load_state_dict(fused.state_dict())
    assert other.state_dict() == {"scale": 8.0, "clean_steps": 2}
    with pytest.raises(StateMismatchError, match="loss scale"):
        other.load_state_dict({"scale": -1.0, "clean_steps": 0})
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(BackwardError, match=r"a loss scale needs fused\.backward"):
        half_loss(model, 0).backward()
    for expected in (4.0, 2.0, 1.0):
        other.backward(half_loss(model, 0, 1e30))
        optimizer.step()
        assert other.dropped and other.loss_scale.value == expected
    with pytest.raises(NonFiniteError, match="loss scale of 1"):
        other.backward(half_loss(model, 0, 1e30))
    assert all(map(torch.equal, before, model.parameters()))
    other.remove()
    plain = lt.FusedBackward(optimizer, model)
    assert plain.state_dict() == {}
    with pytest.raises(StateMismatchError, match="LossScale"):
        plain.load_state_dict({"scale": 8.0, "clean_steps": 2})
    with pytest.raises(InvalidArgumentError, match="between 1 and"):
        LossScale(initial=0.5)
    with pytest.raises(InvalidArgumentError, match="grow_every"):
        LossScale(grow_every=0)

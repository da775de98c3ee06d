"""Factored training: what the weight gets is what the rule would have given it, from a gradient M times smaller."""

import copy

import pytest
import torch
from reference.velora import adamw_on_whole_gradients, unit_of_each_feature, weight_gradient
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import leantune as lt
from leantune.activations.velora import projection
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError

STEPS, EPS = 5, 1e-3


def factored(layer: nn.Module, groups: int = 8) -> tuple[nn.Sequential, lt.apply_velora]:
    model = nn.Sequential(layer)
    return model, lt.apply_velora(model, ["0"], num_groups=groups, factored=True)


def batch(number: int, dtype: torch.dtype, features: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(9, features, generator=generator) + 0.5
    return x.to(dtype), (0.01 * torch.randn(9, 24, generator=generator)).to(dtype)


def train(model: nn.Module, optimizer, steps: range, dtype: torch.dtype, features: int = 48) -> list[Tensor]:
    """The gradients the proxy got."""
    seen = []
    for number in steps:
        x, grad = batch(number, dtype, features)
        optimizer.zero_grad()
        model(x).backward(grad)
        seen.append(model[0].velora_weight.grad.clone())
        optimizer.step()
        assert not model[0].velora_weight.any()
    return seen


def whole_gradients(handle, features: int = 48) -> list[Tensor]:
    site = handle.sites[0]
    pairs = [batch(number, torch.float64, features) for number in range(STEPS)]
    return [weight_gradient(x, grad, site.v, site.product.cut.size) for x, grad in pairs]


@pytest.mark.parametrize("features", [48, 50])
@pytest.mark.parametrize("transposed", [False, True])
def test_a8_adam_on_the_small_gradient_is_adam_on_the_whole_one(monkeypatch, features: int, transposed: bool) -> None:
    monkeypatch.setattr(projection, "_OUTER_ELEMENTS", 300)
    torch.manual_seed(0)
    model, handle = factored((Conv1D(24, features) if transposed else nn.Linear(features, 24)).double())
    start = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=EPS)
    handle.attach(optimizer)
    seen = train(model, optimizer, range(STEPS), torch.float64, features)
    grads = whole_gradients(handle, features)
    for small, whole in zip(seen, grads, strict=True):
        assert float(small.norm()) == pytest.approx(float(whole.norm()), rel=1e-12)  # so clipping is the same
    assert seen[0].numel() == 24 * handle.sites[0].product.cut.groups
    unit = unit_of_each_feature(handle.sites[0].v, handle.sites[0].product.cut.size, features)
    expected = adamw_on_whole_gradients(
        start.t() if transposed else start, grads, EPS * unit.abs(), 1e-2, 0.1, (0.9, 0.999)
    )
    found = model[0].weight.t() if transposed else model[0].weight
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-12)
    assert (found - (start.t() if transposed else start)).abs().max() > 1e-2


def test_linear_rules_move_the_weight_by_its_whole_gradient() -> None:
    torch.manual_seed(0)
    model, handle = factored(nn.Linear(50, 24).double())
    start = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    handle.attach(optimizer)
    train(model, optimizer, range(STEPS), torch.float64, 50)
    velocity, expected = torch.zeros_like(start), start
    for grad in whole_gradients(handle, 50):
        velocity = 0.9 * velocity + grad
        expected = expected - 0.5 * velocity
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=0, atol=1e-12)
    lomo, other = factored(nn.Linear(48, 24))
    start = lomo[0].weight.detach().clone()
    optimizer = lt.Lomo(lomo.parameters(), lr=0.5, weight_decay=0.1)
    other.attach(optimizer)
    train(lomo, optimizer, range(1), torch.float32)
    grad = whole_gradients(other)[0]
    torch.testing.assert_close(lomo[0].weight.detach(), (start * 0.95 - 0.5 * grad).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", ["none", "global", "per_tensor"])
def test_fused_backward_with_ternary_states_is_the_plain_loop(clip: str) -> None:
    models, weights = [], []
    for fuses in (False, True):
        torch.manual_seed(0)
        model, handle = factored(nn.Linear(512, 24, bias=False).to(torch.bfloat16), groups=16)
        optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-2)
        handle.attach(optimizer)
        fused = lt.FusedBackward(optimizer, model, clip, None if clip == "none" else 1e-3) if fuses else None
        for number in range(STEPS):
            x, _ = batch(number, torch.bfloat16, 512)
            loss = model(x).float().square().mean()
            if fused is not None:
                fused.backward(loss)
            else:
                loss.backward()
                bound = 1e-3
                if clip == "global":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
                elif clip == "per_tensor":
                    for param in model.parameters():
                        if param.grad is not None:
                            torch.nn.utils.clip_grad_norm_([param], bound)
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
        weights.append(model[0].weight.detach().clone())
        kept = {row.name: row.state_bytes for row in optimizer.report().rows}
        assert kept["0.velora_weight"] < 24 * 512 * 0.1
    assert models[0][0].weight.dtype == torch.bfloat16
    if clip == "none":
        assert torch.equal(*weights)
    else:  # the clip factor of the plain loop is rounded in the gradient
        assert (weights[0] != weights[1]).float().mean() < 0.02


def test_o21_a_bf16_weight_gets_steps_below_its_last_place_on_average() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 24, bias=False).to(torch.bfloat16)
    nn.init.constant_(layer.weight, 1.0)
    model, handle = factored(layer, groups=16)
    optimizer = lt.Lomo(model.parameters(), lr=1e-4)
    handle.attach(optimizer)
    x = torch.rand(9, 512).to(torch.bfloat16)
    seen = []
    for _ in range(40):
        before = layer.weight.detach().clone()
        model(x).backward(torch.ones(9, 24, dtype=torch.bfloat16))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(layer.weight.detach() != before)
    # Each step draws anew: no element moves, or stays, at all of them.
    assert 0 < seen[0].float().mean() < 1 and not torch.equal(seen[0], seen[1])
    gradient = weight_gradient(x, torch.ones(9, 24), handle.sites[0].v, 32)
    moved = 1.0 - float(layer.weight.detach().double().mean())
    assert moved == pytest.approx(40 * 1e-4 * float(gradient.mean()), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a9_saved_killed_and_resumed_is_identical(tmp_path, dtype: torch.dtype) -> None:
    def begin():
        torch.manual_seed(0)
        model, handle = factored(nn.Linear(48, 24).to(dtype))
        optimizer = lt.AdamW(model.parameters(), lr=1e-2)
        handle.attach(optimizer)
        return model, handle, optimizer

    straight, _, optimizer = begin()
    train(straight, optimizer, range(6), dtype)
    killed, handle, optimizer = begin()
    train(killed, optimizer, range(3), dtype)
    assert set(killed.state_dict()) == {"0.weight", "0.bias"}
    torch.save((killed.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    handle.save(tmp_path / "velora.safetensors")
    resumed, handle, optimizer = begin()
    weights, states = torch.load(tmp_path / "state.pt", weights_only=True)
    assert not resumed.load_state_dict(weights).missing_keys
    optimizer.load_state_dict(states)
    handle.load(tmp_path / "velora.safetensors")
    train(resumed, optimizer, range(3, 6), dtype)
    assert torch.equal(straight[0].weight, resumed[0].weight)


def test_a_batch_without_the_layer_does_not_decay_its_weight() -> None:
    model = nn.ModuleDict({"a": nn.Linear(48, 24), "b": nn.Linear(48, 24)})
    handle = lt.apply_velora(model, ["a", "b"], num_groups=8, factored=True)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    handle.attach(optimizer)
    before = model["b"].weight.detach().clone()
    model["a"](torch.rand(3, 48)).sum().backward()
    optimizer.step()
    assert torch.equal(model["b"].weight, before)


def test_what_cannot_reach_the_weight_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="refresh_every"):
        lt.apply_velora(nn.Sequential(nn.Linear(48, 24)), ["0"], factored=True, refresh_every=2)
    layer = nn.Linear(48, 24)
    layer.weight.data = torch.zeros(48, 24).t()
    with pytest.raises(InvalidTypeError, match="not contiguous"):
        lt.apply_velora(nn.Sequential(layer), ["0"], factored=True)
    assert layer.weight.requires_grad and "forward" not in layer.__dict__
    model, handle = factored(nn.Linear(48, 24))
    with pytest.raises(BackwardError, match="attach"):
        model(torch.rand(2, 48))
    for build, error, words in (
        (lambda p: lt.AdaLomo(p), InvalidTypeError, "AdaLomo"),
        (lambda p: lt.TacoOneSparse(p, lr=1e-3), InvalidTypeError, "TacoOneSparse"),
        (lambda p: torch.optim.RMSprop(p), InvalidTypeError, "RMSprop"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), InvalidArgumentError, "decoupled"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), InvalidArgumentError, "decoupled"),
        (lambda p: lt.AdamW([model[0].bias]), InvalidArgumentError, "none of the parameters"),
    ):
        with pytest.raises(error, match=words):
            handle.attach(build(model.parameters()))
    with pytest.raises(InvalidArgumentError, match="factored"):
        lt.apply_velora(nn.Sequential(nn.Linear(48, 24)), ["0"]).attach(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(InvalidTypeError, match="deep-copied"):
        copy.deepcopy(model)
    optimizer = lt.AdamW(model.parameters())
    handle.attach(optimizer)
    model(torch.rand(2, 48)).sum().backward()
    optimizer.update(model[0].velora_weight, model[0].velora_weight.grad, optimizer.param_groups[0], {})
    with pytest.raises(BackwardError, match="step"):
        model(torch.rand(2, 48))
    optimizer.step()
    handle.remove()
    assert set(dict(model.named_parameters())) == {"0.weight", "0.bias"} and model[0].weight.requires_grad
    model(torch.rand(2, 48)).sum().backward()
    copy.deepcopy(model)


def test_g8_a_dropped_step_leaves_the_weight_alone() -> None:
    torch.manual_seed(0)
    model, handle = factored(nn.Linear(48, 24).to(torch.float16))
    optimizer = lt.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.5)
    handle.attach(optimizer)
    fused = lt.FusedBackward(optimizer, model, loss_scale=lt.LossScale())
    before = model[0].weight.detach().clone()
    fused.backward(model(torch.rand(2, 48).half()).float().sum() * 1e4)
    optimizer.step()
    assert fused.dropped and torch.equal(model[0].weight, before)
    while fused.dropped:
        fused.backward(model(torch.rand(2, 48).half()).float().mean())
        optimizer.step()
    assert not torch.equal(model[0].weight, before)

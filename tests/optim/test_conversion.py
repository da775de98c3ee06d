"""States in another format: to and from torch's AdamW, and other settings of TernaryAdamW."""

import copy

import pytest
import torch
from torch import nn

import leantune as lt
from leantune.errors import StateMismatchError


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 96), nn.Tanh(), nn.Linear(96, 64)).to(dtype)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Losses of regression on a fixed random target map; the gradients of neighbouring steps agree."""
    target = torch.randn(200, 64, generator=torch.Generator().manual_seed(9)) / 14
    losses = []
    for number in range(first, last):
        x = torch.randn(64, 200, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = (model(x.to(next(model.parameters()).dtype)).float() - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def moved(model: nn.Module, start: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(value - start[name]).flatten() for name, value in model.state_dict().items()])


@pytest.mark.parametrize("settings", [{}, {"carry_rank": 0}, {"momentum_planes": 2}, {"states": "exact"}])
def test_a_run_switches_from_torch_adamw_and_back_without_a_jump(settings: dict) -> None:
    model = network()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    before = run(model, adamw, 0, 60)
    other = copy.deepcopy(model)
    stayed = run(other, copy_of(adamw, other), 60, 90)
    ternary = lt.TernaryAdamW(model.named_parameters(), lr=0.5, **settings)
    ternary.load_state_dict(adamw.state_dict())
    assert ternary.param_groups[0]["lr"] == 1e-3 and int(ternary.state[model[0].weight]["step"]) == 60
    switched = run(model, ternary, 60, 90)
    assert sum(stayed) < 0.9 * sum(before[-30:])  # it was still learning
    assert sum(switched) == pytest.approx(sum(stayed), rel=0.03)
    back = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    back.load_state_dict(ternary.exact_state_dict())
    assert back.param_groups[0]["lr"] == 1e-3
    assert sum(run(model, back, 90, 110)) < sum(switched[-20:])


def copy_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made


def test_exact_states_go_to_adamw_and_back_unchanged() -> None:
    model = network()
    first = lt.TernaryAdamW(model.named_parameters(), states="exact")
    run(model, first, 0, 5)
    second = lt.TernaryAdamW(model.named_parameters(), states="exact")
    second.load_state_dict(first.exact_state_dict())
    for param in model.parameters():
        torch.testing.assert_close(second.state[param]["momentum"], first.state[param]["momentum"])
        assert torch.equal(second.state[param]["variance"], first.state[param]["variance"])


def test_where_no_gradient_was_seen_adamw_s_moments_are_zero() -> None:
    param = nn.Parameter(torch.zeros(64, 256))
    optimizer = lt.TernaryAdamW([param], carry_rank=0)
    param.grad = torch.randn(64, 256)
    param.grad[:, 128:] = 0
    param.grad[:8] = 0
    optimizer.step()
    saved = optimizer.exact_state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert (saved[name][:, 128:] == 0).all() and (saved[name][:8] == 0).all() and (saved[name][8:, :128] != 0).any()


@pytest.mark.parametrize("to", [{"block_size": 64}, {"momentum_planes": 2}, {"carry_rank": 0}, {"states": "exact"}, {}])
def test_o7_a_state_of_other_settings_is_converted_when_asked(to: dict) -> None:
    model = network(torch.bfloat16)
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-3, block_size=128)
    run(model, optimizer, 0, 40)
    saved, start = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    other = copy.deepcopy(model)
    made = lt.TernaryAdamW(other.named_parameters(), **to)
    if to:
        with pytest.raises(StateMismatchError, match="convert=True"):
            made.load_state_dict(saved)
        assert not made.state
    made.load_state_dict(saved, convert=True)
    assert made.param_groups[0]["lr"] == 1e-3
    assert all(made.param_groups[0][key] == value for key, value in to.items())
    run(model, optimizer, 40, 60)
    run(other, made, 40, 60)
    one, two = moved(model, start).float(), moved(other, start).float()
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.85
    assert 0.8 < two.norm() / one.norm() < 1.25


def test_states_that_are_not_adamw_s_are_refused() -> None:
    model = network()
    ternary = lt.TernaryAdamW(model.named_parameters())
    for other, words in (
        (torch.optim.AdamW(model.parameters(), amsgrad=True), "amsgrad"),
        (torch.optim.Adam(model.parameters(), weight_decay=0.1), "not AdamW"),
        (torch.optim.AdamW(model.parameters(), maximize=True), "maximize"),
        (torch.optim.SGD(model.parameters(), lr=0.1), "format version"),
    ):
        with pytest.raises(StateMismatchError, match=words):
            ternary.load_state_dict(other.state_dict())
    assert not ternary.state

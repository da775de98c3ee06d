"""The tracker's budget, its modules, and sums of gradients that the engine makes in place."""

import pytest
import torch
from tiny_llama import tiny_llama, tokens
from torch import nn

from leantune.errors import MemoryBudgetError
from leantune.memory import MemoryTracker
from leantune.memory.measured.process import is_out_of_memory
from leantune.memory.reports.shortage import shortage_of
from leantune.memory.traced.trace import exact_loss


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


WEIGHTS, ROWS = 3 * 64 * 64 * 4, 32
ACTIVATION = ROWS * 64 * 4


def test_p10_what_goes_over_the_budget_is_named():
    model = Stack()
    # The input, the first relu's result and the second product are in use; the second relu's result goes over.
    budget = WEIGHTS + 3 * ACTIVATION + ACTIVATION // 2
    tracker = MemoryTracker(model, budget=budget)
    with pytest.raises(MemoryBudgetError) as caught, tracker:
        model(torch.ones(ROWS, 64))
    error = caught.value
    assert (error.module, error.phase, error.size) == ("layers.1.1", "forward", ACTIVATION)
    assert "relu" in error.operator and error.live == WEIGHTS + 4 * ACTIVATION > error.budget == budget
    shortage = shortage_of(error, "step", tracker, "cpu")
    assert shortage.simulated and shortage.module == "layers.1.1"
    # What was in use then, though it has been freed since.
    assert sum(shortage.live.values()) == error.live
    assert shortage.live["activations"] == 4 * ACTIVATION
    assert all(use.bytes > 0 for use in shortage.others)


def test_p10_backward_goes_over_in_the_module_whose_gradient_it_is():
    model = Stack()
    with MemoryTracker(model) as free:
        model(torch.ones(ROWS, 64)).backward()
    model.zero_grad()
    with pytest.raises(MemoryBudgetError) as caught, MemoryTracker(model, budget=free.timeline().peak_bytes - 1):
        model(torch.ones(ROWS, 64)).backward()
    assert caught.value.phase == "backward"
    assert caught.value.module.startswith("layers.")


def test_a_budget_that_suffices_changes_nothing():
    model = Stack()
    with MemoryTracker(model) as free:
        model(torch.ones(ROWS, 64)).backward()
    model.zero_grad()
    with MemoryTracker(model, budget=free.timeline().peak_bytes) as tracker:
        model(torch.ones(ROWS, 64)).backward()
    assert tracker.failure is None


def test_a_device_that_is_full_is_told_from_other_errors():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    tracker = MemoryTracker(Stack())
    with pytest.raises(RuntimeError) as caught, tracker:
        torch.empty(1 << 48, dtype=torch.uint8).add_(1)
    assert is_out_of_memory(caught.value)
    assert tracker.failure is not None and "empty" in tracker.failure.operator


def test_modules_hold_what_they_made():
    model = tiny_llama(tied=True)
    with MemoryTracker(model) as tracker:
        exact_loss(model, tokens(2, 32)).backward()
    timeline = tracker.timeline()
    rows = {row.name: row for row in tracker.modules(timeline)}
    assert rows["model.layers.*.mlp.gate_proj"].count == 2
    assert rows["model.layers.*.mlp.gate_proj"].saved == 2 * 2 * 32 * 160 * 2  # two layers, bf16 (2, 32, 160)
    # With the tied head counted once, modules' weights are the model's.
    assert sum(row.weights for row in rows.values()) == timeline.at(0)["weights"]
    held = timeline.at_peak()
    assert sum(row.at_peak for row in rows.values()) == timeline.peak_bytes - held["weights"] - held["optimizer_states"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return torch.full((1000,), 2.0)


def test_two_gradients_of_one_weight_are_added_in_place():
    """As the engine does without a tracker, where nobody else holds the first."""
    weight = nn.Parameter(torch.ones(1000))
    with MemoryTracker(nn.ParameterList([weight])) as tracker:
        (Doubled.apply(weight) + Doubled.apply(weight)).backward()
    assert torch.equal(weight.grad, torch.full((1000,), 4.0))
    timeline = tracker.timeline()
    passing = timeline.total - timeline.bytes_by_part["weights"]
    assert int(passing.max()) < 2 * 4000 + 100  # two gradients, and no third for their sum


def test_a_view_of_a_gradient_is_added_to_out_of_place():
    """The engine does not write into a view: a head's gradient that comes transposed gets a sum of its own."""
    weight = nn.Parameter(torch.ones(50, 20))
    with MemoryTracker(nn.ParameterList([weight])) as tracker:
        (weight.sigmoid().sum() + (torch.ones(4, 20) @ weight.t()).sum()).backward()
    timeline = tracker.timeline()
    passing = timeline.total - timeline.bytes_by_part["weights"]
    assert int(passing.max()) >= 3 * 4000


def test_hooks_on_modules_are_gone_after_an_error():
    from torch.nn.modules import module

    before = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), MemoryTracker(Stack()):
        raise ZeroDivisionError
    assert (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)) == before

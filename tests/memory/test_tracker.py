"""The tracker against allocations that can be counted by hand."""

import gc

import pytest
import torch
from memory.tiny_llama import tiny_llama, tokens
from torch import nn

from leantune.errors import BackwardError
from leantune.memory.measured.tracker import MemoryTracker, track
from leantune.memory.parts import PARTS
from leantune.memory.traced.trace import exact_loss

TOKENS, WIDTH, HIDDEN = 32, 64, 128
F32 = 4
WEIGHTS = 2 * WIDTH * HIDDEN * F32
ONE_WEIGHT = WIDTH * HIDDEN * F32
SCALARS = 2 * F32  # the loss, and the 1 that backward starts from


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()


def test_ordinary_step_part_by_part():
    model = TwoLayers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(TOKENS, WIDTH)
    with MemoryTracker(model, optimizer) as tracker:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    timeline = tracker.timeline()
    peaks = timeline.part_peaks()
    assert peaks["weights"] == WEIGHTS
    assert peaks["gradients"] == WEIGHTS
    assert peaks["optimizer_states"] == 2 * WEIGHTS + 2 * F32  # two moments, and a step count for each of two weights
    assert peaks["inputs"] == x.numel() * F32
    assert timeline.saved_at_forward_end()["activations"] == TOKENS * HIDDEN * F32 + SCALARS
    assert peaks["loss"] == peaks["recompute"] == 0
    assert peaks["update"] >= ONE_WEIGHT  # the denominator of the largest weight
    # Nothing but weights, states and the batch is left.
    assert timeline.at(len(timeline.times) - 1)["gradients"] == 0
    assert [phase for phase, _, _ in timeline.phase_spans()][1:4] == ["forward", "backward", "update"]


def test_composition_at_the_peak_adds_up():
    model = TwoLayers()
    with MemoryTracker(model) as tracker:
        model(torch.ones(TOKENS, WIDTH)).backward()
    timeline = tracker.timeline()
    assert sum(timeline.at_peak().values()) == timeline.peak_bytes == timeline.total.max()
    assert set(timeline.at_peak()) == set(PARTS)


def test_gradients_freed_inside_backward_are_still_gradients():
    model = TwoLayers()

    def free(parameter):
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free)
    with MemoryTracker(model) as tracker:
        model(torch.ones(TOKENS, WIDTH)).backward()
    peaks = tracker.timeline().part_peaks()
    assert peaks["gradients"] == ONE_WEIGHT  # never two at once
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_and_states_from_before_are_known():
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model(torch.ones(TOKENS, WIDTH)).backward()
    optimizer.step()
    with MemoryTracker(model, optimizer) as tracker:
        model(torch.ones(TOKENS, WIDTH)).backward()  # accumulates in place
        optimizer.step()
    timeline = tracker.timeline()
    assert timeline.at(0)["gradients"] == timeline.at(0)["optimizer_states"] == WEIGHTS
    assert timeline.part_peaks()["optimizer_states"] == WEIGHTS
    # Accumulating holds the old gradients and one incoming one.
    assert timeline.part_peaks()["gradients"] == WEIGHTS + ONE_WEIGHT


def test_views_and_in_place_operators_count_once():
    with track() as t:
        block = torch.zeros(1000)
        views = [block.view(10, 100), block[5:], block.t(), block.add_(1).mul_(2)]
    assert t.kept_bytes == t.largest_allocation_bytes == 4000
    assert t.peak_temporary_bytes == 0
    del views


def test_temporaries_are_what_came_and_went():
    base = torch.ones(1000)
    kept = []
    with track() as t:
        kept.append(base * 3)  # stays: not a temporary
        both = (base + 1) * (base + 2)  # two operands and a result at once
        del both
        (base.double() + 1).sum()  # 8,000 twice at once, then 8,000 and a scalar
    assert t.peak_temporary_bytes == 16_000
    assert t.largest_allocation_bytes == 8_000
    assert t.kept_bytes == 4_000


def test_a_storage_that_grows_is_counted_at_its_new_size():
    with track() as t:
        block = torch.empty(100)
        block.resize_(1000)
    assert t.kept_bytes == 4000
    del block


def test_custom_functions_are_seen_in_forward_and_backward():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.half())
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 2 * x.float()

    weight = nn.Parameter(torch.ones(1000))
    layer = nn.ParameterList([weight])
    with MemoryTracker(layer) as tracker:
        Square.apply(weight).sum().backward()
    timeline = tracker.timeline()
    assert timeline.saved_at_forward_end()["activations"] == 2000 + SCALARS
    assert timeline.part_peaks()["gradients"] == 4000


def test_recomputed_activations_have_a_part_of_their_own():
    model = TwoLayers()
    x = torch.ones(TOKENS, WIDTH, requires_grad=True)
    with MemoryTracker(model) as tracker:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).backward()
    timeline = tracker.timeline()
    assert timeline.saved_at_forward_end()["activations"] == SCALARS
    # relu's output is recomputed and saved; up's is alive with it for a moment.
    assert timeline.part_peaks()["recompute"] == 2 * TOKENS * HIDDEN * F32


def test_logits_are_told_by_the_width_of_the_vocabulary():
    vocabulary = 300
    head = nn.Linear(WIDTH, vocabulary, bias=False)
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    with MemoryTracker(head, vocabulary=vocabulary) as tracker:
        nn.functional.cross_entropy(head(torch.ones(TOKENS, WIDTH)), labels).backward()
    # Log-probabilities are saved; beside them backward holds the gradient of the loss by them, and then by the logits.
    assert tracker.timeline().part_peaks()["loss"] == 3 * TOKENS * vocabulary * F32


def test_a_frozen_head_has_no_gradient_what_its_loss_makes_is_the_losss():
    model = tiny_llama()
    model.requires_grad_(False)
    trained = model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    with MemoryTracker(model) as tracker:
        exact_loss(model, tokens(2, 40)).backward()
    peaks = tracker.timeline().part_peaks()
    assert peaks["gradients"] == trained.numel() * trained.itemsize
    assert peaks["loss"] >= model.lm_head.weight.numel() * F32  # its rows, widened for a tile of the whole vocabulary


def test_two_micro_batches_have_two_forward_ends():
    model = TwoLayers()
    with MemoryTracker(model) as tracker:
        for _ in range(2):
            model(torch.ones(TOKENS, WIDTH)).backward()
    timeline = tracker.timeline()
    assert len(timeline.forward_ends) == 2
    assert timeline.at(timeline.forward_ends[0])["gradients"] == 0
    assert timeline.at(timeline.forward_ends[1])["gradients"] == WEIGHTS
    assert timeline.at(timeline.forward_ends[1])["activations"] == timeline.at(timeline.forward_ends[0])["activations"]


def test_nothing_is_left_behind_even_after_an_error():
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), MemoryTracker(model, optimizer):
        raise ZeroDivisionError
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_tracker_measures_once():
    tracker = MemoryTracker()
    tracker.start()
    tracker.stop()
    with pytest.raises(BackwardError, match="make a new one"):
        tracker.start()


def test_tracking_changes_no_number():
    def train(tracked):
        torch.manual_seed(0)
        model = TwoLayers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            tracker = MemoryTracker(model, optimizer)
            if tracked:
                tracker.start()
            model(torch.randn(TOKENS, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if tracked:
                tracker.stop()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(True), train(False))


def test_objects_freed_after_the_end_do_not_matter():
    with track() as t:
        block = torch.ones(1000)
    del block
    gc.collect()
    assert t.kept_bytes == 4000


def test_reduced_curves_keep_the_peak():
    with track() as t:
        for size in range(1, 400):
            torch.ones(size if size != 123 else 100_000).sum()
    timeline = t.timeline()
    curve = timeline.reduced(50)
    assert len(curve.times) == 50
    assert curve.peak_bytes == timeline.peak_bytes == 400_000 + 4
    summary = timeline.to_json(points=20)
    assert len(summary["seconds"]) == len(summary["bytes_by_part"]["temporaries"]) == 20
    assert summary["peak_bytes"] == timeline.peak_bytes

"""Dropout from the generator's state: torch's own numbers to the bit, and no mask."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from leantune.activations.random_state import state_bytes
from leantune.activations.replayed_dropout import replayed_dropout
from leantune.activations.saved_bytes import SavedBytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_forward_gradient_and_generator_are_those_of_torchs_dropout(dtype: torch.dtype, turned: bool) -> None:
    x, grad = torch.randn(6, 5, 130).to(dtype), torch.randn(5, 6, 130).to(dtype)
    x = x.transpose(0, 1) if turned else x.view(5, 6, 130)
    results = []
    for dropout in (lambda a: functional.dropout(a, 0.3, training=True), lambda a: replayed_dropout(a, 0.3)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = dropout(leaf)
        after = torch.get_rng_state()
        y.backward(grad, retain_graph=True)
        first, leaf.grad = leaf.grad, None
        y.backward(grad)
        assert torch.equal(first, leaf.grad) and torch.equal(after, torch.get_rng_state())
        results.append((y.detach(), first, after))
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*results, strict=True))
    assert 0.2 < (results[1][0] == 0).float().mean() < 0.4


def test_only_the_generators_state_is_kept() -> None:
    with SavedBytes() as saved:
        replayed_dropout(torch.randn(100, 1000, requires_grad=True), 0.5)
    assert saved.bytes == state_bytes(torch.device("cpu")) < 6000


def test_checkpointing_recomputes_the_same_mask() -> None:
    x = torch.randn(8, 32, requires_grad=True)
    y = checkpoint(lambda a: replayed_dropout(a * 2, 0.5), x, use_reentrant=False)
    torch.rand(3)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_a_trace_on_fake_tensors_draws_nothing() -> None:
    before = torch.get_rng_state()
    with FakeTensorMode() as mode, SavedBytes() as saved:
        x = mode.from_tensor(torch.empty(4, 5)).requires_grad_()
        replayed_dropout(x, 0.5).sum().backward()
    assert saved.bytes == before.numel() and torch.equal(before, torch.get_rng_state())
    x = torch.ones(3)
    assert replayed_dropout(x, 0.0) is x

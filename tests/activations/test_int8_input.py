"""A frozen 8-bit layer holds no input between forward and backward once its node has let go of it."""

import weakref

import pytest
import torch
from torch import Tensor

from leantune.activations.int8_input import is_int8_linear, release_input

bnb = pytest.importorskip("bitsandbytes")


def run(layer: torch.nn.Module, dtype: torch.dtype) -> tuple[bool, Tensor]:
    """(whether the input lives after forward, its gradient)."""
    torch.manual_seed(0)
    leaf = torch.randn(2, 6, 64, requires_grad=True)
    x = (leaf * 2).to(dtype)
    held = weakref.ref(x.untyped_storage())
    y = layer(x)
    del x
    alive = held() is not None
    y.float().square().sum().backward()
    return alive, leaf.grad


@pytest.mark.parametrize("training", [True, False])  # on a CPU two different functions of bitsandbytes
@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_freed_and_the_gradient_is_the_same(training: bool, threshold: float, dtype: torch.dtype) -> None:
    layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, threshold=threshold).to("cpu").requires_grad_(False)
    layer.train(training)
    assert is_int8_linear(layer) and not is_int8_linear(torch.nn.Linear(2, 2))
    alive, expected = run(layer, dtype)
    assert alive  # what this module is for; where bitsandbytes lets go itself, it can go
    layer.register_forward_hook(release_input)
    alive, found = run(layer, dtype)
    assert not alive and torch.equal(expected, found)


def test_a_trained_weight_and_a_forward_without_backward_are_left_alone() -> None:
    layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=True)
    layer.register_forward_hook(release_input)
    layer(torch.ones(3, 64)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert layer(torch.ones(1, 64)).shape == (1, 32)

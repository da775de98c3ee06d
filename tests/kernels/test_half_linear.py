"""Linear layers with fp32 products against float64, and the way back."""

import pytest
import torch
from torch import nn

from leantune.kernels import half_linear as half


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_values_and_gradients_are_exact_to_one_rounding(monkeypatch, dtype, rounding, bias):
    monkeypatch.setattr(half, "TILE_BYTES", 7 * 64 * 4)  # 40 rows in six tiles, the last one short
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    inputs = [leaf(3, 5, 64), leaf(40, 64), *([leaf(40)] if bias else [])]
    out = half.half_linear(*inputs)
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = nn.functional.linear(*exact)
    expected.backward(grad.double())
    for found, wanted in [(out, expected), *((a.grad, b.grad) for a, b in zip(inputs, exact))]:
        assert found.dtype == dtype
        scale = wanted.abs().max()
        assert ((found.double() - wanted).abs() <= rounding * wanted.abs() + 1e-6 * scale).all()


def test_layers_change_only_where_needed_and_change_back(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
    monkeypatch.setattr(half, "needs_fp32_products", lambda dtype: dtype == torch.bfloat16)
    handle = half.use_fp32_products(model)
    assert handle.layers == [model[1]]
    x = torch.ones(2, 8)
    assert model[1](x.bfloat16()).grad_fn.name() != "AddmmBackward0"
    assert not half.use_fp32_products(model).layers
    handle.remove()
    assert all("forward" not in layer.__dict__ for layer in model)
    assert model[1](x.bfloat16()).grad_fn.name() == "AddmmBackward0"


def test_it_saves_what_linear_saves():
    saved = []
    weight = torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda _: None):
        half.half_linear(x, weight)
    assert sorted(saved) == sorted([x.data_ptr(), weight.data_ptr()])

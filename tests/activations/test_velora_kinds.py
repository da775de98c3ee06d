"""VeLoRA in every kind of layer: exact where it says exact, equal to its oracle where it approximates, as small as
predicted, and refused where it cannot work."""

import copy
from collections.abc import Callable

import pytest
import torch
from reference.velora import approximate, cell, rebuilt, rebuilt_channels
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import leantune as lt
from leantune.activations.saved_bytes import SavedBytes
from leantune.activations.velora import projection
from leantune.activations.velora.projection import SubTokens, outer_product, outer_strips
from leantune.errors import InvalidArgumentError, InvalidTypeError

CONVOLUTIONS = {
    "same": (lambda: nn.Conv2d(12, 10, 3, padding="same"), (3, 12, 9, 8)),
    "strided": (lambda: nn.Conv2d(12, 10, 3, stride=2, padding=1, dilation=2), (3, 12, 11, 12)),
    "padded tail": (lambda: nn.Conv2d(14, 10, (3, 1), padding=(1, 0)), (3, 14, 9, 8)),
    "groups": (lambda: nn.Conv2d(12, 10, 3, groups=2, bias=False), (3, 12, 9, 8)),
    "one dimension": (lambda: nn.Conv1d(12, 10, 5, stride=3), (3, 12, 29)),
    "no batch": (lambda: nn.Conv1d(12, 10, 5, padding="valid"), (12, 29)),
}


def pair(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, groups: int = 4, **more):
    torch.manual_seed(0)
    plain = make().to(dtype)
    changed = nn.Sequential(copy.deepcopy(plain))
    return plain, changed[0], lt.apply_velora(changed, ["0"], num_groups=groups, **more)


def run(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_(True)
    y = layer(x)
    (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)).sum().backward()
    return y.detach(), x.grad


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # v itself is fp32
    assert found.dtype == dtype and found.shape == expected.shape and found.is_contiguous()
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("features", [48, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a8_gpt2s_transposed_layer(features: int, dtype: torch.dtype) -> None:
    plain, changed, handle = pair(lambda: Conv1D(24, features), dtype, groups=8)
    x = torch.randn(3, 5, features).to(dtype) + 0.5
    (y, dx), (y2, dx2) = run(plain, x), run(changed, x)
    assert torch.equal(y, y2) and torch.equal(dx, dx2) and torch.equal(plain.bias.grad, changed.bias.grad)
    oracle = copy.deepcopy(plain).double()
    oracle.zero_grad()
    site = handle.sites[0]
    x_rebuilt = rebuilt(x, site.v, site.product.cut.size)
    run(
        lambda x: approximate(lambda x, w, b: x @ w + (0 if b is None else b), x, x_rebuilt, *oracle.parameters()),
        x.double(),
    )
    close(changed.weight.grad, oracle.weight.grad, dtype)


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a8_convolutions(case: str, channels_last: bool, dtype: torch.dtype) -> None:
    make, shape = CONVOLUTIONS[case]
    plain, changed, handle = pair(make, dtype)
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=dtype) + 0.5
    if channels_last:
        if x.dim() != 4:
            pytest.skip("a layout of images")
        x = x.contiguous(memory_format=torch.channels_last)
    (y, dx), (y2, dx2) = run(plain, x), run(changed, x)
    assert torch.equal(y, y2) and torch.equal(dx, dx2)
    if plain.bias is not None:
        assert torch.allclose(plain.bias.grad, changed.bias.grad, rtol=1e-5)
    oracle = copy.deepcopy(plain).double()
    oracle.zero_grad()
    site = handle.sites[0]
    images = x if x.dim() == oracle.weight.dim() else x[None]
    x_rebuilt = rebuilt_channels(images, site.v, site.product.cut.size, plain.groups)
    x_rebuilt = x_rebuilt if images is x else x_rebuilt[0]
    run(lambda x: approximate(oracle._conv_forward, x, x_rebuilt, oracle.weight, oracle.bias), x.double())
    close(changed.weight.grad, oracle.weight.grad, dtype)


def through_time(step: Callable, x: Tensor, state) -> tuple[Tensor, Tensor]:
    x, outputs = x.clone().requires_grad_(True), []
    for token in x:
        state = step(token, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    torch.stack(outputs).square().sum().backward()
    return torch.stack(outputs).detach(), x.grad


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_cells_through_time(kind: type, dtype: torch.dtype) -> None:
    plain, changed, handle = pair(lambda: kind(10, 12), dtype)
    x = torch.randn(5, 6, 10).to(dtype) + 0.3
    (y, dx), (y2, dx2) = through_time(plain, x, None), through_time(changed, x, None)
    assert torch.equal(y, y2)
    # The first run had no direction of h in its first step; the gradients by x of every run are exact.
    torch.testing.assert_close(dx, dx2, rtol=1e-6, atol=1e-9)
    changed.zero_grad()
    through_time(changed, x, None)
    lstm, oracle = kind is nn.LSTMCell, copy.deepcopy(plain).double()
    oracle.zero_grad()
    directions = tuple(site.v for site in handle.sites)
    zeros = torch.zeros(6, 12, dtype=torch.float64)
    state = (zeros, zeros) if lstm else (zeros,)
    through_time(lambda x, state: cell(x, state, lstm, oracle, directions), x.double(), state)
    for name, weight in changed.named_parameters():
        close(weight.grad, dict(oracle.named_parameters())[name].grad, dtype)


def test_recurrent_cells_without_a_batch_and_in_evaluation() -> None:
    for kind in (nn.LSTMCell, nn.GRUCell):
        plain, changed, handle = pair(lambda kind=kind: kind(10, 12))
        x = torch.rand(10)
        with torch.no_grad():
            torch.testing.assert_close(plain(x), changed(x))
        assert handle.state_dict() == {}
        torch.testing.assert_close(plain(x), changed(x))
        assert list(handle.state_dict()) == ["0.weight_ih"]  # h was zero
        with pytest.raises(ValueError, match="1-D or 2-D"):
            changed(torch.rand(2, 2, 10))


@pytest.mark.parametrize(
    ("make", "shape", "exact", "kept"),
    [
        (lambda: Conv1D(24, 48), (7, 48), 7 * 48, 7 * 8),
        (lambda: nn.Conv2d(16, 10, 3), (2, 16, 9, 8), 2 * 16 * 72, 2 * 8 * 72),
        (lambda: nn.Conv1d(20, 10, 3, stride=2, groups=2), (2, 20, 9), 2 * 20 * 9, 2 * 8 * 9 + 2 * 2 * 9 * 0),
    ],
)
def test_saved_bytes_are_the_predicted_ones(make, shape: tuple[int, ...], exact: int, kept: int) -> None:
    plain, changed, handle = pair(make, groups=8)
    with SavedBytes(plain) as before:
        plain(torch.randn(shape))
    changed(torch.randn(shape))
    with SavedBytes(changed) as after:
        changed(torch.randn(shape))
    row = handle.report().rows[0]
    size = handle.sites[0].product.cut.size
    kept = row.tokens * handle.sites[0].product.cut.groups
    assert before.bytes == row.exact_bytes == 4 * exact
    assert after.bytes == row.kept_bytes + 4 * size == 4 * (kept + size)
    assert handle.predicted_bytes(row.tokens) == (row.exact_bytes, row.kept_bytes)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_cells_saved_bytes_are_smaller_by_the_predicted_ones(kind: type) -> None:
    plain, changed, handle = pair(lambda: kind(40, 48))
    x, h = torch.rand(9, 40), torch.rand(9, 48)
    state = (h, torch.rand(9, 48)) if kind is nn.LSTMCell else h
    changed(x, state)
    with SavedBytes(changed) as after:
        changed(x.clone(), copy.deepcopy(state))
    for site in handle.sites:
        site.exact = True
    with SavedBytes(changed) as before:
        changed(x.clone(), copy.deepcopy(state))
    with SavedBytes(plain) as torchs:
        plain(x.clone(), copy.deepcopy(state))
    rows = handle.report().rows
    vectors = 4 * sum(row.sub_token for row in rows)
    saved = sum(row.exact_bytes - row.kept_bytes for row in rows)
    assert before.bytes - after.bytes + vectors == saved == 4 * 9 * (40 + 48 - 8)
    assert after.bytes < torchs.bytes


def test_autocast_keeps_no_cast_copy_of_the_weight_for_each_time_step() -> None:
    plain, changed, _ = pair(lambda: nn.GRUCell(40, 48))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = torch.rand(2, 48)
        changed(torch.rand(2, 40), h)
        with SavedBytes(changed) as saved:
            for _ in range(3):
                h = changed(torch.rand(2, 40), h)
        x = torch.rand(2, 40)
        assert torch.equal(changed(x, h), plain(x, h)) and changed(x, h).dtype == plain(x, h).dtype
    assert saved.bytes < 2 * 3 * 48 * 48
    h.sum().backward()
    assert changed.weight_ih.grad.dtype == torch.float32


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("features", [48, 50])
def test_outer_products_in_tiles_and_strips_are_the_whole_one(monkeypatch, transposed: bool, features: int) -> None:
    cut, v = SubTokens.of(features, 8), torch.randn(SubTokens.of(features, 8).size)
    coefficients = torch.randn(8, 24) if transposed else torch.randn(24, 8)

    def whole(dtype: torch.dtype) -> Tensor:
        if transposed:
            return outer_product(coefficients[None], v, cut, dtype)[0]
        return outer_product(coefficients, v, cut, dtype)

    expected = whole(torch.float32)
    by_hand = torch.einsum("jo,s->jso" if transposed else "oj,s->ojs", coefficients, v)
    by_hand = by_hand.flatten(0, 1)[:features] if transposed else by_hand.flatten(1)[:, :features]
    assert torch.equal(expected, by_hand)
    monkeypatch.setattr(projection, "_OUTER_ELEMENTS", 200)
    assert torch.equal(whole(torch.bfloat16), expected.to(torch.bfloat16))
    strips = list(outer_strips(coefficients, v, cut, transposed))
    assert len(strips) > 1 and [top for top, _ in strips] == [
        0,
        *torch.tensor([r.shape[0] for _, r in strips])[:-1].cumsum(0).tolist(),
    ]
    assert torch.equal(torch.cat([rows for _, rows in strips]), expected)


def test_a10_experts_in_one_parameter_are_said_to_be_no_modules() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 6))
            self.router = nn.Linear(8, 4)

    with pytest.raises(InvalidArgumentError, match="4 experts in one tensor"):
        lt.apply_velora(nn.ModuleDict({"mlp": Experts()}), ["gate_up_proj"])


@pytest.mark.parametrize(
    ("make", "groups", "error", "words"),
    [
        (lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), 4, InvalidTypeError, "reflect"),
        (lambda: nn.Conv2d(8, 8, 3, groups=8), 8, InvalidArgumentError, "nothing to save"),
        (lambda: nn.Conv2d(8, 8, 3, groups=4), 6, InvalidArgumentError, "multiple of 4"),
        (lambda: nn.Conv2d(8, 8, 4, padding="same"), 4, InvalidArgumentError, "same"),
        (lambda: nn.Conv2d(8, 8, 3), 9, InvalidArgumentError, "num_groups"),
        (lambda: nn.ConvTranspose2d(8, 8, 3), 4, InvalidTypeError, "nn.Conv2d"),
        (lambda: nn.LSTM(8, 8), 4, InvalidTypeError, "nn.LSTMCell"),
        (lambda: nn.GRUCell(8, 8).requires_grad_(False), 4, InvalidArgumentError, "frozen"),
        (lambda: nn.MultiheadAttention(8, 2).out_proj, 4, InvalidTypeError, "nn.Linear"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(make, groups: int, error: type, words: str) -> None:
    model = nn.ModuleDict({"fine": nn.Linear(16, 4), "other": make()})
    with pytest.raises(error, match=words):
        lt.apply_velora(model, ["fine", "other"], num_groups=groups)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a9_refreshed_directions_go_on_after_saving_as_if_nothing_had_happened(tmp_path) -> None:
    def steps(layer: nn.Module, handle: lt.apply_velora, first: int, last: int) -> list[Tensor]:
        seen = []
        for number in range(first, last):
            torch.manual_seed(number)
            layer(torch.rand(4, 24)).sum().backward()
            seen.append(handle.state_dict()["0"])
        return seen

    make = lambda: nn.Linear(24, 4)  # noqa: E731
    _, straight, handle = pair(make, refresh_every=3)
    seen = steps(straight, handle, 0, 8)
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[2], seen[3]) and torch.equal(seen[3], seen[5])
    _, killed, first = pair(make, refresh_every=3)
    steps(killed, first, 0, 4)
    first.save(tmp_path / "velora.safetensors")
    _, resumed, second = pair(make, refresh_every=3)
    second.load(tmp_path / "velora.safetensors")
    assert all(map(torch.equal, steps(resumed, second, 4, 8), seen[4:]))
    with pytest.raises(InvalidArgumentError, match="refresh_every"):
        pair(make, refresh_every=0)


@pytest.mark.slow
def test_a_compiled_model_has_one_graph_once_directions_are_set() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 20))
    changed = copy.deepcopy(plain)
    lt.apply_velora(changed, ["0", "2"], num_groups=8)
    x = torch.rand(6, 24)
    changed(x).square().sum().backward()
    expected = [param.grad.clone() for param in changed.parameters()]
    changed.zero_grad()
    compiled = torch.compile(changed, fullgraph=True)
    for _ in range(2):
        changed.zero_grad()
        y = compiled(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-6)
        for param, grad in zip(changed.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=1e-5, atol=1e-6)


def test_functional_oracle_of_linear_layers_is_torchs() -> None:
    x, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(approximate(functional.linear, x, x / 2, weight, None), functional.linear(x, weight))


class Recorded(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [lambda: nn.Linear(48, 24), lambda: nn.Conv1d(48, 24, 3), lambda: nn.GRUCell(48, 24)])
def test_a_steady_step_waits_for_no_value_and_measures_nothing(make) -> None:
    _, changed, _ = pair(make)
    shape = (2, 48, 5) if isinstance(changed, nn.Conv1d) else (2, 48)
    inputs = (torch.rand(shape), torch.rand(2, 24)) if isinstance(changed, nn.GRUCell) else (torch.rand(shape),)
    with Recorded() as first:
        changed(*inputs).sum().backward()
    with Recorded() as steady:
        changed(*inputs).sum().backward()
    waits = {"_local_scalar_dense.default", "item.default", "is_nonzero.default"}
    assert waits & set(first.names) and "linalg_vector_norm.default" in first.names
    assert not waits & set(steady.names) and "linalg_vector_norm.default" not in steady.names


def test_a_second_derivative_is_refused_instead_of_being_wrong() -> None:
    _, changed, _ = pair(lambda: nn.Linear(48, 24))
    x = torch.rand(2, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(changed(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

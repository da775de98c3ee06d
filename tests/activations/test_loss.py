"""The logits-free loss: values and gradients against a float64 oracle and torch, bytes, repeated backwards,
refusals."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from reference.cross_entropy import cross_entropy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import leantune as lt
from leantune.activations.logit_tiles import LogitTiles, TileCost, plan_tiles
from leantune.activations.loss import linear_cross_entropy, shift_labels
from leantune.activations.tiled_cross_entropy import TiledCrossEntropy
from leantune.errors import InvalidArgumentError, InvalidTypeError
from leantune.memory.measured.tracker import track

TOKENS, WIDTH, VOCABULARY = 23, 16, 67


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias


def make(
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int = TOKENS,
    width: int = WIDTH,
    vocabulary: int = VOCABULARY,
    ignored: int = 0,
    size: float = 1.0,
) -> Case:
    """Inputs of a seed; ``ignored`` tokens, spread over the batch, carry -100."""
    g = torch.Generator().manual_seed(tokens + 31 * vocabulary)
    hidden = (torch.randn(tokens, width, generator=g) * size).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=g) * 0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=g).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=g)
    labels[0], labels[-1] = 0, vocabulary - 1
    labels[torch.randperm(tokens, generator=g)[:ignored]] = -100
    return Case(hidden, weight, bias, labels)


def error(value: Tensor, expected: Tensor) -> float:
    """Largest deviation by the largest expected magnitude."""
    return float((value.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0},
    {"logit_scale": 0.25},
    {"logit_scale": 1.7, "softcap": 2.0},
]


@pytest.mark.parametrize("tile_bytes", [200, 1000, 4000, 9000, 64 << 20])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ignored", [0, 5, 15])
def test_equals_the_float64_oracle(tile_bytes: int, options: dict[str, Any], ignored: int) -> None:
    case = make(ignored=ignored)
    expected = cross_entropy(
        case.hidden,
        case.weight,
        case.labels,
        case.bias,
        scale=options.get("logit_scale", 1.0),
        softcap=options.get("softcap"),
    )
    loss = linear_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, tile_bytes=tile_bytes, **options)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert error(loss.detach(), expected.loss) < 1e-6
    for tensor, gradient in zip(case.tensors(), (expected.hidden, expected.weight, expected.bias)):
        assert error(tensor.grad, gradient) < 3e-6
    assert not case.hidden.grad[case.labels == -100].any()


def test_float64_stays_float64() -> None:
    case = make(torch.float64, tokens=7, vocabulary=11)
    arguments = (case.hidden, case.weight, case.bias)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, case.labels, bias=bias, softcap=2.0, tile_bytes=2000)

    assert loss(*arguments).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, arguments)


@pytest.mark.parametrize("divisor", [7, torch.tensor(7), torch.tensor([7])], ids=["int", "0-d", "1-d"])
def test_num_items_is_the_divisor(divisor: int | Tensor) -> None:
    case = make(ignored=5)
    expected = cross_entropy(case.hidden, case.weight, case.labels, divisor=7.0)
    loss = linear_cross_entropy(case.hidden, case.weight, case.labels, num_items=divisor)
    loss.backward()
    assert loss.shape == ()
    assert error(loss.detach(), expected.loss) < 1e-6
    assert error(case.weight.grad, expected.weight) < 1e-6


def test_sum_and_another_ignore_index() -> None:
    case = make()
    case.labels[3:9] = 2  # an ordinary token id, as some tokenizers pad with
    expected = cross_entropy(case.hidden, case.weight, case.labels, ignore_index=2, divisor=1.0)
    loss = linear_cross_entropy(case.hidden, case.weight, case.labels, ignore_index=2, reduction="sum")
    loss.backward()
    assert error(loss.detach(), expected.loss) < 1e-6
    assert error(case.hidden.grad, expected.hidden) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch_on_the_same_operands(dtype: torch.dtype) -> None:
    case = make(dtype, ignored=4)
    loss = linear_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, tile_bytes=8000)
    loss.backward()
    wide = [tensor.detach().float().requires_grad_() for tensor in case.tensors()]
    plain = F.cross_entropy(F.linear(*wide), case.labels)
    plain.backward()
    assert error(loss.detach(), plain.detach()) < 1e-6
    for tensor, reference in zip(case.tensors(), wide):
        assert tensor.grad.dtype == dtype
        # One rounding: half an ulp of each element's own magnitude.
        slack = torch.finfo(dtype).eps / 2 * reference.grad.abs() + 1e-6 * reference.grad.abs().max()
        assert bool(((tensor.grad.float() - reference.grad).abs() <= slack).all())


def test_any_leading_shape_and_non_contiguous_operands() -> None:
    case = make(tokens=24)
    flat = linear_cross_entropy(case.hidden, case.weight, case.labels)
    hidden = case.hidden.detach().view(2, 3, 4, WIDTH).requires_grad_()
    transposed = case.weight.detach().t().contiguous().t().requires_grad_()
    loss = linear_cross_entropy(hidden, transposed, case.labels.view(2, 3, 4).int())
    loss.backward()
    flat.backward()
    assert loss.item() == pytest.approx(flat.item(), rel=1e-6)
    assert hidden.grad.shape == hidden.shape
    assert error(hidden.grad.view(-1, WIDTH), case.hidden.grad) < 1e-6
    assert error(transposed.grad, case.weight.grad) < 1e-6
    single = linear_cross_entropy(hidden[0, 0, 0], transposed, case.labels[0])
    assert single.item() == pytest.approx(
        F.cross_entropy(hidden[0, 0, 0] @ transposed.t(), case.labels[0]).item(), rel=1e-5
    )


def test_large_logits_and_masked_vocabulary_do_not_overflow() -> None:
    case = make(size=200.0)
    bias = case.bias.detach().clone()
    bias[:30] = -math.inf  # a padded vocabulary; the first tiles hold nothing else
    labels = case.labels.clamp(min=30)
    hidden, weight = case.hidden.detach().double().requires_grad_(), case.weight.detach().double().requires_grad_()
    expected = F.cross_entropy(F.linear(hidden, weight, bias.double()), labels)
    expected.backward()
    loss = linear_cross_entropy(case.hidden, case.weight, labels, bias=bias, tile_bytes=3000)
    loss.backward()
    assert error(loss.detach(), expected.detach()) < 1e-5
    assert error(case.weight.grad, weight.grad) < 1e-4
    assert error(case.hidden.grad, hidden.grad) < 1e-4


def test_g14_two_backwards_over_one_forward_are_identical() -> None:
    case = make(torch.bfloat16, ignored=4)
    loss = linear_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, softcap=5.0, tile_bytes=5000)
    first = torch.autograd.grad(loss, case.tensors(), retain_graph=True)
    second = torch.autograd.grad(loss, case.tensors(), retain_graph=True)
    fresh = torch.autograd.grad(
        linear_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, softcap=5.0, tile_bytes=5000),
        case.tensors(),
    )
    for one, two, three in zip(first, second, fresh):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert len({gradient.untyped_storage().data_ptr() for gradient in (*first, *second)}) == 6


def test_g14_a_weight_changed_before_backward_is_noticed() -> None:
    case = make()
    loss = linear_cross_entropy(case.hidden, case.weight, case.labels)
    with torch.no_grad():
        case.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_g14_checkpointing_around_it_changes_nothing() -> None:
    case = make(ignored=15)
    layer = nn.Linear(WIDTH, WIDTH)

    def tail(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(layer(hidden), case.weight, case.labels, tile_bytes=4000)

    leaves = (case.hidden, case.weight, layer.weight)
    expected = torch.autograd.grad(tail(case.hidden), leaves)
    loss = checkpoint(tail, case.hidden, use_reentrant=False)
    got = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_a_tied_head_gets_both_gradients() -> None:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    ids = torch.arange(12) % 5
    labels = shift_labels(ids)
    linear_cross_entropy(embedding(ids).tanh(), embedding.weight, labels, tile_bytes=3000).backward()
    got = embedding.weight.grad.clone()
    embedding.weight.grad = None
    F.cross_entropy(F.linear(embedding(ids).tanh(), embedding.weight), labels).backward()
    assert error(got, embedding.weight.grad) < 1e-6


def test_frozen_tensors_get_no_gradient_and_no_buffer() -> None:
    case = make(torch.bfloat16, vocabulary=3000)
    size = case.weight.numel() * 2
    linear_cross_entropy(case.hidden, case.weight.detach(), case.labels, tile_bytes=20_000).backward()
    frozen_weight = case.hidden.grad.clone()
    case.hidden.grad = None
    loss = linear_cross_entropy(case.hidden, case.weight.detach(), case.labels, tile_bytes=20_000)
    with track() as tracker:
        loss.backward()
    assert tracker.largest_allocation_bytes < size / 4
    case.hidden.grad = None
    linear_cross_entropy(case.hidden.detach(), case.weight, case.labels, tile_bytes=20_000).backward()
    frozen_hidden = case.weight.grad.clone()
    case.weight.grad = None
    linear_cross_entropy(case.hidden, case.weight, case.labels, tile_bytes=20_000).backward()
    assert error(frozen_weight, case.hidden.grad) < 0.01 and error(frozen_hidden, case.weight.grad) < 0.01
    with torch.no_grad():
        assert not linear_cross_entropy(case.hidden, case.weight, case.labels).requires_grad


@pytest.mark.parametrize("ignored", [0, 3, 40])
def test_a5_saved_bytes_are_hidden_states_labels_and_one_number_a_token(ignored: int) -> None:
    case = make(torch.bfloat16, tokens=64, vocabulary=997, ignored=ignored)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(case.hidden, case.weight, case.labels, reduction="sum")
    weight = saved.pop(case.weight.untyped_storage().data_ptr())
    assert weight == 997 * WIDTH * 2
    counted = 64 - ignored
    if ignored == 0:  # the caller's own hidden states and labels
        expected = 64 * WIDTH * 2 + 64 * 8 + 64 * 4
    elif ignored == 3:  # the caller's own hidden states, labels and rows that count
        expected = 64 * WIDTH * 2 + counted * (8 + 8 + 4)
    else:  # a copy of the rows that count, which did not need to be looked up again
        expected = counted * (WIDTH * 2 + 8 + 4)
        assert case.hidden.untyped_storage().data_ptr() not in saved
    # Divided by a Python number outside: nothing but these (index_select keeps its rows for the dropped ones).
    assert sum(saved.values()) == expected + (counted * 8 if ignored == 40 else 0)


@pytest.mark.parametrize("tokens", [64, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_a5_temporaries_stay_within_tile_bytes(tokens: int, dtype: torch.dtype, softcap: float | None) -> None:
    vocabulary, width, tile_bytes = 5000, 32, 400_000
    case = make(dtype, tokens=tokens, width=width, vocabulary=vocabulary)
    vectors = 64 * tokens  # O(tokens) vectors: running maxima and sums, columns, masks
    with track() as forward:
        loss = linear_cross_entropy(case.hidden, case.weight, case.labels, softcap=softcap, tile_bytes=tile_bytes)
    assert forward.peak_temporary_bytes <= tile_bytes + vectors
    assert forward.peak_temporary_bytes > tile_bytes / 4  # it does use them
    with track() as backward:
        loss.backward()
    sums = tokens * width * 4
    assert backward.peak_temporary_bytes <= tile_bytes + vectors + sums
    assert backward.kept_bytes == (case.weight.numel() + case.hidden.numel()) * dtype.itemsize
    assert tokens * vocabulary * 4 > 3 * tile_bytes  # what the logits would have been


@pytest.mark.parametrize("ignored", [0, 20])
def test_a5_gathered_rows_are_widened_in_one_place(ignored: int) -> None:
    """Hidden states so wide that two widened tiles of their rows would not fit."""
    case = make(torch.bfloat16, tokens=512, width=512, vocabulary=300, ignored=ignored)
    tile_bytes, vectors = 300_000, 64 * 512
    with track() as forward:
        loss = linear_cross_entropy(case.hidden, case.weight, case.labels, tile_bytes=tile_bytes)
    assert forward.peak_temporary_bytes <= tile_bytes + vectors
    with track() as backward:
        loss.backward()
    assert backward.peak_temporary_bytes <= tile_bytes + vectors + 512 * 512 * 4 + bool(ignored) * 512 * 512 * 2


@pytest.mark.parametrize("tokens", [64, 512])
def test_a5_autocast_keeps_no_copy_of_the_weight_and_one_tile_at_a_time(tokens: int) -> None:
    """A head wide enough that two widened tiles of its rows, or a whole rounded copy, would not fit."""
    vocabulary, width, tile_bytes = 3000, 256, 500_000
    case = make(torch.float32, tokens=tokens, width=width, vocabulary=vocabulary)
    hidden = case.hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with track() as forward:
            loss = linear_cross_entropy(hidden, case.weight, case.labels, tile_bytes=tile_bytes)
        with track() as backward:
            loss.backward()
    vectors = 64 * tokens
    assert forward.peak_temporary_bytes <= tile_bytes + vectors
    assert forward.kept_bytes <= 16 * tokens
    assert backward.peak_temporary_bytes <= tile_bytes + vectors + tokens * width * 4
    assert vocabulary * width * 2 > 3 * tile_bytes  # a rounded copy of the weight


def test_g13_bf16_head_gradient_is_rounded_once_over_token_tiles() -> None:
    """Many token tiles: a bf16 sum over them would lose small parts, a sum in fp32 does not."""
    case = make(torch.bfloat16, tokens=512, vocabulary=50)
    tiles = LogitTiles(
        case.hidden.detach(),
        None,
        case.weight.detach(),
        None,
        scale=1.0,
        operand_dtype=torch.bfloat16,
        tile_bytes=4000,
        gradient_room=True,
        backward=True,
    )
    assert len(tiles.token_slices) > 10 and len(tiles.vocabulary_slices) > 1
    expected = cross_entropy(case.hidden, case.weight, case.labels)
    linear_cross_entropy(case.hidden, case.weight, case.labels, tile_bytes=4000).backward()
    difference = (case.weight.grad.double() - expected.weight).abs()
    # Half a unit in the last of bf16's 8 significant bits is at most 2^-8 of the value; 1e-6 is for the fp32 sums.
    once = 2.0**-8 * expected.weight.abs() + 1e-6 * expected.weight.abs().max()
    assert bool((difference <= once).all())
    assert float((case.weight.grad == expected.weight.to(torch.bfloat16)).float().mean()) > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_linear_does(dtype: torch.dtype) -> None:
    case = make(torch.float32)
    hidden = case.hidden.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, case.weight, case.labels, bias=case.bias, tile_bytes=6000)
        loss.backward()  # also inside the block, where products would be cast again
    rounded = [t.detach().to(torch.bfloat16).float().requires_grad_() for t in (hidden, case.weight, case.bias)]
    expected = F.cross_entropy(F.linear(*rounded), case.labels)
    expected.backward()
    assert loss.dtype == torch.float32 and error(loss.detach(), expected.detach()) < 1e-6
    assert case.weight.grad.dtype == torch.float32 and error(case.weight.grad, rounded[1].grad) < 1e-6
    assert hidden.grad.dtype == dtype and error(hidden.grad, rounded[0].grad) < 2.0**-8


def test_p7_all_labels_ignored() -> None:
    case = make(ignored=TOKENS)

    def gradients(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, case.tensors())

    total = linear_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, reduction="sum")
    shared = linear_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, num_items=9)
    mean = linear_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias)
    assert total.item() == 0 and shared.item() == 0
    assert math.isnan(mean.item())  # not 0: nothing was learnt, and nobody should plot it as a perfect loss
    for loss in (total, shared, mean):
        for gradient, tensor in zip(gradients(loss), case.tensors()):
            assert gradient.shape == tensor.shape and not gradient.any()


def test_a_label_outside_the_vocabulary_is_named() -> None:
    case = make()
    case.labels[4], case.labels[1] = VOCABULARY + 3, -100
    with pytest.raises(InvalidArgumentError, match=rf"label {VOCABULARY + 3} at token 4 .*vocabulary of {VOCABULARY} "):
        linear_cross_entropy(case.hidden, case.weight, case.labels)
    case.labels[4] = -1
    with pytest.raises(InvalidArgumentError, match="label -1 at token 4 "):
        linear_cross_entropy(case.hidden, case.weight, case.labels)


def test_wrong_arguments_are_refused() -> None:
    case = make()
    hidden, weight, labels = case.hidden, case.weight, case.labels
    wrong: list[tuple[type[Exception], str, tuple[Tensor, ...], dict[str, Any]]] = [
        (InvalidArgumentError, "not transposed", (hidden, weight.t(), labels), {}),
        (InvalidArgumentError, "one label a token", (hidden, weight, labels[:-1]), {}),
        (InvalidArgumentError, "bias", (hidden, weight, labels), {"bias": case.bias[:-1]}),
        (InvalidArgumentError, "one dtype", (hidden.bfloat16(), weight, labels), {}),
        (InvalidTypeError, "token ids", (hidden, weight, labels.float()), {}),
        (InvalidTypeError, "hidden states are", (hidden.long(), weight, labels), {}),
        (InvalidTypeError, "weight is a", (hidden, weight.to(torch.int8), labels), {}),
        (InvalidArgumentError, "reduction", (hidden, weight, labels), {"reduction": "none"}),
        (InvalidArgumentError, "num_items divides", (hidden, weight, labels), {"reduction": "sum", "num_items": 3}),
        (InvalidArgumentError, "num_items=0", (hidden, weight, labels), {"num_items": 0}),
        (InvalidArgumentError, "one number", (hidden, weight, labels), {"num_items": torch.tensor([1, 2])}),
        (InvalidArgumentError, "softcap", (hidden, weight, labels), {"softcap": 0.0}),
        (InvalidArgumentError, "logit_scale", (hidden, weight, labels), {"logit_scale": math.inf}),
        (InvalidArgumentError, "tile_bytes", (hidden, weight, labels), {"tile_bytes": 0}),
        (InvalidArgumentError, "need 4 bytes", (hidden, weight, labels), {"tile_bytes": 3}),
    ]
    for kind, message, arguments, options in wrong:
        with pytest.raises(kind, match=message):
            linear_cross_entropy(*arguments, **options)


def test_shift_labels() -> None:
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shift_labels(labels).tolist() == [[2, 3, -100], [5, 6, -100]]
    assert shift_labels(labels, ignore_index=0).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert labels.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert shift_labels(torch.tensor([7])).tolist() == [-100]
    with pytest.raises(InvalidArgumentError, match="no dimension"):
        shift_labels(torch.tensor(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_and_meta_tensors_take_as_many_bytes_as_real_ones(dtype: torch.dtype) -> None:
    case = make(dtype, vocabulary=900)

    def walk(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[int, int, int]:
        with track() as tracker:
            loss = linear_cross_entropy(hidden, weight, labels, tile_bytes=30_000)
            loss.backward()
        assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape
        return tracker.peak_temporary_bytes, tracker.kept_bytes, tracker.largest_allocation_bytes

    real = walk(case.hidden, case.weight, case.labels)
    plain = [t.detach() for t in (case.hidden, case.weight, case.labels)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in plain]
        fake = walk(fakes[0].requires_grad_(), fakes[1].requires_grad_(), fakes[2])
    # Looking for ignored labels, which needs data, takes a few bytes a token of its own.
    assert abs(fake[0] - real[0]) <= 16 * TOKENS and fake[1:] == real[1:]
    meta = [t.detach().to("meta") for t in (case.hidden, case.weight, case.labels)]
    walk(meta[0].requires_grad_(), meta[1].requires_grad_(), meta[2])


@pytest.mark.parametrize("tile_bytes", [5_000, 60_000, 3_000_000, 64 << 20])
@pytest.mark.parametrize("tokens", [1, 500, 40_000])
@pytest.mark.parametrize("cost", [TileCost(4, 0, 0), TileCost(8, 1000, 0), TileCost(12, 500, 2000)], ids=str)
def test_tiles_fit_their_bytes_and_waste_little(tile_bytes: int, tokens: int, cost: TileCost) -> None:
    rows, width = plan_tiles(tokens, 50_000, cost, tile_bytes)
    assert 1 <= rows <= tokens and 1 <= width <= 50_000
    assert cost.of(rows, width) <= tile_bytes
    if rows < tokens:
        assert cost.of(rows + 1, width) > tile_bytes and width <= 256
    elif width < 50_000:
        assert cost.of(rows, 2 * width + 64) > tile_bytes


def test_it_is_the_public_name() -> None:
    assert lt.linear_cross_entropy is linear_cross_entropy
    case = make()
    loss = lt.linear_cross_entropy(case.hidden, case.weight, case.labels, reduction="sum")
    assert type(loss.grad_fn).__name__ == TiledCrossEntropy.__name__ + "Backward"

"""The output head's gradient under a fused backward: in tiles where it can be, and then as if it had been whole."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leantune as lt
from leantune.activations.logit_tiles import LogitTiles
from leantune.activations.tiled_cross_entropy import _Walks
from leantune.backward.graph import head_nodes
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError, NonFiniteError
from leantune.kernels.native import reference_rule
from leantune.memory.measured.tracker import track
from leantune.optim.gradient import NORM_CHUNK, TiledGradient, gradient_tiles, squared_norm

VOCABULARY, WIDTH, TOKENS = 500, 64, 72
TILE_BYTES = 90_000
"""Several tiles of vocabulary rows, none a multiple of the rows in which rules walk."""

RULES = {
    "ternary": lambda p: lt.TernaryAdamW(p, lr=1e-3),
    "ternary_no_carry": lambda p: lt.TernaryAdamW(p, lr=1e-3, carry_rank=0),
    "ternary_exact": lambda p: lt.TernaryAdamW(p, lr=1e-3, states="exact"),
    "adamw": lambda p: lt.AdamW(p, lr=1e-3, weight_decay=0.1),
    "lomo": lambda p: lt.Lomo(p, lr=0.1, weight_decay=0.1),
    "adalomo": lambda p: lt.AdaLomo(p, lr=1e-2),
}


class Model(nn.Module):
    """Embedding, one layer and a head, which may be tied to the embedding."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        tied: bool = False,
        bias: bool = False,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        tile_bytes: int = TILE_BYTES,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary if tied else 50, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=bias)
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight
        self.tile_bytes = tile_bytes

    def hidden(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, self.embed.num_embeddings, (TOKENS,), generator=generator)
        labels = torch.randint(0, self.head.out_features, (TOKENS,), generator=generator)
        labels[:5] = -100
        return torch.tanh(self.body(self.embed(ids))), labels

    def loss_of(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return lt.linear_cross_entropy(
            hidden, self.head.weight, labels, bias=self.head.bias, tile_bytes=self.tile_bytes, **options
        )

    def loss(self, number: int) -> Tensor:
        return self.loss_of(*self.hidden(number))


def train(
    model: Model, rule: Callable[[Any], Any], head: str, clip: str = "per_tensor", steps: int = 6, **options: Any
) -> tuple[list[Tensor], list[float], Any, lt.FusedBackward]:
    """(weights, norms before clipping, optimizer, fused) after some steps, most of which are clipped."""
    optimizer = rule([pair for pair in model.named_parameters() if pair[1].requires_grad])
    fused = lt.FusedBackward(optimizer, model, clip, None if clip == "none" else 0.02, head=head, **options)
    norms = []
    for number in range(steps):
        fused.backward(model.loss(number))
        optimizer.step()
        norms.append(fused.grad_norm)
    return [p.detach() for p in model.parameters()], norms, optimizer, fused


def same_state(one: Any, other: Any, *, but: tuple[str, ...] = ()) -> bool:
    pairs = zip(one.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a if name not in but)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", ["per_tensor", "global", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_tiles_equal_the_whole_gradient_bit_for_bit(rule: str, clip: str, dtype: torch.dtype) -> None:
    """In the rule's own code; with a carry the CPU kernel has a test of its own."""
    ends = []
    for head in ("whole", "tiles"):
        with reference_rule():
            ends.append(train(Model(dtype, bias=True), RULES[rule], head, clip))
    assert "tiles" in ends[1][3].report() and "head='whole'" in ends[0][3].report()
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    assert ends[0][1] == ends[1][1]
    assert same_state(ends[0][2], ends[1][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["ternary_no_carry", "ternary_exact"])
def test_tiles_equal_the_whole_gradient_in_the_cpu_kernel(rule: str, dtype: torch.dtype) -> None:
    ends = [train(Model(dtype), RULES[rule], head, steps=4) for head in ("whole", "tiles")]
    assert all(map(torch.equal, ends[0][0], ends[1][0])) and same_state(ends[0][2], ends[1][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_a_carry_the_cpu_kernel_rounds_the_next_basis_alone_otherwise(dtype: torch.dtype) -> None:
    """Y = u^T u V is summed over rows in another order: the next V may differ in the last bit of its bfloat16."""
    model = Model(dtype)
    _, _, optimizer, fused = train(model, RULES["ternary"], "whole", steps=4)
    fused.remove()
    ends = []
    for head in ("whole", "tiles"):
        twin = copy.deepcopy(model)
        resumed = RULES["ternary"](twin.named_parameters())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        handle = lt.FusedBackward(resumed, twin, head=head)
        handle.backward(twin.loss(9))
        resumed.step()
        ends.append((twin, resumed))
    assert all(map(torch.equal, ends[0][0].parameters(), ends[1][0].parameters()))
    assert same_state(ends[0][1], ends[1][1], but=("carry_basis",))
    one, other = (end[1].state[end[0].head.weight]["carry_basis"].float() for end in ends)
    assert float((one - other).abs().max()) <= 2.0**-8 * float(one.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", ["per_tensor", "global"])
def test_a_tied_head_keeps_one_whole_gradient(clip: str, dtype: torch.dtype) -> None:
    ends = [train(Model(dtype, tied=True), RULES["adamw"], head, clip) for head in ("whole", "tiles")]
    assert all(map(torch.equal, ends[0][0], ends[1][0])) and ends[0][1] == ends[1][1]
    assert ends[1][3].report().startswith("embed.weight: gradient whole") and "tied" in ends[1][3].report()


def live_bytes(tied: bool, head: str, clip: str, dtype: torch.dtype) -> tuple[int, int]:
    """(largest storage made in a step, most bytes of such storages at once); the head is much larger than all else."""
    model = Model(dtype, tied=tied, vocabulary=24_000, width=128, tile_bytes=1 << 20)
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model, clip, head=head)
    fused.backward(model.loss(0))
    optimizer.step()
    with track() as tracker:
        fused.backward(model.loss(1))
        optimizer.step()
    return tracker.largest_allocation_bytes, tracker.peak_temporary_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", ["per_tensor", "global"])
def test_live_bytes_without_and_with_a_whole_gradient(clip: str, dtype: torch.dtype) -> None:
    size = 24_000 * 128 * dtype.itemsize
    largest, together = live_bytes(False, "tiles", clip, dtype)
    # The tile, a chunk of the norm or the update's tiles (8 MiB at most, whatever the size), and little else.
    assert largest <= 4 * NORM_CHUNK < size
    whole_largest, whole_together = live_bytes(False, "whole", clip, dtype)
    assert whole_largest == size
    assert whole_together >= size and together <= (1 << 20) + 4 * NORM_CHUNK + (2 << 20)
    assert live_bytes(True, "tiles", clip, dtype)[0] == size  # tied: in the weight's dtype, never wider


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_heads_one_buffer_is_what_the_embeddings_part_is_added_to(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the tracker, whose look at a storage would make torch add into a third buffer."""
    model = Model(dtype, tied=True)
    buffers: list[tuple[int, torch.dtype]] = []
    whole = _Walks.whole

    def watched(self: _Walks, wanted: bool) -> Tensor | None:
        made = whole(self, wanted)
        buffers.append((made.data_ptr(), made.dtype))
        return made

    monkeypatch.setattr(_Walks, "whole", watched)
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    check = optimizer.check_gradient
    taken: list[tuple[int, torch.dtype]] = []

    def checking(param: Tensor, grad: Tensor, *rest: int) -> Tensor:
        if param is model.embed.weight:
            taken.append((grad.data_ptr(), grad.dtype))
        return check(param, grad, *rest)

    monkeypatch.setattr(optimizer, "check_gradient", checking)
    fused.backward(model.loss(0))
    optimizer.step()
    assert taken == buffers == [(buffers[0][0], dtype)]


def test_gradients_that_live_when_a_hook_is_called() -> None:
    """Of every parameter below the head: nothing of the head's size is alive by then, but for a tied one's part."""
    for tied, head, expected in ((False, "tiles", 0), (False, "whole", 0), (True, "tiles", 1)):
        model = Model(torch.bfloat16, tied=tied, vocabulary=24_000, width=128, tile_bytes=1 << 20)
        optimizer = lt.Lomo(model.parameters(), lr=0.1)
        fused = lt.FusedBackward(optimizer, model, head=head)
        size, counts = 24_000 * 128 * 2, []
        with track() as tracker:
            update = optimizer.update

            def watching(param, *rest, model=model, counts=counts, size=size, tracker=tracker, update=update):
                if param is model.body.weight:
                    known = tracker._log.sizes
                    counts.append(
                        sum(known[a] >= size and tracker._log.births[a] > 0 for a in tracker._log.living.values())
                    )
                return update(param, *rest)

            optimizer.update = watching
            fused.backward(model.loss(0))
            optimizer.step()
        assert counts == [expected]


@pytest.mark.parametrize("clip", ["per_tensor", "global", "none"])
@pytest.mark.parametrize("rule", ["ternary", "lomo"])
def test_a_late_tile_that_is_not_finite_moves_nothing_of_the_head(
    rule: str, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    optimizer = RULES[rule](model.named_parameters())
    fused = lt.FusedBackward(optimizer, model, clip)
    fused.backward(model.loss(0))
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    add = LogitTiles.add_product

    def poisoned(self: LogitTiles, total: Tensor, left: Tensor, right: Tensor, **options: Any) -> None:
        add(self, total, left, right, **options)
        last = self.vocabulary_slices[-1]
        assert last.stop - last.start < self.vocabulary_slices[0].stop
        if options and left.shape[0] == last.stop - last.start:
            total[-1, -1] = math.inf

    with monkeypatch.context() as patched:
        patched.setattr(LogitTiles, "add_product", poisoned)
        with pytest.raises(
            NonFiniteError, match=r"gradient of head\.weight holds NaN or Inf.*Nothing had been updated"
        ):
            fused.backward(model.loss(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for key, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(values[name], state["state"][key][name]) for name in values)
    fused.backward(model.loss(2))  # the batch is skipped and training goes on
    optimizer.step()


def test_what_moved_before_a_later_error_names_the_head() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    hidden, labels = model.hidden(0)
    hidden.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(NonFiniteError, match=r"1 parameter\(s\) had been updated: head\.weight"):
        fused.backward(model.loss_of(hidden, labels))
    with pytest.raises(BackwardError, match="stopped in the middle"):
        optimizer.step()


def test_a_walk_that_fails_between_tiles_is_no_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    loss, made, add = model.loss(0), [], LogitTiles.add_product

    def failing(self, total, left, right, **options):
        made.append(1)
        if (
            len(made) > 2 * len(self.vocabulary_slices) * len(self.token_slices) + 2
        ):  # in the second walk, which makes the head's alone
            raise MemoryError("not enough")
        return add(self, total, left, right, **options)

    monkeypatch.setattr(LogitTiles, "add_product", failing)
    with pytest.raises(MemoryError):
        fused.backward(loss)
    with pytest.raises(BackwardError, match=r"stopped in the middle: MemoryError at head\.weight"):
        optimizer.step()


def test_step_keeps_its_books() -> None:
    model = Model()
    optimizer = lt.Lomo(model.named_parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    with pytest.raises(BackwardError, match="no gradient"):
        optimizer.step()
    fused.backward(model.loss(0))
    assert all(fused.reached(param) for param in model.parameters())
    with pytest.raises(BackwardError, match="again before step"):
        fused.backward(model.loss(1))
    optimizer.step()
    assert not any(fused.reached(param) for param in model.parameters()) and fused.grad_norm > 0
    with pytest.raises(BackwardError, match="no gradient"):
        optimizer.step()
    assert int(optimizer.state[model.head.weight]["step"]) == 1
    assert all(node.taker is None for node, _ in head_nodes(model.loss(0)))
    fused.remove()
    model.loss(0).backward()
    assert model.head.weight.grad is not None


def test_plain_backward_takes_the_whole_gradient() -> None:
    ends = []
    for plain in (True, False):
        model = Model()
        optimizer = lt.AdamW(model.named_parameters(), lr=1e-3)
        fused = lt.FusedBackward(optimizer, model)
        for number in range(3):
            if plain:
                model.loss(number).backward()
            else:
                fused.backward(model.loss(number))
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def reported(model: Model, loss: Callable[[], Tensor], optimizer: Any = None, **options: Any) -> str:
    optimizer = optimizer or lt.Lomo([p for p in model.parameters() if p.requires_grad], lr=0.1)
    fused = lt.FusedBackward(optimizer, model, **options)
    fused.backward(loss())
    optimizer.step()
    return fused.report()


def test_what_keeps_a_gradient_whole_is_said() -> None:
    model = Model()
    assert "whole columns" in reported(model, lambda: model.loss(0), lt.TacoOneSparse(model.parameters(), lr=1e-3))
    two = Model()
    assert "a second loss" in reported(two, lambda: two.loss(0) + two.loss(1))
    watched = Model()
    watched.head.weight.register_hook(lambda grad: grad * 2)
    assert "hook" in reported(watched, lambda: watched.loss(0))
    frozen = Model()
    frozen.head.weight.requires_grad_(False)
    assert "no output head" in reported(frozen, lambda: frozen.loss(0))
    cast = Model(torch.bfloat16)
    weight = cast.head.weight
    assert "no output head" in reported(
        cast, lambda: lt.linear_cross_entropy(cast.hidden(0)[0].float(), weight.float(), cast.hidden(0)[1])
    )
    sums = Model()
    optimizer = lt.Lomo(sums.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, sums, accumulate="float32")
    fused.backward(sums.loss(0) / 2, last=False)
    assert "accumulated" in fused.report()
    fused.backward(sums.loss(1) / 2)
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match="'tiles', 'whole'"):
        lt.FusedBackward(lt.Lomo(Model().parameters(), lr=0.1), head="rows")


def test_a_second_loss_over_one_head_is_exact() -> None:
    ends = []
    for head in ("whole", "tiles"):
        model = Model()
        optimizer = lt.AdamW(model.named_parameters(), lr=1e-3)
        fused = lt.FusedBackward(optimizer, model, head=head)
        fused.backward(model.loss(0) + model.loss(1))
        optimizer.step()
        ends.append(model.head.weight.detach())
    assert torch.equal(*ends)


def test_two_heads_each_with_its_own_loss_both_go_in_tiles() -> None:
    ends = []
    for head in ("whole", "tiles"):
        model = Model()
        second = nn.Parameter(torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(3)))
        optimizer = lt.AdamW([*model.named_parameters(), ("second", second)], lr=1e-3)
        fused = lt.FusedBackward(optimizer, clip="global", head=head)
        hidden, labels = model.hidden(0)
        further = lt.linear_cross_entropy(hidden, second, labels % 300, tile_bytes=TILE_BYTES)
        fused.backward(model.loss_of(hidden, labels) + further)
        optimizer.step()
        ends.append([model.head.weight.detach(), model.embed.weight.detach(), second.detach()])
    assert fused.report().count("in tiles") == 2
    assert all(map(torch.equal, *ends))


def test_lora_style_with_a_trained_head() -> None:
    """A frozen body with a small trained part, and a head trained by another rule."""
    ends = []
    for head in ("whole", "tiles"):
        model = Model(torch.bfloat16)
        model.embed.requires_grad_(False)
        model.body.requires_grad_(False)
        down, up = (nn.Parameter(torch.full(shape, 0.02, dtype=torch.bfloat16)) for shape in ((4, WIDTH), (WIDTH, 4)))
        small, large = lt.AdamW([down, up], lr=1e-2), lt.Lomo([model.head.weight], lr=0.1)
        fused = lt.FusedBackward([small, large], head=head)
        for number in range(3):
            hidden, labels = model.hidden(number)
            fused.backward(model.loss_of(hidden + hidden @ down.t() @ up.t(), labels))
            small.step()
            large.step()
        ends.append([down.detach(), up.detach(), model.head.weight.detach()])
    assert "in tiles" in fused.report()
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": 0.5}, {"reduction": "sum"}])
def test_inside_a_checkpoint_and_with_the_losss_own_options(options: dict[str, Any]) -> None:
    ends = []
    for head in ("whole", "tiles"):
        model = Model(bias=True)
        optimizer = lt.AdamW(model.named_parameters(), lr=1e-3)
        fused = lt.FusedBackward(optimizer, model, "global", 0.5, head=head)
        for number in range(3):
            hidden, labels = model.hidden(number)
            loss = checkpoint(lambda h, m=model, y=labels: m.loss_of(h, y, **options), hidden, use_reentrant=False)
            fused.backward(loss)
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert "in tiles" in fused.report()
    assert all(map(torch.equal, *ends))


def test_loss_scale_with_float16_and_a_dropped_step() -> None:
    ends = []
    for head in ("whole", "tiles"):
        model = Model(torch.float16)
        options = {"loss_scale": lt.LossScale(2.0**24), "steps": 12}
        with reference_rule():
            weights, norms, _, fused = train(model, RULES["ternary"], head, **options)
        ends.append((weights, norms, fused.loss_scale.value))
    assert ends[0][2] == ends[1][2] < 2.0**24  # some were dropped
    assert all(map(torch.equal, ends[0][0], ends[1][0])) and ends[0][1] == ends[1][1]


def test_no_token_counts_and_a_first_step_of_rate_zero() -> None:
    for lr in (0.0, 1e-2):
        model = Model()
        optimizer = lt.AdamW(model.named_parameters(), lr=lr, weight_decay=0.1)
        fused = lt.FusedBackward(optimizer, model)
        before = model.head.weight.detach().clone()
        hidden, labels = model.hidden(0)
        fused.backward(model.loss_of(hidden, labels.fill_(-100), num_items=3))
        optimizer.step()
        assert int(optimizer.state[model.head.weight]["step"]) == (lr > 0)
        torch.testing.assert_close(model.head.weight.detach(), before * (1 - lr * 0.1))
        fused.backward(model.loss(1))
        optimizer.step()
        assert torch.equal(model.head.weight, before) == (lr == 0)


def tiled(grad: Tensor, heights: list[int]) -> TiledGradient:
    def walk():
        top = 0
        for rows in heights:
            yield top, grad[top : top + rows].clone()
            top += rows

    return TiledGradient((grad.shape[0], grad.shape[1]), grad.dtype, grad.device, walk)


@pytest.mark.parametrize("heights", [[700], [1, 699], [130, 260, 310], [256, 256, 188], [7] * 100])
def test_a_tiled_gradient_is_read_as_a_whole_one(heights: list[int]) -> None:
    grad = torch.randn(700, 2048, generator=torch.Generator().manual_seed(0))
    parts = gradient_tiles(tiled(grad, heights), 128)
    for (tile, part), (same, expected) in zip(parts, gradient_tiles(grad, 128), strict=True):
        assert tile == same and torch.equal(part, expected)
    assert torch.equal(torch.cat([piece.clone() for piece in tiled(grad, heights).pieces(12_345)]), grad.view(-1))
    with reference_rule():
        assert torch.equal(squared_norm(tiled(grad, heights)), squared_norm(grad))
    assert float(squared_norm(tiled(grad, heights))) == pytest.approx(float(squared_norm(grad)), rel=3e-7)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_taker_that_does_not_walk_to_the_end_is_refused(taken: int) -> None:
    model = Model()
    loss = model.loss(0)
    ((node, alone),) = head_nodes(loss)
    assert alone and node.head is model.head.weight

    def impatient(walk: Any) -> None:
        for _ in zip(range(taken), walk()):
            pass

    node.taker = impatient
    with pytest.raises(BackwardError, match="not complete"):
        loss.backward()


def test_wrong_tiles_and_wrong_parameters_are_refused() -> None:
    grad = torch.ones(10, 4)
    for heights in ([5], [5, 6], [12]):
        with pytest.raises(InvalidArgumentError, match="gradient of shape"):
            list(TiledGradient((10, 4), grad.dtype, grad.device, lambda h=heights: jumps(h)).walk())
    weight = nn.Parameter(torch.ones(10, 4))
    one_sparse = lt.TacoOneSparse([weight], lr=0.1)
    with pytest.raises(InvalidTypeError, match="TacoOneSparse cannot update"):
        one_sparse.update_in_tiles(weight, tiled(grad, [10]), one_sparse.param_groups[0], {})
    vector = nn.Parameter(torch.ones(10))
    lomo = lt.Lomo([vector], lr=0.1)
    with pytest.raises(InvalidTypeError, match="unsharded matrices"):
        lomo.update_in_tiles(vector, tiled(grad, [10]), lomo.param_groups[0], {})


def jumps(heights: list[int]):
    """Tiles that end too early, overlap, or are too many."""
    return iter([(index * 4, torch.ones(rows, 4)) for index, rows in enumerate(heights)])

"""The loss at the end of a model: without logits, a tile at a time, or over whole logits."""

from dataclasses import dataclass

from leantune.activations.tile_plan import ROUNDED_TOGETHER, TILE_BYTES, TileCost, plan_tiles
from leantune.memory.closed_form.state_bytes import TILE_ELEMENTS
from leantune.memory.closed_form.tape import FLOAT, Block, Results, Tape, Weight
from leantune.memory.parts import ACTIVATIONS, GRADIENTS, LOSS

LABEL = 8
NORM_CHUNK = 1 << 20
"""Of `leantune.optim.gradient`."""
_FORWARD_NUMBERS, _BACKWARD_NUMBERS = 17, 21
"""Bytes a token of what finds the label's logit in a tile: column numbers, a mask, picked logits."""


@dataclass(frozen=True)
class Head:
    """An output layer: (vocabulary, hidden) of ``size`` bytes an element over ``tokens`` rows."""

    tokens: int
    vocabulary: int
    hidden: int
    size: int
    weight: Weight
    softcap: bool
    native: bool
    """The device multiplies 16-bit operands and gives fp32 (CUDA); else they are widened a tile at a time."""
    in_tiles: bool
    """A fused backward takes the weight's gradient in tiles."""
    walks: int = 2


def tiled_loss(tape: Tape, head: Head, hidden: Block) -> Block:
    """`linear_cross_entropy`: the hidden states and three numbers a token are kept."""
    labels = tape.new(head.tokens * LABEL, ACTIVATIONS)
    forward = _Rooms(head, backward=False)
    with_rooms = forward.hold(tape)
    sums = [tape.new(head.tokens * FLOAT) for _ in range(3)]
    tape.touch(head.tokens * _FORWARD_NUMBERS, LOSS)
    tape.drop(*with_rooms, *sums)
    logsumexp = tape.new(head.tokens * FLOAT, ACTIVATIONS)
    summed = tape.new(FLOAT)
    if head.weight.trained:
        tape.uses(head.weight)
    tape.node(summed, (hidden, labels, logsumexp), lambda g: _tiled_back(tape, head, hidden))
    loss = tape.new(FLOAT)
    tape.node(loss, (), lambda g: [(summed, tape.new(FLOAT))])
    tape.drop(labels, logsumexp, summed)
    return loss


def _tiled_back(tape: Tape, head: Head, hidden: Block) -> Results:
    rooms = _Rooms(head, backward=True)
    held = rooms.hold(tape)
    total, factor = tape.new(head.tokens * head.hidden * FLOAT), tape.new(FLOAT)
    elements = head.vocabulary * head.hidden
    results: list[tuple[Block | Weight, Block]] = []
    gradient = None
    if head.weight.trained and head.in_tiles:
        _walk_in_tiles(tape, head, rooms.width)
    elif head.weight.trained:
        gradient = tape.new(elements * head.size, GRADIENTS)
        if head.size != FLOAT:
            held.append(tape.new(rooms.width * head.hidden * FLOAT, LOSS))
        results.append((head.weight, gradient))
    tape.touch(head.tokens * _BACKWARD_NUMBERS, LOSS)
    tape.drop(*held, factor)
    rounded = total
    if head.size != FLOAT:
        rounded = tape.new(head.tokens * head.hidden * head.size)
        tape.drop(total)
    return [(hidden, rounded), *results]


def _walk_in_tiles(tape: Tape, head: Head, width: int) -> None:
    """The gradient's walks: one for its norm, in chunks, and those of the update, in the rule's tiles."""
    scratch = tape.new(width * head.hidden * FLOAT, LOSS)
    tape.touch(head.tokens * _BACKWARD_NUMBERS, LOSS)
    elements, strip = head.vocabulary * head.hidden, width * head.hidden
    if head.size != FLOAT:
        tape.touch(min(strip, ROUNDED_TOGETHER) * head.size, LOSS)
    chunk = min(NORM_CHUNK, elements)
    tape.touch(chunk * FLOAT if strip % chunk else 0, LOSS)
    rows = max(1, TILE_ELEMENTS // head.hidden)
    piece = min(rows * head.hidden, elements)
    copy = tape.new(piece * FLOAT if strip % piece else 0, LOSS)
    tape.update(head.weight)
    tape.drop(copy, scratch)


class _Rooms:
    """Working memory of the walk over tiles (`LogitTiles`)."""

    def __init__(self, head: Head, backward: bool) -> None:
        self.head = head
        narrow = head.size != FLOAT
        widened = narrow and not head.native
        width = head.hidden
        cell, column, row = FLOAT * (1 + (1 if backward and head.softcap else 0)), 0, 0
        if widened:
            column += width * FLOAT
            row += width * FLOAT
        if backward and head.weight.trained:
            column += width * FLOAT
        if head.native and narrow and backward:
            cell += head.size
            row += width * FLOAT
            column += width * FLOAT
        self.rows, self.width = plan_tiles(
            max(1, head.tokens), head.vocabulary, TileCost(cell, column, row), TILE_BYTES
        )
        self._widened = widened
        self._backward = backward

    def hold(self, tape: Tape) -> list[Block]:
        """The rooms, held until the walk's end."""
        head = self.head
        logits = self.rows * self.width
        held = [tape.new(logits * FLOAT, LOSS)]
        if self._widened:
            held.append(tape.new(min(self.rows, head.tokens) * head.hidden * FLOAT, LOSS))
            held.append(tape.new(self.width * head.hidden * FLOAT, LOSS))
        elif self._backward and head.native and head.size != FLOAT:
            # The logits' gradient in 16 bits, and a product that cannot be added in place.
            held.append(tape.new(logits * head.size, LOSS))
            held.append(tape.new(max(self.rows, self.width) * head.hidden * FLOAT, LOSS))
        return held


def whole_logits_loss(tape: Tape, head: Head, hidden: Block) -> Block:
    """The model's own: logits in the weights' dtype, in fp32, and their log-softmax."""
    cells = head.tokens * head.vocabulary
    weight = head.weight
    if weight.trained:
        tape.uses(weight)
    logits = tape.new(cells * head.size, LOSS)

    def head_back(gradient: Block) -> Results:
        results: list[tuple[Block | Weight, Block]] = []
        if weight.trained:
            results.append((weight, tape.new(weight.gradient_bytes, GRADIENTS)))
        return [*results, (hidden, tape.new(head.tokens * head.hidden * head.size))]

    tape.node(logits, (hidden,) if weight.trained else (), head_back)
    wide = logits
    if head.size != FLOAT:
        wide = tape.new(cells * FLOAT, LOSS)
        tape.node(wide, (), lambda g: [(logits, tape.new(cells * head.size, LOSS))])
    labels = tape.new(head.tokens * LABEL, ACTIVATIONS)
    chances = tape.new(cells * FLOAT, LOSS)
    tape.node(chances, (chances,), lambda g: [(wide, tape.new(cells * FLOAT, LOSS))])
    loss, count = tape.new(FLOAT), tape.new(FLOAT)
    tape.node(loss, (chances, labels, count), lambda g: [(chances, tape.new(cells * FLOAT, LOSS))])
    tape.drop(labels, chances, count)
    if wide is not logits:
        tape.drop(wide)
    tape.drop(logits)
    return loss

"""A step of training as tensors that come and go: autograd's own bookkeeping, replayed with sizes alone.

A program (`leantune.memory.closed_form.block`, `.loss`) says which tensors each operator makes, which of them it keeps
for backward and what its backward makes. The tape counts references as Python and autograd do: a tensor lives while a
local name, a kept tensor or a gradient on its way holds it. Backward runs the operators in reverse, the order in which
autograd's engine runs them. Nothing here knows a model, and no tensor exists.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from leantune.memory.measured.timeline import BACKWARD, FORWARD, PHASES, MemoryTimeline, resolve
from leantune.memory.parts import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, PARTS, RECOMPUTE, TEMPORARIES, UPDATE

FLOAT = 4
Does = Literal["kept", "applied", "dropped", "gathered"]
"""What becomes of complete gradients."""
_CODE = {part: code for code, part in enumerate(PARTS)}


class Block:
    """Bytes of one tensor's memory and how many hold it."""

    __slots__ = ("allocation", "constant", "held", "size")

    def __init__(self, size: int, allocation: int) -> None:
        self.size = size
        self.allocation = allocation
        self.held = 1
        self.constant = False
        """Needs no gradient: nothing before it is trained."""


@dataclass(frozen=True)
class Weight:
    """A parameter as the tape sees it."""

    name: str
    elements: int
    trained: bool
    gradient_bytes: int
    update_bytes: int
    """Temporaries of its update."""
    state_bytes: int = 0
    """Of the optimizer's state for it."""


class _Enough(Exception):
    """A rerun has made all that its backward needs; torch's checkpointing stops there too."""


Results = Iterable[tuple["Block | Weight", Block]]
"""Whose gradients an operator's backward gives, and the gradients."""
Backward = Callable[[Block], Results]


@dataclass
class _Node:
    out: Block
    kept: tuple[Block, ...]
    saves: bool
    """Something, if only a weight: under checkpointing its backward asks for the rerun."""
    backward: Backward
    frame: "Frame | None"


@dataclass
class Frame:
    """What was run under gradient checkpointing: its nodes keep nothing until backward has run it again."""

    rerun: Callable[[], None] | None = None
    ran: bool = False
    kept: list[tuple[Block, ...]] = field(default_factory=list)
    inputs: tuple[Block, ...] = ()
    last: int = 0
    """The last node that keeps something."""
    first: int = 0
    """The node before which nothing is kept: with it the inputs go."""


class Tape:
    """Counts bytes by part over a step.

    Args:
        accumulate: bytes an element of the sums that a fused backward gathers over micro-batches.
        sums_in_place: autograd adds two gradients of one tensor into the first of them where nothing else holds it.
    """

    def __init__(self, *, accumulate: int = FLOAT, sums_in_place: bool = True) -> None:
        self.gradients_are: Does = "kept"
        self.keeps = True
        """False: in evaluation no operator keeps anything."""
        self.makes_states = False
        """A first step: states appear at each weight's update."""
        self._in_place = sums_in_place
        self._births: list[int] = []
        self._deaths: list[int] = []
        self._sizes: list[int] = []
        self._parts: list[int] = []
        self._phases: list[int] = []
        self._phase = PHASES.index(FORWARD)
        self._part: str | None = None
        self._nodes: list[_Node] = []
        self._frame: Frame | None = None
        self._rerunning: Frame | None = None
        self._made: list[Block] = []
        self._accumulate = accumulate
        self._gradients: dict[str, Block] = {}
        self._sums: list[tuple[Weight, Block]] = []
        self._partial: dict[str, tuple[Block, int]] = {}
        self._uses: dict[str, int] = {}
        self._forward_ends: list[int] = []
        self._event()

    # -- tensors ------------------------------------------------------------------------------------------------------

    def hold(self, size: int, part: str) -> Block:
        """A tensor that exists before anything runs, for good."""
        return self._allocate(size, part, birth=0)

    def new(self, size: int, part: str | None = None) -> Block:
        """A tensor an operator makes, held by a local name."""
        return self._allocate(size, part or self._part or TEMPORARIES, birth=self._event())

    def _allocate(self, size: int, part: str, birth: int) -> Block:
        block = Block(size, len(self._sizes))
        if self._rerunning is not None:
            self._made.append(block)
        self._births.append(birth)
        self._deaths.append(-1)
        self._sizes.append(size)
        self._parts.append(_CODE[part])
        return block

    def keep(self, block: Block) -> Block:
        """One more holder of ``block``."""
        block.held += 1
        return block

    def drop(self, *blocks: Block) -> None:
        """A holder less of each; the last one frees it."""
        for block in blocks:
            block.held -= 1
            if block.held == 0:
                self._deaths[block.allocation] = self._event()

    def touch(self, size: int, part: str) -> None:
        """A tensor that is gone at once."""
        self.drop(self.new(size, part))

    def _event(self) -> int:
        self._phases.append(self._phase)
        return len(self._phases) - 1

    # -- forward ------------------------------------------------------------------------------------------------------

    def node(
        self,
        out: Block,
        kept: Sequence[Block],
        backward: Backward,
        sources: Sequence[Block] = (),
        *,
        keeps_weight: bool = False,
    ) -> Block:
        """Record an operator that made ``out`` and keeps ``kept``; returns ``out``.

        Args:
            sources: its inputs, where they may all be constant and nothing it reads is trained: then so is ``out``.
            keeps_weight: it keeps a weight as well, which costs nothing.
        """
        if not self.keeps:
            return out
        if sources and all(source.constant for source in sources):
            out.constant = True
            return out
        again = self._rerunning
        if again is not None:
            again.kept.append(tuple(self.keep(block) for block in kept))
            if len(again.kept) > again.last:
                # The operator keeps before it makes.
                self._sizes[out.allocation] = 0
                raise _Enough
            return out
        if self._frame is None:
            kept = tuple(self.keep(block) for block in kept)
        self._nodes.append(_Node(out, tuple(kept), bool(kept) or keeps_weight, backward, self._frame))
        return out

    def uses(self, weight: Weight) -> None:
        """One more operator gives this weight a gradient: a tied one has two."""
        if self._rerunning is None:
            self._uses[weight.name] = self._uses.get(weight.name, 0) + 1

    def checkpointed(self, run: Callable[[], Block], inputs: Sequence[Block]) -> Block:
        """Run a part of the program so that it keeps its ``inputs`` alone, and again when its backward begins."""
        if not self.keeps:
            return run()
        frame = self._frame = Frame(inputs=tuple(self.keep(block) for block in inputs))
        begin = len(self._nodes)
        out = run()
        self._frame = None
        keeping = [number for number, node in enumerate(self._nodes[begin:]) if node.saves]
        frame.first, frame.last = (keeping[0], keeping[-1]) if keeping else (0, -1)
        frame.rerun = functools.partial(self._rerun, frame, run) if keeping else None
        return out

    def _rerun(self, frame: Frame, run: Callable[[], Block]) -> None:
        self._rerunning, self._part, self._made = frame, RECOMPUTE, []
        with suppress(_Enough):
            run()
        self._rerunning, self._part = None, None
        kept = Counter(id(block) for blocks in frame.kept for block in blocks)
        for block in self._made:
            local = block.held - kept[id(block)]
            for _ in range(local):
                self.drop(block)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, loss: Block, *, retain: bool = False) -> None:
        """Run all operators' backwards; what they kept is freed on the way, unless ``retain``: another follows."""
        self._phase = PHASES.index(FORWARD)
        root = self.new(loss.size)
        pending: dict[int, Block] = {id(loss): self.keep(root)}
        self._forward_ends.append(len(self._phases) - 1)
        for allocation, death in enumerate(self._deaths):
            if death < 0 and self._births[allocation] > 0 and self._parts[allocation] == _CODE[TEMPORARIES]:
                self._parts[allocation] = _CODE[ACTIVATIONS]
        self._phase = PHASES.index(BACKWARD)
        nodes, self._nodes = self._nodes, self._nodes if retain else []
        places = _places(nodes)
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            gradient = pending.pop(id(node.out), None)
            if gradient is None:
                raise AssertionError(f"operator {number} of the tape got no gradient")
            kept = node.kept
            if node.frame is not None:
                kept = self._recomputed(node.frame, places[number]) if node.saves else ()
            results = list(node.backward(gradient))
            if node.frame is not None or not retain:
                self.drop(*kept)
            if node.frame is not None and places[number] == node.frame.first:
                node.frame.kept, node.frame.ran = [], False
                self.drop(*(() if retain else node.frame.inputs))
            self.drop(gradient)
            for target, block in results:
                if isinstance(target, Weight):
                    self._ready(target, block)
                else:
                    pending[id(target)] = self._sum(pending.get(id(target)), block)
        self.drop(root)
        if not retain:
            self._uses.clear()
        self._phase = PHASES.index(FORWARD)

    def _recomputed(self, frame: Frame, place: int) -> tuple[Block, ...]:
        if frame.rerun is not None and not frame.ran:
            frame.ran = True
            frame.rerun()
        return frame.kept[place] if place < len(frame.kept) else ()

    def _sum(self, first: Block | None, second: Block, part: str | None = None) -> Block:
        if first is None:
            return second
        if self._in_place and first.held == 1:
            self.drop(second)
            return first
        total = self.new(first.size, part)
        self.drop(first, second)
        return total

    def _ready(self, weight: Weight, gradient: Block) -> None:
        """What a weight's gradient meets: the rest of it (tied), a sum over micro-batches, an update, or ``.grad``."""
        self._parts[gradient.allocation] = _CODE[GRADIENTS]
        so_far, count = self._partial.get(weight.name, (None, 0))
        total = self._sum(so_far, gradient, GRADIENTS)
        if count + 1 < self._uses.get(weight.name, 1):
            self._partial[weight.name] = total, count + 1
            return
        self._partial.pop(weight.name, None)
        self.complete(weight, total)

    def complete(self, weight: Weight, gradient: Block) -> None:
        """All of a weight's gradient is there."""
        if self.gradients_are == "applied":
            self.update(weight)
        if self.gradients_are in ("applied", "dropped"):
            self.drop(gradient)
        elif self.gradients_are == "gathered" and weight.elements * self._accumulate != weight.gradient_bytes:
            if weight.name not in self._gradients:
                total = self._gradients[weight.name] = self.new(weight.elements * self._accumulate, UPDATE)
                self._sums.append((weight, total))
            self.drop(gradient)
        else:
            if weight.name not in self._gradients:
                self._sums.append((weight, gradient))
            before = self._gradients.pop(weight.name, None)
            self._gradients[weight.name] = gradient if before is None else before
            if before is not None:
                self.drop(gradient)

    def update(self, weight: Weight) -> None:
        """Update a weight; in a first step its state appears."""
        if self.makes_states:
            self.new(weight.state_bytes, OPTIMIZER_STATES)
        self.touch(weight.update_bytes, UPDATE)

    def apply_sums(self) -> None:
        """Update by what was gathered, one weight after the other, and free it."""
        for weight, total in self._sums:
            self.update(weight)
            self.drop(total)
        self._sums, self._gradients = [], {}

    # -- results ------------------------------------------------------------------------------------------------------

    def timeline(self) -> MemoryTimeline:
        """Bytes by part after every event, as a tracker gives them; times count events."""
        times = [float(event) for event in range(len(self._phases))]
        return resolve(times, self._phases, self._births, self._deaths, self._sizes, self._parts, self._forward_ends)


def _places(nodes: Sequence[_Node]) -> list[int]:
    """The place of each node within its frame."""
    counts: dict[int, int] = {}
    places = []
    for node in nodes:
        key = id(node.frame)
        places.append(counts.get(key, 0))
        counts[key] = places[-1] + 1
    return places

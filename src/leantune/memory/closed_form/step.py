"""One training step of a model by closed form: its blocks, loss and updates walked over a tape."""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from leantune.memory.closed_form.block import DecoderBlock
from leantune.memory.closed_form.linears import Linears
from leantune.memory.closed_form.loss import Head, tiled_loss, whole_logits_loss
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.operators import INDEX, Operators
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.closed_form.tape import Block, Tape
from leantune.memory.closed_form.weights import WeightTable
from leantune.memory.measured.timeline import MemoryTimeline
from leantune.memory.parts import INPUTS, OPTIMIZER_STATES, TEMPORARIES, UPDATE, WEIGHTS


def walk_step(shape: ModelShape, settings: RunSettings, table: WeightTable) -> MemoryTimeline:
    """A steady step: forward, backward and update, as `leantune.memory.traced.trace` walks it on fake tensors."""
    accumulate = 2 if settings.accumulate == "bfloat16" else 4
    with _uncollected():
        walk = _Walk(shape, settings, table, Tape(accumulate=accumulate))
        walk.train()
        return walk.tape.timeline()


def walk_first_step(shape: ModelShape, settings: RunSettings, table: WeightTable) -> MemoryTimeline:
    """The step before: states appear one after the other, at each weight's update."""
    with _uncollected():
        walk = _Walk(shape, settings, table, Tape(accumulate=2 if settings.accumulate == "bfloat16" else 4))
        walk.tape.makes_states = True
        walk.train()
        return walk.tape.timeline()


def walk_evaluation(shape: ModelShape, settings: RunSettings, table: WeightTable) -> MemoryTimeline:
    """A forward of one evaluation batch, of training's size, that keeps nothing."""
    with _uncollected():
        walk = _Walk(shape, settings, table, Tape())
        walk.tape.keeps = False
        walk.begin()
        walk.tape.drop(walk.forward())
        return walk.tape.timeline()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Looking for cycles among the tape's many small objects, of which there are none, takes as long as the walk."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Walk:
    def __init__(self, shape: ModelShape, settings: RunSettings, table: WeightTable, tape: Tape) -> None:
        self.shape, self.settings, self.table, self.tape = shape, settings, table, tape
        self.ops = Operators(tape, settings.tokens, settings.item_bytes)
        self.linears = Linears(shape, settings, table)

    def train(self) -> None:
        """At most two micro-batches: a third looks like the second."""
        settings, tape = self.settings, self.tape
        self.begin()
        micro_batches = min(2, settings.micro_batches)
        for _ in range(micro_batches):
            loss = self.forward()
            if settings.fused and micro_batches == 1:
                if settings.two_passes:
                    tape.gradients_are = "dropped"
                    tape.backward(loss, retain=True)
                tape.gradients_are = "applied"
            elif settings.fused:
                tape.gradients_are = "gathered"
            tape.backward(loss)
            tape.drop(loss)
        if settings.fused:
            tape.apply_sums()
        else:
            self._update_at_once()

    def _update_at_once(self) -> None:
        """After an ordinary backward: all gradients are there."""
        if self.tape.makes_states and self.table.cost.ours:
            # As a config's parameter groups come: matrices, then vectors.
            trained = [weight for weight in self.table.values() if weight.trained]
            for weight in sorted(trained, key=lambda weight: len(self.table.shapes[weight.name]) < 2):
                self.tape.update(weight)
            return
        if self.tape.makes_states:  # torch's own make all states before they update
            self.tape.new(self.table.state_bytes, OPTIMIZER_STATES)
        self.tape.touch(self.table.whole_update_bytes, UPDATE)

    def begin(self) -> None:
        """What is there before the step."""
        self.tape.hold(self.table.weight_bytes, WEIGHTS)
        if not self.tape.makes_states:
            self.tape.hold(self.table.state_bytes, OPTIMIZER_STATES)
        # Tokens and labels; what is padding, or the positions of packed rows.
        self.tape.hold((3 if self.settings.padded else 2) * self.settings.tokens * INDEX, INPUTS)

    def forward(self) -> Block:
        tape, ops, shape = self.tape, self.ops, self.shape
        embedded = x = self._embed()
        masks = self._masks()
        turn, positions = self._tables()
        for layer in range(shape.layers):
            run = functools.partial(self._block(layer, turn, masks).run, x)
            out = tape.checkpointed(run, (x, *turn, positions, *masks[:1])) if self._is_checkpointed(layer) else run()
            if x is not embedded:
                tape.drop(x)
            x = out
        name = "model.norm.weight"
        hidden = ops.rms_norm(x, ops.tokens, shape.hidden, self.table[name], widened=shape.widened_norms)
        tape.drop(x, *turn, positions, *masks)
        if x is not embedded:
            tape.drop(embedded)
        head = self._head()
        loss = (tiled_loss if self.settings.exact_loss else whole_logits_loss)(tape, head, hidden)
        tape.drop(hidden)
        return loss

    def _is_checkpointed(self, layer: int) -> bool:
        every = self.settings.checkpoint_every
        return bool(every) and layer % every == 0

    def _embed(self) -> Block:
        weight, size = self.table["model.embed_tokens.weight"], self.ops.tokens * self.shape.hidden * self.ops.size
        out = self.tape.new(size)
        if weight.trained:
            self.tape.uses(weight)
            self.tape.node(out, (), lambda g: [(weight, self.tape.new(weight.gradient_bytes))])
        # Checkpointing asks embeddings for gradients, so that the first block is run again.
        constant = not weight.trained and not self.settings.checkpoint_every
        out.constant = constant
        if not weight.trained and not constant:
            self.tape.node(out, (), lambda g: [])
        if not self.shape.scaled_embedding:
            return out
        scaled = self.tape.new(size)
        scaled.constant = constant
        if not constant:
            self.tape.node(scaled, (), lambda g: [(out, self.tape.new(size))])
        self.tape.drop(out)
        return scaled

    def _tables(self) -> tuple[tuple[Block, Block], Block]:
        """Cosines and sines of the rotary positions, and the positions."""
        size = self.settings.length * self.shape.head_size * self.ops.size
        return (self.tape.new(size), self.tape.new(size)), self.tape.new(self.settings.length * INDEX)

    def _masks(self) -> list[Block]:
        """Where rows are padded or packed: which tokens see which, once for each kind of attention."""
        if not self.settings.padded:
            return []
        masks = []
        for _ in range(self.shape.rotary_kinds):
            causal = self.tape.new(self.settings.length**2)
            self.tape.touch(self.settings.length**2, TEMPORARIES)
            masks.append(self.tape.new(self.settings.batch_size * self.settings.length**2))
            self.tape.drop(causal)
        return masks

    def _block(self, layer: int, turn: tuple[Block, Block], masks: list[Block]) -> DecoderBlock:
        return DecoderBlock(
            self.shape,
            self.shape.block_prefix(layer),
            self.table,
            self.linears,
            self.ops,
            turn,
            masks[0] if masks else None,
            self.settings.swiglu,
        )

    def _head(self) -> Head:
        shape, settings = self.shape, self.settings
        weight = self.table["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        return Head(
            tokens=settings.tokens,
            vocabulary=shape.vocabulary,
            hidden=shape.hidden,
            size=settings.item_bytes,
            weight=weight,
            softcap=shape.softcap is not None,
            native=settings.cuda and settings.item_bytes == 2,
            in_tiles=settings.fused and not shape.tied and self.table.tileable and settings.micro_batches == 1,
        )

"""The dropout before an adapter: with its mask kept, or drawn again from the generator's state."""

from dataclasses import dataclass

from leantune.memory.closed_form.operators import Operators, Remade
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.closed_form.tape import Block, Results

STATE_BYTES = 5056
"""A CPU generator's state. A GPU's, 16 bytes, lies on the host."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of ``x``, (tokens, inner) in the adapters' dtype."""

    ops: Operators
    settings: RunSettings
    x: Block
    inner: int

    @property
    def _mask_bytes(self) -> int:
        """A byte an element on a GPU; on a CPU the factors themselves."""
        return self.ops.tokens * self.inner * (1 if self.settings.cuda else self.ops.size)

    def run(self, remade: Remade | None, *, replayed: bool) -> tuple[Block, Remade | None, tuple[Block, ...]]:
        """(the dropped-out copy, how it is made again where it needs not be kept, what to let go of after its use).

        Args:
            remade: how ``x`` is made again, where it is not kept.
            replayed: VeLoRA's layer draws the mask again whatever exact savings do.
        """
        exact = self.settings.dropout and self._mask_bytes > (16 if self.settings.cuda else STATE_BYTES)
        if not exact:
            return (self._replayed() if replayed else self._masked()), None, ()
        tape, x = self.ops.tape, self.x
        state = self._state()
        mask, out = tape.new(self._mask_bytes), tape.new(x.size)

        def back(gradient: Block) -> Results:
            # The dropout runs again, on a tensor of x's size, for its mask.
            like, again, dropped = tape.new(x.size), tape.new(self._mask_bytes), tape.new(x.size)
            tape.drop(dropped, like)
            to_x = tape.new(x.size)
            tape.drop(again)
            return [(x, to_x)]

        tape.node(out, (state,), back, (x,))
        tape.drop(mask)
        again = self._again(state, remade) if self.settings.shared_adapter_input else None
        return out, again, (state,)

    def _again(self, state: Block, remade: Remade | None) -> Remade:
        tape, x = self.ops.tape, self.x

        def make() -> Block:
            source = None if remade is None else remade.make()
            mask, out = tape.new(self._mask_bytes), tape.new(x.size)
            tape.drop(mask)
            if source is not None:
                tape.drop(source)
            return out

        return Remade((state, *((x,) if remade is None else remade.leaves)), make)

    def _masked(self) -> Block:
        tape, x = self.ops.tape, self.x
        mask, out = tape.new(self._mask_bytes), tape.new(x.size)
        tape.node(out, (mask,), lambda g: [(x, tape.new(x.size))], (x,))
        tape.drop(mask)
        return out

    def _replayed(self) -> Block:
        """`leantune.activations.replayed_dropout`."""
        tape, x = self.ops.tape, self.x
        if x.constant:
            return self._masked()
        state = self._state()
        mask, out = tape.new(self._mask_bytes), tape.new(x.size)

        def back(gradient: Block) -> Results:
            again, to_x = tape.new(self._mask_bytes), tape.new(x.size)
            tape.drop(again)
            return [(x, to_x)]

        tape.node(out, (state,), back)
        tape.drop(mask, state)
        return out

    def _state(self) -> Block:
        return self.ops.tape.new(0 if self.settings.cuda else STATE_BYTES)

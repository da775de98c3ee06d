"""Loss scaling: float16 gradients underflow unless the loss is multiplied first, and overflow where it is multiplied by
too much."""

from typing import Any

from leantune.errors import InvalidArgumentError, NonFiniteError, StateMismatchError

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24


class LossScale:
    """The factor of the loss. A step whose gradients overflow is dropped whole and halves it; ``grow_every`` whole
    steps in a row double it, up to 2^24.

    ``initial``: from 1 to 2^24. Raises InvalidArgumentError. Source: Micikevicius et al. 2018, arXiv 1710.03740.

    >>> scale = LossScale(initial=4.0, grow_every=2)
    >>> scale.overflowed(); scale.whole_step(); scale.whole_step(); scale.value
    4.0
    """

    def __init__(self, initial: float = INITIAL_SCALE, grow_every: int = 2000) -> None:
        if not 1 <= initial <= LARGEST_SCALE:
            raise InvalidArgumentError(f"the loss scale is {initial}; it must lie between 1 and 2^24.")
        if grow_every < 1:
            raise InvalidArgumentError(f"grow_every is {grow_every}; it must be at least 1 step.")
        self.value = float(initial)
        self.grow_every = grow_every
        self.clean_steps = 0

    def overflowed(self) -> None:
        """Halve it. Raises NonFiniteError where it is 1: then the gradients overflow by themselves."""
        if self.value == 1.0:
            raise NonFiniteError(
                "a gradient overflows float16, or holds NaN, at a loss scale of 1: scaling cannot help. Nothing has "
                "been updated. Look at the loss and the learning rate, or train in bfloat16."
            )
        self.value, self.clean_steps = max(1.0, self.value / 2), 0

    def whole_step(self) -> None:
        self.clean_steps += 1
        if self.clean_steps == self.grow_every:
            self.value, self.clean_steps = min(LARGEST_SCALE, 2 * self.value), 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateMismatchError, with nothing changed, for what ``state_dict()`` did not give."""
        if set(state) != {"scale", "clean_steps"} or not 1 <= float(state["scale"]) <= LARGEST_SCALE:
            raise StateMismatchError(f"{state!r} is not the state of a loss scale (scale, clean_steps).")
        self.value, self.clean_steps = float(state["scale"]), int(state["clean_steps"])

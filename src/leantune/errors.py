"""The exceptions leantune raises: each says what was wrong, why it cannot work, and what to write instead."""


class LeantuneError(Exception):
    """Base of every error raised on purpose by leantune."""

    exit_code = 2
    """What a command that ends with this error returns to the shell."""


class InvalidArgumentError(LeantuneError, ValueError):
    """An argument has a value that cannot work. Raised before anything is loaded or changed."""


class InvalidTypeError(LeantuneError, TypeError):
    """An argument is of a kind that cannot work (a complex parameter, a sparse gradient...)."""


class StateMismatchError(LeantuneError, RuntimeError):
    """A saved state does not belong to this optimizer or model. Nothing has been changed."""


class NonFiniteError(LeantuneError, RuntimeError):
    """A loss or a gradient holds NaN or Inf. The message says what, if anything, has already moved."""


class BackwardError(LeantuneError, RuntimeError):
    """A fused backward pass was used in a way in which a parameter would silently get a wrong update, or none."""


class ConfigError(LeantuneError, ValueError):
    """A training configuration or data file is wrong; the message lists every problem found."""


class MemoryBudgetError(LeantuneError, RuntimeError):
    """Live tensors would exceed the memory budget. Raised where it happens; the command ends with exit code 3.

    Args: ``live``, ``budget`` and ``size`` (of the allocation that went over) in bytes; ``part`` is one of
    `leantune.memory.PARTS`, ``phase`` a stage of the step, ``module`` and ``operator`` what asked for the memory.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, live: int, budget: int, size: int, part: str, phase: str, module: str, operator: str
    ) -> None:
        super().__init__(message)
        self.live, self.budget, self.size = live, budget, size
        self.part, self.phase, self.module, self.operator = part, phase, module, operator


class NotEnoughRoomError(LeantuneError, RuntimeError):
    """Memory or disk would not hold what is to be made. Raised before anything is loaded or written."""

    exit_code = 3


class WriteError(LeantuneError, RuntimeError):
    """The disk did not take what a run writes. The message says which checkpoint is whole. The command ends with exit
    code 3."""

    exit_code = 3


class StoppedError(LeantuneError, RuntimeError):
    """A run was told to stop by a signal (SIGINT, SIGTERM); its checkpoint is written. The command ends with 128
    plus the ``number`` of the signal, as a shell reports it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + int(number)


class LaunchError(LeantuneError, RuntimeError):
    """Processes that were started for a run did not all come to its end. The command ends with ``exit_code``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

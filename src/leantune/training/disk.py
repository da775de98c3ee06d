"""What a run says when the disk does not take what it writes."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leantune.errors import LeantuneError, WriteError
from leantune.training.checkpoints import checkpoints

_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG}
_TOLD = re.compile("|".join(os.strerror(number) for number in sorted(_REFUSED)))
_TORCH = re.compile(r"PytorchStreamWriter|iostream error|unexpected pos")


@dataclass
class Writing:
    """How far a run has come with what it writes to ``folder``."""

    folder: Path
    model_is_whole: bool = False
    """Set once the trained model is in its folder: what is missing then are reports."""

    def left(self) -> str:
        """What is left after a write was refused, and how to go on."""
        if self.model_is_whole:
            return "The model is trained and written, whole; reports on the run (plots, summary, run card) are missing"
        if found := checkpoints(self.folder):
            return (
                f"The last whole checkpoint is {found[-1]}. Make room, then the same command with resume: true goes on"
            )
        return "There is no checkpoint yet. Make room, or write another output_dir, and start again"


@contextmanager
def writes_are_told(folder: Path, left: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a failed write under ``folder``, whichever library wrote, into a `WriteError` that says what is
    ``left`` and how to go on. Errors that say so themselves pass."""
    try:
        yield
    except LeantuneError:
        raise
    except Exception as error:
        reason = refused_write(error, folder)
        if reason is None:
            raise
        raise WriteError(f"{folder} could not be written: {reason}. {left()}") from error


def refused_write(error: BaseException | None, folder: Path) -> str | None:
    """Why the system refused a write under ``folder``, in its own words; None where ``error`` is no such thing.

    Python's errors have a number; those of safetensors and tokenizers have words alone, torch's writer not even those.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSED:
            place = Path(str(error.filename)) if error.filename else folder
            if folder.resolve() in (place.resolve(), *place.resolve().parents):
                return str(error.strerror)
        elif told := _TOLD.search(str(error)):
            return told.group()
        elif isinstance(error, RuntimeError) and _TORCH.search(str(error)):
            return "torch could not write a file (a full disk, most often)"
        error = error.__cause__ or error.__context__
    return None

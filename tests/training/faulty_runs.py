"""Runs that fail at the k-th write: a process that has everything imported and trains in children of its own.

    LD_PRELOAD=faulty_writes.so python faulty_runs.py FOLDER JSON

JSON: {"keys": the run's config, "kinds": ["full", "denied", "killed"], "most": how many places to try}. Prints one JSON
line a run: kind, place, how the faulty run ended, what it said, and whether the run that follows it without faults
(resumed where a checkpoint is left) ends with the weights of a run without faults.
"""

import ctypes
import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from leantune.errors import LeantuneError
from leantune.training.checkpoints import checkpoints
from leantune.training.config import build_config
from leantune.training.run import train

ERRORS = {"full": errno.ENOSPC, "denied": errno.EACCES, "killed": 0}
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def preloaded() -> Any:
    """faulty_writes.so, which this process was started under."""
    library = ctypes.CDLL(None)
    library.faults_seen.restype = ctypes.c_long
    return library


def child(keys: dict[str, Any], output: Path, place: int, number: int, said: Path) -> int:
    """A run in a process of its own; its exit code (0 trained, 3 refused write, 1 another error), -9 killed. ``said``
    gets its message, and the number of writes."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code, library = 0, preloaded()
    try:
        library.faults_arm(str(output).encode(), ctypes.c_long(place), number)
        config = build_config(keys | {"output_dir": str(output)})
        train(config, console=Console(file=io.StringIO()))
        said.write_text(str(library.faults_seen()))
    except LeantuneError as error:
        code = error.exit_code
        said.write_text(f"{type(error).__name__}: {error}")
    except BaseException as error:
        code = 1
        said.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def weights(output: Path) -> bytes:
    return next(output / name for name in WEIGHTS if (output / name).exists()).read_bytes()


def main() -> None:
    torch.set_num_threads(1)
    folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    keys, said = asked["keys"], folder / "said.txt"
    assert child(keys, folder / "whole", 0, 0, said) == 0, said.read_text()
    writes, expected = int(said.read_text()), weights(folder / "whole")
    print(json.dumps({"writes": writes}), flush=True)
    step = max(1, writes // asked["most"])
    for kind in asked["kinds"]:
        for place in range(1, writes + 1, step):
            output = folder / f"{kind}-{place}"
            said.write_text("")
            code = child(keys, output, place, ERRORS[kind], said)
            message = said.read_text()
            left = [path.name for path in checkpoints(output)] if output.exists() else []
            finished = any((output / name).exists() for name in WEIGHTS)
            more: dict[str, Any] = {"resume": True} if left else {}
            again, then = 0, ""
            if not (finished and left and left[-1] == f"checkpoint-{keys['max_steps']}"):
                if finished or (output.exists() and not left):
                    shutil.rmtree(output)  # as the message says: start again
                again = child(keys | more, output, 0, 0, said)
                then = said.read_text() if again else ""
            same = again == 0 and weights(output) == expected
            found = {"kind": kind, "place": place, "code": code, "said": message, "left": left, "then": then}
            found["finished"] = finished
            print(json.dumps(found | {"same": same}), flush=True)
            shutil.rmtree(output, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Commands that fail at the k-th write, each in a child of a process that has everything imported.

    LD_PRELOAD=faulty_writes.so python faulty_commands.py FOLDER JSON

JSON: {"command": words, in which {out} is the folder to write to, "expected": exit code without faults, "kinds":
["full", "denied", "killed"], "most": how many places to try}. Prints one JSON line a run: kind, place, exit code, what
was said on stderr, which files were left, and the exit code of the same command again, without faults.
"""

import contextlib
import ctypes
import errno
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from leantune import cli
from leantune.training.profiling import profile as profiling
from leantune.training.profiling import resumed_step
from leantune.training.saved import evaluation, merge  # noqa: F401  (imported before the children are made)

ERRORS = {"full": errno.ENOSPC, "denied": errno.EACCES, "killed": 0}
library = ctypes.CDLL(None)


def child(words: list[str], output: Path, place: int, number: int, said: Path) -> int:
    """The command's exit code, -9 where it was killed; ``said`` gets its stderr, and the number of writes."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code, told = 0, io.StringIO()
    try:
        sys.argv = ["leantune", *[word.replace("{out}", str(output / "out")) for word in words]]
        library.faults_arm(str(output).encode(), ctypes.c_long(place), number)
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        code = 1
        told.write(f"Traceback: {type(error).__name__}: {error}")
    finally:
        writes = library.faults_seen()
        library.faults_arm(b"", ctypes.c_long(0), 0)
        said.write_text(json.dumps({"writes": writes, "said": told.getvalue()}))
        os._exit(code)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def in_this_process(command: list[str], **_: object) -> SimpleNamespace:
    """A profile resumes in a process of its own, which takes longer than everything else here."""
    sys.argv = command[2:]
    resumed_step.main()
    return SimpleNamespace(returncode=0, stderr="")


def main() -> None:
    library.faults_seen.restype = ctypes.c_long
    torch.set_num_threads(1)
    profiling.subprocess = SimpleNamespace(run=in_this_process)  # type: ignore[attr-defined]
    folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    words, said = asked["command"], folder / "said.json"
    place = folder / "whole"
    place.mkdir()
    code = child(words, place, 0, 0, said)
    first = json.loads(said.read_text())
    print(json.dumps({**first, "code": code, "files": files(place)}), flush=True)
    step = max(1, first["writes"] // asked["most"])
    for kind in asked["kinds"]:
        for at in range(1, first["writes"] + 1, step):
            output = folder / f"{kind}-{at}"
            output.mkdir()
            said.write_text('{"said": ""}')
            code = child(words, output, at, ERRORS[kind], said)
            found = {"kind": kind, "place": at, "code": code, "said": json.loads(said.read_text())["said"]}
            found["left"] = files(output)
            again = child(words, output, 0, 0, said)
            print(json.dumps({**found, "again": again, "files": files(output)}), flush=True)


if __name__ == "__main__":
    main()

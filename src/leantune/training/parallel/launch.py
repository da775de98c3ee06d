"""``--nproc_per_node``: this command again in several processes of this machine, and a word on the one that fails."""

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from leantune.errors import ConfigError, LaunchError

_NAMES = ("--nproc_per_node", "--nproc-per-node", "--nproc_per-node", "--nproc-per_node")
_SAVING_SECONDS = 600
"""What processes are given, after a signal, to finish their step and write a checkpoint."""
_LINES = 12
"""Of a failed process's last words."""


def take_nproc(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """(number of processes, the arguments without it); None where it is not given.

    Raises ConfigError where it is no number of at least 1.

    >>> take_nproc(["run.yaml", "--nproc_per_node", "2", "--resume"])
    (2, ['run.yaml', '--resume'])
    """
    rest: list[str] = []
    found: str | None = None
    items = list(arguments)
    while items:
        item = items.pop(0)
        name, equals, value = item.partition("=")
        if name not in _NAMES:
            rest.append(item)
            continue
        if found is not None:
            raise ConfigError("- --nproc_per_node is given twice; keep one of them")
        found = value if equals else items.pop(0) if items else ""
    if found is None:
        return None, rest
    if not found.isdecimal() or int(found) < 1:
        raise ConfigError(f"- --nproc_per_node is {found!r}; it is a number of processes, one a GPU: at least 1")
    return int(found), rest


def launch(processes: int, arguments: Sequence[str], output_dir: str) -> None:
    """Run ``leantune train arguments`` in that many processes and wait for all of them. The first one has the terminal.

    Raises ConfigError where there are fewer GPUs, or this is a process of a launcher already; LaunchError where a
    process fails, with its rank, its last words and how to go on.
    """
    _check(processes)
    # torchrun is silent on this, and N processes with all cores each are slower than one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="leantune-logs-") as logs:
        others = dict.fromkeys(range(1, processes), Std.ALL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id="leantune",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=others),
            shutdown_timeout=_SAVING_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "leantune", "train", *arguments)
        except SignalException as stopped:
            number = int(stopped.sigval)
            name = signal.Signals(number).name
            raise LaunchError(f"stopped by {name}. {going_on(output_dir)}", 128 + number) from None
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            rank = _root(codes, failed.get_first_failure()[0])
            words = _last_words(Path(logs), rank) if codes[rank] > 0 else ""
            raise _failure(rank, codes[rank], words, output_dir) from None


def going_on(output_dir: str) -> str:
    """How a run that ended goes on."""
    from leantune.training.checkpoints import checkpoints

    found = checkpoints(output_dir)
    if not found:
        return "There is no checkpoint yet: start it again."
    return f"The last whole checkpoint is {found[-1]}; the same command with --resume goes on from it."


def _check(processes: int) -> None:
    import torch

    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "- --nproc_per_node starts processes, and this is one of a launcher already (torchrun, accelerate launch); "
            "leave it out, or start leantune train alone"
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < processes:
        raise ConfigError(
            f"- --nproc_per_node is {processes}, one a GPU, and there are {torch.cuda.device_count()} here (as "
            "CUDA_VISIBLE_DEVICES allows)"
        )


def _root(codes: dict[int, int], first: int) -> int:
    """The rank that failed by itself: one that was killed before those that missed it; SIGTERM comes from the
    launcher."""
    killed = [rank for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM]
    return min(killed) if killed else first


def _failure(rank: int, code: int, words: str, output_dir: str) -> LaunchError:
    if code > 128:  # it has stopped on purpose, and written a checkpoint
        return LaunchError(f"stopped by {signal.Signals(code - 128).name}. {going_on(output_dir)}", code)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    memory = " (Linux does this when memory runs out)" if -code == signal.SIGKILL else ""
    said = f"\nIts last words:\n{words}" if words else ""
    return LaunchError(
        f"rank {rank} {how}{memory}; the other ranks were ended. {going_on(output_dir)}{said}",
        code if code > 0 else 128 - code,
    )


def _last_words(logs: Path, rank: int) -> str:
    """The end of what a process other than the first wrote; the first one's is on the terminal."""
    for path in logs.glob(f"*/attempt_0/{rank}/stderr.log"):
        return "\n".join(f"  {line}" for line in path.read_text(errors="replace").splitlines()[-_LINES:])
    return ""

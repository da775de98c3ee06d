"""Rows that are read and tokenised while training asks for them: for data that fit on no disk."""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leantune.errors import ConfigError
from leantune.training.config import TrainConfig
from leantune.training.data.problems import Problem
from leantune.training.data.report import DROPPED_FILE, SourceReport
from leantune.training.data.row_stream import Remarks, RowStream
from leantune.training.data.sources import find_files, read
from leantune.training.pretrained import ModelLimits

SHUFFLED_TOGETHER = 1000
"""Rows held at a time, from which the next one is drawn."""


@dataclass(frozen=True)
class _Streamed:
    config: TrainConfig
    tokenizer: Any
    limits: ModelLimits
    length: int


def streamed(config: TrainConfig, tokenizer: Any, limits: ModelLimits | None, length: int) -> Any:
    """An IterableDataset of the run's rows: pass after pass over all sources, without an end.

    A pass is shuffled a thousand rows at a time, by the seed and its number. Without an end there is one epoch, so that
    a resumed run skips exactly the batches it has seen; transformers loses its place where a stream begins anew.

    A row that cannot be used stops the run when it comes, or with drop_invalid is left out and written to
    output_dir/dropped.jsonl (which holds those of the last pass).
    """
    from datasets import Features, IterableDataset, List, Value

    numbers = List(Value("int32"))
    return IterableDataset.from_generator(
        _passes,
        features=Features({"input_ids": numbers, "labels": numbers}),
        gen_kwargs={"run": _Streamed(config, tokenizer, limits or ModelLimits(), length)},
    )


def rows_digest(config: TrainConfig) -> str:
    """What stands for the rows of a streamed run when it is resumed: names, and sizes and times of files."""
    known: list[Any] = []
    for source in config.sources:
        for file in find_files("dataset", source) or []:
            facts = file.stat()
            known.append([str(file), facts.st_size, facts.st_mtime_ns])
        known.append(source)
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _passes(run: _Streamed) -> Iterator[dict[str, list[int]]]:
    for number in itertools.count():
        rows = _shuffled(_rows(run), random.Random(f"{run.config.seed} {number}"))
        first = next(rows, None)
        if first is None:
            raise ConfigError(f"- dataset: {', '.join(run.config.sources)}: no row is left to train on")
        yield first
        yield from rows


def _shuffled(rows: Iterator[Any], draw: random.Random) -> Iterator[Any]:
    """Each row once, drawn from the thousand that are held."""
    held: list[Any] = []
    for row in rows:
        if len(held) < SHUFFLED_TOGETHER:
            held.append(row)
            continue
        place = draw.randrange(len(held))
        out, held[place] = held[place], row
        yield out
    draw.shuffle(held)
    yield from held


def _rows(run: _Streamed) -> Iterator[dict[str, list[int]]]:
    dropped = 0
    for name in run.config.sources:
        source = SourceReport("dataset", name)
        items = read("dataset", name, streaming=True)
        for item in RowStream(items, source, run.tokenizer, run.limits, Remarks()):
            problem = item if isinstance(item, Problem) else None
            if not isinstance(item, Problem):
                if item.start < run.length:
                    yield {"input_ids": item.ids[: run.length], "labels": item.labels[: run.length]}
                    continue
                why = f"nothing is left to learn within max_length {run.length}"
                problem = Problem(item.place, why, raw=run.tokenizer.decode(item.ids))
            if problem is not None and problem.severity != "note":
                _refuse_or_drop(run.config, problem, first=dropped == 0)
                dropped += 1


def _refuse_or_drop(config: TrainConfig, problem: Problem, first: bool) -> None:
    if problem.severity == "file" or not config.drop_invalid:
        raise ConfigError(f"- dataset: {problem} (drop_invalid: true leaves out rows that cannot be used)")
    path = Path(config.output_dir) / DROPPED_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if first else "a", encoding="utf-8") as file:
        file.write(json.dumps({**problem.to_json(), "data": problem.raw}, default=str) + "\n")

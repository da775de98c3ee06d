"""From data sets to rows of token ids and labels: one way for ``train``, which stops on what is wrong, and
``validate``, which tells it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from leantune.errors import ConfigError
from leantune.training.config import TrainConfig
from leantune.training.data.problems import Problem
from leantune.training.data.report import DataReport, SourceReport
from leantune.training.data.row_stream import Remarks, RowStream
from leantune.training.data.sources import read
from leantune.training.data.streaming import rows_digest, streamed
from leantune.training.data.token_rows import TokenRows
from leantune.training.pretrained import ModelLimits

STREAMED_AHEAD = 256
"""Rows of each source that a streamed run looks at before it starts."""
VALIDATED_OF_A_STREAM = 10_000
"""Rows of each source that ``validate`` looks at where the config says streaming."""
_LENGTH_STEP = 64


@dataclass
class PreparedData:
    """``train`` and ``held_out`` are data sets of ``input_ids`` and ``labels`` (-100 where nothing is learnt).

    ``rows`` is None, and ``train`` an IterableDataset, where rows are streamed. ``digest`` then stands for them.
    """

    train: Any
    held_out: Any | None
    report: DataReport
    max_length: int
    longest: int = 0
    padded: bool = True
    rows: int | None = None
    digest: str | None = None
    lengths: Any | None = None
    """Tokens of each row of ``train``, cut as they are; None where they are not known before they are read."""
    recipe: Any | None = None
    """What ``method: auto`` chose for these rows (`leantune.training.planning.recipe.Recipe`)."""
    notes: list[str] = field(default_factory=list)
    kept: list[TokenRows] = field(default_factory=list, repr=False)
    """The files behind the data sets live as long as these."""


@dataclass
class Examined:
    """All rows, tokenised, and which of them are to be used: positions in ``train`` and ``held`` (or in ``train``,
    where a share of it is held out)."""

    report: DataReport
    train: TokenRows
    held: TokenRows | None
    train_rows: list[int]
    held_rows: list[int]


def load_data(config: TrainConfig, tokenizer: Any, limits: ModelLimits | None = None) -> PreparedData:
    """Read, check and tokenise the data of a run.

    Chat data and alpaca train on assistant turns and the token that ends them, prompt/completion on the completion,
    text on everything. Whatever `examine` finds wrong is a ConfigError that names files and lines; with
    ``drop_invalid`` rows that cannot be used are left out instead, and listed.
    """
    found = examine(config, tokenizer, limits, STREAMED_AHEAD if config.streaming else None)
    found.report.refuse()
    length = found.report.max_length
    kept = [found.train]
    whole = found.train.dataset(length)
    held_out = None
    if found.held is not None:
        kept.append(found.held)
        held_out = found.held.dataset(length).select(found.held_rows)
    elif found.held_rows:
        held_out = whole.select(found.held_rows)
    lengths = numpy.minimum(numpy.asarray(found.train.lengths)[found.train_rows], length)
    prepared = PreparedData(
        train=whole.select(found.train_rows),
        held_out=held_out,
        report=found.report,
        max_length=length,
        longest=int(lengths.max()),
        padded=bool(lengths.min() < lengths.max()),
        rows=len(found.train_rows),
        lengths=lengths,
        notes=found.report.remarks(),
        kept=kept,
    )
    if config.streaming:
        prepared.train, prepared.lengths = streamed(config, tokenizer, limits, length), None
        prepared.longest, prepared.padded, prepared.rows = length, True, None
        prepared.digest = rows_digest(config)
    return prepared


def examine(
    config: TrainConfig, tokenizer: Any, limits: ModelLimits | None = None, look_at: int | None = None
) -> Examined:
    """Read and tokenise all rows, find what is wrong with them, and choose which are trained on and which held out.

    Args:
        config: names the data, ``max_length`` (``auto``: from the data), ``eval_split``, ``dataset_weights``.
        tokenizer: the model's.
        limits: sizes of the model, where they are known.
        look_at: read that many rows of each source only.
    Raises: ConfigError where a source is not there, or the tokenizer cannot be used with such data.
    """
    limits = limits or ModelLimits()
    report = DataReport(config.drop_invalid)
    report.looked_at = look_at
    train, ranges = TokenRows(), []
    for source in config.sources:
        start = len(train)
        _collect(report, "dataset", source, train, config, tokenizer, limits, look_at)
        ranges.append(range(start, len(train)))
    held = None
    if config.eval_dataset:
        held = TokenRows()
        _collect(report, "eval_dataset", config.eval_dataset, held, config, tokenizer, limits, None)
    report.max_length = _length(config, train.lengths, limits, report.notes)
    usable = _usable(report, train, ranges, tokenizer)
    if held is None:
        usable, held_rows = _split(config, report, train, usable, tokenizer)
    else:
        (held_rows,) = _usable(report, held, [range(len(held))], tokenizer, first=len(ranges))
        report.sources[-1].usable = len(held_rows)
        usable = _without_copies(report, train, usable, held, held_rows, tokenizer)
    for source_report, part in zip(report.sources, usable):
        source_report.usable = len(part)
    return Examined(report, train, held, _weighted(config, report, usable), held_rows)


# --- reading ----------------------------------------------------------------------------------------------------------


def _collect(
    report: DataReport,
    key: str,
    name: str,
    rows: TokenRows,
    config: TrainConfig,
    tokenizer: Any,
    limits: ModelLimits,
    look_at: int | None,
) -> None:
    """Tokenise the rows of one source into ``rows``; what is wrong goes into its part of ``report``."""
    source = SourceReport(key, name)
    report.sources.append(source)
    items = read(key, name, streaming=config.streaming)
    remarks = Remarks()
    for item in RowStream(itertools.islice(items, look_at), source, tokenizer, limits, remarks):
        if isinstance(item, Problem):
            report.add(source, item)
            continue
        place, ids, labels, start = item
        source.example = source.example or (ids, labels)
        rows.append(place, ids, labels, start)
    for note in remarks.notes(name):
        source.findings.add(note)


# --- choosing ---------------------------------------------------------------------------------------------------------


def _length(config: TrainConfig, lengths: Sequence[int], limits: ModelLimits, notes: list[str]) -> int:
    """``max_length``, or the one that suits the rows; what is said about it goes into ``notes``."""
    if config.max_length:
        if limits.positions and config.max_length > limits.positions and max(lengths, default=0) > limits.positions:
            notes.append(
                f"max_length is {config.max_length}, and the model was made for {limits.positions} positions; rows are "
                "longer than that"
            )
        return config.max_length
    length = fitting_length(lengths, limits.positions)
    notes.append(f"max_length: auto is {length}: 99 % of the rows have no more tokens")
    return length


def fitting_length(lengths: Sequence[int], positions: int | None = None) -> int:
    """The 99th percentile of ``lengths``, rounded up to a multiple of 64, within the model's ``positions``. Tokens.

    >>> fitting_length([10] * 98 + [130, 4000]), fitting_length([10] * 98 + [130, 4000], positions=128)
    (192, 128)
    """
    if not len(lengths):
        return positions or _LENGTH_STEP
    mark = int(numpy.percentile(numpy.asarray(lengths), 99, method="lower"))
    length = -(-mark // _LENGTH_STEP) * _LENGTH_STEP
    return min(length, positions) if positions else length


def _usable(
    report: DataReport, rows: TokenRows, ranges: list[range], tokenizer: Any, first: int = 0
) -> list[list[int]]:
    """The rows of each range that hold something to learn within max_length; the others are told."""
    kept = []
    for source, part in zip(report.sources[first:], ranges):
        source.measure(rows.lengths[part.start : part.stop], rows.trained[part.start : part.stop])
        source.cut = sum(rows.lengths[row] > report.max_length for row in part)
        usable = [row for row in part if rows.starts[row] < report.max_length]
        source.masked = len(part) - len(usable)
        if source.masked:
            for row in part:
                if rows.starts[row] >= report.max_length:
                    why = f"nothing is left to learn within max_length {report.max_length}"
                    fix = f"its answer begins after {rows.starts[row]} tokens: raise max_length, or shorten its prompt"
                    report.add(source, Problem(rows.place(row), why, fix, raw=rows.text(row, tokenizer)))
        kept.append(usable)
    return kept


def _split(
    config: TrainConfig, report: DataReport, train: TokenRows, usable: list[list[int]], tokenizer: Any
) -> tuple[list[list[int]], list[int]]:
    """(rows of each source to train on, rows held out): ``eval_split`` of all rows, drawn by the seed."""
    if not config.eval_split:
        return usable, []
    rows = [row for part in usable for row in part]
    held = round(len(rows) * config.eval_split)
    if not 0 < held < len(rows):
        if not report.clean and not config.drop_invalid:
            return usable, []
        raise ConfigError(f"- eval_split: {config.eval_split} of {len(rows)} rows is {held}; both parts need a row")
    order = numpy.random.default_rng(config.seed).permutation(len(rows))
    chosen = {rows[place] for place in order[:held]}
    rest = [[row for row in part if row not in chosen] for part in usable]
    held_rows = sorted(chosen)
    return _without_copies(report, train, rest, train, held_rows, tokenizer), held_rows


def _without_copies(
    report: DataReport,
    train: TokenRows,
    usable: list[list[int]],
    held: TokenRows,
    held_rows: list[int],
    tokenizer: Any,
) -> list[list[int]]:
    """``usable`` without the rows that are also held out: a loss on rows that were trained on says nothing."""
    seen = {held.digests[row]: row for row in held_rows}
    kept = []
    for source, part in zip(report.sources, usable):
        kept.append([row for row in part if train.digests[row] not in seen])
        source.copies = len(part) - len(kept[-1])
        if source.copies:
            for row in part:
                twin = seen.get(train.digests[row])
                if twin is not None:
                    why = f"it is also held out ({held.place(twin)})"
                    fix = "take it out of one of the two"
                    report.add(source, Problem(train.place(row), why, fix, raw=train.text(row, tokenizer)))
    return kept


def _weighted(config: TrainConfig, report: DataReport, usable: list[list[int]]) -> list[int]:
    """The rows of an epoch: each source's as often as its weight says; a fraction is drawn by the seed."""
    if config.dataset_weights is None:
        return [row for part in usable for row in part]
    taken: list[int] = []
    for number, (part, weight) in enumerate(zip(usable, config.dataset_weights)):
        whole, share = divmod(weight, 1)
        drawn = numpy.random.default_rng((config.seed, number)).permutation(len(part))[: round(len(part) * share)]
        rows = part * int(whole) + [part[place] for place in sorted(drawn)]
        if part and not rows:
            name = report.sources[number].name
            raise ConfigError(f"- dataset_weights: {weight:g} of the {len(part)} rows of {name} is none; raise it")
        report.sources[number].taken = len(rows)
        taken += rows
    return taken

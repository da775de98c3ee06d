"""The report on a run's data as tables, and one row as the model sees it."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leantune.training.data.chat import IGNORED
from leantune.training.data.problems import Problem
from leantune.training.data.report import DataReport, SourceReport

_EXAMPLE_TOKENS = 400


def print_report(console: Console, report: DataReport, tokenizer: Any, shown: int) -> None:
    """Lengths, what is wrong (the first ``shown`` of each source), an example with its trained tokens in green."""
    console.print(_sources(report))
    for source in report.sources:
        found = source.findings.of("file", "row")
        if found:
            console.print(_problems(source, found, shown))
        for note in source.findings.of("note"):
            console.print(Text(f"note: {note}"))
    for text in report.notes:
        console.print(Text(f"note: {text}"))
    for source in report.sources:
        if source.example is not None:
            console.print(Text(f"\nthe first row of {source.name}, what is trained on in green:", style="bold"))
            console.print(rendered(*source.example, tokenizer))


def _sources(report: DataReport) -> Table:
    looked = f", the first {report.looked_at:,} rows" if report.looked_at else ""
    table = Table(title=f"data at max_length {report.max_length}{looked}", title_justify="left")
    names = [source.name for source in report.sources]
    table.add_column("")
    for source in report.sources:
        table.add_column(
            source.name if names.count(source.name) == 1 else f"{source.name} ({source.key})", justify="right"
        )
    for label, cell in _ROWS:
        cells = [cell(source) for source in report.sources]
        if any(cells):
            table.add_row(label, *(text or "-" for text in cells))
    return table


_ROWS = (
    ("shape", lambda source: source.shape or "none known"),
    ("rows", lambda source: f"{source.read:,}"),
    ("rows that cannot be used", lambda source: f"{source.findings.counts['row']:,}"),
    ("  with nothing to learn within max_length", lambda source: f"{source.masked:,}" if source.masked else ""),
    ("  that are also held out", lambda source: f"{source.copies:,}" if source.copies else ""),
    ("rows longer than max_length", lambda source: f"{source.cut:,}"),
    ("rows an epoch takes (weighted)", lambda source: "" if source.taken is None else f"{source.taken:,}"),
    ("tokens", lambda source: f"{source.tokens:,}"),
    ("  of them trained on", lambda source: f"{source.trained:,}"),
    ("tokens a row: half have no more than", lambda source: str(source.lengths.get("p50", ""))),
    ("  90 % of them", lambda source: str(source.lengths.get("p90", ""))),
    ("  99 % of them", lambda source: str(source.lengths.get("p99", ""))),
    ("  the longest", lambda source: str(source.lengths.get("longest", ""))),
)


def _problems(source: SourceReport, found: list[Problem], shown: int) -> Table:
    counts = source.findings.counts
    table = Table(title=f"{source.name}: what is wrong", title_justify="left", show_lines=False)
    for column in ("where", "field", "why", "what to do"):
        table.add_column(column, overflow="fold")
    for problem in found[:shown]:
        place = problem.place
        where = f"line {place.line}" if place.line else f"row {place.row}" if place.row else "the file"
        if place.file != source.name:
            where = f"{place.file}, {where}"
        table.add_row(*(Text(cell) for cell in (where, problem.column, problem.why, problem.fix)))
    if (more := counts["file"] + counts["row"] - shown) > 0:
        table.caption = f"and {more} more (--shown {shown + more} shows them, --json writes the first thousand)"
    return table


def rendered(ids: list[int], labels: list[int], tokenizer: Any) -> Text:
    """A row as text: what is learnt in bold green, the rest dim; long rows are shown in part."""
    text = Text()
    place = 0
    end = min(len(ids), _EXAMPLE_TOKENS)
    while place < end:
        learnt = labels[place] != IGNORED
        stop = place
        while stop < end and (labels[stop] != IGNORED) == learnt:
            stop += 1
        text.append(tokenizer.decode(ids[place:stop]), style="bold green" if learnt else "dim")
        place = stop
    if end < len(ids):
        text.append(f" ... ({len(ids) - end} more tokens)", style="dim italic")
    return text

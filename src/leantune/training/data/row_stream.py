"""The rows of one source on their way to token ids, and what is wrong with each; nothing is kept here."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from leantune.training.data.encoding import check_ids, encode, trained_from
from leantune.training.data.problems import BadRowError, Place, Problem
from leantune.training.data.report import SourceReport
from leantune.training.data.shapes import ACCEPTED, Row, Shape, shape_of, unknown_columns
from leantune.training.data.sources import Found
from leantune.training.pretrained import ModelLimits

_STRANGERS = 100
"""After so many rows of no known shape, and none of a known one, the file is not read on."""


class Tokenised(NamedTuple):
    """A row as the model will see it; ``start`` is the place of the first token that is learnt."""

    place: Place
    ids: list[int]
    labels: list[int]
    start: int


class RowStream:
    """The rows of one source, tokenised, or what is wrong with one.

    The shape of the first row that has one is the shape of all.
    """

    def __init__(
        self,
        items: Iterable[Found | Problem],
        source: SourceReport,
        tokenizer: Any,
        limits: ModelLimits,
        remarks: "Remarks",
    ) -> None:
        self._items, self._source, self._tokenizer = items, source, tokenizer
        self._limits, self._remarks = limits, remarks
        self._first_shape: Shape | None = None

    def __iter__(self) -> Iterator[Tokenised | Problem]:
        strangers: list[Found] = []
        wrong_file = False
        for item in self._items:
            if isinstance(item, Problem):
                self._source.read += item.severity == "row"
                wrong_file = wrong_file or item.severity == "file"
                yield item
                continue
            self._source.read += 1
            shape = shape_of(tuple(item[1]))
            if shape is None and self._first_shape is None:
                strangers.append(item)
                if len(strangers) == _STRANGERS:
                    break
                continue
            for place, row in strangers:
                yield self._stranger(place, row, shape)
            strangers.clear()
            yield self._tokenised(*item, shape)
        if strangers:
            place, row = strangers[0]
            asked = " (is its first line a header?)" if place.file.endswith((".csv", ".tsv")) else ""
            why = f"the rows have {unknown_columns(list(row))}{asked}.\n{ACCEPTED}"
            yield Problem(Place(place.file), why, severity="file")
        elif not self._source.read and not wrong_file:
            yield Problem(Place(self._source.name), "it holds no rows", severity="file")

    def _tokenised(self, place: Place, row: Row, shape: Shape | None) -> Tokenised | Problem:
        if shape is None:
            return self._stranger(place, row, self._first_shape)
        if self._first_shape is None:
            self._first_shape, self._source.shape = shape, shape.name
            if unused := [column for column in row if column not in shape.read]:
                self._remarks.say(f"not used: the columns {', '.join(unused)}")
        if shape.name != self._first_shape.name:
            return self._stranger(place, row, self._first_shape, f"it has the shape {shape.name}")
        try:
            converted = shape.convert(row)
            self._remarks.look_at(place, converted, self._tokenizer)
            ids, labels = encode(converted, self._tokenizer)
            check_ids(ids, self._tokenizer, self._limits.embedding_rows)
            start = trained_from(labels)
            if start is None:
                raise BadRowError("there is nothing to learn in it")
        except BadRowError as error:
            return error.at(place, row)
        return Tokenised(place, ids, labels, start)

    def _stranger(self, place: Place, row: Row, shape: Shape | None, why: str = "") -> Problem:
        why = why or f"it has {unknown_columns(list(row))}"
        fix = "keep rows of one shape in a file; several files can be named as a list"
        return Problem(place, f"{why}, and other rows have the shape {shape.name if shape else ''}", fix, raw=row)


class Remarks:
    """Things worth knowing that stop nothing, counted over the rows of one source."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Place] = {}
        self._said: list[str] = []

    def say(self, text: str) -> None:
        """One remark about the whole source."""
        self._said.append(text)

    def look_at(self, place: Place, row: Row, tokenizer: Any) -> None:
        """Count what a converted row shows."""
        for what in _seen_in(row, tokenizer):
            self._counts[what] += 1
            self._first.setdefault(what, place)

    def notes(self, name: str) -> list[Problem]:
        """A note a remark, with its count and the first place."""
        counted = [
            Problem(
                self._first[what],
                f"{count} {'row' if count == 1 else 'rows'} (this is the first) {what}",
                "",
                "",
                "note",
            )
            for what, count in self._counts.items()
        ]
        return [Problem(Place(name), text, severity="note") for text in self._said] + counted


def _seen_in(row: Row, tokenizer: Any) -> Iterable[str]:
    texts = [turn["content"] for turn in row["messages"]] if "messages" in row else list(row.values())
    if any("\r" in text for text in texts):
        yield "with carriage returns (\\r) in the text, which the model will learn to write"
    if texts[-1].strip().lower() in ("nan", "none", "null", "#n/a"):
        yield f"whose answer is the text {texts[-1].strip()!r}, as a missing value is sometimes written"
    if "messages" not in row and tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token):
        yield f"beginning with {tokenizer.bos_token!r}, which is not added a second time"
    if "prompt" in row and row["prompt"][-1].isalnum() and row["completion"][0].isalnum():
        yield "whose completion follows its prompt without a space or a line end between them"
    if row.get("asked_once") and not tokenizer.chat_template:
        yield "written as '### Instruction: ... ### Response: ...', for the tokenizer has no chat template"

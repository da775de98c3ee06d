"""Writes ``train.jsonl`` and ``held_out.jsonl``, byte for byte the same on every machine.

Run it as ``python -m leantune.cli.demo_data.make [FOLDER]``.

Only ``random.Random.random`` is drawn from: of Python's generator it alone is promised to give the same numbers in
every version.
"""

import json
import sys
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import TypeVar

from leantune.cli.demo_data import grammar
from leantune.cli.demo_data.record import CURRENCIES, METHODS, SYSTEM_PROMPT, Expense

TRAIN_ROWS = 480
HELD_OUT_ROWS = 96
SEED = 20260
FIRST_DAY = date(2023, 1, 1)
DAYS = 4 * 365

Row = dict[str, list[dict[str, str]]]
Choice = TypeVar("Choice")


def pick(rng: Random, choices: Sequence[Choice]) -> Choice:
    """One of ``choices``, each equally likely."""
    return choices[int(rng.random() * len(choices))]


def spell_number(number: int) -> str:
    """A whole number below 100 in words: 42 is ``forty-two``."""
    if number < 20:
        return grammar.NUMBER_WORDS[number]
    tens, ones = divmod(number, 10)
    return grammar.TENS_WORDS[tens] + (f"-{grammar.NUMBER_WORDS[ones]}" if ones else "")


def amount_of(rng: Random) -> int:
    """An amount in hundredths: mostly under 100 units, sometimes thousands, whole units two times in five."""
    scale = rng.random()
    units = 2 + int(rng.random() * (98 if scale < 0.6 else 900 if scale < 0.9 else 4900))
    return units * 100 if rng.random() < 0.4 else units * 100 + 5 * (1 + int(rng.random() * 19))


def amount_phrase(rng: Random, cents: int, currency: str) -> str:
    """``cents`` of ``currency`` as somebody would write it: ``€12.50``, ``12 euros and 50 cents``."""
    symbol, words, word, hundredths = grammar.CURRENCY_WORDS[currency]
    units, rest = divmod(cents, 100)
    style = rng.random()
    unit_word = word if units == 1 else words
    if not rest and units < 100 and style < 0.3:
        return f"{spell_number(units)} {unit_word}"
    grouped = f"{units:,}" if rng.random() < 0.5 else str(units)
    if rest and style < 0.15:
        return f"{grouped} {unit_word} and {rest} {hundredths}"
    number = grouped if not rest and rng.random() < 0.6 else f"{grouped}.{rest:02d}"
    if symbol is not None and style < 0.6:
        return f"{symbol}{number}"
    if style < 0.8:
        return f"{number} {unit_word}"
    return f"{currency} {number}" if style < 0.9 else f"{number} {currency}"


def date_phrase(rng: Random, day: date) -> str:
    """``day`` as somebody would write it, always with its year: ``3 March 2025``, ``Mar 3, 2025``, ``2025-03-03``."""
    month = grammar.MONTHS[day.month - 1]
    suffix = "th" if 10 < day.day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    style = rng.random()
    if style < 0.3:
        return f"{day.day} {month} {day.year}"
    if style < 0.55:
        return f"{month} {day.day}, {day.year}"
    if style < 0.7:
        return f"{month[:3]} {day.day}, {day.year}"
    if style < 0.8:
        return f"the {day.day}{suffix} of {month} {day.year}"
    if style < 0.9:
        return f"{grammar.WEEKDAYS[day.weekday()]}, {day.day} {month} {day.year}"
    return day.isoformat()


def make_row(rng: Random, split: str, frame: str) -> Row:
    """One row in messages format, written in ``frame`` with the words of ``split`` (``train`` or ``held_out``)."""
    person = f"{pick(rng, grammar.FIRST_NAMES[split])} {pick(rng, grammar.LAST_NAMES[split])}"
    article, item = pick(rng, grammar.ITEMS[split])
    cents, currency = amount_of(rng), pick(rng, CURRENCIES)
    day = FIRST_DAY + timedelta(days=int(rng.random() * DAYS))
    method = pick(rng, METHODS)
    sentence = frame.format(
        person=person,
        item=item,
        a_item=f"{article} {item}",
        amount=amount_phrase(rng, cents, currency),
        date=date_phrase(rng, day),
        method=pick(rng, grammar.METHOD_PHRASES[split][method]),
    )
    sentence = sentence[0].upper() + sentence[1:]
    if rng.random() < 0.25:
        before, after = pick(rng, grammar.REMARKS[split])
        sentence = " ".join(part for part in (before, sentence, after) if part)
    expense = Expense(
        item=item,
        cents=cents,
        currency=currency,
        person=person if "{person}" in frame else None,
        day=day if "{date}" in frame else None,
        method=method if "{method}" in frame else None,
    )
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": sentence},
            {"role": "assistant", "content": expense.to_json()},
        ]
    }


def make_rows(split: str, count: int, seed: int) -> list[Row]:
    """``count`` rows of ``split``, no sentence twice.

    The frames are taken in turn, so that each is written equally often. Every second held-out row is written in a
    training frame (with words of its own), the others in frames only held-out rows have.
    """
    rng = Random(seed)
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < count:
        number = len(rows)
        if split == "held_out" and number % 2:
            # Training frames come in groups by what they leave out; a stride coprime to their number visits all groups.
            frame = grammar.FRAMES["train"][number // 2 * 7 % len(grammar.FRAMES["train"])]
        else:
            own = grammar.FRAMES[split]
            frame = own[(number // 2 if split == "held_out" else number) % len(own)]
        row = make_row(rng, split, frame)
        sentence = row["messages"][1]["content"]
        if sentence not in seen:
            seen.add(sentence)
            rows.append(row)
    # Fisher-Yates on random() alone: which frame comes next must not be foreseeable from the row's number.
    for last in range(len(rows) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        rows[last], rows[other] = rows[other], rows[last]
    return rows


def write_rows(rows: list[Row], path: Path) -> None:
    """Writes ``rows`` to ``path`` as JSON lines: UTF-8, newline (LF) line ends."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(text.encode())


def make(folder: Path) -> None:
    """Writes both files into ``folder``."""
    write_rows(make_rows("train", TRAIN_ROWS, SEED), folder / "train.jsonl")
    write_rows(make_rows("held_out", HELD_OUT_ROWS, SEED + 1), folder / "held_out.jsonl")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

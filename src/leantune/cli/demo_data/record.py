"""The record the demo teaches: one schema, one spelling, so that an answer is either right to the letter or not."""

import json
import re
from dataclasses import dataclass
from datetime import date

KEYS = ("person", "item", "amount", "currency", "date", "method")
CURRENCIES = ("EUR", "USD", "GBP", "CHF")
METHODS = ("card", "cash", "transfer")

SYSTEM_PROMPT = "Write the expense as a JSON record: person, item, amount, currency, date, method. Unknown is null."

_AMOUNT_TEXT = re.compile(r'"amount": (?:0|[1-9][0-9]*)\.[0-9]{2},')


@dataclass(frozen=True)
class Expense:
    """One expense.

    Attributes:
        item: what was bought, as in the sentence but without its article.
        cents: the amount in hundredths of the currency, positive.
        currency: one of :data:`CURRENCIES` (ISO 4217).
        person: who paid, or None where the sentence does not say.
        day: when, or None.
        method: one of :data:`METHODS`, or None.
    """

    item: str
    cents: int
    currency: str
    person: str | None = None
    day: date | None = None
    method: str | None = None

    def to_json(self) -> str:
        """The record's only spelling: keys in the order of :data:`KEYS`, two decimals, ISO date, null where unsaid."""
        values = (
            json.dumps(self.person, ensure_ascii=False),
            json.dumps(self.item, ensure_ascii=False),
            f"{self.cents // 100}.{self.cents % 100:02d}",
            json.dumps(self.currency),
            json.dumps(self.day.isoformat() if self.day else None),
            json.dumps(self.method),
        )
        return "{" + ", ".join(f'"{key}": {value}' for key, value in zip(KEYS, values)) + "}"


def problems(text: str) -> list[str]:
    """Everything that keeps ``text`` from being a record of the schema, in plain words; empty when it is one."""
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except json.JSONDecodeError as error:
        return [f"not JSON: {error}"]
    # object_pairs_hook turns an object into a list of pairs, and leaves a JSON array a list of something else.
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        return ["not a JSON object"]
    if tuple(key for key, _ in pairs) != KEYS:
        return [f"keys are {[key for key, _ in pairs]}, not {list(KEYS)} in this order"]
    record, found = dict(pairs), []
    if not isinstance(record["item"], str) or not record["item"]:
        found.append("item is not a text")
    if not _AMOUNT_TEXT.search(text):
        found.append("amount is not a number with two decimals")
    if record["currency"] not in CURRENCIES:
        found.append(f"currency is not one of {CURRENCIES}")
    if record["person"] is not None and not (isinstance(record["person"], str) and record["person"]):
        found.append("person is neither a text nor null")
    if record["method"] is not None and record["method"] not in METHODS:
        found.append(f"method is neither one of {METHODS} nor null")
    if record["date"] is not None and not _is_iso_date(record["date"]):
        found.append("date is neither YYYY-MM-DD nor null")
    return found


def _is_iso_date(value: object) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        return False
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return True

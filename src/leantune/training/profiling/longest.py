"""The rows of a profile: the longest of the data, so that its steps are the largest that training will meet."""

import dataclasses
from typing import Any

from leantune.training.config import TrainConfig
from leantune.training.data.load import PreparedData

EVALUATED_BATCHES = 2


def longest_first(config: TrainConfig, data: PreparedData, steps: int) -> PreparedData:
    """Rows for ``steps`` steps that are all alike: the longest rows of the data fill every step.

    Packed rows are made from all rows, longest first, repeated until they fill the steps. Held-out rows are the longest
    few batches.
    """
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    order = _by_length(data.train)
    if config.packing:
        lengths = [len(data.train[index]["input_ids"]) for index in order]
        # Packing leaves gaps at the ends of rows: twice the tokens are enough to fill every step.
        needed = 2 * rows * steps * config.max_length
        chosen, padded = order * -(-needed // max(1, sum(lengths))), True
    else:
        step = [order[index % len(order)] for index in range(rows)]
        chosen = step * steps
        padded = len({len(data.train[index]["input_ids"]) for index in step}) > 1
    held_out = data.held_out
    if held_out is not None:
        held_out = held_out.select(_by_length(held_out)[: EVALUATED_BATCHES * config.per_device_train_batch_size])
    return dataclasses.replace(
        data, train=data.train.select(chosen), held_out=held_out, rows=len(chosen), padded=padded, lengths=None
    )


def _by_length(rows: Any) -> list[int]:
    lengths = [len(ids) for ids in rows["input_ids"]]
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])

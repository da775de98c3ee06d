"""method: auto takes the first rung of the ladder that leaves room, keeps what was set, and says why."""

from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest

from leantune.errors import ConfigError
from leantune.memory.budget.run_stages import stage_bytes
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.sizes import GIB
from leantune.training.config import build_config
from leantune.training.data.batch_order import LongestFirst
from leantune.training.planning.auto import padding
from leantune.training.planning.recipe import choose_recipe, ladder
from leantune.training.planning.settings import settings_of

LLAMA_8B = ModelShape("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, tied=False)
SHALLOW = replace(LLAMA_8B, layers=6)


def wanted(**keys):
    values = {"model_name_or_path": "m", "dataset": "d", "method": "auto", "max_length": 2048, **keys}
    return build_config(values)


def need_of(shape):
    def need(config):
        settings = settings_of(config)
        return stage_bytes(shape, settings).peak, settings.where

    return need


ONE_ROW = {"per_device_train_batch_size": 1}


def test_the_ladder_goes_down():
    need = need_of(SHALLOW)
    totals = [need(rung.config)[0].total for rung in ladder(wanted(**ONE_ROW))]
    assert totals == sorted(totals, reverse=True) and len(totals) == 6


def test_each_rung_is_chosen_where_it_is_the_first_to_leave_room():
    config, need = wanted(**ONE_ROW), need_of(SHALLOW)
    rungs = list(ladder(config))
    for place, rung in enumerate(rungs):
        total = need(rung.config)[0].total
        enough = min(total + GIB, -(-total * 20 // 19) + 20)
        chosen = choose_recipe(config, need, enough)
        assert chosen.rung.name == rung.name and chosen.spare == enough - total
        if place + 1 < len(rungs):
            assert chosen.next.startswith(rungs[place + 1].name)
            tighter = choose_recipe(config, need, enough - (16 << 20))
            assert tighter.rung.name != rung.name


def test_an_8b_on_24_gib_trains_all_weights_in_five_lines():
    recipe = choose_recipe(wanted(), need_of(LLAMA_8B), 24 * GIB)
    chosen = recipe.rung.config
    assert (chosen.method, chosen.optim, chosen.fused) == ("full", "ternary_adamw", True)
    assert chosen.per_device_train_batch_size < 8 and chosen.gradient_accumulation_steps == 1
    heads = [
        "chosen: full, ternary states",
        "because: it needs ",
        "costs: ",
        "next best: ",
        "you set: dataset, max_len",
    ]
    assert all(line.startswith(head) for line, head in zip(recipe.lines, heads, strict=True))
    assert "24.00 GiB at" in recipe.lines[1] and "would need" in recipe.lines[1]


def test_keys_that_were_set_are_kept():
    rungs = list(ladder(wanted(optim="adamw_torch", dtype="bfloat16")))
    assert {rung.config.optim for rung in rungs} == {"adamw_torch"} and not any(rung.config.fused for rung in rungs)
    assert {rung.config.dtype for rung in rungs} == {"bfloat16"}
    assert {rung.config.method for rung in ladder(wanted(lora_r=4))} == {"lora", "qlora"}
    assert {rung.config.gradient_checkpointing for rung in ladder(wanted(gradient_checkpointing=False))} == {False}
    assert {rung.config.per_device_train_batch_size for rung in ladder(wanted(**ONE_ROW))} == {1}
    rows = {r.config.per_device_train_batch_size * r.config.gradient_accumulation_steps for r in ladder(wanted())
            if r.config.method != "full"}  # fmt: skip
    assert rows == {8}, "adapters make up for fewer rows by micro-batches"


def test_keys_that_cannot_work_together_are_told():
    with pytest.raises(ConfigError, match="lomo has no learning rate"):
        choose_recipe(wanted(optim="lomo"), need_of(SHALLOW), 24 * GIB)


def test_where_nothing_fits_the_last_rung_says_what_is_missing():
    recipe = choose_recipe(wanted(), need_of(LLAMA_8B), 2 * GIB)
    assert recipe.spare < 0 and recipe.rung.config.method == "qlora"
    assert "nothing fits 2.00 GiB: even this needs" in recipe.lines[1]


def test_a_budget_without_a_method_means_auto():
    values = {"model_name_or_path": "m", "dataset": "d"}
    assert build_config(values).method == "full"
    assert build_config({**values, "memory_budget": "24GiB"}).method == "auto"
    assert build_config({**values, "memory_budget": "24GiB", "method": "lora"}).method == "lora"


# -- the order of rows -------------------------------------------------------------------------------------------------

LENGTHS = numpy.random.default_rng(0).integers(10, 900, 203)


@pytest.mark.parametrize("grouped", [False, True])
def test_a7_the_longest_rows_come_first_and_every_row_once_an_epoch(grouped):
    order = LongestFirst(LENGTHS, 4, seed=3, grouped=grouped)
    first = list(order)
    assert sorted(LENGTHS[first[:4]]) == sorted(LENGTHS)[-4:]
    assert first == list(order)
    order.set_epoch(1)
    second = list(order)
    assert second != first and sorted(first) == sorted(second) == list(range(len(LENGTHS))) and len(order) == 203
    again = LongestFirst(LENGTHS, 4, seed=3, grouped=grouped)
    again.set_epoch(1)
    assert list(again) == second, "an epoch's order depends on nothing before it"


def test_batches_of_like_length_hold_little_padding():
    def waste(order):
        batches = LENGTHS[list(order)][:200].reshape(-1, 4)
        return 4 * batches.max(axis=1).sum() / batches.sum()

    assert waste(LongestFirst(LENGTHS, 4, 3)) > 1.4 > 1.05 > waste(LongestFirst(LENGTHS, 4, 3, grouped=True))
    assert padding(SimpleNamespace(lengths=LENGTHS), 4, 0) > 1.4
    assert padding(SimpleNamespace(lengths=None), 4, 0) == padding(SimpleNamespace(lengths=LENGTHS), 1, 0) == 1.0

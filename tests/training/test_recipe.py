"""method: auto takes the first rung of the ladder that leaves room, and says why."""

from dataclasses import replace

import pytest

from leantune.errors import InvalidArgumentError
from leantune.memory.budget.run_stages import stage_bytes
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.sizes import GIB
from leantune.training.planning.recipe import choose_recipe, ladder

LLAMA_8B = ModelShape("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, tied=False)
SETTINGS = RunSettings(1, 2048)
SHALLOW = replace(LLAMA_8B, layers=6)


def test_the_ladder_goes_down():
    totals = [stage_bytes(SHALLOW, rung.settings).peak.total for rung in ladder(SHALLOW, SETTINGS)]
    assert totals == sorted(totals, reverse=True) and len(totals) == 6


def test_each_rung_is_chosen_where_it_is_the_first_to_leave_room():
    rungs = list(ladder(SHALLOW, SETTINGS))
    for place, rung in enumerate(rungs):
        total = stage_bytes(SHALLOW, rung.settings).peak.total
        enough = min(total + GIB, -(-total * 20 // 19) + 20)
        chosen = choose_recipe(SHALLOW, SETTINGS, enough)
        assert chosen.rung.name == rung.name and chosen.spare == enough - total
        if place + 1 < len(rungs):
            assert chosen.next == rungs[place + 1].name
            tighter = choose_recipe(SHALLOW, SETTINGS, enough - (16 << 20))
            assert tighter.rung.name != rung.name


def test_an_8b_on_24_gib_trains_all_weights():
    recipe = choose_recipe(LLAMA_8B, SETTINGS, 24 * GIB)
    assert recipe.rung.keys["method"] == "full" and recipe.rung.settings.optim == "ternary_adamw"
    assert "24.00 GiB at 1 x 2048 tokens" in str(recipe) and "Next: LoRA" in str(recipe)


def test_where_nothing_fits_it_says_what_is_missing():
    with pytest.raises(InvalidArgumentError, match=r"nothing fits 2\.00 GiB .* even QLoRA"):
        choose_recipe(LLAMA_8B, SETTINGS, 2 * GIB)

"""Stages, budgets, advice, solved maxima, several processes; published figures and the headline plans."""

import itertools
from dataclasses import replace

import pytest

from leantune.errors import InvalidArgumentError
from leantune.memory.budget.advice import FREE, advise
from leantune.memory.budget.comparison import compare, comparison_rows
from leantune.memory.budget.gpus import card_bytes
from leantune.memory.budget.largest import MOST_ROWS, largest, parameters, solve
from leantune.memory.budget.run_stages import (
    ADAPTERS,
    COMMUNICATION,
    CONTEXT,
    FRAGMENTATION,
    FRAGMENTED,
    peak_bytes,
    stage_bytes,
)
from leantune.memory.budget.sharding import ALONE, Parallel, rank_share
from leantune.memory.budget.sweep import plot_sweep, sweep
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.optimizer_cost import OptimizerCost, Trained
from leantune.memory.closed_form.settings import EXACT_SAVINGS, RunSettings
from leantune.memory.closed_form.weights import WeightTable
from leantune.memory.parts import ACTIVATIONS, GRADIENTS, LOSS, OPTIMIZER_STATES, WEIGHTS
from leantune.memory.sizes import GIB

LLAMA_7B = ModelShape("llama", 32_000, 4096, 32, 32, 32, 128, 11_008, tied=False)
LLAMA_8B = ModelShape("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, tied=False)
QWEN3_8B = ModelShape("qwen3", 151_936, 4096, 36, 32, 8, 128, 12_288, tied=False, head_norms=True)
LLAMA_30B = ModelShape("llama", 32_000, 6656, 60, 52, 52, 128, 17_920, tied=False)
LLAMA_65B = ModelShape("llama", 32_000, 8192, 80, 64, 64, 128, 22_016, tied=False)
LLAMA_3B = ModelShape("llama", 128_256, 3072, 28, 24, 8, 128, 8192, tied=True)
SMALL = ModelShape("llama", 2000, 128, 4, 4, 2, 32, 320, tied=False)
TERNARY = RunSettings(1, 2048, checkpoint_every=1)


def peak(shape, settings, parallel=ALONE):
    return stage_bytes(shape, settings, parallel).peak


# -- published ---------------------------------------------------------------------------------------------------------


def test_a_7b_with_adamw_takes_100_gib_of_weights_gradients_and_states():
    """fp32, 16 bytes a parameter: the figure everyone quotes."""
    table = WeightTable(LLAMA_7B, RunSettings(dtype="float32", optim="adamw_torch_fused", fused=False))
    assert parameters(LLAMA_7B) == table.elements == 6_738_415_616
    total = table.weight_bytes + table.gradient_bytes + table.state_bytes
    assert total / GIB == pytest.approx(100.4, rel=0.01)


def test_eight_bit_adamw_on_opt_13b_takes_27_7_gb_of_states():
    """TACO's paper: "AdamW8bit with 32-bit embeddings". OPT's tensors by hand: its blocks are not in closed form."""
    hidden, inner, layers = 5120, 20_480, 40
    block = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)] + [(hidden,)] * 9 + [(inner,)]
    kinds = [Trained(shape, "bfloat16") for shape in block * layers + [(hidden,)] * 2]
    kinds += [Trained(shape, "bfloat16", embedding=True) for shape in ((50_272, hidden), (2050, hidden))]
    cost = OptimizerCost("adamw_bnb_8bit")
    total = sum(cost.state_bytes({kind: 1}, on_host=False) for kind in kinds)
    assert total / 1e9 == pytest.approx(27.7, rel=0.01)


def printed_by_torchtune(settings, *, loss="chunked", on_host=False):
    """GiB a plan expects an allocator to print there: no context, but its gaps.

    Their loss makes logits in eight chunks, of which all are there, in 16 bits, until their gradients take their place;
    then the head's gradient is summed chunk by chunk (of a frozen head one chunk's logits come on top). ``on_host``:
    saved activations lie there.
    """
    staged, logits = stage_bytes(LLAMA_3B, settings), settings.tokens * LLAMA_3B.vocabulary * 2
    head = LLAMA_3B.vocabulary * LLAMA_3B.hidden * 2
    candidates = [stage.parts for stage in staged.stages]
    if loss == "chunked":
        beside = 2 * head if settings.method == "full" else logits // 8
        candidates.append({**staged.saved, LOSS: logits + beside})

    def reserved(parts):
        tensors = {part: size for part, size in parts.items() if part not in (CONTEXT, FRAGMENTATION)}
        if on_host:
            tensors[ACTIVATIONS] = 0
        still = sum(tensors[part] for part in (WEIGHTS, ADAPTERS, OPTIMIZER_STATES))
        return sum(tensors.values()) + FRAGMENTED * (sum(tensors.values()) - still)

    return max(map(reserved, candidates)) / GIB


def test_torchtunes_ladder_on_a_3b():
    """2 x 4,096 tokens, A100, GiB as torchtune printed them: every level within 3 %, drops within 15 %.

    Compiling is not modelled, so its step and the next two are one. Two drops of under 2 GiB are small differences of
    such levels: the optimizer in backward saves 1.8 there and 2.4 here (the peak moves from all gradients to the loss),
    activations on the host 1.3 and 1.6.
    """
    ordinary = RunSettings(2, 4096, optim="adamw_torch_fused", fused=False, exact_loss=False)
    recomputed = replace(ordinary, exact_loss=True, checkpoint_every=1)
    in_backward = replace(recomputed, fused=True)
    adapters = replace(recomputed, method="lora", adapter_dtype="bfloat16")
    ladder = {
        "packed": (60.0, printed_by_torchtune(ordinary, loss="whole")),
        "checkpointing": (24.9, printed_by_torchtune(recomputed)),
        "in backward": (23.1, printed_by_torchtune(in_backward)),
        "activations on the host": (21.8, printed_by_torchtune(in_backward, on_host=True)),
        "8-bit": (17.6, printed_by_torchtune(replace(in_backward, optim="adamw_bnb_8bit"), on_host=True)),
        "LoRA": (8.5, printed_by_torchtune(adapters, on_host=True)),
        "QLoRA": (4.6, printed_by_torchtune(replace(adapters, method="qlora"), on_host=True)),
    }
    for name, (printed, found) in ladder.items():
        assert found == pytest.approx(printed, rel=0.03), name
    levels = list(ladder.items())
    for (_, above), (name, below) in itertools.pairwise(levels):
        drop = above[0] - below[0]
        assert above[1] - below[1] == pytest.approx(drop, rel=0.15 if drop > 2 else 0.35), name


# -- headlines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_8B], ids=["Llama", "Qwen3"])
def test_headline_8b_full_ternary_on_24_gib(shape):
    assert peak(shape, TERNARY).total < 24 * GIB - GIB
    assert peak(shape, replace(TERNARY, optim="adamw", fused=False)).total > 60 * GIB


def test_headline_30b_full_on_an_80_gb_card():
    """One-sparse fits 80e9 bytes; the ternary states fit what an H100 of "80 GB" has (79.6 GiB), but not 80e9 bytes:
    1.0 GiB too much, and 60.6 GiB of it are weights."""
    settings = replace(TERNARY, length=512)
    assert peak(LLAMA_30B, replace(settings, optim="taco_one_sparse")).total < 80e9
    ternary = peak(LLAMA_30B, settings)
    assert ternary.total < card_bytes("H100 80GB") - 3 * GIB
    assert 0 < ternary.total - 80e9 < 1.5 * GIB
    assert max(ternary.parts, key=ternary.parts.get) == WEIGHTS


def test_headline_65b_lomo_on_eight_cards_of_24_gib():
    """It does not fit yet, by 0.3 GiB at 512 tokens: what FSDP2 gathers and reduces is 7 GiB (docs/limits.md)."""
    settings = replace(TERNARY, optim="lomo", length=512)
    found = peak(LLAMA_65B, settings, Parallel("fsdp2", 8))
    assert 0 < found.total - 24 * GIB < 0.5 * GIB
    assert found.parts[COMMUNICATION] > 6 * GIB
    assert peak(LLAMA_65B, settings, Parallel("fsdp2", 10)).total < 24 * GIB


# -- stages, budgets ---------------------------------------------------------------------------------------------------


def test_p1_p3_p4_every_stage_is_planned_and_none_after_training_is_its_peak():
    staged = stage_bytes(SMALL, RunSettings(2, 256, optim="adamw", fused=False))
    names = [stage.name for stage in staged.stages]
    assert names == ["load", "forward", "backward", "first step", "steady step", "evaluation", "save", "resume"]
    by_name = {stage.name: stage for stage in staged.stages}
    steady = by_name["steady step"]
    assert steady.total == max(by_name[name].total for name in ("forward", "backward", "steady step"))
    assert by_name["resume"].total <= steady.total and by_name["save"].total <= steady.total
    table = WeightTable(SMALL, RunSettings(2, 256, optim="adamw", fused=False))
    assert by_name["load"].total == table.weight_bytes + by_name["load"].parts[CONTEXT]
    assert by_name["resume"].host >= table.state_bytes and by_name["save"].host >= table.weight_bytes
    assert staged.checkpoint_bytes == table.weight_bytes + table.state_bytes
    assert staged.disk_bytes(3) == 4 * staged.checkpoint_bytes + table.weight_bytes
    assert staged.part_peaks[GRADIENTS] == table.gradient_bytes


def test_without_a_fused_backward_the_first_step_holds_gradients_and_states():
    settings = RunSettings(1, 16, optim="adamw", fused=False)
    staged, table = stage_bytes(SMALL, settings), WeightTable(SMALL, settings)
    first = next(stage for stage in staged.stages if stage.name == "first step")
    assert first.parts[GRADIENTS] == table.gradient_bytes
    # All states but those of the last vectors, whose update is smaller than the update before it.
    assert 0.99 * table.state_bytes < first.parts[OPTIMIZER_STATES] <= table.state_bytes
    fused = stage_bytes(SMALL, RunSettings(4, 512, optim="adamw"))
    by_name = {stage.name: stage for stage in fused.stages}
    assert by_name["first step"].parts[OPTIMIZER_STATES] < by_name["steady step"].parts[OPTIMIZER_STATES]


def test_advice_saves_what_it_says_and_is_ranked():
    settings = RunSettings(4, 512, optim="adamw_torch", fused=False, exact_loss=False)
    total = peak(SMALL, settings).total
    found = advise(SMALL, settings, ALONE, total, total - 1)
    assert [advice.rank for advice in found] == sorted(advice.rank for advice in found)
    assert found[0].rank == FREE and found[0].change == "exact_savings: true"
    for advice, after in (
        ("exact_savings: true", replace(settings, **EXACT_SAVINGS)),
        ("gradient_checkpointing: true", replace(settings, checkpoint_every=1)),
        ("optim: lomo", replace(settings, optim="lomo", fused=True)),
    ):
        (one,) = [a for a in found if a.change == advice]
        assert one.saved == total - peak(SMALL, after).total > 0
        assert one.suffices


@pytest.mark.parametrize(
    ("savings", "named"), [(EXACT_SAVINGS, "q_proj, k_proj, v_proj, gate_proj, up_proj"), ({}, "down_proj")]
)
def test_advice_names_layers_on_which_velora_saves(savings, named):
    settings = RunSettings(4, 512, **savings)
    total = peak(LLAMA_8B, settings).total
    found = {item.change: item.saved for item in advise(LLAMA_8B, settings, ALONE, total, None)}
    assert found[f"velora_target_modules: {named}"] > GIB // 8


def test_the_largest_runs_fit_and_the_next_do_not():
    settings, budget = RunSettings(1, 512), int(0.75 * GIB)
    found = largest(SMALL, settings, ALONE, budget)
    for fits, does_not in (
        (settings.with_rows(found.batch_size), settings.with_rows(found.batch_size + 1)),
        (replace(settings, length=found.length), replace(settings, length=found.length + 64)),
    ):
        assert peak(SMALL, fits).total <= budget < peak(SMALL, does_not).total
    assert peak(replace(SMALL, layers=found.layers), settings).total <= budget
    assert peak(replace(SMALL, layers=found.layers + 1), settings).total > budget
    assert found.parameters == parameters(replace(SMALL, layers=found.layers))
    assert largest(SMALL, settings, ALONE, 1).batch_size == 0
    assert solve(lambda rows: 1, 2, MOST_ROWS) == MOST_ROWS


@pytest.mark.parametrize("budget", [99, 100, 101, 4000, 12_345, 99_999])
def test_solving_finds_the_edge_of_any_growing_need(budget):
    for need in (lambda n: 100 + 7 * n * n, lambda n: 100 if n < 500 else 10**6, lambda n: 90 + n // 3):
        found = solve(need, budget, 1000)
        assert found == max((n for n in range(1, 1001) if need(n) <= budget), default=0)


def test_the_comparison_ranks_the_ways_as_they_are_known():
    totals = {one.name: one.staged.peak.total for one in compare(LLAMA_8B, TERNARY)}
    assert totals["AdamW, fp32"] > totals["AdamW, bf16"] > totals["AdamW 8-bit, bf16"] > totals["leantune, ternary"]
    assert totals["leantune, ternary"] > totals["leantune, one-sparse"] > totals["LOMO"] > totals["QLoRA"]
    rows = comparison_rows(compare(SMALL, TERNARY), 1)
    assert rows[1][-1] == "does not fit"


# -- several processes -------------------------------------------------------------------------------------------------


def test_fsdp_shards_rows_and_gathers_a_block():
    settings = RunSettings(1, 128, optim="ternary_adamw")
    table = WeightTable(SMALL, settings)
    alone, four = (rank_share(SMALL, settings, table, p) for p in (ALONE, Parallel("fsdp2", 4)))
    assert four.weights == pytest.approx(alone.weights / 4, rel=0.01)
    assert alone.states / 4 < four.states < alone.states / 2  # what belongs to columns is whole on each
    block = sum(table.stored[name] for name in table if name.startswith("model.layers.0."))
    root = sum(table.stored[name] for name in table if not name.startswith("model.layers."))
    assert four.communication == root + 4 * block
    odd = rank_share(replace(SMALL, vocabulary=2001), settings, WeightTable(replace(SMALL, vocabulary=2001), settings),
                     Parallel("fsdp2", 4))  # fmt: skip
    assert odd.weights > four.weights


def test_ddp_copies_gradients_into_buckets_only_without_a_fused_backward():
    for fused in (False, True):
        settings = RunSettings(1, 128, optim="adamw", fused=fused)
        table = WeightTable(SMALL, settings)
        share = rank_share(SMALL, settings, table, Parallel("ddp", 2))
        assert share.communication == (0 if fused else table.gradient_bytes)
        assert share.weights == table.weight_bytes
    with pytest.raises(InvalidArgumentError, match="write ddp or fsdp"):
        Parallel("none", 2)
    with pytest.raises(InvalidArgumentError, match="zero3"):
        Parallel("zero3", 2)


# -- cards, pictures ---------------------------------------------------------------------------------------------------


def test_cards_are_found_by_name_and_unknown_ones_get_suggestions():
    assert card_bytes("nvidia geforce rtx 4090") == card_bytes("RTX-4090") == 24_564 << 20
    with pytest.raises(InvalidArgumentError, match="RTX 4090"):
        card_bytes("RTX 4099")


def test_a_sweep_grows_and_is_drawn(tmp_path):
    for by in ("length", "batch"):
        rows = sweep(SMALL, RunSettings(1, 256), ALONE, by)
        totals = [sum(parts.values()) for _, parts in rows]
        assert totals == sorted(totals) and rows[0][1][ACTIVATIONS] < rows[-1][1][ACTIVATIONS]
    path = plot_sweep(SMALL, RunSettings(1, 256), ALONE, tmp_path / "sweep.png", budget=GIB)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_g13_the_plan_shows_where_the_logits_were():
    whole = peak(LLAMA_8B, replace(TERNARY, exact_loss=False))
    assert whole.parts[LOSS] > 2048 * 128_256 * 8 and peak(LLAMA_8B, TERNARY).parts[LOSS] <= 64 << 20


@pytest.mark.parametrize("settings", [TERNARY, replace(TERNARY, optim="adamw", fused=False), RunSettings(4, 512)])
def test_the_peak_alone_is_that_of_all_stages(settings):
    for way in (settings, replace(settings, method="lora"), replace(settings, exact_loss=False, padded=True)):
        assert peak_bytes(SMALL, way) == peak(SMALL, way).total

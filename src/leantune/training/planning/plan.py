"""``lt.plan``: from a config to a plan against budgets, without loading a weight."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leantune.errors import ConfigError, InvalidArgumentError
from leantune.memory.budget.advice import advise
from leantune.memory.budget.calibrated import calibrated, calibration_note
from leantune.memory.budget.gpus import card_bytes
from leantune.memory.budget.largest import largest
from leantune.memory.budget.model_files import read_config, read_sizes, read_weight_files
from leantune.memory.budget.run_plan import Budgets, RunPlan
from leantune.memory.budget.run_stages import CONTEXT_BYTES, FRAGMENTED, Stage, stage_bytes
from leantune.memory.budget.sharding import Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.closed_form.step import walk_step
from leantune.memory.closed_form.weights import WeightTable
from leantune.memory.reports.calibration import read_calibration
from leantune.memory.sizes import parse_size
from leantune.training.config import TrainConfig, load_config
from leantune.training.planning.need import check_known, needed
from leantune.training.planning.recipe import Recipe, choose_recipe
from leantune.training.planning.settings import settings_of

TIERS = ("closed", "traced", "measured")


def plan(
    config: str | Path | TrainConfig,
    *,
    memory_budget: str | int | None = None,
    host_memory_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    gpu: str | None = None,
    parallel: str | None = None,
    world_size: int = 1,
    tier: str = "closed",
    advice: bool = True,
    calibration: str | Path | None = None,
) -> RunPlan:
    """What a run will need, by part and stage, before anything is loaded.

    Args:
        config: a config file, or a `TrainConfig`. ``dataset`` need not be set: a plan is for max_length, the longest
            row there can be.
        memory_budget: memory of the device ("24GiB"); by default the config's, or the card's of ``gpu``.
        host_memory_budget, disk_budget: held on their own.
        gpu: the name of a card ("RTX 4090"). Without one the plan is for a GPU all the same.
        parallel, world_size: "ddp" or "fsdp2", by default the config's, and how many processes.
        tier: "closed" (arithmetic), "traced" (also one step on fake tensors), "measured" (also two real steps of a
            model with random weights, on this machine): the later ones are compared with the first.
        calibration: memory_calibration.json of a profile on the same machine, or its folder: stages are corrected by
            it, advice and maxima are not, and a note states the error it found.
        advice: also work out what would help and how large the run could be; False takes a tenth of the time.

    A model or a setting that is not in closed form is planned from a step on fake tensors, without advice.

    Raises ConfigError, or InvalidArgumentError, for a config that cannot work, a model without config.json or of an
    unknown architecture, damaged files.
    """
    if tier not in TIERS:
        raise InvalidArgumentError(f"tier is {tier!r}; write one of {', '.join(TIERS)}")
    config = config if isinstance(config, TrainConfig) else load_config(config, planning=True)
    if not config.model_name_or_path:
        raise ConfigError("- model_name_or_path is missing")
    if not config.max_length:
        raise ConfigError(
            "- max_length: auto is a percentile of the data's lengths, and a plan reads no data; write a number of "
            "tokens (leantune validate prints the lengths)"
        )
    asked = _Asked(config, _budgets(config, memory_budget, host_memory_budget, disk_budget, gpu), tier, advice)
    described, spread = read_sizes(config.model_name_or_path), _spread(config, parallel, world_size)
    recipe = _recipe(asked, described, spread)
    if recipe is not None:
        config = recipe.rung.config
        asked = replace(asked, config=config)
    try:
        shape, settings = ModelShape.of_config(described), settings_of(config)
        table = check_known(config, shape, settings)
    except InvalidArgumentError as error:
        found = _from_trace(asked, spread, str(error))
    else:
        found = _in_closed_form(asked, spread, shape, settings, table)
    if recipe is not None:
        found = replace(found, chosen=recipe.lines)
    if config.parallel is not None and spread.ranks == 1:
        alone = f"this plan is for one process; write world_size (--world_size 8) for {config.parallel} on several"
        found = replace(found, notes=(*found.notes, alone))
    if calibration is None:
        return found
    measured = read_calibration(calibration)
    return replace(found, staged=calibrated(found.staged, measured), notes=(*found.notes, calibration_note(measured)))


def _spread(config: TrainConfig, parallel: str | None, world_size: int) -> Parallel:
    """One process has no other to share with, whatever the config says of several."""
    if parallel is None:
        parallel = "none" if world_size == 1 else (config.parallel or "ddp")
    return Parallel(parallel, world_size)


@dataclass(frozen=True)
class _Asked:
    config: TrainConfig
    budgets: Budgets
    tier: str
    advice: bool


def _in_closed_form(
    asked: _Asked, spread: Parallel, shape: ModelShape, settings: RunSettings, table: WeightTable
) -> RunPlan:
    config, memory = asked.config, asked.budgets.memory
    staged = stage_bytes(shape, settings, spread)
    solved = asked.advice and memory is not None
    return RunPlan(
        model=config.model_name_or_path,
        parameters=table.elements,
        trained=table.trained,
        settings=settings,
        parallel=spread,
        staged=staged,
        disk_bytes=staged.disk_bytes(config.save_total_limit),
        budgets=asked.budgets,
        dtypes=_dtypes(settings, table.cost.name),
        advice=advise(shape, settings, spread, staged.peak.total, memory) if asked.advice else (),
        largest=largest(shape, settings, spread, memory) if solved and memory is not None else None,
        tiers=_tiers(config, shape, settings, asked.tier),
        notes=(*config.notes, *_notes(config, shape, table, memory is not None)),
    )


def _from_trace(asked: _Asked, spread: Parallel, why: str) -> RunPlan:
    """A plan of whatever transformers can build, from one step on fake tensors."""
    from leantune.memory.traced.traced_stages import traced_stages
    from leantune.training.planning.tiers import traced

    config = asked.config
    if spread.ranks > 1:
        raise InvalidArgumentError(f"{why}; several processes are planned in closed form alone: plan for one")
    settings = settings_of(config)
    found, model = traced(config, read_config(config.model_name_or_path), settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    staged = traced_stages(found, settings, sum(p.numel() * p.element_size() for p in trained))
    return RunPlan(
        model=config.model_name_or_path,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in trained),
        settings=settings,
        parallel=spread,
        staged=staged,
        disk_bytes=staged.disk_bytes(config.save_total_limit),
        budgets=asked.budgets,
        dtypes=_dtypes(settings, config.optim),
        tiers={"traced": found.total},
        notes=(*config.notes, f"from a step on fake tensors, without advice: {why}", *_assumptions(), *found.notes),
    )


def _recipe(asked: _Asked, described: Any, spread: Parallel) -> Recipe | None:
    """What ``method: auto`` takes; a method that was not set means auto where there is a budget."""
    config, budget = asked.config, asked.budgets.memory
    if budget is None or not (config.leaves_out("method") or config.method == "auto"):
        return None
    auto = replace(config, method="auto")

    def need(candidate: TrainConfig) -> tuple[Stage, str]:
        settings = settings_of(candidate)
        return needed(candidate, described, settings, spread), settings.where + spread.where

    return choose_recipe(auto, need, budget)


def _budgets(
    config: TrainConfig, memory: str | int | None, host: str | int | None, disk: str | int | None, gpu: str | None
) -> Budgets:
    if memory is None:
        memory = config.memory_budget
    if memory is None and gpu is not None:
        memory = card_bytes(gpu)
    return Budgets(
        None if memory is None else parse_size(memory, name="memory_budget"),
        None if host is None else parse_size(host, name="host_memory_budget"),
        None if disk is None else parse_size(disk, name="disk_budget"),
    )


def _dtypes(settings: RunSettings, optim: str) -> dict[str, str]:
    states = {"ternary_adamw": "trits", "adamw": "float32", "lomo": "none", "adalomo": "float32 factors"}
    weights = f"{settings.dtype} (base in nf4)" if settings.method == "qlora" else settings.dtype
    trained = settings.adapter_dtype if settings.adapts else settings.dtype
    kept = states.get(optim, trained)
    return {"weights": weights, "compute": settings.dtype, "gradients": trained, "states": kept}


def _assumptions() -> tuple[str, ...]:
    return (
        f"device context {CONTEXT_BYTES >> 20} MiB and fragmentation {100 * FRAGMENTED:.0f} % of what comes and goes "
        "are assumptions; a profile measures them",
    )


def _notes(config: TrainConfig, shape: ModelShape, table: WeightTable, budgeted: bool) -> list[str]:
    notes = [*_assumptions()]
    if config.velora_factored:
        notes.append("velora_factored is not in this plan: gradients and states of its targets are counted whole")
    if config.method == "auto" and not budgeted:
        notes.append("method: auto is decided against a budget; without one this is method: full")
    if shape.positions and config.max_length > shape.positions:
        notes.append(f"max_length is {config.max_length:,}, the model was made for {shape.positions:,} positions")
    files = read_weight_files(config.model_name_or_path)
    base = sum(w.elements for name, w in table.items() if ".lora_" not in name)
    if files is None:
        notes.append("no weight files were read: sizes are those of config.json")
    elif files.elements != base and not shape.tied:
        notes.append(f"the files hold {files.elements:,} numbers, config.json describes {base:,}: check the folder")
    else:
        dtypes = ", ".join(sorted(files.bytes_by_dtype))
        notes.append(f"weight files: {files.nbytes / 2**30:.2f} GiB in {dtypes}, loaded as {config.dtype}")
    return notes


def _tiers(config: TrainConfig, shape: ModelShape, settings: RunSettings, tier: str) -> dict[str, int]:
    """Tensor bytes of a steady step's peak by each tier, as a CPU runs it."""
    here = replace(settings, cuda=False)
    tiers = {"closed": walk_step(shape, here, WeightTable(shape, here)).peak_bytes}
    if tier in ("traced", "measured"):
        described = read_config(config.model_name_or_path)
        from leantune.training.planning.tiers import traced

        tiers["traced"] = traced(config, described, settings)[0].total
    if tier == "measured":
        from leantune.training.planning.tiers import measured_peak

        tiers["measured"] = measured_peak(config, described, settings)
    return tiers

"""leantune plan: what a run will need, before anything is loaded."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from leantune.memory.budget.run_plan import RunPlan

EXAMPLES = """Examples:

leantune plan config.yaml --memory_budget 24GiB

leantune plan --model_name_or_path ./model --max_length 2048 --gpu "RTX 4090"

leantune plan config.yaml --compare

leantune plan config.yaml --tier traced --json

leantune plan config.yaml --parallel fsdp2 --world_size 8 --gpu "RTX 3090"

Exit codes: 0 fits, 3 does not, 2 bad input.
"""
DOES_NOT_FIT = 3


def plan(
    arguments: list[str] | None = typer.Argument(
        None,
        metavar="[CONFIG] [--KEY VALUE]...",
        help="As for leantune train; the dataset need not be named: a plan is for rows of max_length.",
        show_default=False,
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
    gpu: str = typer.Option(None, help='A card by name ("RTX 4090"): its memory is the budget.'),
    compare: bool = typer.Option(False, "--compare", help="AdamW, 8-bit, LoRA, QLoRA, LOMO and ours side by side."),
    tier: str = typer.Option("closed", help="closed, traced (a step on fake tensors) or measured (real steps)."),
    parallel: str = typer.Option(None, help="ddp or fsdp2; by default the config's, and ddp."),
    world_size: int = typer.Option(1, "--world_size", "--world-size", help="Processes, one device each."),
    host_memory_budget: str = typer.Option(None, "--host_memory_budget", "--host-memory-budget", help='"64GiB"'),
    disk_budget: str = typer.Option(None, "--disk_budget", "--disk-budget", help='"200GiB"'),
    calibration: Path = typer.Option(None, help="memory_calibration.json of a profile, or its folder."),
    sweep: Path = typer.Option(None, help="Folder for pictures of the peak against length and batch."),
) -> None:  # fmt: skip
    """Plan a run's memory: by part and stage, against budgets, with what would help and the largest run that fits."""
    given = list(arguments or [])
    path = given.pop(0) if given and not given[0].startswith("--") else None
    from leantune.training.config import load_config

    config = load_config(path, given, planning=True)
    from leantune.training.planning.plan import plan as plan_config

    found = plan_config(
        config,
        gpu=gpu,
        tier=tier,
        parallel=parallel,
        world_size=world_size,
        host_memory_budget=host_memory_budget,
        disk_budget=disk_budget,
        calibration=calibration,
    )
    sys.stdout.write(found.to_json() if as_json else found.table() + "\n")
    if compare or sweep is not None:
        _more(found, compare=compare and not as_json, sweep=sweep)
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _more(found: "RunPlan", *, compare: bool, sweep: Path | None) -> None:
    from leantune.memory.budget.comparison import compare as compare_ways
    from leantune.memory.budget.comparison import comparison_rows
    from leantune.memory.budget.model_files import read_sizes
    from leantune.memory.budget.run_plan import columns
    from leantune.memory.budget.sweep import plot_sweep
    from leantune.memory.closed_form.model_shape import ModelShape

    shape, budget = ModelShape.of_config(read_sizes(found.model)), found.budgets.memory
    if compare:
        rows = comparison_rows(compare_ways(shape, found.settings, found.parallel), budget)
        print(f"side by side at {found.where}, peaks of a run:")
        print("\n".join(columns(rows)))
    if sweep is None:
        return
    for by in ("length", "batch"):
        place = sweep / f"memory_by_{by}.png"
        title = f"Planned memory of {Path(found.model).name}"
        plot_sweep(shape, found.settings, found.parallel, place, by=by, budget=budget, title=title)
        print(f"wrote {place}", file=sys.stderr)

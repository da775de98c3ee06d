"""Pictures of a plan: the run's peak against length and against batch, with the budget as a line."""

from dataclasses import replace
from pathlib import Path

from leantune.memory.budget.run_stages import ADAPTERS, stage_bytes
from leantune.memory.budget.sharding import Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.parts import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, WEIGHTS
from leantune.memory.reports.plots import COLOURS, new_figure, write_figure
from leantune.memory.sizes import plot_unit

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_BATCHES = (1, 2, 4, 8, 16, 32)


def sweep(shape: ModelShape, settings: RunSettings, parallel: Parallel, by: str) -> list[tuple[int, dict[str, int]]]:
    """(length or batch, bytes of weights, states and everything else at the run's peak)."""
    values = _LENGTHS if by == "length" else _BATCHES
    rows = []
    for value in values:
        one = replace(settings, length=value) if by == "length" else replace(settings, batch_size=value)
        parts = stage_bytes(shape, one, parallel).peak.parts
        weights, states = parts[WEIGHTS] + parts[ADAPTERS], parts[OPTIMIZER_STATES]
        gradients = parts[GRADIENTS]
        rest = sum(parts.values()) - weights - states - gradients
        rows.append((value, {WEIGHTS: weights, OPTIMIZER_STATES: states, GRADIENTS: gradients, ACTIVATIONS: rest}))
    return rows


def plot_sweep(
    shape: ModelShape,
    settings: RunSettings,
    parallel: Parallel,
    path: str | Path,
    *,
    by: str = "length",
    budget: int | None = None,
    title: str = "",
) -> Path:
    """Draw `sweep` as stacked areas into the PNG file ``path``; returns it. ``by``: "length" or "batch"."""
    rows = sweep(shape, settings, parallel, by)
    scale, unit = plot_unit(max(sum(parts.values()) for _, parts in rows))
    labels = {WEIGHTS: "weights", OPTIMIZER_STATES: "states", GRADIENTS: "gradients", ACTIVATIONS: "all else"}
    figure, axes = new_figure(8, 4.5)
    x = [value for value, _ in rows]
    axes.stackplot(
        x,
        [[parts[part] / scale for _, parts in rows] for part in labels],
        labels=list(labels.values()),
        colors=[COLOURS[part] for part in labels],
    )
    if budget is not None:
        axes.axhline(budget / scale, color="#222222", linestyle=(0, (5, 3)), linewidth=1.2, label="budget")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(bottom=0)
    other = f"batch {settings.batch_size}" if by == "length" else f"{settings.length:,} tokens a row"
    axes.set_xlabel(f"{'tokens a row' if by == 'length' else 'rows in a batch'} ({other})")
    axes.set_ylabel(f"peak on the device ({unit})")
    axes.set_title(title or "Planned memory", loc="left", fontsize=11)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return write_figure(figure, path)

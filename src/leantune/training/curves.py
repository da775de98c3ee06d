"""curves.png: loss, gradient norm, learning rate and speed over the steps of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leantune.memory.parts import GRADIENTS, OPTIMIZER_STATES
from leantune.memory.reports.plots import COLOURS, write_figure

CURVES = {
    "loss": "loss (nats a token)",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
}
"""Keys of log.jsonl, and what their axes say."""


def plot_curves(rows: Sequence[dict[str, Any]], path: str | Path) -> Path | None:
    """One panel a figure that the log holds, held-out losses as points beside the loss.

    Args:
        rows: of log.jsonl.
        path: the PNG file to write.
    Returns: the path; None where nothing was logged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [key for key in CURVES if any(row.get(key) is not None for row in rows)]
    if not shown:
        return None
    figure = Figure(figsize=(8, 1.9 * len(shown)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for key, axes in zip(shown, panels, strict=True):
        points = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
        axes.plot(*zip(*points), color=COLOURS[OPTIMIZER_STATES], linewidth=1.4, marker="o" if len(points) == 1 else "")
        held_out = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row] if key == "loss" else []
        if held_out:
            axes.plot(*zip(*held_out), color=COLOURS[GRADIENTS], marker="o", linewidth=0, label="held out")
            axes.legend(frameon=False, fontsize=8)
        if key == "grad_norm" and all(value > 0 for _, value in points):
            axes.set_yscale("log")
        axes.set_ylabel(CURVES[key], fontsize=8.5)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[-1].set_xlabel("optimizer step", fontsize=8.5)
    return write_figure(figure, path)

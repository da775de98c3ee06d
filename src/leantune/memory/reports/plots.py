"""Pictures of a run: memory by part over a step, and loss over steps. Drawn without a display, as PNG files or as SVG
text to put into a page."""

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leantune.errors import InvalidArgumentError
from leantune.memory.measured.timeline import BACKWARD, FORWARD, UPDATE_PHASE, MemoryTimeline
from leantune.memory.parts import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    LABELS,
    LOSS,
    OPTIMIZER_STATES,
    PARTS,
    RECOMPUTE,
    TEMPORARIES,
    UPDATE,
    WEIGHTS,
)
from leantune.memory.sizes import format_bytes, plot_unit
from leantune.whole_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    WEIGHTS: "#4c566a",
    OPTIMIZER_STATES: "#0072b2",
    GRADIENTS: "#d55e00",
    ACTIVATIONS: "#009e73",
    RECOMPUTE: "#8fd3b6",
    LOSS: "#cc79a7",
    TEMPORARIES: "#e6c229",
    UPDATE: "#56b4e9",
    INPUTS: "#b8b8b8",
}
"""One colour a part, apart from each other for the colour-blind as well."""

_INK = "#222222"
_BEHIND_TEXT = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
_STACK = (WEIGHTS, INPUTS, *(part for part in PARTS if part not in (WEIGHTS, INPUTS)))
"""Bottom to top: what does not change first."""


def plot_memory(
    timeline: MemoryTimeline, path: str | Path, *, plan_total: int | None = None, title: str = "Memory over one step"
) -> Path:
    """Draw bytes in use by part over a tracked step as a stacked area.

    Args:
        timeline: from `MemoryTracker.timeline`.
        path: the PNG file to write.
        plan_total: bytes planned for the step's peak, drawn as a line.
        title: say what was run, with its batch and length.
    Returns: the path.
    """
    scale, unit = plot_unit(max(timeline.peak_bytes, plan_total or 0))
    figure, axes = new_figure(9.5, 4.8)
    _draw_stack(axes, timeline, 1000, scale)
    top = max(timeline.peak_bytes, plan_total or 0) / scale * 1.16
    axes.set_ylim(0, top)
    _draw_phases(axes, timeline, top)
    _draw_peak(axes, timeline, scale, unit)
    if plan_total is not None:
        axes.axhline(
            plan_total / scale,
            color=_INK,
            linestyle=(0, (5, 3)),
            linewidth=1.2,
            label=f"planned peak  {format_bytes(plan_total)}",
        )
    axes.set_xlabel("time in the step (ms, while being tracked)")
    axes.set_ylabel(f"tensor memory ({unit})")
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    handles, names = axes.get_legend_handles_labels()
    order = range(len(handles) - 1, -1, -1)  # top of the stack first
    axes.legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        fontsize=8.5,
        title="part, and its own peak",
        title_fontsize=8.5,
        alignment="left",
    )
    return write_figure(figure, path)


def memory_svg(
    timeline: MemoryTimeline,
    *,
    plan_total: int | None = None,
    budget: int | None = None,
    size: tuple[float, float] = (9.5, 3.6),
    columns: int = 300,
) -> str:
    """The same stacked area as an SVG element for a page, without title and legend.

    Args:
        timeline: from `MemoryTracker.timeline`.
        plan_total, budget: bytes, each drawn as a line where given.
        size: width and height in inches; text keeps its size, so a narrow picture is for a narrow screen.
        columns: stretches of time that are told apart.
    """
    highest = max(timeline.peak_bytes, plan_total or 0, budget or 0)
    scale, unit = plot_unit(highest)
    figure, axes = new_figure(*size)
    _draw_stack(axes, timeline, columns, scale)
    axes.set_ylim(0, highest / scale * 1.16)
    _draw_phases(axes, timeline, highest / scale * 1.16)
    _draw_peak(axes, timeline, scale, unit)
    early = float(timeline.times[timeline.peak_event]) < 0.5 * float(timeline.times[-1])  # away from the peak's own
    for level, name, dashes in ((plan_total, "planned peak", (5, 3)), (budget, "budget", (1, 2))):
        if level is not None:
            axes.axhline(level / scale, color=_INK, linestyle=(0, dashes), linewidth=1.2)
            axes.annotate(
                f"{name} {format_bytes(level)}",
                (0.995 if early else 0.005, level / scale),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                xytext=(0, 3),
                ha="right" if early else "left",
                fontsize=8,
                color=_INK,
            )
    axes.set_xlabel("time in the step (ms, while being tracked)", fontsize=9, color=_INK)
    axes.set_ylabel(unit, fontsize=9, color=_INK)
    return _svg(figure)


def _draw_stack(axes: "Axes", timeline: MemoryTimeline, columns: int, scale: float) -> list[str]:
    """The areas, bottom to top; returns the parts drawn."""
    peaks = timeline.part_peaks()
    drawn = sorted((part for part in PARTS if peaks[part] > 0), key=_STACK.index)
    milliseconds, events = _columns(timeline, columns)
    levels = np.array([timeline.bytes_by_part[part][events] for part in drawn], dtype=np.float64) / scale
    labels = [f"{LABELS[part]}  {format_bytes(peaks[part])}" for part in drawn]
    axes.stackplot(
        milliseconds, levels, labels=labels, colors=[COLOURS[part] for part in drawn], step="post", linewidth=0
    )
    axes.set_xlim(0, float(milliseconds[-1]))
    return drawn


def plot_loss(
    steps: Sequence[float],
    losses: Sequence[float],
    path: str | Path,
    *,
    heldout: Sequence[tuple[float, float]] = (),
    smooth: float | None = None,
    title: str = "Loss",
) -> Path:
    """Draw training loss over steps, with held-out loss as points, joined by a line from three on.

    Args:
        steps, losses: one entry a logged step; not finite losses are left out of the curve.
        path: the PNG file to write.
        heldout: (step, loss) of every evaluation.
        smooth: weight of the past in an exponential moving average drawn over the raw curve, in [0, 1); by default 0.9
            from 40 points on and none below.
        title: what was trained.
    Returns: the path.
    Raises: InvalidArgumentError where steps and losses differ in length, or ``smooth`` is outside [0, 1).
    """
    if len(steps) != len(losses):
        raise InvalidArgumentError(f"{len(steps)} steps and {len(losses)} losses; each step needs its loss")
    if smooth is not None and not 0 <= smooth < 1:
        raise InvalidArgumentError(f"smooth is {smooth}; it is the weight of the past, at least 0 and below 1")
    weight = (0.9 if len(losses) >= 40 else 0.0) if smooth is None else smooth
    figure, axes = new_figure(8, 4.5)
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    marker = "o" if len(y) == 1 else ""
    if weight and len(y):
        axes.plot(x, y, color=COLOURS[OPTIMIZER_STATES], alpha=0.3, linewidth=1, label="training, each step")
        axes.plot(x, _smoothed(y, weight), color=COLOURS[OPTIMIZER_STATES], linewidth=1.8, label="training, smoothed")
    elif len(y):
        axes.plot(x, y, color=COLOURS[OPTIMIZER_STATES], linewidth=1.5, marker=marker, label="training")
    if heldout:
        at, values = zip(*heldout)
        # Before and after alone say nothing about the way between them: no line.
        line = 1.4 if len(values) > 2 else 0.0
        name = f"held out, {values[0]:.3f}" + (f" to {values[-1]:.3f}" if len(values) > 1 else "")
        axes.plot(at, values, color=COLOURS[GRADIENTS], linewidth=line, marker="o", markersize=5, label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    return write_figure(figure, path)


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """A figure of its own on the Agg canvas: pyplot, and with it the user's backend, stays untouched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, colors=_INK)
    return figure, axes


def _columns(timeline: MemoryTimeline, count: int) -> tuple[Any, Any]:
    """(start of each of ``count`` equal stretches of time in ms, and the end; the event to draw there).

    That is the event with the largest total within the stretch or just before it: a spike, however short, is a column
    wide.
    """
    edges = np.linspace(0.0, max(float(timeline.times[-1]), 1e-6), count + 1)
    cuts = np.searchsorted(timeline.times, edges)
    total = timeline.total
    events = []
    for first, last in itertools.pairwise(cuts):
        begin = max(0, int(first) - 1)
        events.append(begin + int(np.argmax(total[begin : max(int(last), begin + 1)])))
    return edges * 1e3, np.array([*events, events[-1]])


def _draw_phases(axes: "Axes", timeline: MemoryTimeline, top: float) -> None:
    """Name the stages of the step above the areas, with a line where each begins."""
    width = float(timeline.times[-1]) * 1e3
    drawn = ""
    for phase, first, last in timeline.phase_spans():
        if phase not in (FORWARD, BACKWARD, UPDATE_PHASE):
            continue
        begin, end = float(timeline.times[first]) * 1e3, float(timeline.times[last]) * 1e3
        # Under a fused backward, updates too short to name cut one backward into several.
        if end - begin < 0.04 * width or phase == drawn:
            continue
        drawn = phase
        axes.axvline(begin, color=_INK, linewidth=0.6, alpha=0.35)
        axes.text(begin + 0.006 * width, top * 0.985, phase, va="top", ha="left", fontsize=8.5, color=_INK)


def _draw_peak(axes: "Axes", timeline: MemoryTimeline, scale: float, unit: str) -> None:
    when = float(timeline.times[timeline.peak_event]) * 1e3
    level = timeline.peak_bytes / scale
    right = when > 0.6 * float(timeline.times[-1]) * 1e3
    axes.plot([when], [level], marker="v", color=_INK, markersize=5, clip_on=False)
    text: dict[str, Any] = {"ha": "right" if right else "left", "va": "bottom", "fontsize": 8.5, "color": _INK}
    offset = (-6 if right else 6, 3)
    axes.annotate(
        f"peak {level:.2f} {unit}",
        (when, level),
        textcoords="offset points",
        xytext=offset,
        annotation_clip=False,
        bbox=_BEHIND_TEXT,
        zorder=5,
        **text,
    )


def _smoothed(values: Any, weight: float) -> Any:
    """Exponential moving average, corrected for its start (as if the past before the first value did not exist)."""
    out = np.empty_like(values)
    level = mass = 0.0
    for index, value in enumerate(values):
        level = weight * level + (1 - weight) * float(value)
        mass = weight * mass + (1 - weight)
        out[index] = level / mass
    return out


def _svg(figure: "Figure") -> str:
    """The figure as an <svg> element that scales with its page and takes the page's ink (CSS ``color``) for its own."""
    import matplotlib

    text = io.StringIO()
    # Text stays text, and one figure's names do not meet another's in the same page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(figure.get_size_inches())}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', svg, count=1)
    for ink in (_INK, "#000000"):
        svg = svg.replace(ink, "currentColor")
    svg = svg.replace("#ffffff", "var(--paper, #ffffff)")
    # The size alone, so that the page's own font is used.
    return re.sub(r"font: ?([\d.]+px) [^;\"]*", r"font-size: \1", svg)


def write_figure(figure: "Figure", path: str | Path) -> Path:
    """Write a figure as a PNG file, its folder made where it is missing; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        figure.savefig(aside, format="png")
    return path

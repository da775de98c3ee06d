"""The report of a profile: one HTML file that needs nothing beside itself.

Pictures are SVG inside the page; there is no script, no font and no address to fetch. It follows the reader's light or
dark setting, prints on paper, and fits a phone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leantune.memory.parts import LABELS, PARTS
from leantune.memory.reports.plots import COLOURS, memory_svg
from leantune.memory.reports.profile import MemoryProfile, difference
from leantune.memory.reports.stages import STAGE_LABELS, STEP, TOTAL, StageMeasurement, StageRow
from leantune.memory.sizes import format_bytes
from leantune.whole_file import write_whole

MODULES_SHOWN = 16


@dataclass(frozen=True)
class _Block:
    """One part in a stage's bar; percent of the widest bar."""

    part: str
    start: float
    width: float
    title: str


@dataclass(frozen=True)
class _Bar:
    """A stage's bar: its blocks, and where the plan and the measurement from outside stand."""

    label: str
    total: str
    blocks: list[_Block]
    planned: float | None
    outside: str


def write_report(profile: MemoryProfile, path: str | Path) -> Path:
    """Write a profile as an HTML page; returns the path."""
    path = Path(path)
    write_whole(path, render_report(profile))
    return path


def render_report(profile: MemoryProfile) -> str:
    """The page's text. Whatever comes from the run (names, messages) is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("leantune.memory.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = lambda size: "" if size is None else format_bytes(size)
    page = environment.get_template("report.html.j2")
    return page.render(
        profile=profile,
        bars=_bars(profile),
        wide=_picture(profile, (9.5, 3.6)),
        narrow=_picture(profile, (4.4, 3.4)),
        plan_tables=_plan_tables(profile),
        modules=profile.modules[:MODULES_SHOWN],
        more_modules=max(0, len(profile.modules) - MODULES_SHOWN),
        parts=[part for part in PARTS if _used(profile, part)],
        labels=LABELS,
        colours=COLOURS,
        stage_labels=STAGE_LABELS,
        headline=_headline(profile),
        figures=_figures(profile),
    )


def _headline(profile: MemoryProfile) -> str:
    shortage = profile.shortage
    if shortage is not None:
        kind = "over the memory budget" if shortage.simulated else "out of memory"
        return f"{kind.capitalize()} in: {STAGE_LABELS[shortage.stage]}"
    peak = profile.peak
    if peak is None:
        return "Nothing was measured"
    if profile.budget is not None:
        spare = format_bytes(profile.budget - peak.peak_bytes)
        return f"Fits {format_bytes(profile.budget)}, with {spare} to spare"
    return f"Needs {format_bytes(peak.peak_bytes)} of tensors"


def _figures(profile: MemoryProfile) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the figures at the top."""
    found = []
    peak = profile.peak
    if profile.shortage is not None:
        live = sum(profile.shortage.live.values())
        found.append(("in use when it ran out", format_bytes(live), f"in {STAGE_LABELS[profile.shortage.stage]}"))
    elif peak is not None:
        found.append(("largest stage", format_bytes(peak.peak_bytes), STAGE_LABELS[peak.stage]))
    if profile.budget is not None:
        found.append(("budget", format_bytes(profile.budget), "of live tensors"))
    row = next((row for row in profile.rows if (row.stage, row.part) == (STEP, TOTAL)), None)
    if row is not None and row.planned is not None:
        remark = f"measured {difference(row)}" if row.measured else ""
        found.append(("planned for a step", format_bytes(row.planned), remark))
    step = profile.stage(STEP)
    if step is not None and step.outside_bytes is not None:
        whose = "the allocator" if profile.machine.get("device") == "cuda" else "the process"
        found.append((f"{whose} in a step", format_bytes(step.outside_bytes), "above what it held before loading"))
    if profile.tokens_per_second:
        found.append(("speed", f"{profile.tokens_per_second:,.0f} tokens/s", "one step, not tracked"))
    return found


def _bars(profile: MemoryProfile) -> list[_Bar]:
    stages = list(profile.stages)
    if profile.shortage is not None and any(profile.shortage.live.values()):
        stages.append(StageMeasurement(profile.shortage.stage, profile.shortage.live))
    planned = {row.stage: row.planned for row in profile.rows if row.part == TOTAL}
    tops = [stage.peak_bytes for stage in stages] + [value or 0 for value in planned.values()] + [profile.budget or 0]
    widest = max(tops, default=0) or 1
    order = list(STAGE_LABELS)
    return [
        _bar(stage, planned.get(stage.stage), widest) for stage in sorted(stages, key=lambda s: order.index(s.stage))
    ]


def _bar(stage: StageMeasurement, planned: int | None, widest: int) -> _Bar:
    blocks, start = [], 0.0
    for part in PARTS:
        size = stage.parts.get(part, 0)
        if size:
            width = 100 * size / widest
            blocks.append(_Block(part, start, width, f"{LABELS[part]}: {format_bytes(size)}"))
            start += width
    outside = "" if stage.outside_bytes is None else format_bytes(stage.outside_bytes)
    place = None if planned is None else 100 * planned / widest
    return _Bar(STAGE_LABELS[stage.stage], format_bytes(stage.peak_bytes), blocks, place, outside)


def _plan_tables(profile: MemoryProfile) -> list[tuple[str, list[dict[str, str]]]]:
    """(stage, its rows as text) of every stage that was planned."""
    tables: dict[str, list[dict[str, str]]] = {}
    planned = {row.stage for row in profile.rows if row.planned is not None}
    totals = {row.stage: max(row.planned or 0, row.measured or 0) for row in profile.rows if row.part == TOTAL}
    for row in profile.rows:
        if row.stage in planned:
            name = "total" if row.part == TOTAL else LABELS[row.part]
            values = {"part": row.part, "name": name, "planned": _text(row.planned), "measured": _text(row.measured)}
            tables.setdefault(STAGE_LABELS[row.stage], []).append(
                {**values, "difference": _told(row, totals[row.stage])}
            )
    return list(tables.items())


def _told(row: StageRow, total: int) -> str:
    """The difference in percent, where the part is a hundredth of its stage or more."""
    return difference(row) if 100 * max(row.planned or 0, row.measured or 0) >= total else ""


def _picture(profile: MemoryProfile, size: tuple[float, float]) -> Any:
    if profile.timeline is None or len(profile.timeline.times) < 2:
        return ""
    from markupsafe import Markup

    svg = memory_svg(profile.timeline, plan_total=profile.planned_step, budget=profile.budget, size=size)
    return Markup(svg)


def _used(profile: MemoryProfile, part: str) -> bool:
    stages = any(stage.parts.get(part) for stage in profile.stages)
    drawn = profile.timeline is not None and int(profile.timeline.bytes_by_part[part].max()) > 0
    return stages or drawn


def _text(size: int | None) -> str:
    return "" if size is None else format_bytes(size)

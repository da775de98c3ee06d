"""run_card.md: what a run was and what came of it, for whoever finds its folder later."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leantune.environment import MISSING, environment
from leantune.memory import MemoryTimeline, format_bytes
from leantune.training.config import TrainConfig
from leantune.training.data.load import PreparedData
from leantune.training.samples import stopping
from leantune.whole_file import write_whole

if TYPE_CHECKING:
    from leantune.training.run import TrainResult

RUN_CARD = "run_card.md"
_PLOTS = ("loss.png", "curves.png", "memory.png")


def write_run_card(
    config: TrainConfig,
    result: "TrainResult",
    data: PreparedData,
    methods: dict[str, str],
    timeline: MemoryTimeline | None,
    folder: Path,
) -> Path:
    """Data, settings, methods, memory (planned beside measured), results and versions, as Markdown.

    Args:
        config: of the run, resolved.
        result: what `train` gives back.
        data: its rows.
        methods: what the header said of the run (`leantune.training.summary.facts`).
        timeline: of the measured step; None where no step was measured.
        folder: where it is written, beside the plots.
    Returns: the file.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("leantune.training"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters["cell"] = cell
    path = folder / RUN_CARD
    text = pages.get_template("run_card.md.j2").render(
        name=result.output_dir.name,
        config=config,
        chosen=chosen(config),
        methods=methods,
        sources=data.report.sources,
        rows=data.rows,
        held_out=0 if data.held_out is None else len(data.held_out),
        notes=[*config.notes, *data.notes],
        results=_results(config, result),
        memory=_memory(result, timeline),
        where=result.plan.where if result.plan else None,
        plots=[plot for plot in _PLOTS if (folder / plot).is_file()],
        samples=result.samples,
        machine=_machine(),
    )
    write_whole(path, re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")
    return path


def cell(value: Any) -> str:
    """Text that stays in one cell of a Markdown table.

    >>> cell("a|b\\nc")
    'a\\\\|b c'
    """
    return " ".join(str(value).replace("|", "\\|").split())


def chosen(config: TrainConfig) -> dict[str, Any]:
    """The keys of a config that are not at their defaults, those passed through to transformers included."""
    default = TrainConfig()
    named = [field.name for field in dataclasses.fields(config) if field.name not in ("extra", "notes", "resume")]
    own = {name: getattr(config, name) for name in named if getattr(config, name) != getattr(default, name)}
    return {**own, **config.extra}


def _results(config: TrainConfig, result: "TrainResult") -> dict[str, str]:
    found = {"steps": f"{max((row['step'] for row in result.log), default=0):,}"}
    losses = [row["loss"] for row in result.log if "loss" in row]
    if losses:
        found["training loss, first and last logged"] = f"{losses[0]:.4f}, {losses[-1]:.4f}"
    if result.held_out_before is not None and result.held_out_after is not None:
        begun = f"at step {result.begun_at}, where the run was resumed," if result.begun_at else "before"
        found[f"held-out loss, {begun} and after"] = f"{result.held_out_before:.4f}, {result.held_out_after:.4f}"
    found["speed"] = f"{result.tokens_per_second:,.0f} tokens/s"
    if result.samples:
        found["answers"] = stopping(result.samples, config.sample_tokens)
    if result.velora is not None:
        found["saved by VeLoRA"] = format_bytes(result.velora.saved_bytes)
    return found


def _memory(result: "TrainResult", timeline: MemoryTimeline | None) -> list[tuple[str, str, str, str]]:
    """(part, planned, measured, difference); what was not planned, or not measured, is a dash."""
    if result.plan is not None and timeline is not None:
        return result.plan.compare(timeline)
    if result.plan is not None:
        return [(part, planned, "-", "-") for part, planned, _ in result.plan.rows()]
    if timeline is not None:
        parts = [(part, "-", format_bytes(size), "-") for part, size in timeline.part_peaks().items() if size]
        return [*parts, ("total", "-", format_bytes(timeline.peak_bytes), "-")]
    return []


def _machine() -> dict[str, str]:
    found = environment()
    packages = {name: version for name, version in found["packages"].items() if version != MISSING}
    gpus = ", ".join(gpu["name"] for gpu in found["gpus"]) or "none"
    return {"python": found["python"], **packages, "CPU": found["cpu"], "GPU": gpus}

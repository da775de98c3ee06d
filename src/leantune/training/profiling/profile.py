"""``profile``: a few real steps of a run on its longest rows, every stage measured, and a report of it.

Load, two tracked steps and one that is not, evaluation, a checkpoint; then the checkpoint is resumed from in a process
of its own. Nothing is written but the profile's folder; the checkpoint is removed at the end.
"""

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from leantune.errors import ConfigError, MemoryBudgetError
from leantune.memory import Plan, format_bytes, parse_size, process_peak, reset_process_peak
from leantune.memory.measured.cuda_allocator import CudaAllocator
from leantune.memory.measured.machine import describe_machine, versions
from leantune.memory.measured.modules import ModuleRow
from leantune.memory.measured.process import is_out_of_memory
from leantune.memory.measured.timeline import BACKWARD, FORWARD, MemoryTimeline
from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.reports.calibration import calibration
from leantune.memory.reports.profile import MemoryProfile
from leantune.memory.reports.report import write_report
from leantune.memory.reports.shortage import MemoryShortage, shortage_of
from leantune.memory.reports.stages import (
    BACKWARD_STAGE,
    EVALUATION,
    FIRST_STEP,
    FORWARD_STAGE,
    LOAD,
    RESUME,
    SAVE,
    STEP,
    StageMeasurement,
    stage_rows,
)
from leantune.training.config import TrainConfig, load_config
from leantune.training.disk import writes_are_told
from leantune.training.optimizers import plain_optimizer
from leantune.training.parallel.processes import refuse_launchers
from leantune.training.profiling.longest import longest_first
from leantune.training.profiling.planned import PlannedRun, planned_run
from leantune.training.run import build_trainer, load_model, load_rows, plan_of_run
from leantune.training.summary import dtypes
from leantune.training.trainer import LeanTrainer

STEPS = 3
"""The first step (states appear), a steady one, and one that is only timed and seen from outside."""

INSTEAD = (
    "Write leantune profile CONFIG alone, which measures one process with the whole model (parallel: ddp). What a "
    "process of several needs, with parallel: fsdp2 too, leantune plan CONFIG --parallel fsdp2 --world_size N says"
)
"""What to run where a profile of several processes is asked for."""

SNAPSHOT_FILE = "memory_snapshot.pickle"
REPORT_FILE = "memory_report.html"


def profile(
    config: TrainConfig | str | Path,
    flags: Mapping[str, object] | None = None,
    *,
    folder: str | Path | None = None,
    console: Console | None = None,
) -> MemoryProfile:
    """Measure what a run needs, stage by stage, on a few real steps.

    Args:
        config: a TrainConfig, or the path of a YAML file.
        flags: keys that win over the file's, as in ``leantune profile CONFIG --key value``.
        folder: where to write; ``<output_dir>/profile`` by default.
        console: where to print; a plain one by default.

    Writes memory_profile.json, memory_report.html and memory_calibration.json. With ``memory_budget`` the tracked
    stages are stopped, as by a full device, once live tensors exceed it.

    Returns: the profile; ``profile.shortage`` says where memory ran out, if it did.
    Raises: ConfigError where config or data cannot work, and in one of several processes of a launcher.
    """
    refuse_launchers("profile", INSTEAD)
    if not isinstance(config, TrainConfig):
        given = [f"--{key}={json.dumps(value)}" for key, value in (flags or {}).items()]
        config = load_config(config, given)
    elif flags:
        raise ConfigError("- flags go with a config file; change the TrainConfig itself (dataclasses.replace)")
    console = console or Console()
    target = Path(folder) if folder is not None else Path(config.output_dir) / "profile"
    work = target / ".run"
    with writes_are_told(target, lambda: "The profile is not whole; make room, or give another output_dir"):
        target.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        try:
            found = _Profiling(_as_profiled(config, work), target, console).run()
        finally:
            shutil.rmtree(work, ignore_errors=True)
        found.save(target)
        _write_calibration(found, target)
        write_report(found, target / REPORT_FILE)
    _print(console, found, target)
    return found


def _as_profiled(config: TrainConfig, work: Path) -> TrainConfig:
    """The run's config with its data in order, a few steps, and nothing written on the way."""
    quiet = {"train_sampling_strategy": "sequential", "save_strategy": "no", "eval_strategy": "no"}
    dropped = ("eval_steps", "save_only_model")
    extra = {**{key: value for key, value in config.extra.items() if key not in dropped}, **quiet}
    # The longest rows are wanted, which a stream would not tell.
    changes: dict[str, Any] = {"max_steps": STEPS, "resume": False, "save_total_limit": None, "streaming": False}
    return dataclasses.replace(config, output_dir=str(work), extra=extra, **changes)


class _Profiling:
    """One profile under way: what has been measured so far, and where it is."""

    def __init__(self, config: TrainConfig, target: Path, console: Console) -> None:
        self.config = config
        self.target = target
        self.console = console
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.budget = None if config.memory_budget is None else parse_size(config.memory_budget)
        self.allocator = CudaAllocator(self.device) if self.device.type == "cuda" else None
        self.stage = LOAD
        self.tracker: MemoryTracker | None = None
        self.stages: list[StageMeasurement] = []
        self.timeline: MemoryTimeline | None = None
        self.modules: list[ModuleRow] = []
        self.plan: Plan | None = None
        self.planned: PlannedRun | None = None
        self.notes: list[str] = []
        self.described: dict[str, str] = {}
        self.tokens_per_second: float | None = None
        self.baseline = 0

    def run(self) -> MemoryProfile:
        """Every stage, up to the one in which memory runs out."""
        self.config, tokenizer, data = load_rows(self.config)
        self.notes += [*self.config.notes, *data.notes]
        data = longest_first(self.config, data, STEPS + 1)
        data.notes = []
        shortage, allocator = None, {}
        self.baseline = process_peak(self.device).current
        if self.allocator is not None:
            self.allocator.start()
        try:
            self._train(tokenizer, data)
            gc.collect()
            self._resume()
        except Exception as error:
            if not (isinstance(error, MemoryBudgetError) or is_out_of_memory(error)):
                raise
            shortage = self._shortage(error)
        finally:
            if self.allocator is not None:
                allocator = self.allocator.figures()
                self.allocator.stop()
        return self._profile(shortage, allocator)

    def _train(self, tokenizer: Any, data: Any) -> None:
        """Load, steps, evaluation and save. The model is gone when this returns, so that resuming has room."""
        with self._tracked(LOAD, unseen_are_new=True) as tracker, _reading_in_this_thread():
            loaded = load_model(self.config)
            tracker.adopt(loaded.model)
        trainer = build_trainer(self.config, loaded, tokenizer, data)
        # The plan is for the batch that is run, or the two could not be compared.
        data.notes = []
        self.plan = plan_of_run(self.config, trainer, data)
        self.planned = planned_run(self.config, data, self.plan, cuda=self.device.type == "cuda")
        self.notes += data.notes
        self._describe(trainer, data)
        self.described["exact savings"] = "; ".join(loaded.savings.lines())
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Steps(self, trainer))
        try:
            trainer.train()
        finally:
            if self.tracker is not None:
                self.tracker.stop()
            if trainer.attached is not None:
                trainer.attached.remove()
        optimizer = plain_optimizer(trainer)
        if trainer.eval_dataset is None:
            self.notes.append("evaluation was not measured: there are no held-out rows (eval_dataset or eval_split)")
        else:
            with self._tracked(EVALUATION, trainer.model, optimizer):
                trainer.held_out_loss()
        with self._tracked(SAVE, trainer.model, optimizer, unseen_are_new=True):
            trainer.save_checkpoint()

    def _describe(self, trainer: LeanTrainer, data: Any) -> None:
        config = self.config
        rows, micro = config.per_device_train_batch_size, config.gradient_accumulation_steps
        where = self.plan.where if self.plan else f"{rows} x {data.longest} tokens"
        self.described = {
            "model": config.model_name_or_path,
            "where": where,
            "method": config.method,
            "optimizer": config.optim,
            "gradients": "applied and freed in backward" if config.fused else "kept until the step",
            "checkpointing": "on" if config.gradient_checkpointing else "off",
            "loss": "without logits" if trainer.exact_loss else "full logits",
            "micro-batches": str(micro),
        }
        stored = dtypes(config, trainer.model, plain_optimizer(trainer))
        self.described |= {f"{name} dtype": stored[name] for name in ("weights", "compute", "states")}

    @contextmanager
    def _tracked(
        self, stage: str, model: Any = None, optimizer: Any = (), unseen_are_new: bool = False
    ) -> Iterator[MemoryTracker]:
        """Measure what runs inside as ``stage``."""
        tracker = self.begin(stage, model, optimizer, unseen_are_new)
        try:
            yield tracker
        finally:
            tracker.stop()
        self.end()

    def begin(self, stage: str, model: Any, optimizer: Any, unseen_are_new: bool = False) -> MemoryTracker:
        """Start to measure a stage."""
        self.stage = stage
        reset_process_peak(self.device)
        self.tracker = MemoryTracker(model, optimizer, budget=self.budget, unseen_are_new=unseen_are_new)
        self._began = time.perf_counter()
        return self.tracker.start()

    def end(self) -> None:
        """Note what the stage used; its tracker has been stopped."""
        tracker, self.tracker = self.tracker, None
        assert tracker is not None
        timeline = tracker.timeline()
        outside = process_peak(self.device).peak - self.baseline
        self.stages.append(
            StageMeasurement(
                self.stage,
                timeline.at_peak(),
                outside_bytes=outside,
                seconds=round(time.perf_counter() - self._began, 3),
                part_peaks=timeline.part_peaks(),
            )
        )
        if self.stage == STEP:
            self.timeline, self.modules = timeline, tracker.modules(timeline)
            self.stages.append(StageMeasurement(FORWARD_STAGE, timeline.peak_in(FORWARD)))
            self.stages.append(StageMeasurement(BACKWARD_STAGE, timeline.peak_in(BACKWARD)))

    def _resume(self) -> None:
        """Load the checkpoint into a trainer of its own, in a process of its own, and train one step."""
        self.stage = RESUME
        config, out = Path(self.config.output_dir) / "resume.yaml", Path(self.config.output_dir) / "resume.json"
        again = dataclasses.replace(self.config, max_steps=STEPS + 1)
        config.write_text(again.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "leantune.training.profiling.resumed_step", str(config), str(out)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            if ended.returncode < 0 or "MemoryError" in last or "out of memory" in last.lower():
                raise MemoryError(f"resuming ended with exit code {ended.returncode}: {last}")
            raise RuntimeError(f"the checkpoint could not be resumed from: {last}")
        self.stages.append(StageMeasurement(**json.loads(out.read_text(encoding="utf-8"))))

    def _shortage(self, error: BaseException) -> MemoryShortage:
        shortage = shortage_of(error, self.stage, self.tracker, self.device)
        if self.tracker is not None:
            self.tracker.stop()
            self.timeline = self.tracker.timeline()
            self.modules = self.tracker.modules(self.timeline)
        if self.allocator is not None and not shortage.simulated:
            self.allocator.write_snapshot(self.target / SNAPSHOT_FILE)
            shortage = dataclasses.replace(shortage, snapshot=SNAPSHOT_FILE)
        return shortage

    def _profile(self, shortage: MemoryShortage | None, allocator: dict[str, Any]) -> MemoryProfile:
        largest = max(self.stages, key=lambda stage: stage.peak_bytes, default=None)
        parts = shortage.live if shortage is not None else largest.parts if largest is not None else {}
        stages = {stage.stage: stage for stage in self.stages}
        if RESUME in stages:
            resume = stages[RESUME].peak_bytes
            trained = max(stage.peak_bytes for name, stage in stages.items() if name != RESUME)
            verdict = "no more than" if resume <= trained else "MORE than"
            self.notes.append(
                f"resuming needs {format_bytes(resume)} of tensors, {verdict} training ({format_bytes(trained)})"
            )
        planned = self.planned
        return MemoryProfile(
            run=self.described or {"model": self.config.model_name_or_path},
            machine=describe_machine(self.device),
            versions=versions(),
            budget=self.budget,
            stages=tuple(self.stages),
            rows=tuple(stage_rows(planned.stages() if planned else {}, self.stages)),
            timeline=self.timeline,
            modules=tuple(self.modules),
            advice=planned.advice(parts, self.budget) if planned else (),
            notes=tuple(self.notes),
            tokens_per_second=self.tokens_per_second,
            shortage=shortage,
            allocator=allocator,
        )


class _Steps(TrainerCallback):
    """Measures the first step and a steady one; times the one after, untracked."""

    def __init__(self, profiling: _Profiling, trainer: LeanTrainer) -> None:
        self._profiling = profiling
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start the tracker, or the clock."""
        if state.global_step < STEPS - 1:
            stage = STEP if state.global_step else FIRST_STEP
            self._profiling.begin(stage, self._trainer.model, plain_optimizer(self._trainer))
        else:
            reset_process_peak(self._profiling.device)
            self._began, self._tokens = time.perf_counter(), self._trainer.tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stop it."""
        profiling = self._profiling
        if profiling.tracker is not None:
            profiling.tracker.stop()
            profiling.end()
            return
        seconds = time.perf_counter() - self._began
        profiling.tokens_per_second = (self._trainer.tokens_seen - self._tokens) / seconds
        outside = process_peak(profiling.device).peak - profiling.baseline
        # The tracker's own bookkeeping is resident memory too: the step without it is the one to report.
        profiling.stages = [
            dataclasses.replace(stage, outside_bytes=outside) if stage.stage == STEP else stage
            for stage in profiling.stages
        ]


@contextmanager
def _reading_in_this_thread() -> Iterator[None]:
    """transformers reads weights in threads of a pool, where no tracker sees them."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _write_calibration(found: MemoryProfile, target: Path) -> None:
    if found.shortage is not None:
        return  # half a measurement would mislead later plans
    step = found.stage(STEP)
    beside = None if step is None or step.outside_bytes is None else max(0, step.outside_bytes - step.peak_bytes)
    calibration(found.rows, machine=found.machine, versions=found.versions, run=found.run, beside_tensors=beside).save(
        target
    )


def _print(console: Console, found: MemoryProfile, target: Path) -> None:
    table = Table(title=f"memory by stage, {found.run.get('where', '')}", title_justify="left")
    for column in ("stage", "planned", "measured", "difference"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for row in found.table():
        table.add_row(*row)
    console.print(table)
    lines: list[str] = list(found.notes)
    if found.tokens_per_second:
        lines.append(f"{found.tokens_per_second:,.0f} tokens/s in a step that was not tracked")
    if found.shortage is not None:
        lines.append(f"stage {found.shortage.stage}: {found.shortage.message}")
        lines += [f"pid {use.pid} ({use.name}) holds {format_bytes(use.bytes)}" for use in found.shortage.others]
        lines += [f"fix: {text}" for text in found.advice]
    for line in lines:
        console.print(line, highlight=False)
    console.print(f"report: {target / REPORT_FILE}", highlight=False, soft_wrap=True)

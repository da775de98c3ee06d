"""A process that resumes a run from its checkpoint, trains one step, and writes what that took: for ``profile``.

python -m leantune.training.profiling.resumed_step CONFIG.yaml RESULT.json
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from transformers import PrinterCallback

from leantune.memory import process_peak, reset_process_peak
from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.reports.stages import RESUME, StageMeasurement
from leantune.memory.sizes import parse_size
from leantune.training.checkpoints import VELORA_FILE, check_checkpoint, checkpoints
from leantune.training.config import TrainConfig, load_config
from leantune.training.optimizers import plain_optimizer
from leantune.training.profiling.longest import longest_first
from leantune.training.run import build_trainer, load_model, load_rows


def resumed_step(config: TrainConfig) -> StageMeasurement:
    """Measure loading the last checkpoint of ``config.output_dir`` into a fresh trainer, and the step after it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = checkpoints(config.output_dir)[-1]
    check_checkpoint(checkpoint, config)
    config, tokenizer, data = load_rows(config)
    data = longest_first(config, data, config.max_steps)
    baseline = process_peak(device).current
    reset_process_peak(device)
    loaded = load_model(config, checkpoint)
    trainer, velora = build_trainer(config, loaded, tokenizer, data), loaded.velora
    trainer.remove_callback(PrinterCallback)
    if velora is not None:
        velora.load(checkpoint / VELORA_FILE)
    budget = None if config.memory_budget is None else parse_size(config.memory_budget)
    if trainer.optimizer is None:
        trainer.create_optimizer()
    with MemoryTracker(trainer.model, plain_optimizer(trainer), budget=budget, unseen_are_new=True) as tracker:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    timeline = tracker.timeline()
    outside = process_peak(device).peak - baseline
    return StageMeasurement(RESUME, timeline.at_peak(), outside_bytes=outside, part_peaks=timeline.part_peaks())


def main() -> None:
    """See the module."""
    config, result = sys.argv[1:3]
    measured = resumed_step(load_config(config))
    Path(result).write_text(json.dumps(dataclasses.asdict(measured)), encoding="utf-8")


if __name__ == "__main__":
    main()

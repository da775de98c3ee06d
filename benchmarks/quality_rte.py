"""The LOMO paper's fine-tuning setting, small: SmolLM2-135M on RTE, scored by the likelihood of its answer.

    python benchmarks/quality_rte.py --data FOLDER [--methods lomo,adamw] [--threads 2]
    python benchmarks/quality_rte.py --data FOLDER --steps 3 --rows /tmp/rte.csv    # every method for a moment
    python benchmarks/quality_rte.py --data FOLDER --plan --rows /tmp/rte.csv       # hours of the whole, from that
    python benchmarks/quality_rte.py --summary                                      # the Markdown table from the rows

FOLDER holds rte_train.tsv and rte_dev.tsv (GLUE). The model answers " yes" or " no" to whether the premise implies the
hypothesis; 1,000 rows are trained on and the other 1,767 held out (the standard error of an accuracy is 1.2 points).
bf16 weights, rounded stochastically; batches of 16 rows, one epoch; the rate rises over a tenth of the steps and falls
linearly to a tenth.

  zero-shot   the model as it is
  lora        peft's LoRA of rank 16 on every linear layer, fp32 adapters, AdamW, clipped by the global norm
  lomo        in a fused backward, clipped by the global norm of 1 as in the paper (two backwards over one forward)
  adalomo     in a fused backward, without clipping, which its update does by itself
  adamw       fp32 states, ordinary backward, clipped by the global norm of 1
  ternary     TernaryAdamW in a fused backward, clipped per tensor

Each method's rate is searched on a grid of factors of 2: one epoch of the first 400 training rows with seed 0, judged
on the last 200 training rows, extended until the best is interior. Then an epoch of all 1,000 rows at that rate, with
three seeds; AdaLomo with one. A row of results/quality_rte.csv a run; what is there is not run again. Memory by part is
what `MemoryTracker` counts in the second step of each run, the same batch for every method with that seed.
"""

import argparse
import base64
import functools
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quality.entailment import TRAINED, EntailmentTask
from quality.entailment_table import PARTS, ZERO_SHOT, table
from quality.task import MissingData
from quality.training import rate, rate_factor, to_hex
from rows import ResultRows
from torch import Tensor, nn

import leantune as lt
from leantune.errors import NonFiniteError
from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.parts import ACTIVATIONS, GRADIENTS, LOSS, OPTIMIZER_STATES, WEIGHTS

BATCH, EPOCHS, CLIP = 16, 1, 1.0
SEARCH_TRAINED, SEARCH_JUDGED = range(400), range(800, TRAINED)
MOST_RATES = 8
RATES_A_SEARCH = 4
"""What a search takes, for the plan: three rates, and more where it has to move."""
REHEARSED_JUDGED = 16
COLUMNS = (
    "method", "lr", "stage", "epochs", "steps", "trained_rows", "held_out_loss", "accuracy",
    *(f"{part}_bytes" for part in PARTS), "measured_tokens", "tokens_per_second", "judged_tokens_per_second", "threads",
    "seconds", "correct", "losses",
)  # fmt: skip
"""``stage``: "search" (the loss is that of its own judged rows), "final", "rehearsal". ``activations``: saved by
forward when backward begins, logits included; ``peak``: of all tensors at once. ``measured_tokens``: of the batch that
memory was counted on. ``losses``: of the held-out rows in order, fp16, base64."""


@dataclass
class Setup:
    """What a method makes of a model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    fused: lt.FusedBackward | None = None

    def step(self, loss: Tensor) -> None:
        if self.fused is not None:
            self.fused.backward(loss)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Method:
    """``power``: the search begins at a rate of 1e-3 * 2^power."""

    build: Callable[[nn.Module, float, int], Setup]
    power: int
    seeds: int = 3


def lora(model: nn.Module, lr: float, seed: int) -> Setup:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [param for param in adapted.parameters() if param.requires_grad]
    return Setup(adapted, lt.AdamW(trained, lr=lr, weight_decay=0.0, seed=seed))


def full(rule: Callable[..., Any], clip: str | None, **settings: Any) -> Callable[[nn.Module, float, int], Setup]:
    """All parameters by ``rule``; ``clip``: of a fused backward, None for an ordinary one."""

    def build(model: nn.Module, lr: float, seed: int) -> Setup:
        optimizer = rule(model.named_parameters(), lr=lr, seed=seed, **settings)
        if clip is None:
            return Setup(model, optimizer)
        bound = None if clip == "none" else CLIP
        return Setup(model, optimizer, lt.FusedBackward(optimizer, model, clip, bound))

    return build


METHODS = {
    "adamw": Method(full(lt.AdamW, None, weight_decay=0.01), power=-4),
    "ternary": Method(full(lt.TernaryAdamW, "per_tensor", weight_decay=0.01), power=-4),
    "lomo": Method(full(lt.Lomo, "global"), power=5),
    "lora": Method(lora, power=-1),
    "adalomo": Method(full(lt.AdaLomo, "none"), power=-1, seeds=1),
}
"""In order of work. Settings beyond these are the classes' own."""


# -- one run ---------------------------------------------------------------------------------------------------------


def train(setup: Setup, task: EntailmentTask, batches: list[list[int]], lr: float) -> dict[str, Any]:
    """Trains on ``batches``; the row's memory and speed. Raises NonFiniteError.

    Speed leaves out the first step, in which states are allocated, and the second, which is tracked.
    """
    found: dict[str, Any] = {}
    seconds = tokens = 0.0
    for number, places in enumerate(batches):
        for group in setup.optimizer.param_groups:
            group["lr"] = lr * rate_factor(number, len(batches))
        tracker = MemoryTracker(setup.model, setup.optimizer) if number == 1 else None
        begun = time.perf_counter()
        if tracker is not None:
            tracker.start()
        loss = task.loss(setup.model, places)
        if not math.isfinite(loss.item()):
            raise NonFiniteError(f"the loss of step {number} is {loss.item()}")
        setup.step(loss)
        del loss
        if tracker is not None:
            tracker.stop()
            found |= memory(tracker) | {"measured_tokens": task.tokens(places)}
        elif number > 1:
            seconds += time.perf_counter() - begun
            tokens += task.tokens(places)
    return found | {"tokens_per_second": tokens / seconds if seconds else float("nan")}


def memory(tracker: MemoryTracker) -> dict[str, int]:
    timeline = tracker.timeline()
    peaks, saved = timeline.part_peaks(), timeline.saved_at_forward_end()
    return {
        "parameters_bytes": peaks[WEIGHTS],
        "gradients_bytes": peaks[GRADIENTS],
        "states_bytes": peaks[OPTIMIZER_STATES],
        "activations_bytes": saved[ACTIVATIONS] + saved[LOSS],
        "peak_bytes": timeline.peak_bytes,
    }


def run(
    task: EntailmentTask,
    method: str,
    lr: float,
    seed: int,
    trained: range,
    judged: range,
    epochs: int,
    steps: int | None = None,
) -> dict[str, Any]:
    """The row's columns of one run; ``steps``: so many alone, to rehearse. What diverges has a loss of infinity."""
    begun = time.perf_counter()
    torch.manual_seed(seed)
    model = task.model()
    generator = torch.Generator().manual_seed(1000 + seed)
    batches = task.batches(trained, BATCH, epochs, generator)
    if steps is not None:  # a rehearsal: of the median length, so that its speed is that of the whole
        middle = (len(batches) - steps) // 2
        batches = sorted(batches, key=task.tokens)[middle : middle + steps]
    setup = METHODS[method].build(model, lr, seed)
    row: dict[str, Any] = {"epochs": epochs, "steps": len(batches), "trained_rows": len(trained)}
    row["threads"] = torch.get_num_threads()
    try:
        row |= train(setup, task, batches, lr)
    except NonFiniteError as error:
        print(f"{method} at {lr:.2e}: {error}", flush=True)
        return row | {"held_out_loss": float("inf"), "seconds": time.perf_counter() - begun}
    return row | score(task, setup.model, judged) | {"seconds": time.perf_counter() - begun}


def untrained(task: EntailmentTask) -> dict[str, Any]:
    """The row's columns of the model as it is."""
    begun = time.perf_counter()
    model = task.model()
    size = sum(param.numel() * param.element_size() for param in model.parameters())
    row = {"parameters_bytes": size, "threads": torch.get_num_threads()} | score(task, model, task.held_out)
    return row | {"seconds": time.perf_counter() - begun}


def score(task: EntailmentTask, model: nn.Module, judged: range) -> dict[str, Any]:
    begun = time.perf_counter()
    found = task.judge(model, judged)
    loss = found.losses.mean().item()
    return {
        "held_out_loss": loss if math.isfinite(loss) else float("inf"),
        "accuracy": found.correct.float().mean().item(),
        "judged_tokens_per_second": task.tokens(list(judged)) / (time.perf_counter() - begun),
        "correct": to_hex(found.correct.tolist()),
        "losses": base64.b64encode(found.losses.half().numpy().tobytes()).decode(),
    }


# -- the work --------------------------------------------------------------------------------------------------------


class Benchmark:
    """Runs in order, each looked up in ``rows`` first."""

    def __init__(self, rows: ResultRows, task: EntailmentTask) -> None:
        self.rows, self.task = rows, task

    def ensure(self, method: str, lr: float, seed: int, stage: str, measure: Callable[[], dict[str, Any]]) -> float:
        """The held-out loss of this run, run now if its row is not there."""
        found = self.rows.find(method=method, lr=lr, seed=seed, stage=stage)
        if found:
            return float(found[0]["held_out_loss"])
        row = self.rows.append(seed=seed, method=method, lr=lr, stage=stage, **measure())
        loss = float(row["held_out_loss"])
        print(f"{method:9} lr {lr:.2e} seed {seed} {stage:9} loss {loss:.4f} {float(row['seconds']):.0f} s", flush=True)
        return loss

    def zero_shot(self) -> None:
        self.ensure(ZERO_SHOT, 0.0, 0, "final", functools.partial(untrained, self.task))

    def search(self, method: str) -> int:
        """The grid's best power, both of whose neighbours are worse (or the best of as many rates as are allowed)."""
        losses: dict[int, float] = {}

        def loss(power: int) -> float:
            if power not in losses:
                lr = rate(power)
                measure = functools.partial(run, self.task, method, lr, 0, SEARCH_TRAINED, SEARCH_JUDGED, 1)
                losses[power] = self.ensure(method, lr, 0, "search", measure)
            return losses[power]

        place = METHODS[method].power
        while len(losses) < MOST_RATES:
            best = min((place - 1, place, place + 1), key=lambda power: (loss(power), power))
            if best == place:
                break
            place = best
        return place

    def finish(self, method: str) -> None:
        lr, task = rate(self.search(method)), self.task
        for seed in range(METHODS[method].seeds):
            measure = functools.partial(run, task, method, lr, seed, task.trained, task.held_out, EPOCHS)
            self.ensure(method, lr, seed, "final", measure)

    def rehearse(self, method: str, steps: int) -> None:
        lr, judged = rate(METHODS[method].power), self.task.held_out[:REHEARSED_JUDGED]
        measure = functools.partial(run, self.task, method, lr, 0, self.task.trained, judged, 1, steps)
        self.ensure(method, lr, 0, "rehearsal", measure)


def plan(rows: ResultRows, task: EntailmentTask) -> None:
    """Hours of the whole from a rehearsal's tokens a second, in training and in judging."""
    trained, held_out = task.tokens(list(task.trained)), task.tokens(list(task.held_out))
    searched, judged = task.tokens(list(SEARCH_TRAINED)), task.tokens(list(SEARCH_JUDGED))
    total = 0.0
    print("method     tokens/s judged/s  search h   final h")
    for name, method in METHODS.items():
        found = rows.find(method=name, stage="rehearsal")
        if not found:
            raise SystemExit(f"{rows.path} has no rehearsal of {name}: run --steps 3 --rows {rows.path} first")
        speed, judging = (float(found[-1][f"{kind}tokens_per_second"]) for kind in ("", "judged_"))
        search = RATES_A_SEARCH * (searched / speed + judged / judging) / 3600
        final = method.seeds * (EPOCHS * trained / speed + held_out / judging) / 3600
        total += search + final
        print(f"{name:9} {speed:9.0f} {judging:8.0f} {search:9.2f} {final:9.2f}")
    total += held_out / judging / 3600
    print(f"in all {total:.1f} hours with {found[-1]['threads']} threads, zero-shot included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with rte_train.tsv and rte_dev.tsv")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods to run, separated by commas")
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--steps", type=int, help="rehearse: every method once, for so many steps (with --rows)")
    parser.add_argument("--layers", type=int, help="rehearse on the model's first layers alone (not for --plan)")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--plan", action="store_true", help="print what the whole takes, from a rehearsal in --rows")
    parser.add_argument("--summary", action="store_true", help="print the table from the rows and stop")
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        parser.error(f"no method {', '.join(unknown)}; methods: {', '.join(METHODS)}")
    if arguments.steps is not None and (arguments.rows is None or arguments.steps < 3):
        parser.error("--steps N (3 or more: two are not timed) is for rehearsals and needs --rows FILE")
    if arguments.layers is not None and arguments.steps is None:
        parser.error("--layers is for rehearsals: give --steps too")
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("quality_rte", COLUMNS, arguments.rows)
    if not arguments.summary:
        if arguments.data is None:
            parser.error("--data FOLDER is needed (see --help for what it holds)")
        try:
            task = EntailmentTask(arguments.data, arguments.layers)
        except MissingData as missing:
            parser.error(str(missing))
        if arguments.plan:
            plan(rows, task)
            return
        benchmark = Benchmark(rows, task)
        if arguments.steps is not None:
            for method in methods:
                benchmark.rehearse(method, arguments.steps)
            return
        benchmark.zero_shot()
        for method in methods:
            benchmark.finish(method)
    print(table(rows, itertools.chain([ZERO_SHOT], METHODS)))


if __name__ == "__main__":
    main()

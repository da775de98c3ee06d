"""``eval``: held-out loss of a saved model, by the loader and the loss of training, and tasks of lm-eval."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from leantune.errors import ConfigError, NonFiniteError
from leantune.kernels.half_linear import use_fp32_products
from leantune.training.config import TrainConfig, build_config
from leantune.training.data.load import load_data
from leantune.training.disk import writes_are_told
from leantune.training.identity import trained_on_others
from leantune.training.parallel.processes import refuse_launchers
from leantune.training.pretrained import model_limits
from leantune.training.saved.saved_model import SavedModel, find_saved, load_saved, load_saved_tokenizer, parse_dtype
from leantune.training.saved.task_evaluation import Scores, check_tasks, evaluate_tasks
from leantune.training.trainer import base_model, loss_obstacle, summed_loss
from leantune.whole_file import write_whole

REPORT = "eval.json"


@dataclass(frozen=True)
class EvalResult:
    """Loss in nats a trained token, its exponential, how many rows and trained tokens; scores of tasks by name."""

    model: str
    dataset: str | None
    loss: float | None
    perplexity: float | None
    rows: int
    tokens: int
    max_length: int | None
    dtype: str
    tasks: Scores = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def evaluate(
    model: str,
    dataset: str | None = None,
    *,
    tasks: tuple[str, ...] = (),
    model_name_or_path: str | None = None,
    max_length: int | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    dtype: str | None = None,
    chat_template: bool = False,
    drop_invalid: bool = False,
    output_file: str | None = None,
    console: Console | None = None,
) -> EvalResult:
    """Measure a run, an adapter or a model, print a table, and write it as JSON.

    Args:
        model: folder of a run, checkpoint, adapter or model, or a hub name. An adapter is evaluated on its base as it
            was trained, quantised where that was.
        dataset: rows in any shape ``train`` takes; None: the held-out rows of the run (eval_dataset or eval_split).
        tasks: files of questions (.jsonl) and names of lm-eval's own tasks.
        max_length: tokens of a row that count; None: as in the run, else the default of ``train``. Rows held out by
            eval_split come in the length of the run.
        batch_size: rows a forward pass.
        limit: questions of each task at most.
        dtype: of the weights; None: that of the run, else bfloat16.
        chat_template: put the questions of tasks into the model's chat template.
        output_file: None: eval.json in the run's folder, in the working directory for models of other origin.
    Raises: ConfigError where an argument, the data, or a task cannot be used.
    """
    refuse_launchers("eval", "Write leantune eval MODEL alone; it uses one device")
    console = console or Console()
    if batch_size < 1 or (limit is not None and limit < 1):
        raise ConfigError("- batch_size and limit are counts; write 1 or more")
    saved = find_saved(model, model_name_or_path)
    local = check_tasks(tasks)
    wanted = saved.dtype if dtype is None else parse_dtype(dtype)
    tokenizer = load_saved_tokenizer(saved)
    rows, length = None, None
    notes: list[str] = []
    if dataset is not None or _held_out_named(saved) or not tasks:
        rows, length, notes = _rows(saved, dataset, tokenizer, max_length, drop_invalid)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_saved(saved, wanted, device)
    if device == "cpu":
        use_fp32_products(loaded)
    loss, tokens = None, 0
    if rows is not None:
        exact = _exact_loss(saved, loaded, notes)
        with torch.autocast(device, torch.bfloat16, enabled=_autocasts(saved, wanted)):
            loss, tokens = held_out_loss(
                loaded, rows, tokenizer.pad_token_id, batch_size=batch_size, exact_savings=exact
            )
    scores = evaluate_tasks(base_model(loaded), tokenizer, local, batch_size, limit, chat_template) if local else {}
    result = EvalResult(
        model=model,
        dataset=dataset or _held_out_named(saved),
        loss=loss,
        perplexity=None if loss is None else math.exp(min(loss, 700.0)),
        rows=0 if rows is None else len(rows),
        tokens=tokens,
        max_length=length,
        dtype=str(wanted).removeprefix("torch."),
        tasks=scores,
        notes=notes,
    )
    place = Path(output_file) if output_file else (Path(model) if saved.run else Path()) / REPORT
    _show(console, result)
    with writes_are_told(place.parent, lambda: "The figures are those above; give another --output_file"):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    console.print(f"written to {place}", highlight=False)
    return result


@torch.no_grad()
def held_out_loss(
    model: Any, rows: Any, pad_token_id: int, *, batch_size: int = 8, exact_savings: bool = True
) -> tuple[float, int]:
    """(mean loss in nats over all trained tokens of ``rows``, how many they are): what training logs as held-out loss.

    Args:
        model: a causal language model in evaluation mode.
        rows: a data set of ``input_ids`` and ``labels`` (-100 where nothing is learnt), as `load_data` makes it.
        pad_token_id: fills up the shorter rows of a batch.
        batch_size: rows a forward pass; the longest come first, so that a lack of memory shows at once.
        exact_savings: the loss without logits; else full logits in float32.
    Raises: NonFiniteError where the loss of a batch is no number.
    """
    collate = DataCollatorForLanguageModeling(pad_token_id=pad_token_id)
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]["input_ids"]))
    total, count = 0.0, 0
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate([{key: rows[row][key] for key in ("input_ids", "labels")} for row in chosen])
        loss, tokens = summed_loss(model, {k: v.to(model.device) for k, v in batch.items()}, exact_savings)
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(
                f"the loss is {loss.item()} on rows {sorted(row + 1 for row in chosen)} of those evaluated; the "
                "model's weights or these rows are broken"
            )
        total, count = total + loss.item(), count + int(tokens)
    return total / count, count


def _autocasts(saved: SavedModel, dtype: torch.dtype) -> bool:
    """Whether the run computed in bfloat16 on float32 weights, and these are float32 as well."""
    return saved.run is not None and saved.run.bf16 and dtype == torch.float32


def _held_out_named(saved: SavedModel) -> str | None:
    """What the run held out, in words; None where it held out nothing."""
    run = saved.run
    if run is None or not (run.eval_dataset or run.eval_split):
        return None
    return run.eval_dataset or f"{run.eval_split:g} of {run.dataset}, held out"


def _rows(
    saved: SavedModel, dataset: str | None, tokenizer: Any, max_length: int | None, drop_invalid: bool
) -> tuple[Any, int, list[str]]:
    """(rows to evaluate, the length they are cut to, what the loader remarked)."""
    run, limits = saved.run, model_limits(saved.base)
    if dataset is None:
        if run is None or _held_out_named(saved) is None:
            raise ConfigError(
                f"- dataset is missing: {saved.name} is not a run that held rows out. Give rows with --dataset, or "
                "tasks with --tasks"
            )
        if run.eval_split:
            return _split_off(saved, run, tokenizer, max_length)
        dataset, drop_invalid = run.eval_dataset, drop_invalid or run.drop_invalid
    length = max_length or (run.max_length if run else TrainConfig.max_length) or "auto"
    named = {"model_name_or_path": saved.base, "dataset": dataset, "max_length": length, "drop_invalid": drop_invalid}
    data = load_data(build_config(named), tokenizer, limits)
    return data.train, data.max_length, list(data.notes)


def _split_off(
    saved: SavedModel, run: TrainConfig, tokenizer: Any, max_length: int | None
) -> tuple[Any, int, list[str]]:
    """The rows that ``eval_split`` held out of the run's own data: chosen again as they were chosen then."""
    if max_length not in (None, run.max_length):
        raise ConfigError(
            f"- max_length is {max_length} and was {run.max_length} in the run, where it decided which rows were held "
            "out: others would be among them that were trained on. Leave it out, or give rows with --dataset"
        )
    data = load_data(run, tokenizer, model_limits(run.model_name_or_path))
    if saved.run_folder is not None and trained_on_others(run, data, saved.run_folder):
        raise ConfigError(
            f"- the rows of {', '.join(run.sources)} are others than those that {saved.name} was trained on, so its "
            "held-out rows cannot be told from trained ones. Put the old files back, or give rows with --dataset"
        )
    return data.held_out, data.max_length, list(data.notes)


def _exact_loss(saved: SavedModel, model: Any, notes: list[str]) -> bool:
    """Whether the loss is taken without logits: as in its run, else where that is this model's loss. A note says so
    where it is not."""
    if saved.run is not None and "loss" not in saved.run.chosen_savings:
        return False
    obstacle = loss_obstacle(model)
    if obstacle is not None:
        notes.append(f"the loss is taken from full logits: {obstacle}")
    return obstacle is None


def _show(console: Console, result: EvalResult) -> None:
    table = Table(title=f"leantune eval: {result.model} ({result.dtype})", title_justify="left")
    for column in ("", "figure", "value", "of"):
        table.add_column(column, justify="left" if column in ("", "figure") else "right")
    if result.loss is not None:
        what = str(result.dataset)
        counted = f"{result.tokens:,} tokens, {result.rows:,} rows"
        table.add_row(what, "loss, nats a token", f"{result.loss:.4f}", counted)
        table.add_row("", "perplexity", f"{result.perplexity:.4g}", "")
    for task, figures in result.tasks.items():
        for place, (name, (value, error)) in enumerate(figures["figures"].items()):
            spread = "" if error is None else f" ± {error:.4f}"
            asked = f"{figures['questions']:,} questions" if figures["questions"] is not None else ""
            table.add_row(task if not place else "", name, f"{value:.4f}{spread}", asked if not place else "")
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False)

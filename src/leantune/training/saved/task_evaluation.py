"""Tasks run by lm-eval: its own by name, and files of questions, for which the task is made here."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leantune.errors import ConfigError

Scores = dict[str, dict[str, Any]]
"""By task: ``questions`` (how many), and ``figures``: by name, (value, standard error or None)."""
Row = dict[str, Any]

_SHAPES = (
    '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1} (answer: an index from 0, a letter, or the choice '
    'itself), or {"prompt": "2 + 2 =", "completion": " 4"}'
)


def check_tasks(tasks: tuple[str, ...]) -> list[str | dict[str, Any]]:
    """The tasks as lm-eval takes them; files of questions are read, and become configs.

    Raises: ConfigError where lm-eval is missing, or listing every row of a file that is no question.
    """
    if not tasks:
        return []
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "- tasks are run by lm-eval, which is not installed here: pip install 'leantune[eval]' (or lm-eval). "
            "Without it: --dataset alone, for the held-out loss"
        )
    made = [_task_of_file(Path(task)) if task.endswith((".jsonl", ".json")) else task for task in tasks]
    names = [task if isinstance(task, str) else task["task"] for task in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"- tasks: {', '.join(twice)} comes twice; give each once (a file's task is its name)")
    return made


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: list[str | dict[str, Any]],
    batch_size: int,
    limit: int | None,
    chat_template: bool,
) -> Scores:
    """Scores of a loaded model on what `check_tasks` returned.

    Raises: ConfigError where lm-eval knows no task of a name, or cannot get its data.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # Indexing lm-eval's own thousands of tasks takes seconds, and files need none of them.
    manager = TaskManager(include_defaults=any(isinstance(task, str) for task in tasks))
    if unknown := [task for task in tasks if isinstance(task, str) and not manager.match_tasks([task])]:
        raise ConfigError(
            f"- tasks: lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` lists its own, and a file of "
            "questions ends in .jsonl"
        )
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
    try:
        found = simple_evaluate(
            wrapped,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
            apply_chat_template=chat_template,
        )
    except (OSError, ConnectionError) as error:
        raise ConfigError(
            f"- tasks: the data of a task cannot be had: {type(error).__name__}: {str(error).splitlines()[0]}. "
            "lm-eval's own tasks need the hub, or its cache; a .jsonl file of questions needs neither"
        ) from error
    return {name: _figures(found, name) for name in found["results"]}


def _figures(found: Any, name: str) -> dict[str, Any]:
    """lm-eval's "acc,none" and "acc_stderr,none" of one task as (value, standard error)."""
    results = found["results"][name]
    figures: dict[str, tuple[float, float | None]] = {}
    for key, value in results.items():
        figure, _, which = key.partition(",")
        if not which or figure.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = results.get(f"{figure}_stderr,{which}")
        label = figure if which == "none" else f"{figure} ({which})"
        figures[label] = (float(value), float(error) if isinstance(error, int | float) else None)
    counts = found.get("n-samples", {}).get(name)
    return {"questions": counts["effective"] if counts else None, "figures": figures}


# --- a task from a file -----------------------------------------------------------------------------------------------


def _task_of_file(path: Path) -> dict[str, Any]:
    """An lm-eval task over the questions of a file; zero-shot."""
    rows = _read(path)
    kinds = {"choices" in row for row in rows}
    if len(kinds) > 1:
        raise ConfigError(f"- tasks: {path} mixes questions with choices and completions; make two files of it")
    common = {"task": path.stem, "custom_dataset": _dataset(rows), "test_split": "test", "num_fewshot": 0}
    if kinds == {True}:
        return {
            **common,
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [_mean("acc"), _mean("acc_norm")],
        }
    return {
        **common,
        "output_type": "loglikelihood",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{completion}}",
        "target_delimiter": "",
        "metric_list": [_mean("acc"), {**_mean("perplexity"), "aggregation": "perplexity", "higher_is_better": False}],
    }


def _mean(name: str) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True}


def _dataset(rows: list[Row]) -> Callable[..., Any]:
    def made(**_: Any) -> Any:
        from datasets import Dataset

        return {"test": Dataset.from_list(rows)}

    return made


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        raise ConfigError(f"- tasks: there is no file {path}")
    rows: list[Row] = []
    bad: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(question(json.loads(line)))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    if bad:
        shown = "\n  ".join([*bad[:10], *([f"and {len(bad) - 10} more"] if len(bad) > 10 else [])])
        raise ConfigError(f"- tasks: {path}: {len(bad)} lines are no questions. A line is {_SHAPES}:\n  {shown}")
    if not rows:
        raise ConfigError(f"- tasks: {path} holds no questions. A line is {_SHAPES}")
    return rows


def question(row: Any) -> Row:
    """A line of a task's file as the task reads it: the answer as an index, and a space before choices that need one.

    Raises ValueError saying what is wrong with it.

    >>> question({"question": "2 + 2 =", "choices": ["3", "4"], "answer": "B"})
    {'question': '2 + 2 =', 'choices': [' 3', ' 4'], 'answer': 1}
    """
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}")
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str) and row["completion"]:
        return {"prompt": row["prompt"], "completion": row["completion"]}
    asked, choices = row.get("question"), row.get("choices")
    if not isinstance(asked, str) or not isinstance(choices, list) or "answer" not in row:
        raise ValueError(f"it has the fields {', '.join(map(str, row)) or 'none'}")
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices must be two texts or more")
    joined = choices if asked[-1:].isspace() else [c if c[0].isspace() else f" {c}" for c in choices]
    return {"question": asked, "choices": joined, "answer": _index(row["answer"], choices)}


def _index(answer: Any, choices: list[str]) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool):
        index = answer
    elif answer in choices:
        index = choices.index(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer.isalpha():
        index = ord(answer.upper()) - ord("A")
    else:
        raise ValueError(f"answer {answer!r} is none of the choices")
    if not 0 <= index < len(choices):
        raise ValueError(f"answer {answer!r} is beyond the {len(choices)} choices")
    return index

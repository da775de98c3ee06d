"""From a YAML file and flags to a checked config."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import yaml

from leantune.errors import ConfigError
from leantune.training.config.checks import problems_of
from leantune.training.config.foreign_keys import OFF_IS_HERE
from leantune.training.config.keys import ALIASES, FOREIGN_OPTIMIZER_KEYS, REFUSED, convert, passed_through, suggestion
from leantune.training.config.run_config import TrainConfig
from leantune.training.config.trainer_fields import described_fields


def load_config(
    path: str | Path | None = None, flags: typing.Sequence[str] = (), *, planning: bool = False
) -> TrainConfig:
    """Read a YAML file and flags (``--key value``, ``--key=value``, ``--key``); flags win.

    ``planning``: the config is only planned: no dataset is needed.

    Raises ConfigError listing every problem found: unknown keys with the nearest known one, wrong types, combinations
    that cannot work.
    """
    problems: list[str] = []
    notes: list[str] = []
    values = _canonical(_from_file(path), problems, notes) | _canonical(_from_flags(flags, problems), problems, notes)
    return build_config(values, problems, notes, planning=planning)


def build_config(
    values: dict[str, Any],
    problems: list[str] | None = None,
    notes: list[str] | None = None,
    *,
    planning: bool = False,
) -> TrainConfig:
    """A checked TrainConfig from plain keys and values; raises ConfigError with every problem. ``planning`` as in
    `load_config`. With it the trainer's own fields are known by names
    and plain types alone: trl is not imported."""
    problems = [] if problems is None else problems
    notes = [] if notes is None else notes
    values = dict(values)
    _moments(values, notes)
    _length(values, problems)
    _plain_names(values, problems)
    hints = typing.get_type_hints(TrainConfig)
    own = {f.name for f in dataclasses.fields(TrainConfig)} - {"extra", "notes", "given"}
    kept: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in values.items():
        if planning and key not in own and key not in REFUSED and key in described_fields():
            hint = described_fields()[key]
            converted, problem = (value, "") if hint is None else convert(key, value, hint)
            if not problem:
                extra[key] = converted
                continue
        if key not in own and key not in passed_through():
            problems.append(f"unknown key {key!r}{suggestion(key, [*own, *passed_through()])}")
            continue
        hint, choices = (hints[key], None) if key in own else passed_through()[key]
        converted, problem = convert(key, value, hint, choices)
        if problem:
            problems.append(problem)
        else:
            (kept if key in own else extra)[key] = converted
    if kept.get("optim") == "taco":
        kept["optim"] = "ternary_adamw"
        notes.append(
            "optim: taco means the ternary states (ternary_adamw); the published one-sparse TACO is another optimizer: "
            "write optim: taco_one_sparse for it"
        )
    if "memory_budget" in kept and "method" not in values:
        kept["method"] = "auto"
    # A value that could not be read counts as not set here, so that the other problems are told too.
    config = TrainConfig(**kept, extra=extra, notes=tuple(notes), given=frozenset({*kept, *extra} & set(values)))
    problems += [problem for problem in problems_of(config, planning) if not _told(problem, problems)]
    if problems:
        raise ConfigError("\n".join(f"- {problem}" for problem in problems))
    return config


def _moments(values: dict[str, Any], notes: list[str]) -> None:
    """transformers' adam_beta1 and adam_beta2 become ``betas``, which every optimizer here reads."""
    if "adam_beta1" in values or "adam_beta2" in values:
        first, second = TrainConfig.betas
        pair = [values.pop("adam_beta1", first), values.pop("adam_beta2", second)]
        if "betas" not in values:
            values["betas"] = pair
            notes.append(f"adam_beta1 and adam_beta2 are read as betas: {pair}")


def _length(values: dict[str, Any], problems: list[str]) -> None:
    """``max_length: auto`` becomes 0."""
    if values.get("max_length") == 0:
        del values["max_length"]
        problems.append("max_length is 0; it must be at least 1, or auto")
    elif values.get("max_length") == "auto":
        values["max_length"] = 0


def _plain_names(values: dict[str, Any], problems: list[str]) -> None:
    """Datasets are names; what else is said of each stands under a key of its own."""
    named = values.get("dataset")
    items = named if isinstance(named, list) else [named]
    if any(isinstance(item, dict) for item in items):
        del values["dataset"]
        problems.append(
            "dataset holds keys of its own; write names alone, dataset: [a.jsonl, b.csv], and dataset_weights"
        )


def _told(problem: str, problems: list[str]) -> bool:
    """Whether a key that could not be read is why ``problem`` says that it is missing."""
    key, _, rest = problem.partition(" ")
    return rest == "is missing" and any(known.startswith(f"{key} ") for known in problems)


def _from_file(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"- there is no config file {path}. Give its path, or --model_name_or_path and --dataset as flags."
        )
    content = path.read_bytes()
    try:
        values = yaml.load(content.decode("utf-8-sig"), _OnceLoader)
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise ConfigError(f"- {path}, line {line}: byte {byte:#04x} is not UTF-8; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"- {path} cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        held = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"- {path} holds {held}; a config is lines of `key: value`.")
    return values


class _OnceLoader(yaml.SafeLoader):
    """YAML whose keys stand once; YAML itself silently keeps the last of two."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader does, after looking for a key that comes again."""
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if str(key.value) in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"{key.value} stands in line {seen[str(key.value)]} and in line {line}; keep one")
            seen[str(key.value)] = line
        return super().construct_mapping(node, deep)


def _from_flags(flags: typing.Sequence[str], problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    items = list(flags)
    while items:
        item = items.pop(0)
        if not item.startswith("--"):
            problems.append(f"{item!r} is no flag: write --key value")
            continue
        key, equals, text = item[2:].partition("=")
        if not equals:
            text = items.pop(0) if items and not items[0].startswith("--") else "true"
        if key in values:
            problems.append(f"--{key} is given twice; keep one of them")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            values[key] = text
    return values


def _canonical(values: dict[str, Any], problems: list[str], notes: list[str]) -> dict[str, Any]:
    """Keys with underscores and without aliases; a key given twice, under two names, is a problem."""
    out: dict[str, Any] = {}
    for raw, value in values.items():
        key = str(raw).replace("-", "_")
        name = ALIASES.get(key, key)
        if key in REFUSED and key not in FOREIGN_OPTIMIZER_KEYS:
            if value is None or (value is False and key in OFF_IS_HERE):
                notes.append(f"{key}: {'empty' if value is None else 'false'} is as it is here; it can be left out")
                continue
            problems.append(f"{key}: {REFUSED[key]}")
            continue
        if name != key and value is None:
            notes.append(f"{key}: empty is as it is here; it can be left out")
            continue
        if name in out:
            problems.append(f"{key} sets {name} a second time; keep one of them")
            continue
        if name != key:
            notes.append(f"{key} is read as {name}")
        if name == "lora_target_modules" and value == "all":
            value = "all-linear"
            notes.append(f"{key}: all is read as all-linear")
        out[name] = value
    return out

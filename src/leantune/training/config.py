"""What a run is: flat keys under the names people already type, checked as a whole before anything is loaded."""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from leantune.backward.accumulation import KINDS
from leantune.errors import ConfigError, InvalidArgumentError
from leantune.memory.sizes import parse_size
from leantune.training.config_keys import ALIASES, FOREIGN_OPTIMIZER_KEYS, REFUSED, convert, passed_through, suggestion

OUR_OPTIMIZERS = ("ternary_adamw", "adamw", "lomo", "adalomo", "taco_one_sparse")
_LEARNING_RATES = {("full", "ternary_adamw"): 5e-5, ("full", "adamw"): 5e-5, ("full", "adalomo"): 5e-4}
_LORA_RATE = 2e-4
LORA_METHODS = ("lora", "qlora")
"""Those that train adapters on a frozen base."""

_MOMENTS = ("betas", "adam_epsilon")  # transformers' own optimizers read these where they can

# Settings only some optimizers read: set for another, they would be ignored.
_ONLY_FOR = {
    "betas": ("ternary_adamw", "adamw"),
    "adam_epsilon": ("ternary_adamw", "adamw"),
    "carry_rank": ("ternary_adamw",),
    "momentum_planes": ("ternary_adamw",),
    "block_size": ("ternary_adamw",),
    "master_bits": ("ternary_adamw", "adamw"),
    "rounding": OUR_OPTIMIZERS,
}

# Settings only some methods read.
_ONLY_FOR_METHODS = {
    LORA_METHODS: ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    ("qlora",): ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    ("lora",): ("load_in_8bit",),
}


@dataclass(frozen=True)
class TrainConfig:
    """The keys of a run that leantune itself reads. ``extra`` holds the other fields of ``trl.SFTConfig`` that were
    set."""

    model_name_or_path: str = ""
    dataset: str = ""
    output_dir: str = "runs/leantune"
    method: str = "full"
    """full, lora, or qlora (LoRA on a frozen 4-bit base)."""
    optim: str = "ternary_adamw"
    """ternary_adamw, adamw, lomo, adalomo, taco_one_sparse, or any name transformers knows (adamw_torch...)."""
    learning_rate: float | None = None
    """None: 5e-5 full (AdaLomo 5e-4), 2e-4 LoRA and QLoRA; lomo and taco_one_sparse must be given one."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    carry_rank: int = 4
    momentum_planes: int = 1
    block_size: int = 128
    rounding: str | None = None
    master_bits: int | None = None
    fused_backward: bool | None = None
    """None: on for leantune's optimizers, off for transformers'."""
    accumulate: str | None = None
    """Under fused_backward, what sums gradients over micro-batches: float32 (exact) or bfloat16 (rounded)."""
    clip: str | None = None
    """per_tensor, global or none; None: global where max_grad_norm was set, else per_tensor."""
    max_grad_norm: float | None = None
    exact_savings: bool = True
    """The loss without logits."""
    velora_target_modules: tuple[str, ...] | None = None
    velora_num_groups: int = 32
    dtype: str = "bfloat16"
    """Storage of the weights: bfloat16, float32 or float16."""
    bf16: bool = False
    """Autocast, for float32 weights."""
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] | str = "all-linear"
    bnb_4bit_quant_type: str = "nf4"
    """Of method: qlora: nf4 or fp4."""
    bnb_4bit_use_double_quant: bool = True
    """Of method: qlora: the scales of the 4-bit weights are quantised as well (0.37 bits a weight less)."""
    load_in_8bit: bool = False
    """Of method: lora: an 8-bit base."""
    eval_dataset: str | None = None
    eval_split: float | None = None
    """Share of the rows held out when no eval_dataset is given."""
    max_length: int = 1024
    packing: bool = False
    drop_invalid: bool = False
    """Drop rows that cannot be used, and say which, instead of stopping."""
    memory_budget: str | None = None
    """Memory of the device, for example 24GiB: the plan is held against it before training."""
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    num_train_epochs: float = 1.0
    max_steps: int = -1
    logging_steps: float = 1
    save_steps: float = 500
    save_total_limit: int | None = 2
    seed: int = 42
    resume: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What was understood in another way than written; the header shows it."""

    @property
    def ours(self) -> bool:
        """Whether the optimizer is one of leantune's."""
        return self.optim in OUR_OPTIMIZERS

    @property
    def fused(self) -> bool:
        """Whether gradients are applied inside backward."""
        return self.ours if self.fused_backward is None else self.fused_backward

    @property
    def clip_mode(self) -> str:
        """The clipping of a fused run; the header names it."""
        return self.clip or ("per_tensor" if self.max_grad_norm is None else "global")

    @property
    def rate(self) -> float:
        """The learning rate, the default for method and optimizer where none was set."""
        if self.learning_rate is not None:
            return self.learning_rate
        return _LORA_RATE if self.method in LORA_METHODS else _LEARNING_RATES.get((self.method, self.optim), 5e-5)

    def to_yaml(self) -> str:
        """The resolved config as YAML that :func:`load_config` reads back to an equal one (``resume`` is not part of
        it)."""
        left_out = ("extra", "notes", "resume")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return yaml.safe_dump({**values, **self.extra}, sort_keys=False)


def load_config(path: str | Path | None = None, flags: typing.Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and flags (``--key value``, ``--key=value``, ``--key``); flags win.

    Raises ConfigError listing every problem found: unknown keys with the nearest known one, wrong types, combinations
    that cannot work.
    """
    problems: list[str] = []
    notes: list[str] = []
    values = _canonical(_from_file(path), problems, notes) | _canonical(_from_flags(flags, problems), problems, notes)
    return build_config(values, problems, notes)


def build_config(
    values: dict[str, Any], problems: list[str] | None = None, notes: list[str] | None = None
) -> TrainConfig:
    """A checked TrainConfig from plain keys and values; raises ConfigError with every problem."""
    problems = [] if problems is None else problems
    notes = [] if notes is None else notes
    values = dict(values)
    _moments(values, notes)
    hints = typing.get_type_hints(TrainConfig)
    own = {f.name for f in dataclasses.fields(TrainConfig)} - {"extra", "notes"}
    kept: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in values.items():
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
    # A value that could not be read counts as not set here, so that the other problems are told too.
    config = TrainConfig(**kept, extra=extra, notes=tuple(notes))
    problems += [problem for problem in _combinations(config) if not _told(problem, problems)]
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
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"- {path} cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"- {path} holds a {type(values).__name__}; a config is lines of `key: value`.")
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
            problems.append(f"{key}: {REFUSED[key]}")
            continue
        if name in out:
            problems.append(f"{key} sets {name} a second time; keep one of them")
            continue
        if name != key:
            notes.append(f"{key} is read as {name}")
        out[name] = value
    return out


def _combinations(c: TrainConfig) -> list[str]:
    """What is wrong with a config whose single values are of the right type."""
    found = _wrong_values(c) + _ignored(c) + _wrong_extra(c)
    if c.fused and not c.ours:
        found.append(
            f"fused_backward is on, but transformers' {c.optim} needs all gradients at once; "
            f"use one of {', '.join(OUR_OPTIMIZERS)}"
        )
    if c.fused and c.gradient_accumulation_steps > 1 and c.accumulate is None:
        found.append(
            f"gradient_accumulation_steps is {c.gradient_accumulation_steps} with fused_backward, which frees each "
            "gradient before the next micro-batch. Raise per_device_train_batch_size instead (the loss without logits "
            "makes room), or let sums of gradients live: accumulate: float32 (4 bytes a parameter) or bfloat16 (2, "
            "rounded)"
        )
    if c.accumulate not in (None, *KINDS):
        found.append(f"accumulate is {c.accumulate!r}; write {' or '.join(KINDS)}")
    if c.accumulate is not None and not (c.fused and c.gradient_accumulation_steps > 1):
        found.append(
            "accumulate says what sums gradients under fused_backward with gradient_accumulation_steps above 1; it "
            "would be ignored here"
        )
    if c.fused and c.max_grad_norm is not None and c.clip == "none":
        found.append("max_grad_norm is set, but clip: none would ignore it; write clip: global (exact) or per_tensor")
    if not c.fused and c.clip == "per_tensor":
        found.append("clip: per_tensor is for fused_backward; with an ordinary backward write clip: global, or none")
    if not c.fused and c.clip == "none" and c.max_grad_norm is not None:
        found.append("max_grad_norm is set, but clip: none would ignore it; write clip: global")
    reentrant = (c.extra.get("gradient_checkpointing_kwargs") or {}).get("use_reentrant")
    if c.fused and reentrant:
        found.append(
            "use_reentrant checkpointing runs backwards inside backward, which would update weights in pieces under "
            "fused_backward; leave use_reentrant out"
        )
    if c.optim == "lomo" and c.learning_rate is None:
        found.append(
            "optim: lomo has no learning rate that suits; give one (its paper: 3e-2 to 5e-2 with clip: global)"
        )
    if c.optim == "taco_one_sparse" and c.learning_rate is None:
        found.append(
            "optim: taco_one_sparse has no learning rate that suits; give one: it is what one weight of each column of "
            "a square matrix moves in a step (docs/taco_one_sparse.md says how to find it)"
        )
    if c.velora_target_modules and c.gradient_checkpointing:
        found.append(
            "VeLoRA saves nothing inside checkpointed blocks; drop velora_target_modules or gradient_checkpointing"
        )
    if c.bf16 and c.dtype != "float32":
        found.append(f"bf16 is autocast for float32 weights; dtype is {c.dtype}: leave bf16 out")
    if c.eval_dataset and c.eval_split:
        found.append("eval_dataset and eval_split are both set; keep one")
    if c.memory_budget is not None:
        try:
            parse_size(c.memory_budget)
        except InvalidArgumentError as error:
            found.append(f"memory_budget: {error}")
    return found


def _ignored(c: TrainConfig) -> list[str]:
    """Settings that the chosen optimizer, or method, would not read (traps O16, G9)."""
    defaults = TrainConfig()
    found = [
        f"{key} is set, but optim: {c.optim} does not read it ({', '.join(optimizers)} would); leave it out"
        for key, optimizers in _ONLY_FOR.items()
        if c.optim not in optimizers and (c.ours or key not in _MOMENTS) and getattr(c, key) != getattr(defaults, key)
    ]
    if c.master_bits is not None and c.dtype != "bfloat16":
        found.append(f"master_bits is for bfloat16 weights; dtype is {c.dtype}: leave master_bits out")
    if c.ours:
        found += [f"{key}: {REFUSED[key]}" for key in sorted(FOREIGN_OPTIMIZER_KEYS & set(c.extra))]
    found += [
        f"{key} is set, but method is {c.method}; write method: {' or '.join(methods)}, or leave it out"
        for methods, keys in _ONLY_FOR_METHODS.items()
        for key in keys
        if c.method not in methods and getattr(c, key) != getattr(defaults, key)
    ]
    if c.velora_num_groups != defaults.velora_num_groups and not c.velora_target_modules:
        found.append("velora_num_groups is set without velora_target_modules; name the layers (down_proj)")
    return found


def _wrong_extra(c: TrainConfig) -> list[str]:
    found = []
    if c.extra.get("packing_strategy") == "wrapped":
        found.append("packing_strategy: wrapped lets rows attend to one another; write bfd or bfd_split")
    if c.extra.get("eval_strategy", "no") != "no" and not (c.eval_dataset or c.eval_split):
        found.append("eval_strategy is set, but there are no held-out rows; write eval_split: 0.05, or eval_dataset")
    return found


def _wrong_values(c: TrainConfig) -> list[str]:
    found = [f"{key} is missing" for key in ("model_name_or_path", "dataset") if not getattr(c, key)]
    if c.method == "auto":
        found.append("method: auto is not in this release; write full, lora or qlora")
    elif c.method not in ("full", *LORA_METHODS):
        found.append(f"method is {c.method!r}; write full, lora or qlora")
    if c.bnb_4bit_quant_type not in ("nf4", "fp4"):
        found.append(f"bnb_4bit_quant_type is {c.bnb_4bit_quant_type!r}; write nf4 or fp4")
    if not c.ours:
        from transformers.training_args import OptimizerNames

        names = {name.value for name in OptimizerNames}
        if c.optim not in names:
            found.append(f"optim {c.optim!r} is unknown{suggestion(c.optim, [*OUR_OPTIMIZERS, *names])}")
    if c.dtype not in ("bfloat16", "float32", "float16"):
        found.append(f"dtype is {c.dtype!r}; write bfloat16, float32 or float16")
    if c.clip not in (None, "per_tensor", "global", "none"):
        found.append(f"clip is {c.clip!r}; write per_tensor, global or none")
    if len(c.betas) != 2:
        found.append(f"betas is {c.betas}; it takes two numbers")
    for key in (
        "max_length",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "velora_num_groups",
        "lora_r",
    ):
        if getattr(c, key) < 1:
            found.append(f"{key} is {getattr(c, key)}; it must be at least 1")
    if c.save_total_limit is not None and c.save_total_limit < 1:
        found.append(f"save_total_limit is {c.save_total_limit}; it must be at least 1 (null keeps every checkpoint)")
    if c.max_steps == 0 or c.max_steps < -1:
        found.append(f"max_steps is {c.max_steps}; it must be at least 1 (leave it out to train num_train_epochs)")
    if c.num_train_epochs <= 0 and c.max_steps < 1:
        found.append(f"num_train_epochs is {c.num_train_epochs}; it must be above 0")
    if c.lora_alpha <= 0:
        found.append(f"lora_alpha is {c.lora_alpha}; it must be above 0 (the adapters' output is scaled by alpha / r)")
    if not 0 <= c.lora_dropout < 1:
        found.append(f"lora_dropout is {c.lora_dropout}; it is a share of at least 0 and below 1")
    if c.seed < 0:
        found.append(f"seed is {c.seed}; it must be at least 0")
    if c.eval_split is not None and not 0 < c.eval_split < 1:
        found.append(f"eval_split is {c.eval_split}; it is a share between 0 and 1")
    if c.learning_rate is not None and not c.learning_rate >= 0:
        found.append(f"learning_rate is {c.learning_rate}; it must be at least 0")
    if c.max_grad_norm is not None and not c.max_grad_norm > 0:
        found.append(
            f"max_grad_norm is {c.max_grad_norm}; it must be above 0 (leave it out, or clip: none, for no clipping)"
        )
    return found

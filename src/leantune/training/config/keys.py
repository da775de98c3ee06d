"""The names a config may hold beside leantune's own: other tools' names, and the fields of ``trl.SFTConfig``."""

import difflib
import enum
import types
import typing
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from leantune.training.config.foreign_keys import FOREIGN

# The same meaning under another name: taken, with a note.
ALIASES = {
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "sample_packing": "packing",
    "torch_dtype": "dtype",
    "model": "model_name_or_path",
    "base_model": "model_name_or_path",
    "lr": "learning_rate",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "datasets": "dataset",
    "dataset_name": "dataset",
    "train_file": "dataset",
    "validation_file": "eval_dataset",
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "lr_scheduler": "lr_scheduler_type",
    "adapter": "method",
    "finetuning_type": "method",
    "val_set_size": "eval_split",
    "val_size": "eval_split",
    "test_size": "eval_split",
    "epochs": "num_train_epochs",
    "enable_activation_checkpointing": "gradient_checkpointing",
}

# Refused, with what to write. Fields of SFTConfig stand here when they would be ignored, or undo what leantune does.
REFUSED = FOREIGN | {
    "warmup_ratio": "write warmup_steps; a value below 1 is a fraction of all steps",
    "batch_size": "write per_device_train_batch_size (rows in one forward pass)",
    "use_peft": "write method: lora or qlora",
    "device_map": "one device per process, always: a model split over devices by layers trains at the speed of one",
    "load_in_4bit": "write method: qlora (a 4-bit base with LoRA adapters)",
    "quantization_bit": "write method: qlora for 4 bits, or method: lora with load_in_8bit: true",
    "bnb_4bit_compute_dtype": "products with 4-bit weights are computed in dtype; leave it out",
    "bnb_4bit_quant_storage": "4-bit weights are stored in bytes (uint8); leave it out",
    "velora_config": "write velora_target_modules and velora_num_groups",
    "optim_args": "write the setting itself: betas, weight_decay, carry_rank...",
    "optim_target_modules": "it belongs to optimizers that are not in this release; leave it out",
    "max_steps_per_epoch": "write max_steps",
    "fp16": "float16 needs loss scaling, not in this release; use dtype: bfloat16, or dtype: float32 and bf16: true",
    "loss_type": "the loss is the mean negative log-likelihood of the trained tokens; leave it out",
    "label_smoothing_factor": "label smoothing is not in this release; leave it out",
    "use_liger_kernel": "the loss without logits is exact_savings: true; leave use_liger_kernel out",
    "liger_kernel_config": "the loss without logits is exact_savings: true; leave liger_kernel_config out",
    "router_aux_loss_coef": "the router's balancing loss is not added here; leave it out",
    "model_init_kwargs": "write dtype; nothing else about loading can be set in this release",
    "trust_remote_code": "code that comes with a model is not run in this release",
    "dataset_kwargs": "leantune prepares the data itself; leave it out",
    "dataset_text_field": "name the column text",
    "dataset_num_proc": "rows are tokenised in one process in this release; leave it out",
    "dataset_split": "write the split after the name (dataset: name:split)",
    "chat_template_path": "the tokenizer's own chat template is used; put the template into the model's folder",
    "chat_template": "the tokenizer's own chat template is used; put the template into the model's folder",
    "template": "the tokenizer's own chat template is used; leave it out",
    "eos_token": "the tokenizer's own eos_token is used; change it in the model's folder",
    "pad_token": "the tokenizer's own pad_token is used (its eos_token where it has none); leave it out",
    "truncation_mode": "rows are cut at their end, after max_length tokens; leave it out",
    "assistant_only_loss": "chat data is trained on assistant turns only, always; leave it out",
    "completion_only_loss": "prompt data is trained on completions only, always; leave it out",
    "train_on_inputs": "answers alone are trained on; give the rows as text to train on every token",
    "torch_compile": "compiled models are not in this release; leave it out",
    "torch_compile_backend": "compiled models are not in this release; leave it out",
    "torch_compile_mode": "compiled models are not in this release; leave it out",
    "torch_empty_cache_steps": "it is not in this release; leave it out",
    "activation_offloading": "it is not in this release; write gradient_checkpointing: true",
    "load_best_model_at_end": "it is not in this release; every checkpoint kept can be loaded as a model",
    "fp16_full_eval": "the held-out loss is computed in the dtypes of training; leave it out",
    "bf16_full_eval": "the held-out loss is computed in the dtypes of training; leave it out",
    "padding_free": "write packing: true",
    "label_names": "leave it out; the labels are leantune's",
    "remove_unused_columns": "leave it out; rows hold input_ids and labels alone",
    "resume_from_checkpoint": "write resume: true; it goes on from the last whole checkpoint in output_dir",
    "auto_find_batch_size": "it starts again after an out-of-memory, weights already moved; set memory_budget instead",
    "push_to_hub": "upload output_dir yourself after training",
    "hub_token": "a token does not belong into the config kept beside a run; set the variable HF_TOKEN",
    "logging_nan_inf_filter": "a loss that is not finite stops the run; leave it out",
    "do_train": "it has no effect; leave it out",
    "do_eval": "write eval_strategy: steps or epoch",
    "do_predict": "it has no effect; leave it out",
    "deepspeed": "write parallel: ddp or fsdp2",
    "fsdp": "write parallel: ddp or fsdp2",
    "fsdp_config": "write parallel: ddp or fsdp2",
    "parallelism_config": "write parallel: ddp or fsdp2",
    "accelerator_config": "rows are dealt to processes by leantune; leave it out",
    "average_tokens_across_devices": "every token of a step weighs the same, on all processes; leave it out",
    "ddp_find_unused_parameters": "there is no DistributedDataParallel in a run; leave it out",
    "ddp_bucket_cap_mb": "there is no DistributedDataParallel in a run; leave it out",
    "ddp_broadcast_buffers": "there is no DistributedDataParallel in a run; leave it out",
    "ddp_static_graph": "there is no DistributedDataParallel in a run; leave it out",
}

# Taken for transformers' own optimizers, which read them; refused (REFUSED) for leantune's.
FOREIGN_OPTIMIZER_KEYS = frozenset({"optim_args", "optim_target_modules"})


@lru_cache(maxsize=1)
def passed_through() -> dict[str, tuple[Any, Any]]:
    """Fields of trl.SFTConfig a config may set as they are: name to (type, allowed values or None). Imports trl."""
    import dataclasses

    from trl import SFTConfig

    hints = typing.get_type_hints(SFTConfig)
    return {
        f.name: (hints[f.name], f.metadata.get("choices"))
        for f in dataclasses.fields(SFTConfig)
        if f.init and (f.name not in REFUSED or f.name in FOREIGN_OPTIMIZER_KEYS)
    }


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'max_length'?", or nothing where no known name is close; aliases lead to what they stand for."""
    close = difflib.get_close_matches(name, sorted({*known, *ALIASES}), n=1)
    return f"; did you mean {ALIASES.get(close[0], close[0])!r}?" if close else ""


def convert(key: str, value: Any, hint: Any, choices: Iterable[Any] | None = None) -> tuple[Any, str]:
    """The value as the type ``hint``, and "" or why it cannot be: "1e-5" is a number, "a,b" is two names.

    >>> convert("learning_rate", "1e-5", float), convert("x", "a, b", tuple[str, ...] | str), convert("n", "many", int)
    ((1e-05, ''), (('a', 'b'), ''), (None, "n is 'many'; it takes int"))
    """
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if is_union else (hint,)
    if value is None:
        return (None, "") if type(None) in options else (None, f"{key} is empty; it needs a value")
    for option in options:
        if isinstance(option, type) and issubclass(option, enum.Enum):
            choices = [member.value for member in option]
    allowed = None if choices is None else list(choices)
    if value is False and allowed is not None and "no" in map(str, allowed):
        value = "no"  # YAML reads a bare no as false
    if allowed is not None and not isinstance(value, dict | list) and str(value) not in map(str, allowed):
        return None, f"{key} is {value!r}; it takes {', '.join(map(str, allowed))}"
    # Sequences first: text with commas is a list where a list is allowed at all.
    for option in sorted(options, key=lambda option: not _is_sequence(option)):
        found = _as(value, option, options)
        if found is not None:
            return found[0], ""
    wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options if option is not type(None))
    return None, f"{key} is {value!r}; it takes {wanted}"


def _is_sequence(option: Any) -> bool:
    return (typing.get_origin(option) or option) in (tuple, list)


def _as(value: Any, option: Any, options: tuple[Any, ...]) -> tuple[Any] | None:
    """``(converted,)``, or None where ``value`` is no ``option``."""
    base: Any = typing.get_origin(option) or option
    if _is_sequence(option):
        if isinstance(value, str) and ("," in value or str not in options):
            value = [part.strip() for part in value.split(",")]
        if not isinstance(value, list | tuple):
            return None
        element = (typing.get_args(option) or (str,))[0]
        items = [_as(item, element, (element,)) for item in value]
        return None if None in items else (base(item[0] for item in items if item is not None),)
    if base is typing.Literal:
        return (value,) if value in typing.get_args(option) else None
    if isinstance(value, bool):
        return (value,) if base is bool else None
    if base is float and isinstance(value, int | float | str):
        try:
            return (float(value),)
        except ValueError:
            return None
    if base is int and isinstance(value, int):
        return (value,)
    if base is dict and isinstance(value, dict):
        return (value,)
    if (base is str or (isinstance(base, type) and issubclass(base, enum.Enum))) and not isinstance(value, dict | list):
        return (str(value),)
    return None

"""What is wrong with a config whose single values are of the right type."""

from leantune.errors import InvalidArgumentError
from leantune.memory.sizes import parse_size
from leantune.training.config.keys import FOREIGN_OPTIMIZER_KEYS, REFUSED, suggestion
from leantune.training.config.parallel import problems_in_parallel
from leantune.training.config.run_config import EXACT_SAVINGS, LORA_METHODS, OUR_OPTIMIZERS, TrainConfig

ACCUMULATED_IN = ("float32", "bfloat16")
"""What sums gradients over micro-batches (`leantune.backward.accumulation.KINDS`)."""
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

FACTORABLE = ("ternary_adamw", "adamw", "lomo", "adamw_torch", "adamw_torch_fused", "sgd")
"""Optimizers whose step on VeLoRA's factored gradient is known to be one on the whole gradient."""

# Settings only some methods read.
_ONLY_FOR_METHODS = {
    LORA_METHODS: ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    ("qlora",): ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    ("lora",): ("load_in_8bit",),
}


def problems_of(c: TrainConfig, planning: bool) -> list[str]:
    """Every problem of a config, in words; ``planning``: it is only to be planned."""
    found = _wrong_values(c, planning) + _wrong_extra(c) + _wrong_data(c) + _wrong_budget(c)
    # Of method: auto the keys that were set must go together with what it chooses, which is looked at there.
    return found if c.method == "auto" else found + _ignored(c) + _wrong_together(c)


def _wrong_together(c: TrainConfig) -> list[str]:
    """Settings that cannot work with one another."""
    found = []
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
    if c.accumulate not in (None, *ACCUMULATED_IN):
        found.append(f"accumulate is {c.accumulate!r}; write {' or '.join(ACCUMULATED_IN)}")
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
    found += _wrong_savings(c)
    if c.parallel is not None:
        found += problems_in_parallel(c, c.parallel)
    if c.bf16 and c.dtype != "float32":
        found.append(f"bf16 is autocast for float32 weights; dtype is {c.dtype}: leave bf16 out")
    return found


def _wrong_savings(c: TrainConfig) -> list[str]:
    """What is wrong with the savings of activation memory."""
    found = []
    if not isinstance(c.exact_savings, bool):
        known = ", ".join(EXACT_SAVINGS)
        found += [
            f"exact_savings names {name!r}; it takes true, false, or some of {known}"
            for name in c.exact_savings
            if name not in EXACT_SAVINGS
        ]
        if not c.exact_savings:
            found.append(f"exact_savings is an empty list; write false, or some of {known}")
        if len(set(c.exact_savings)) < len(c.exact_savings):
            found.append(f"exact_savings names one saving twice: {', '.join(c.exact_savings)}")
    if c.velora_refresh_every is not None and c.velora_refresh_every < 1:
        found.append(
            f"velora_refresh_every is {c.velora_refresh_every}; it is a number of training forwards of at least 1 "
            "(leave it out for directions that stay)"
        )
    if c.velora_min_cosine is not None and not 0 < c.velora_min_cosine <= 1:
        found.append(f"velora_min_cosine is {c.velora_min_cosine}; it is a cosine above 0 and at most 1")
    return found + (_wrong_factored(c) if c.velora_factored else [])


def _wrong_factored(c: TrainConfig) -> list[str]:
    found = []
    if c.velora_refresh_every is not None:
        found.append(
            "velora_factored needs directions that stay, for the optimizer's states are of the first ones; leave "
            "velora_refresh_every out"
        )
    if c.velora_min_cosine is not None:
        found.append(
            "velora_min_cosine lets layers go back to exact gradients, and velora_factored freezes their weights; "
            "leave one of them out"
        )
    if c.optim not in FACTORABLE:
        found.append(
            f"velora_factored does not know what {c.optim}'s step on the small gradient means for the weight; use one "
            f"of {', '.join(FACTORABLE)}"
        )
    if c.optim == "sgd" and c.weight_decay:
        found.append("sgd adds weight_decay to the gradient, which velora_factored's cannot hold; use adamw, or 0")
    if c.master_bits is not None:
        found.append("master_bits are kept for whole weights, and velora_factored folds steps into them; leave one out")
    return found


def _wrong_budget(c: TrainConfig) -> list[str]:
    if c.memory_budget is None:
        return []
    try:
        parse_size(c.memory_budget)
    except InvalidArgumentError as error:
        return [f"memory_budget: {error}"]
    return []


def _wrong_data(c: TrainConfig) -> list[str]:
    """What is wrong with how the data are named, weighted, held out or streamed."""
    found = []
    if c.eval_dataset and c.eval_split:
        found.append("eval_dataset and eval_split are both set; keep one")
    twice = sorted({name for name in c.sources if c.sources.count(name) > 1})
    if twice:
        found.append(
            f"dataset names {', '.join(twice)} twice; write it once, and dataset_weights to take it more often"
        )
    if c.dataset_weights is not None:
        if len(c.dataset_weights) != len(c.sources):
            found.append(
                f"dataset_weights has {len(c.dataset_weights)} numbers for {len(c.sources)} datasets; give one for each"
            )
        if not all(0 < weight < float("inf") for weight in c.dataset_weights):
            found.append(f"dataset_weights is {list(c.dataset_weights)}; each must be above 0")
    if c.longest_first and (c.packing or c.streaming):
        found.append(
            f"longest_first orders whole rows that are known, and {'packing' if c.packing else 'streaming'} is on; "
            "leave it out"
        )
    if c.streaming:
        found += _wrong_stream(c)
    return found


def _wrong_stream(c: TrainConfig) -> list[str]:
    found = []
    if c.max_steps < 1:
        found.append("streaming needs max_steps: how many rows there are is not known before the last one")
    if c.eval_split:
        found.append("eval_split needs all rows, and streaming reads them as it trains; give an eval_dataset")
    if c.dataset_weights is not None:
        found.append("dataset_weights needs all rows, and streaming reads them as it trains; leave one of them out")
    if c.max_length == 0:
        found.append("max_length: auto needs all rows, and streaming reads them as it trains; give a number")
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
    if not c.velora_target_modules:
        found += [
            f"{key} is set without velora_target_modules; name the layers (down_proj)"
            for key in ("velora_num_groups", "velora_factored", "velora_refresh_every", "velora_min_cosine")
            if getattr(c, key) != getattr(defaults, key)
        ]
    if not c.num_samples:
        found += [
            f"{key} is set, but num_samples is 0, so nothing is sampled; write num_samples: 4"
            for key in ("sample_every", "sample_tokens")
            if getattr(c, key) != getattr(defaults, key)
        ]
    return found


def _wrong_extra(c: TrainConfig) -> list[str]:
    found = []
    if c.extra.get("packing_strategy") == "wrapped":
        found.append("packing_strategy: wrapped lets rows attend to one another; write bfd or bfd_split")
    if c.extra.get("eval_steps") is not None and c.extra.get("eval_strategy", "no") != "steps":
        found.append(
            "eval_steps is set, but no evaluation happens by steps; write eval_strategy: steps, or leave it out"
        )
    if c.extra.get("eval_strategy", "no") != "no" and not (c.eval_dataset or c.eval_split):
        found.append("eval_strategy is set, but there are no held-out rows; write eval_split: 0.05, or eval_dataset")
    return found


def _wrong_optimizer_values(c: TrainConfig) -> list[str]:
    """What the optimizers would refuse once the model is loaded."""
    found = []
    if c.learning_rate is not None and not 0 <= c.learning_rate < float("inf"):
        found.append(f"learning_rate is {c.learning_rate}; it must be a number of at least 0")
    if not 0 <= c.weight_decay < float("inf"):
        found.append(f"weight_decay is {c.weight_decay}; it must be a number of at least 0")
    if len(c.betas) != 2 or not all(0 <= beta < 1 for beta in c.betas):
        found.append(f"betas is {list(c.betas)}; it takes two numbers of at least 0 and below 1, [0.9, 0.999]")
    if not 0 < c.adam_epsilon < float("inf"):
        found.append(f"adam_epsilon is {c.adam_epsilon}; it must be above 0")
    if c.momentum_planes not in (1, 2):
        found.append(f"momentum_planes is {c.momentum_planes}; write 1 or 2")
    if not 0 <= c.carry_rank <= 64:
        found.append(f"carry_rank is {c.carry_rank}; it must be from 0 (no carry) to 64")
    if c.block_size % 8 or not 16 <= c.block_size <= 4096:
        found.append(f"block_size is {c.block_size}; it must be a multiple of 8 from 16 to 4096")
    if c.master_bits not in (None, 24):
        found.append(f"master_bits is {c.master_bits}; write 24 (bfloat16 and 8 more bits), or leave it out")
    if c.rounding not in (None, "stochastic", "nearest"):
        found.append(f"rounding is {c.rounding!r}; write stochastic or nearest")
    return found


def _wrong_values(c: TrainConfig, planning: bool) -> list[str]:
    needed = ("model_name_or_path",) if planning else ("model_name_or_path", "dataset")
    found = [f"{key} is missing" for key in needed if not getattr(c, key)]
    if c.method not in ("full", "auto", *LORA_METHODS):
        found.append(f"method is {c.method!r}; write auto, full, lora or qlora")
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
    if c.max_length < 0:
        found.append(f"max_length is {c.max_length}; it must be at least 1, or auto")
    for key in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "velora_num_groups",
        "lora_r",
        "sample_tokens",
    ):
        if getattr(c, key) < 1:
            found.append(f"{key} is {getattr(c, key)}; it must be at least 1")
    if c.num_samples < 0:
        found.append(f"num_samples is {c.num_samples}; it must be at least 0 (none)")
    if c.sample_every is not None and c.sample_every < 1:
        found.append(f"sample_every is {c.sample_every}; it must be at least 1 (leave it out to sample at the end)")
    if c.save_total_limit is not None and c.save_total_limit < 1:
        found.append(f"save_total_limit is {c.save_total_limit}; it must be at least 1 (null keeps every checkpoint)")
    if c.max_steps == 0 or c.max_steps < -1:
        found.append(f"max_steps is {c.max_steps}; it must be at least 1 (leave it out to train num_train_epochs)")
    if c.num_train_epochs <= 0 and c.max_steps < 1:
        found.append(f"num_train_epochs is {c.num_train_epochs}; it must be above 0")
    if not c.lora_target_modules:
        found.append("lora_target_modules is empty; name layers (q_proj, v_proj), or write all-linear")
    if c.lora_alpha <= 0:
        found.append(f"lora_alpha is {c.lora_alpha}; it must be above 0 (the adapters' output is scaled by alpha / r)")
    if not 0 <= c.lora_dropout < 1:
        found.append(f"lora_dropout is {c.lora_dropout}; it is a share of at least 0 and below 1")
    if c.seed < 0:
        found.append(f"seed is {c.seed}; it must be at least 0")
    if c.eval_split is not None and not 0 < c.eval_split < 1:
        found.append(f"eval_split is {c.eval_split}; it is a share between 0 and 1")
    if not c.output_dir:
        found.append("output_dir is empty; write the name of a folder")
    found += [
        f"{key} is {getattr(c, key):g}; it must be at least 1, or a share of all steps below 1"
        for key in ("logging_steps", "save_steps")
        if not getattr(c, key) > 0
    ]
    found += _wrong_optimizer_values(c)
    if c.max_grad_norm is not None and not c.max_grad_norm > 0:
        found.append(
            f"max_grad_norm is {c.max_grad_norm}; it must be above 0 (leave it out, or clip: none, for no clipping)"
        )
    return found

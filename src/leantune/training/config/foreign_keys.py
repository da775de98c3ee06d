"""Keys of axolotl, LLaMA-Factory and torchtune configs that mean nothing here: each with what to write instead.

None of them is ever ignored. docs/migration.md has them as tables, held against this file by
tests/training/test_migration.py.
"""

_ATTENTION = "attention is torch's scaled_dot_product_attention, flash kernels included; leave it out"
_ADAPTERS_ALONE = "adapters alone are trained beside a frozen base; to train more write method: full"
_MERGE_FIRST = "merge that adapter first (leantune merge) and write the merged folder as model_name_or_path"
_LORA_VARIANT = "not in a config; build it with PEFT in Python and use lt.attach (examples/trl_sft.py)"
_OTHER_OPTIMIZER = "not in this release; optim: ternary_adamw keeps every parameter training in less memory"
_WANDB = "write report_to: wandb; wandb reads its settings from variables (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE)"
_ONE_PROCESS = "rows are tokenised in one process in this release; leave it out"
_NO_CACHE = "rows are prepared in memory at every start; leave it out"
_SHARED_SAVINGS = "the loss without logits and recomputed products are exact_savings: true, the default; leave it out"
_IN_THE_MODEL = "change it in the model's own folder (config.json, tokenizer_config.json)"
_IN_PYTHON = "leantune train does supervised fine-tuning; for preferences see examples/dpo.py"

FOREIGN = {
    # -- axolotl ------------------------------------------------------------------------------------------------------
    "model_type": "the class is read from the model's config.json; leave it out",
    "tokenizer_type": "the class is read from the tokenizer's files; leave it out",
    "tokenizer_config": "the tokenizer is the one in the model's folder; leave it out",
    "strict": "an unknown key is an error, always; leave it out",
    "dataset_prepared_path": _NO_CACHE,
    "test_datasets": "write eval_dataset",
    "shuffle_merged_datasets": "rows of all datasets are shuffled together; leave it out",
    "lora_model_dir": _MERGE_FIRST,
    "lora_target_linear": "write lora_target_modules: all-linear; it is the default",
    "lora_modules_to_save": _ADAPTERS_ALONE,
    "lora_fan_in_fan_out": "it is read from the layers; leave it out",
    "peft_use_dora": _LORA_VARIANT,
    "peft_use_rslora": _LORA_VARIANT,
    "loraplus_lr_ratio": _LORA_VARIANT,
    "relora_steps": _LORA_VARIANT,
    "eval_sample_packing": "held-out rows are not packed; leave it out",
    "pad_to_sequence_len": "a batch is padded to its longest row; leave it out",
    "excess_length_strategy": "rows are cut at max_length; leantune validate names those that lose their answer",
    "group_by_length": "write train_sampling_strategy: group_by_length",
    "cosine_min_lr_ratio": "write lr_scheduler_type: cosine_with_min_lr and lr_scheduler_kwargs: {min_lr_rate: 0.1}",
    "wandb_project": _WANDB,
    "wandb_entity": _WANDB,
    "wandb_watch": _WANDB,
    "wandb_name": "write report_to: wandb and run_name",
    "wandb_run_id": _WANDB,
    "wandb_log_model": _WANDB,
    "early_stopping_patience": "not in this release; every checkpoint kept can be loaded as a model",
    "local_rank": "it is set by the launcher; leave it out",
    "xformers_attention": _ATTENTION,
    "flash_attention": _ATTENTION,
    "sdp_attention": _ATTENTION,
    "s2_attention": _ATTENTION,
    "eager_attention": _ATTENTION,
    "evals_per_epoch": "write eval_strategy: steps and eval_steps; a value below 1 is a share of all steps",
    "saves_per_epoch": "write save_steps; a value below 1 is a share of all steps",
    "eval_table_size": "write num_samples: answers to so many held-out rows",
    "eval_max_new_tokens": "write sample_tokens",
    "debug": "leantune validate shows what is trained on; leave it out",
    "special_tokens": _IN_THE_MODEL,
    "tokens": _IN_THE_MODEL,
    "plugins": _SHARED_SAVINGS,
    "unfrozen_parameters": "part of a model cannot be chosen in a config: method: full, or a loop in Python with "
    "lt.FusedBackward",
    "lisa_n_layers": _OTHER_OPTIMIZER,
    "rl": _IN_PYTHON,
    "roles_to_train": "the assistant's turns are trained on, always; leave it out",
    "train_on_eos": "the token that ends an answer is trained on, always; leave it out",
    # -- LLaMA-Factory ------------------------------------------------------------------------------------------------
    "stage": "supervised fine-tuning is what leantune train does; leave it out (for preferences: examples/dpo.py)",
    "dataset_dir": "write the file's path as dataset",
    "max_samples": "cut the file, or write max_steps",
    "overwrite_cache": _NO_CACHE,
    "tokenized_path": _NO_CACHE,
    "preprocessing_num_workers": _ONE_PROCESS,
    "overwrite_output_dir": "a folder that holds a run is never overwritten; write another output_dir, or resume: true",
    "plot_loss": "curves are drawn at the end of every run; leave it out",
    "pure_bf16": "bfloat16 weights are the default (dtype: bfloat16); leave it out",
    "quantization_method": "4-bit and 8-bit bases are bitsandbytes'; leave it out",
    "quantization_type": "write bnb_4bit_quant_type: nf4 or fp4",
    "double_quantization": "write bnb_4bit_use_double_quant",
    "adapter_name_or_path": _MERGE_FIRST,
    "create_new_adapter": _MERGE_FIRST,
    "additional_target": _ADAPTERS_ALONE,
    "freeze_trainable_layers": _OTHER_OPTIMIZER,
    "freeze_trainable_modules": _OTHER_OPTIMIZER,
    "use_dora": _LORA_VARIANT,
    "use_rslora": _LORA_VARIANT,
    "pissa_init": _LORA_VARIANT,
    "use_galore": _OTHER_OPTIMIZER,
    "galore_rank": _OTHER_OPTIMIZER,
    "galore_target": _OTHER_OPTIMIZER,
    "galore_scale": _OTHER_OPTIMIZER,
    "galore_update_interval": _OTHER_OPTIMIZER,
    "galore_layerwise": "write fused_backward: true: gradients are applied and freed inside backward",
    "use_apollo": _OTHER_OPTIMIZER,
    "use_badam": _OTHER_OPTIMIZER,
    "badam_mode": _OTHER_OPTIMIZER,
    "use_adam_mini": _OTHER_OPTIMIZER,
    "use_muon": _OTHER_OPTIMIZER,
    "train_on_prompt": "answers alone are trained on; give the rows as text to train on every token",
    "mask_history": "all answers of a conversation are trained on; split it into rows for the last one alone",
    "neat_packing": "write packing: true; packed rows do not see one another",
    "flash_attn": _ATTENTION,
    "shift_attn": _ATTENTION,
    "enable_liger_kernel": _SHARED_SAVINGS,
    "use_unsloth": _SHARED_SAVINGS,
    "use_unsloth_gc": "write gradient_checkpointing: true",
    "disable_gradient_checkpointing": "write gradient_checkpointing: true or false; false is the default",
    "upcast_layernorm": "norms stay in dtype; their weights are rounded stochastically",
    "upcast_lmhead_output": "the loss is computed in float32 from tiles of logits; leave it out",
    "rope_scaling": _IN_THE_MODEL,
    "resize_vocab": _IN_THE_MODEL,
    "compute_accuracy": "evaluation gives the loss; scores come from leantune eval",
    "mix_strategy": "write dataset: [a.jsonl, b.jsonl] and dataset_weights",
    "interleave_probs": "write dataset_weights: how often an epoch takes the rows of each dataset",
    "pref_beta": _IN_PYTHON,
    "pref_loss": _IN_PYTHON,
    # -- torchtune ----------------------------------------------------------------------------------------------------
    "optimizer_in_bwd": "write fused_backward: true",
    "enable_activation_offloading": "write gradient_checkpointing: true",
    "compile": "compiled models are not in this release; leave it out",
    "checkpointer": "write model_name_or_path and output_dir",
    "tokenizer": "the tokenizer is the one in the model's folder; leave it out",
    "loss": _SHARED_SAVINGS,
    "metric_logger": "write report_to; log.jsonl is always written",
    "device": "one device a process, always; leave it out",
}

OFF_IS_HERE = frozenset(FOREIGN) - {
    "double_quantization", "shuffle_merged_datasets", "pure_bf16", "optimizer_in_bwd", "disable_gradient_checkpointing",
    "train_on_eos", "upcast_lmhead_output",
} | {
    "load_in_4bit", "fp16", "train_on_inputs", "use_peft", "push_to_hub", "use_liger_kernel", "torch_compile",
    "auto_find_batch_size", "trust_remote_code", "do_predict", "load_best_model_at_end", "activation_offloading",
    "deepspeed", "fsdp",
}  # fmt: skip
"""Refused keys whose ``false`` says what is so here anyway: it is taken, with a note."""

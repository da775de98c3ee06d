"""Configs of a run that cannot be what was meant."""

from training.malformed.case import Case

NAMED = b"model_name_or_path: m\ndataset: d\n"

CONFIGS = [
    Case(
        "no file",
        {},
        ("- there is no config file {d}/run.yaml. Give its path, or --model_name_or_path and --dataset as flags."),
    ),
    Case("an empty config", {"run.yaml": b""}, "- {d}/run.yaml holds nothing; a config is lines of `key: value`."),
    Case(
        "a list for a config",
        {"run.yaml": b"- a\n- b\n"},
        "- {d}/run.yaml holds a list; a config is lines of `key: value`.",
    ),
    Case(
        "a tab",
        {"run.yaml": b"model_name_or_path: m\n\tdataset: d\n"},
        (
            "- {d}/run.yaml cannot be read as YAML: while scanning for the next token\n"
            "found character '\\t' that cannot start any token\n  in \"<unicode string>\", line 2, column "
            "1:\n    \tdataset: d\n    ^"
        ),
    ),
    Case(
        "latin-1",
        {"run.yaml": b"model_name_or_path: caf\xe9\n"},
        "- {d}/run.yaml, line 1: byte 0xe9 is not UTF-8; save the file as UTF-8",
    ),
    Case(
        "a key twice",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\nseed: 1\nseed: 2\n"},
        "- {d}/run.yaml cannot be read as YAML: seed stands in line 3 and in line 4; keep one",
    ),
    Case(
        "one key under two names",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\nmax_length: 8\ncutoff_len: 9\n"},
        "- cutoff_len sets max_length a second time; keep one of them",
    ),
    Case(
        "unknown keys",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\nlearnin_rate: 1\nmax_lenght: 3\n"},
        (
            "- unknown key 'learnin_rate'; did you mean 'learning_rate'?\n"
            "- unknown key 'max_lenght'; did you mean 'max_length'?"
        ),
    ),
    Case(
        "wrong kinds",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\nmax_length: long\npacking: maybe\nlearning_rate: fast\n"},
        (
            "- max_length is 'long'; it takes int\n"
            "- packing is 'maybe'; it takes bool\n"
            "- learning_rate is 'fast'; it takes float"
        ),
    ),
    Case(
        "max_length 0",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\nmax_length: 0\n"},
        "- max_length is 0; it must be at least 1, or auto",
    ),
    Case(
        "a dataset twice",
        {"run.yaml": b"model_name_or_path: m\ndataset: [d, e, d]\n"},
        "- dataset names d twice; write it once, and dataset_weights to take it more often",
    ),
    Case(
        "weights for other datasets",
        {"run.yaml": b"model_name_or_path: m\ndataset: [d, e]\ndataset_weights: [1, 2, 3]\n"},
        "- dataset_weights has 3 numbers for 2 datasets; give one for each",
    ),
    Case(
        "a weight of 0",
        {"run.yaml": b"model_name_or_path: m\ndataset: [d, e]\ndataset_weights: [1, 0]\n"},
        "- dataset_weights is [1.0, 0.0]; each must be above 0",
    ),
    Case(
        "datasets with settings of their own",
        {"run.yaml": b"model_name_or_path: m\ndataset:\n  - path: d\n    weight: 2\n"},
        ("- dataset holds keys of its own; write names alone, dataset: [a.jsonl, b.csv], and dataset_weights"),
    ),
    Case("an empty list of datasets", {"run.yaml": b"model_name_or_path: m\ndataset: []\n"}, "- dataset is missing"),
    Case(
        "streaming without an end",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\nstreaming: true\n"},
        "- streaming needs max_steps: how many rows there are is not known before the last one",
    ),
    Case(
        "streaming with what needs all rows",
        {
            "run.yaml": b"model_name_or_path: m\ndataset: [d, e]\nstreaming: true\nmax_steps: 5\neval_split: 0.1\n"
            b"dataset_weights: [1, 2]\nmax_length: auto\n"
        },
        (
            "- eval_split needs all rows, and streaming reads them as it trains; give an eval_dataset\n"
            "- dataset_weights needs all rows, and streaming reads them as it trains; leave one of them "
            "out\n"
            "- max_length: auto needs all rows, and streaming reads them as it trains; give a number"
        ),
    ),
    Case(
        "rows held out twice",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\neval_dataset: e\neval_split: 0.1\n"},
        "- eval_dataset and eval_split are both set; keep one",
    ),
    Case(
        "packing that leaks",
        {"run.yaml": b"model_name_or_path: m\ndataset: d\npacking: true\npacking_strategy: wrapped\n"},
        "- packing_strategy: wrapped lets rows attend to one another; write bfd or bfd_split",
    ),
    Case(
        "a method that is none",
        {"run.yaml": NAMED + b"method: fulll\n"},
        "- method is 'fulll'; write auto, full, lora or qlora",
    ),
    Case(
        "an optimizer misspelt",
        {"run.yaml": NAMED + b"optim: adamww\n"},
        "- optim 'adamww' is unknown; did you mean 'adamw'?",
    ),
    Case(
        "weights in int8",
        {"run.yaml": NAMED + b"dtype: int8\n"},
        "- dtype is 'int8'; write bfloat16, float32 or float16",
    ),
    Case(
        "no rows a step",
        {"run.yaml": NAMED + b"per_device_train_batch_size: 0\ngradient_accumulation_steps: 0\n"},
        (
            "- per_device_train_batch_size is 0; it must be at least 1\n"
            "- gradient_accumulation_steps is 0; it must be at least 1"
        ),
    ),
    Case(
        "no end",
        {"run.yaml": NAMED + b"max_steps: 0\n"},
        "- max_steps is 0; it must be at least 1 (leave it out to train num_train_epochs)",
    ),
    Case(
        "no epochs",
        {"run.yaml": NAMED + b"num_train_epochs: 0\n"},
        "- num_train_epochs is 0.0; it must be above 0",
    ),
    Case(
        "a rate that is no number",
        {"run.yaml": NAMED + b"learning_rate: .nan\n"},
        "- learning_rate is nan; it must be a number of at least 0",
    ),
    Case(
        "an optimizer's settings out of range",
        {"run.yaml": NAMED + b"betas: [0.9, 1.5]\nadam_epsilon: 0\nweight_decay: -1\n"},
        (
            "- weight_decay is -1.0; it must be a number of at least 0\n"
            "- betas is [0.9, 1.5]; it takes two numbers of at least 0 and below 1, [0.9, 0.999]\n"
            "- adam_epsilon is 0.0; it must be above 0"
        ),
    ),
    Case(
        "ternary states out of range",
        {"run.yaml": NAMED + (b"momentum_planes: 3\ncarry_rank: -1\nblock_size: 100\nmaster_bits: 7\nrounding: up\n")},
        (
            "- momentum_planes is 3; write 1 or 2\n"
            "- carry_rank is -1; it must be from 0 (no carry) to 64\n"
            "- block_size is 100; it must be a multiple of 8 from 16 to 4096\n"
            "- master_bits is 7; write 24 (bfloat16 and 8 more bits), or leave it out\n"
            "- rounding is 'up'; write stochastic or nearest"
        ),
    ),
    Case(
        "a setting of another optimizer",
        {"run.yaml": NAMED + b"optim: lomo\nlearning_rate: 1.0e-3\nbetas: [0.8, 0.9]\n"},
        "- betas is set, but optim: lomo does not read it (ternary_adamw, adamw would); leave it out",
    ),
    Case(
        "adapters without layers",
        {"run.yaml": NAMED + b"method: lora\nlora_target_modules: []\n"},
        "- lora_target_modules is empty; name layers (q_proj, v_proj), or write all-linear",
    ),
    Case(
        "a budget without a unit",
        {"run.yaml": NAMED + b"memory_budget: 24\n"},
        (
            "- memory_budget: size '24' has no unit, so it could mean bytes or GiB; write '24GiB' (2**30 "
            "bytes) or '24GB' (10**9 bytes)"
        ),
    ),
    Case(
        "a save every 0 steps",
        {"run.yaml": NAMED + b"save_steps: 0\nlogging_steps: -1\n"},
        (
            "- logging_steps is -1; it must be at least 1, or a share of all steps below 1\n"
            "- save_steps is 0; it must be at least 1, or a share of all steps below 1"
        ),
    ),
    Case(
        "evaluations that never come",
        {"run.yaml": NAMED + b"eval_split: 0.1\neval_steps: 5\n"},
        ("- eval_steps is set, but no evaluation happens by steps; write eval_strategy: steps, or leave it out"),
    ),
    Case(
        "evaluations of nothing",
        {"run.yaml": NAMED + b"eval_strategy: epoch\n"},
        "- eval_strategy is set, but there are no held-out rows; write eval_split: 0.05, or eval_dataset",
    ),
    Case(
        "projections inside checkpointed blocks",
        {"run.yaml": NAMED + b"velora_target_modules: q_proj\ngradient_checkpointing: true\n"},
        ("- VeLoRA saves nothing inside checkpointed blocks; drop velora_target_modules or gradient_checkpointing"),
    ),
    Case(
        "a model split over devices",
        {"run.yaml": NAMED + b"device_map: auto\n"},
        (
            "- device_map: one device per process, always: a model split over devices by layers trains at "
            "the speed of one"
        ),
    ),
    Case(
        "a fraction under its old name",
        {"run.yaml": NAMED + b"warmup_ratio: 0.1\n"},
        "- warmup_ratio: write warmup_steps; a value below 1 is a fraction of all steps",
    ),
    Case(
        "an output folder without a name",
        {"run.yaml": NAMED + b"output_dir: ''\n"},
        "- output_dir is empty; write the name of a folder",
    ),
]

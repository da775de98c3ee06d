"""Configs of a run that cannot be what was meant."""

from training.malformed.case import Case

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
]

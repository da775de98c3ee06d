"""What each change saves a run that does not fit: planned peaks of an 8B model, one change added to the other.

    python benchmarks/does_not_fit.py                # plans, writes rows, prints the table of docs/does_not_fit.md
    python benchmarks/does_not_fit.py --summary      # the table from the rows

The model is Llama 3.1 8B as its config.json describes it; rows of 2,048 tokens, four a step to begin with. A row of
results/does_not_fit.csv a rung; planned by arithmetic (`leantune.plan`), not measured. "keeps on": the change stays for
the rungs below it; alternatives at the end are each set against the last rung that does.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rows import ResultRows

import leantune as lt
from leantune.memory import format_bytes
from leantune.training.config import build_config

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
}  # fmt: skip
START: dict[str, Any] = {
    "optim": "adamw_torch", "dtype": "bfloat16", "fused_backward": False, "exact_savings": False, "method": "full",
    "per_device_train_batch_size": 4, "max_length": 2048,
}  # fmt: skip
RUNGS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("torch's AdamW, bfloat16 weights, as other trainers run it", "", {}, ""),
    ("exact savings", "`exact_savings: true`", {"exact_savings": True}, "no number; time in velora.md"),
    ("ternary states", "`optim: ternary_adamw`", {"optim": "ternary_adamw"}, "no quality found (quality.md)"),
    (
        "fused backward",
        "`fused_backward: true`",
        {"fused_backward": True},
        "clipping is per tensor; exact: two backwards",
    ),
    (
        "every second block recomputed",
        "`gradient_checkpointing_kwargs: {every_n_layers: 2}`",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
        "about a sixth more time",
    ),
    (
        "every block recomputed",
        "`gradient_checkpointing: true`",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {}},
        "about a third more time",
    ),
    ("one row a step", "`per_device_train_batch_size: 1`", {"per_device_train_batch_size": 1}, "noisier gradients"),
)
ALTERNATIVES: tuple[tuple[str, str, dict[str, Any], str, int], ...] = (
    ("without the carry", "`carry_rank: 0`", {"carry_rank": 0}, "quality at large batches (ternary_states.md)", 1),
    ("shorter rows", "`max_length: 1024`", {"max_length": 1024}, "what is cut off", 1),
    ("one-sparse states", "`optim: taco_one_sparse`", {"optim": "taco_one_sparse", "learning_rate": 1e-3},
     "another optimizer (taco_one_sparse.md)", 1),
    ("no states", "`optim: lomo`", {"optim": "lomo", "learning_rate": 3e-2}, "another optimizer", 1),
    ("rows of weights over 2 GPUs", "`parallel: fsdp2`", {"parallel": "fsdp2"}, "communication", 2),
    ("rows of weights over 8 GPUs", "`parallel: fsdp2`", {"parallel": "fsdp2"}, "communication", 8),
    ("adapters alone", "`method: lora`", {"method": "lora"}, "the base is frozen", 1),
    ("adapters on a 4-bit base", "`method: qlora`", {"method": "qlora"}, "the base is frozen and rounded", 1),
)  # fmt: skip
COLUMNS = ("rung", "keeps_on", "write", "costs", "batch", "length", "processes", "peak_bytes")


def planned(model: Path, keys: dict[str, Any], processes: int) -> int:
    """Bytes of the peak on one device."""
    config = build_config({"model_name_or_path": str(model), **keys}, planning=True)
    return lt.plan(config, world_size=processes, advice=False).total


def run(rows: ResultRows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        keys = dict(START)
        for rung, write, change, costs in RUNGS:
            keys |= change
            _append(rows, Path(folder), rung, True, write, costs, keys, 1)
        for rung, write, change, costs, processes in ALTERNATIVES:
            _append(rows, Path(folder), rung, False, write, costs, keys | change, processes)


def _append(
    rows: ResultRows, model: Path, rung: str, keeps: bool, write: str, costs: str, keys: dict[str, Any], processes: int
) -> None:
    batch, length = keys["per_device_train_batch_size"], keys["max_length"]
    peak = planned(model, keys, processes)
    rows.append(seed=0, rung=rung, keeps_on=keeps, write=write, costs=costs, batch=batch, length=length,
                processes=processes, peak_bytes=peak)  # fmt: skip


def table(rows: ResultRows) -> str:
    """Markdown, from the newest row of each rung."""
    newest = {row["rung"]: row for row in rows.read()}
    names = [name for name, *_ in RUNGS] + [name for name, *_ in ALTERNATIVES]
    lines = ["| change | write | planned peak | saves | costs |", "|---|---|---|---|---|"]
    before = 0
    for row in (newest[name] for name in names if name in newest):
        peak = int(row["peak_bytes"])
        saves = format_bytes(before - peak) if before else ""
        name = row["rung"] if row["keeps_on"] == "True" else f"or: {row['rung']}"
        lines.append(f"| {name} | {row['write']} | {format_bytes(peak)} | {saves} | {row['costs']} |")
        if row["keeps_on"] == "True":
            before = peak
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--summary", action="store_true", help="print the table from the rows and stop")
    arguments = parser.parse_args()
    rows = ResultRows("does_not_fit", COLUMNS, arguments.rows)
    if not arguments.summary:
        run(rows)
    print(table(rows))


if __name__ == "__main__":
    main()

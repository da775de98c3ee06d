"""leantune demo: a real language model learns a task twice, with leantune's methods and with torch AdamW, side by
side."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from leantune.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

HELD_OUT_ROWS = 48
GENERATED_ROWS = 32
SHOWN_ROWS = 3
STEPS, ROWS_A_STEP = 15, 6
MAX_NEW_TOKENS = 72  # the longest record has 59

SIDES: dict[str, dict[str, Any]] = {
    "leantune": {
        "optim": "ternary_adamw",
        "learning_rate": 2e-4,
        "dtype": "bfloat16",
        "fused_backward": True,
        # The loss without logits alone: under all exact savings the input of down_proj is not kept, and VeLoRA would
        # have nothing to show.
        "exact_savings": ["loss"],
        "velora_target_modules": ["down_proj"],
        "velora_num_groups": 32,
    },
    # What people run today: float32 weights (torch AdamW on bfloat16 weights loses most updates to rounding), full
    # logits.
    "torch AdamW": {"optim": "adamw_torch", "learning_rate": 2e-4, "dtype": "float32", "exact_savings": False},
}
CAPTION = (
    "leantune: bfloat16 weights, ternary AdamW states, gradients applied inside backward, loss without logits, VeLoRA "
    "on down_proj. torch AdamW: float32 weights, ordinary backward, full logits."
)

# Progress bars of the libraries underneath would drown the demo's own output.
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}

Rows = list[dict[str, Any]]
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """How much a demo does: training steps, held-out rows for the loss, of them the answered, tokens each."""

    steps: int
    held_out: int
    generated: int
    new_tokens: int


def demo(
    tiny: bool = typer.Option(False, "--tiny", help="A random 2-layer model, under 30 s: checks that everything runs."),
    output_dir: Path = typer.Option(
        Path("runs/demo"), "--output_dir", "--output-dir", help="Where both runs and the summary are written."
    ),
    max_steps: int = typer.Option(
        0, "--max_steps", "--max-steps", help=f"Training steps of each side; 0: {STEPS} (tiny: 4)."
    ),
    side: str = typer.Option("", hidden=True),
) -> None:
    """Fine-tune SmolLM2-135M-Instruct on sentences to JSON records, beside torch AdamW, and compare."""
    if max_steps < 0:
        raise ConfigError(f"- max_steps is {max_steps}; write how many steps to train, or leave it out for {STEPS}")
    size = Size(max_steps or STEPS, HELD_OUT_ROWS, GENERATED_ROWS, MAX_NEW_TOKENS)
    if tiny:
        size = Size(max_steps or 4, 8, 4, 8)
    if side:
        _train_side(side, tiny, output_dir, size)
        return
    os.environ.update({key: value for key, value in _QUIET.items() if key not in os.environ})
    from rich.console import Console

    from leantune.training.demo_model import demo_model_path, demo_model_source

    console, model = Console(), demo_model_path(tiny)
    began = time.perf_counter()
    console.print(f"model: {demo_model_source(model)}", highlight=False)
    held_out = _prepare(output_dir, size)
    console.print(f"before training: {size.generated} held-out sentences are answered", highlight=False)
    before = answers(model, held_out[: size.generated], size.new_tokens)
    results: Results = {}
    for name in SIDES:
        console.rule(name)
        results[name] = _run_side(name, tiny, output_dir, size)
        after = answers(output_dir / folder_of(name), held_out[: size.generated], size.new_tokens)
        results[name] |= _examined(held_out[: size.generated], before, after)
    _report(console, results, output_dir, size, demo_model_source(model))
    minutes = (time.perf_counter() - began) / 60
    console.print(f"\nwritten to {output_dir} ({minutes:.1f} minutes in all)", highlight=False)


def folder_of(name: str) -> str:
    """The folder of a side's run under ``output_dir``."""
    return name.replace(" ", "_").lower()


def _prepare(output_dir: Path, size: Size) -> Rows:
    """Clear what an earlier demo left in ``output_dir``, and nothing else there; write the held-out rows used."""
    for name in SIDES:
        if (output_dir / folder_of(name) / "demo.json").is_file():
            shutil.rmtree(output_dir / folder_of(name))
        (output_dir / folder_of(name)).mkdir(parents=True, exist_ok=True)
    lines = (files("leantune.cli") / "demo_data" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    used = lines[: size.held_out]
    (output_dir / "held_out.jsonl").write_text("".join(f"{line}\n" for line in used), encoding="utf-8")
    return [json.loads(line) for line in used]


# --- the two runs -----------------------------------------------------------------------------------------------------


def _run_side(name: str, tiny: bool, output_dir: Path, size: Size) -> dict[str, Any]:
    """Train one side in a process of its own: what one leaves in memory must not count for the other.

    The tiny model leaves nothing worth counting, and starting Python twice more would take longer than its training.
    """
    if tiny:
        _train_side(name, tiny, output_dir, size)
    else:
        command = [sys.executable, "-m", "leantune.cli.demo", "--side", name, "--output_dir", str(output_dir)]
        finished = subprocess.run([*command, "--max_steps", str(size.steps)], check=False)
        if finished.returncode:
            raise typer.Exit(finished.returncode)
    figures: dict[str, Any] = json.loads((output_dir / folder_of(name) / "demo.json").read_text(encoding="utf-8"))
    return figures


def _train_side(name: str, tiny: bool, output_dir: Path, size: Size) -> None:
    """Train one side in this process; its figures go into demo.json in its folder."""
    from leantune.training.config import build_config
    from leantune.training.demo_model import demo_model_path
    from leantune.training.run import train

    folder = output_dir / folder_of(name)
    config = build_config(
        {
            "model_name_or_path": str(demo_model_path(tiny)),
            "dataset": str(files("leantune.cli") / "demo_data" / "train.jsonl"),
            "eval_dataset": str(output_dir / "held_out.jsonl"),
            "output_dir": str(folder),
            "max_length": 512 if tiny else 256,
            "per_device_train_batch_size": ROWS_A_STEP,
            "method": "full",
            "max_steps": size.steps,
            "warmup_steps": max(1, size.steps // 10),
            "save_strategy": "no",
            **SIDES[name],
        }
    )
    result = train(config)
    profile = json.loads((folder / "memory_profile.json").read_text(encoding="utf-8"))
    figures = {
        "held_out_before": result.held_out_before,
        "held_out_after": result.held_out_after,
        "tokens_per_second": result.tokens_per_second,
        "peak_bytes": result.peak_bytes,
        "part_peaks": profile["part_peaks"],
        "velora_saved_bytes": result.velora.saved_bytes if result.velora else None,
        "velora_exact_bytes": result.velora.exact_bytes if result.velora else None,
    }
    (folder / "demo.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


# --- answers ----------------------------------------------------------------------------------------------------------


def answers(folder: Path, rows: Rows, new_tokens: int) -> list[str]:
    """Greedy answers of the model saved in ``folder`` to the prompts of ``rows``: one batch, padded on the left.

    Weights are widened to float32, exactly: a CPU without bfloat16 products would take minutes for the same answers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def _examined(rows: Rows, before: list[str], after: list[str]) -> dict[str, Any]:
    """Exact matches before and after, letter for letter, and the first few answers."""
    wanted = [row["messages"][-1]["content"] for row in rows]
    each = list(zip((row["messages"][1]["content"] for row in rows), wanted, before, after, strict=True))
    return {
        "answered": len(rows),
        "exact_before": sum(w == b for _, w, b, _ in each),
        "exact_after": sum(w == a for _, w, _, a in each),
        "answers": [{"sentence": s, "wanted": w, "before": b, "after": a} for s, w, b, a in each],
    }


# --- the comparison ---------------------------------------------------------------------------------------------------


def table_rows(results: Results) -> list[list[str]]:
    """The comparison, a list a row: what, then a cell for each side."""
    from leantune.memory import LABELS, PARTS, format_bytes

    sides = list(results.values())
    rows = [
        ["held-out loss before", *(f"{side['held_out_before']:.3f}" for side in sides)],
        ["held-out loss after", *(f"{side['held_out_after']:.3f}" for side in sides)],
        ["exact match before", *(f"{side['exact_before']} of {side['answered']}" for side in sides)],
        ["exact match after", *(f"{side['exact_after']} of {side['answered']}" for side in sides)],
    ]
    for part in PARTS:
        sizes = [side["part_peaks"].get(part, 0) for side in sides]
        if any(sizes):
            rows.append([f"peak of {LABELS[part]}", *(format_bytes(number) for number in sizes)])
    rows.append(["peak of all parts together", *(format_bytes(side["peak_bytes"]) for side in sides)])
    saving = [(side["velora_saved_bytes"], side["velora_exact_bytes"]) for side in sides]
    rows.append(
        [
            "VeLoRA's own saving, of its layers' inputs",
            *("-" if saved is None else f"{format_bytes(saved)} of {format_bytes(exact)}" for saved, exact in saving),
        ]
    )
    rows.append(["tokens/s", *(f"{side['tokens_per_second']:.0f}" for side in sides)])
    return rows


def _title(results: Results, size: Size) -> str:
    rates = {name: f"{SIDES[name]['learning_rate']:g}" for name in results}
    same = f"lr {', '.join(f'{rate} ({name})' for name, rate in rates.items())}"
    return f"The same rows in the same order and seed, {size.steps} steps of {ROWS_A_STEP} rows, {same}. {CAPTION}"


def _report(console: "Console", results: Results, output_dir: Path, size: Size, source: str) -> None:
    """Print the table and the shown answers; write demo.json and demo.md."""
    from rich.table import Table

    title, rows = _title(results, size), table_rows(results)
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = ["# leantune demo", "", f"Model: {source}.", "", title, "", f"| | {' | '.join(results)} |"]
    lines += ["|---" * (len(results) + 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    for shown in zip(*(side["answers"][:SHOWN_ROWS] for side in results.values()), strict=True):
        console.print(f"\n[bold]{shown[0]['sentence']}[/bold]", highlight=False)
        lines += ["", f"**{shown[0]['sentence']}**", ""]
        told = [("wanted", shown[0]["wanted"]), ("before", shown[0]["before"])]
        for label, text in [*told, *((name, one["after"]) for name, one in zip(results, shown, strict=True))]:
            console.print(f"  {label:>12}: {text}", highlight=False, markup=False)
            lines.append(f"- {label}: `{' '.join(text.split())}`")
    (output_dir / "demo.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (output_dir / "demo.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(demo)

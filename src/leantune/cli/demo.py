"""leantune demo: a real language model learns a task twice, with leantune's methods and with torch AdamW, side by side."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

HELD_OUT_ROWS = 48
GENERATED_ROWS = 32
SHOWN_ROWS = 3
STEPS, ROWS_A_STEP = 30, 6
LEARNING_RATE = 2e-4
SIDES = {
    "leantune": {
        "optim": "ternary_adamw",
        "dtype": "bfloat16",
        "fused_backward": True,
        "exact_savings": True,
        "velora_target_modules": ["down_proj"],
        "velora_num_groups": 32,
    },
    # What people run today: float32 weights (torch AdamW on bfloat16 weights loses most updates to rounding), full logits.
    "torch AdamW": {"optim": "adamw_torch", "dtype": "float32", "exact_savings": False},
}


@dataclass(frozen=True)
class Size:
    """How much a demo does."""

    steps: int
    held_out: int
    generated: int


def demo(
    tiny: bool = typer.Option(False, "--tiny", help="A random 2-layer model, under 30 s: checks that everything runs."),
    output_dir: Path = typer.Option(Path("runs/demo"), help="Where both runs and the summary are written."),
    max_steps: int = typer.Option(0, help="Training steps of each side; 0: 30 (tiny: 4)."),
    side: str = typer.Option("", hidden=True),
) -> None:
    """Fine-tune SmolLM2-135M-Instruct on sentences to JSON records, beside torch AdamW, and compare."""
    size = Size(max_steps or 4, 8, 4) if tiny else Size(max_steps or STEPS, HELD_OUT_ROWS, GENERATED_ROWS)
    if side:
        _run_side(side, tiny, output_dir, size)
        return
    from rich.console import Console

    from leantune.training.demo_model import demo_model_path, demo_model_source

    console = Console()
    model = demo_model_path(tiny)
    console.print(f"model: {demo_model_source(model)}", highlight=False)
    if output_dir.exists() and any(output_dir.rglob("checkpoint-*")):
        import shutil

        for name in SIDES:
            shutil.rmtree(output_dir / _folder(name), ignore_errors=True)
    results = {}
    for name in SIDES:
        console.rule(name)
        command = [sys.executable, "-m", "leantune.cli.demo", "--side", name, "--output-dir", str(output_dir)]
        command += ["--max-steps", str(size.steps), *(["--tiny"] if tiny else [])]
        # A process each: what one side leaves behind in memory must not count for the other.
        finished = subprocess.run(command, check=False)
        if finished.returncode:
            raise typer.Exit(finished.returncode)
        results[name] = json.loads((output_dir / _folder(name) / "demo.json").read_text(encoding="utf-8"))
    _compare(console, results, size)
    (output_dir / "demo.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {output_dir}", highlight=False)


def _run_side(name: str, tiny: bool, output_dir: Path, size: Size) -> None:
    """Train one side in this process and leave its figures in demo.json."""
    from leantune.training.config import build_config
    from leantune.training.demo_model import demo_model_path
    from leantune.training.run import train

    folder = output_dir / _folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    data = files("leantune.cli") / "demo_data"
    held_out = [json.loads(line) for line in (data / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    few = folder / "held_out.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in held_out[: size.held_out]), encoding="utf-8")
    model_path = str(demo_model_path(tiny))
    before = _answers_of(model_path, held_out[: size.generated])
    config = build_config(
        {
            "model_name_or_path": model_path,
            "dataset": str(data / "train.jsonl"),
            "eval_dataset": str(few),
            "output_dir": str(folder),
            "learning_rate": LEARNING_RATE,
            "max_length": 256,
            "per_device_train_batch_size": ROWS_A_STEP,
            "max_steps": size.steps,
            "save_steps": size.steps,
            "warmup_steps": max(1, size.steps // 10),
            "save_strategy": "no",
            **SIDES[name],
        }
    )
    result = train(config)
    after = _answers(result.model, result.tokenizer, held_out[: size.generated])
    wanted = [row["messages"][-1]["content"] for row in held_out[: size.generated]]
    figures: dict[str, Any] = {
        "held_out_before": result.held_out_before,
        "held_out_after": result.held_out_after,
        "exact_before": sum(a == b for a, b in zip(before, wanted, strict=True)),
        "exact_after": sum(a == b for a, b in zip(after, wanted, strict=True)),
        "generated": len(wanted),
        "tokens_per_second": result.tokens_per_second,
        "peak_bytes": result.peak_bytes,
        "memory_by_part": result.memory_by_part,
        "velora_saved_bytes": result.velora.saved_bytes if result.velora else None,
        "velora_exact_bytes": result.velora.exact_bytes if result.velora else None,
        "shown": [
            {"prompt": row["messages"][1]["content"], "wanted": w, "before": b, "after": a}
            for row, w, b, a in list(zip(held_out, wanted, before, after, strict=False))[:SHOWN_ROWS]
        ],
    }
    (folder / "demo.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _answers_of(model_path: str, rows: list[dict[str, Any]]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return _answers(model, AutoTokenizer.from_pretrained(model_path), rows)


def _answers(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[str]:
    """Greedy answers to the rows' prompts, one batch, padded on the left."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    model.eval()
    with torch.no_grad():
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=72,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def _compare(console: Any, results: dict[str, dict[str, Any]], size: Size) -> None:
    from rich.table import Table

    from leantune.memory import LABELS, PARTS, format_bytes

    table = Table(
        title=f"the same rows in the same order, {size.steps} steps of {ROWS_A_STEP} rows, lr {LEARNING_RATE:g}; "
        "leantune: bfloat16 weights, torch AdamW: float32 weights",
        title_justify="left",
    )
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")

    def row(label: str, cells: list[str]) -> None:
        table.add_row(label, *cells)

    sides = list(results.values())
    row("held-out loss before", [f"{side['held_out_before']:.3f}" for side in sides])
    row("held-out loss after", [f"{side['held_out_after']:.3f}" for side in sides])
    row("exact match before", [f"{side['exact_before']}/{side['generated']}" for side in sides])
    row("exact match after", [f"{side['exact_after']}/{side['generated']}" for side in sides])
    for part in PARTS:
        sizes = [side["memory_by_part"].get(part, 0) for side in sides]
        if any(sizes):
            row(f"memory at the peak: {LABELS[part]}", [format_bytes(number) for number in sizes])
    row("memory at the peak: total", [format_bytes(side["peak_bytes"]) for side in sides])
    saved = [side["velora_saved_bytes"] for side in sides]
    row("VeLoRA's own saving", [format_bytes(number) if number is not None else "-" for number in saved])
    row("tokens/s", [f"{side['tokens_per_second']:.0f}" for side in sides])
    console.print(table)
    ours, other = sides[0]["shown"], sides[-1]["shown"]
    for mine, theirs in zip(ours, other, strict=True):
        console.print(f"\n[bold]{mine['prompt']}[/bold]", highlight=False)
        for label, text in (
            ("wanted", mine["wanted"]),
            ("before", mine["before"]),
            (next(iter(results)), mine["after"]),
            (list(results)[-1], theirs["after"]),
        ):
            console.print(f"  {label:>12}: {text}", highlight=False, markup=False)


def _folder(name: str) -> str:
    return name.replace(" ", "_").lower()


if __name__ == "__main__":
    typer.run(demo)

"""leantune merge: an adapter into its base."""

import typer

EXAMPLES = """Examples:

leantune merge runs/lora

leantune merge runs/lora/checkpoint-500 --output_dir merged --dtype float32

leantune merge runs/qlora --base full

leantune merge adapter_from_peft --model_name_or_path ./base
"""


def merge(
    run: str = typer.Argument(..., help="The folder of an adapter: of a run, a checkpoint, or PEFT's own."),
    output_dir: str | None = typer.Option(
        None, "--output_dir", "--output-dir", help="Where the whole model goes; RUN-merged by default."
    ),
    model_name_or_path: str | None = typer.Option(
        None,
        "--model_name_or_path",
        "--model-name-or-path",
        help="The base, where it is not the one the adapter names.",
    ),
    dtype: str | None = typer.Option(
        None, "--dtype", help="Of the weights written: bfloat16, float16, float32; by default that of the run."
    ),
    base: str | None = typer.Option(
        None,
        "--base",
        help="Of an adapter trained on a quantised base: quantised (the default) merges into its dequantised weights, "
        "which training saw; full into the original ones.",
    ),
) -> None:
    """Merge an adapter into its base, reload the result from disk, and compare its logits with the unmerged model's."""
    from leantune.training.saved.merge import merge as run_merge

    run_merge(run, output_dir, model_name_or_path=model_name_or_path, dtype=dtype, base=base)

"""leantune eval: held-out loss and tasks."""

import typer

EXAMPLES = """Examples:

leantune eval runs/first

leantune eval runs/first --dataset held_out.jsonl

leantune eval ./model --dataset held_out.jsonl --max_length 2048 --batch_size 2

leantune eval runs/lora --tasks questions.jsonl,arc_easy --limit 200
"""


def evaluate(
    model: str = typer.Argument(..., help="A run, a checkpoint, an adapter, a model's folder, or a hub name."),
    dataset: str | None = typer.Option(
        None, "--dataset", help="Rows in any shape train takes; by default those that the run held out."
    ),
    tasks: str = typer.Option(
        "", "--tasks", help="Separated by commas: .jsonl files of questions, and names of lm-eval's own tasks."
    ),
    model_name_or_path: str | None = typer.Option(
        None,
        "--model_name_or_path",
        "--model-name-or-path",
        help="An adapter's base, where it is not the one it names.",
    ),
    max_length: int | None = typer.Option(
        None, "--max_length", "--max-length", min=2, help="Tokens of a row that count; by default as in the run."
    ),
    batch_size: int = typer.Option(8, "--batch_size", "--batch-size", min=1, help="Rows a forward pass."),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Questions of each task at most."),
    dtype: str | None = typer.Option(None, "--dtype", help="Of the weights; by default that of the run."),
    chat_template: bool = typer.Option(
        False, "--chat_template", "--chat-template", help="Put the questions of tasks into the model's chat template."
    ),
    drop_invalid: bool = typer.Option(
        False, "--drop_invalid", "--drop-invalid", help="Leave out rows that cannot be used, and say which."
    ),
    output_file: str | None = typer.Option(
        None, "--output_file", "--output-file", help="Where the figures go; by default eval.json in the run's folder."
    ),
) -> None:
    """The held-out loss (nats a token, perplexity) by training's own loader and loss, and tasks of lm-eval."""
    from leantune.training.saved.evaluation import evaluate as run_evaluate

    run_evaluate(
        model,
        dataset,
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        model_name_or_path=model_name_or_path,
        max_length=max_length,
        batch_size=batch_size,
        limit=limit,
        dtype=dtype,
        chat_template=chat_template,
        drop_invalid=drop_invalid,
        output_file=output_file,
    )

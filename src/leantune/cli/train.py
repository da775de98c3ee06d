"""leantune train: from a config or flags to a trained model."""

import typer


def train(
    context: typer.Context,
    config: str | None = typer.Argument(None, help="YAML file of flat keys; flags override it."),
) -> None:
    """Fine-tune a model.

    leantune train config.yaml --learning_rate 1e-4

    leantune train --model_name_or_path ./model --dataset rows.jsonl --output_dir runs/first
    """
    flags = list(context.args)
    if config is not None and config.startswith("--"):
        flags.insert(0, config)
        config = None
    from leantune.training.config import load_config

    loaded = load_config(config, flags)
    from leantune.training.run import train as run

    run(loaded)

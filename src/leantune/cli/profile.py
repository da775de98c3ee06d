"""leantune profile: a few real steps, measured against the plan."""

import typer

EXAMPLES = """Examples:

leantune profile config.yaml

leantune profile config.yaml --memory_budget 24GiB

leantune profile --model_name_or_path ./model --dataset rows.jsonl --output_dir runs/first

The exit code is 0 where everything fits, 3 where memory ran out (of the budget, or of the device), 2 for bad input.
"""


def profile(
    arguments: list[str] | None = typer.Argument(
        None,
        metavar="[CONFIG] [--KEY VALUE]...",
        help="The config of a training run and its keys as flags, as for leantune train. memory_budget is enforced.",
        show_default=False,
    ),
) -> None:
    """Measure the memory of a run on a few real steps, stage by stage, and write a report."""
    from leantune.training.parallel.launch import take_nproc

    processes, given = take_nproc(arguments or [])
    path = given.pop(0) if given and not given[0].startswith("--") else None
    # Wrong keys are told before torch and the data libraries are loaded.
    from leantune.training.config import load_config

    config = load_config(path, given)
    if processes is not None and processes > 1:
        from leantune.errors import ConfigError
        from leantune.training.profiling.profile import INSTEAD

        raise ConfigError(f"- --nproc_per_node is {processes}, and leantune profile runs in one process. {INSTEAD}")
    from leantune.training.profiling.profile import profile as run

    if run(config).shortage is not None:
        raise typer.Exit(3)

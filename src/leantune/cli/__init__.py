"""The command line: one small file a command."""

import sys

import typer

from leantune.errors import LeantuneError

app = typer.Typer(
    name="leantune",
    help="Fine-tune language models with all of their parameters in little more than the memory of their weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Subcommands follow."""


def main() -> None:
    """Entry point: a mistake of the user's ends with its message and exit code 2, not with a traceback."""
    from leantune.cli.demo import demo
    from leantune.cli.train import train

    free = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("train", context_settings=free)(train)
    app.command("demo")(demo)
    try:
        app()
    except LeantuneError as error:
        print(f"leantune: {error}", file=sys.stderr)
        sys.exit(2)

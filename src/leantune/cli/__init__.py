"""The command line: one small file a command. Only typer is imported before a command runs."""

import sys

import typer

from leantune.errors import LeantuneError


def command_line() -> typer.Typer:
    """The ``leantune`` command with its sub-commands."""
    from leantune.cli import env, evaluate, merge
    from leantune.cli import profile as profile_command
    from leantune.cli.demo import demo
    from leantune.cli.plan import EXAMPLES as PLAN_EXAMPLES
    from leantune.cli.plan import plan
    from leantune.cli.train import EXAMPLES, train
    from leantune.cli.validate import EXAMPLES as VALIDATE_EXAMPLES
    from leantune.cli.validate import validate

    app = typer.Typer(
        name="leantune",
        help="Fine-tune language models with all of their parameters in little more than the memory of their weights.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # Any key of the config is a flag, so typer must let through those it does not know.
    any_flag = {"ignore_unknown_options": True}
    app.command("train", epilog=EXAMPLES, context_settings=any_flag)(train)
    app.command("validate", epilog=VALIDATE_EXAMPLES, context_settings=any_flag)(validate)
    app.command("plan", epilog=PLAN_EXAMPLES, context_settings=any_flag)(plan)
    app.command("profile", epilog=profile_command.EXAMPLES, context_settings=any_flag)(profile_command.profile)
    app.command("demo")(demo)
    app.command("merge", epilog=merge.EXAMPLES)(merge.merge)
    app.command("eval", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
    app.command("env", epilog=env.EXAMPLES)(env.env)
    return app


def main() -> None:
    """Entry point: a user's mistake ends with its message on stderr and exit code 2, not with a traceback; what does
    not fit with exit code 3."""
    try:
        command_line()()
    except LeantuneError as error:
        print(f"leantune: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

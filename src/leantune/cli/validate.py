"""leantune validate: what is wrong with data, row by row, before anything is trained."""

import json
from pathlib import Path

import typer

EXAMPLES = """Examples:

leantune validate config.yaml

leantune validate rows.csv --model_name_or_path ./model

leantune validate rows.jsonl --model_name_or_path ./model --max_length auto --json

leantune validate config.yaml --drop_invalid

Exit code: 0 nothing is wrong, 1 something is, 2 there is nothing to look at (no such file, model or key).
"""

_CONFIGS = (".yaml", ".yml")


def validate(
    arguments: list[str] | None = typer.Argument(
        None,
        metavar="CONFIG | DATA [--KEY VALUE]...",
        help="A config of a run (.yaml), or a file, folder or hub name with --model_name_or_path. Keys of the config "
        "may stand as flags, as for leantune train; max_length, eval_split, dataset_weights and drop_invalid matter "
        "here. --json prints one JSON object instead of tables, --shown N how many problems of each source are shown "
        "(20).",
        show_default=False,
    ),
) -> None:
    """Read the data of a run as `leantune train` would; name every row that cannot be used, and why."""
    given = list(arguments or [])
    as_json = "--json" in given
    given = [word for word in given if word != "--json"]
    shown, given = _taken(given, "--shown", 20)
    path = given.pop(0) if given and not given[0].startswith("--") else None
    if path is not None and not path.endswith(_CONFIGS):
        given = ["--dataset", path, *given]
        path = None
    from leantune.training.config import load_config

    config = load_config(path, given)
    from rich.console import Console

    from leantune.training.data.load import VALIDATED_OF_A_STREAM, examine
    from leantune.training.data.tables import print_report
    from leantune.training.disk import writes_are_told
    from leantune.training.pretrained import load_tokenizer, model_limits

    tokenizer = load_tokenizer(config.model_name_or_path)
    limits = model_limits(config.model_name_or_path)
    report = examine(config, tokenizer, limits, VALIDATED_OF_A_STREAM if config.streaming else None).report
    with writes_are_told(Path(config.output_dir), lambda: "No row was written; make room, or give another output_dir"):
        written = report.write_dropped(Path(config.output_dir))
    if as_json:
        print(json.dumps({**report.to_json(), "dropped_file": str(written) if written else None}, indent=2))
    else:
        console = Console()
        print_report(console, report, tokenizer, shown)
        if written is not None:
            console.print(f"\n{report.dropped} rows that cannot be used are in {written}", highlight=False)
        console.print("\nnothing is wrong" if report.clean else "\nproblems were found", style="bold")
    raise typer.Exit(0 if report.clean else 1)


def _taken(words: list[str], flag: str, default: int) -> tuple[int, list[str]]:
    """(the number after ``flag``, the other words)."""
    from leantune.errors import ConfigError

    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            text = value if equals else words[place + 1] if place + 1 < len(words) else ""
            if not text.isdigit():
                raise ConfigError(f"- {flag} takes a number, not {text!r}")
            return int(text), words[:place] + words[place + (1 if equals else 2) :]
    return default, words

"""Write docs/reference.md: public names, config keys and commands, from the code itself.

python docs/generate_reference.py            # or make reference
python docs/generate_reference.py --check    # exit code 1 where the page is not what the code says
"""

import ast
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import typer

import leantune as lt
from leantune.cli import command_line
from leantune.training.config import run_config
from leantune.training.config.keys import ALIASES, REFUSED

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

Written by `make reference` from docstrings, config keys and commands; a test says when it is stale.
"""


def page() -> str:
    return "\n".join([HEAD, *_names(), *_keys(), *_commands()]).rstrip() + "\n"


# -- public names -----------------------------------------------------------------------------------------------------


def _names() -> list[str]:
    lines = ["## Python", ""]
    for name in (name for name in lt.__all__ if name != "__version__"):
        lines += _entry(f"lt.{name}", getattr(lt, name))
        if inspect.isclass(getattr(lt, name)):
            for method, found in _methods(getattr(lt, name)):
                lines += _entry(f"lt.{name}.{method}", found, level=4)
    return lines


def _methods(owner: type) -> list[tuple[str, Any]]:
    """Public methods with a docstring of leantune's own, in the order of the classes they come from."""
    found: dict[str, Any] = {}
    for home in reversed([base for base in owner.__mro__ if base.__module__.startswith("leantune")]):
        for name, member in vars(home).items():
            if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            if inspect.getdoc(member):
                found[name] = member
    return list(found.items())


def _entry(name: str, found: Any, level: int = 3) -> list[str]:
    """A heading, the signature, the first paragraph as prose and the rest as it stands."""
    first, _, rest = (inspect.getdoc(found) or "").partition("\n\n")
    lines = ["#" * level + f" `{name}`", ""]
    if not isinstance(found, property):
        lines += ["```text", *_signature(name, found), "```", ""]
    lines += [" ".join(first.split()), ""]
    if rest.strip():
        lines += ["```text", *rest.strip("\n").splitlines(), "```", ""]
    return lines


def _signature(name: str, found: Any) -> list[str]:
    signature = inspect.signature(found)
    arguments = [str(argument) for argument in signature.parameters.values() if argument.name != "self"]
    marks: list[str] = []
    for argument in signature.parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and "*" not in marks:
            marks.append("*")
        if argument.name != "self":
            marks.append(str(argument))
    text = f"{name}({', '.join(marks or arguments)})"
    if len(text) <= 110:
        return [text]
    return [f"{name}(", *(f"    {mark}," for mark in marks), ")"]


# -- config keys ------------------------------------------------------------------------------------------------------


def _keys() -> list[str]:
    """The fields of TrainConfig with the text that stands under each, aliases, and what is refused."""
    lines = ["## Config keys", "", "Beside these, every field of `trl.SFTConfig` that is not refused below.", ""]
    lines += ["| key | takes | default | |", "|---|---|---|---|"]
    source = ast.parse(textwrap.dedent(inspect.getsource(run_config.TrainConfig)))
    body = source.body[0].body  # type: ignore[attr-defined]
    for place, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id in ("extra", "notes", "given"):
            continue
        after = body[place + 1] if place + 1 < len(body) else None
        said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = " ".join(str(after.value.value).split()) if said else ""  # type: ignore[union-attr]
        default = ast.unparse(node.value) if node.value is not None else ""
        lines.append(f"| `{node.target.id}` | `{_cell(ast.unparse(node.annotation))}` | `{default}` | {_cell(text)} |")
    lines += ["", "Other names that are read as one of these:", "", "| written | read as |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in sorted(ALIASES.items())]
    lines += ["", "Refused, with what to write:", "", "| key | |", "|---|---|"]
    lines += [f"| `{key}` | {_cell(text)} |" for key, text in sorted(REFUSED.items())]
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- commands ---------------------------------------------------------------------------------------------------------


def _commands() -> list[str]:
    lines = ["## Commands", ""]
    app: Any = typer.main.get_command(command_line())
    for name, command in app.commands.items():
        lines += [f"### `leantune {name}`", "", " ".join((command.help or "").split()), ""]
        lines += ["| argument | |", "|---|---|"]
        for option in command.params:
            shown = option.metavar or option.name if option.param_type_name == "argument" else ", ".join(option.opts)
            said = " ".join((getattr(option, "help", None) or "").split())
            lines.append(f"| `{_cell(str(shown))}` | {_cell(said)} |")
        examples = [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("leantune ")]
        lines += ["", *(f"    {line}" for line in examples), ""]
    return lines


def main() -> None:
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else 1)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

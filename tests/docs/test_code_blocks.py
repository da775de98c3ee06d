"""Every code block of README.md, CONTRIBUTING.md, docs/ and examples/README.md does what it shows.

Each Python block runs by itself; what snippets take from the reader (a model, a batch, a loss) is there (`given`). YAML
is read as a config. `leantune` commands are parsed, their keys and options checked, and plan, validate and env run;
those that train run in test_quick_start.py, which is slow.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import yaml
from docs.blocks import BLOCKS, COMMANDS, KINDS, PAGES, PROGRAMS, ROOT, Block
from docs.folder import reader_folder

from leantune.training.config import load_config

PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.kind == "python"})
RUN_HERE = ("plan", "validate", "env")
CONFIGS = (".yaml", ".yml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: str) -> Path:
    return reader_folder(tmp_path_factory.mktemp("reader"), tiny_model_path)


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def given(folder: Path) -> dict:
    """What snippets take for granted."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    import leantune as lt

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    tokens = torch.randint(320, (2, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    dataset = Dataset.from_list([{"text": f"Row {number} of the text."} for number in range(16)])
    return {
        "torch": torch, "lt": lt, "model": model, "batch": batch, "loss": model(**batch).loss, "dataset": dataset,
        "AutoModelForCausalLM": AutoModelForCausalLM, "SFTConfig": SFTConfig, "SFTTrainer": SFTTrainer,
    }  # fmt: skip


def test_every_block_says_what_it_is() -> None:
    assert len(BLOCKS) > 50
    wrong = [block.place for block in BLOCKS if block.kind not in KINDS]
    wrong += [block.place for block, words in COMMANDS if words[0] not in PROGRAMS]
    assert not wrong, "blocks of no known kind, or commands of no known program"


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=names)
def test_python_runs_as_printed(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(reader_folder(tmp_path, str(folder / "model")))
    for block in (block for block in BLOCKS if block.page == page and block.kind == "python"):
        # A snippet begins anew: pages show alternatives, each for a model of its own.
        namespace = given(Path("."))
        code = compile("\n" * block.line + block.text, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, namespace)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "yaml"], ids=lambda block: block.place)
def test_yaml_is_a_config(block: Block, tmp_path: Path) -> None:
    keys = {"model_name_or_path": "model", "dataset": "rows.jsonl"} | yaml.safe_load(block.text)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(keys), encoding="utf-8")
    load_config(config)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "json"], ids=lambda block: block.place)
def test_json_is_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    ("block", "words"), COMMANDS, ids=[f"{block.place} {' '.join(words)[:50]}" for block, words in COMMANDS]
)
def test_a_command_is_one(block: Block, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    program, *rest = words
    if program in ("torchrun", "accelerate"):
        assert rest[rest.index("-m") :][:2] == ["-m", "leantune"] if "-m" in rest else Path(ROOT, rest[1]).exists()
        rest = rest[rest.index("-m") + 2 :] if "-m" in rest else []
        program = "leantune" if rest else program
    if program == "leantune":
        check_leantune(*rest)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert rest[0] in targets
    elif program == "python" and rest[0] != "-m":
        source = (ROOT / rest[0]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in rest[1:] if word.startswith("--"))
    elif program == "pip":
        extras = re.findall(r"leantune\[(\w+)\]", " ".join(rest))
        declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for extra in extras)


def check_leantune(command: str, *words: str) -> None:
    """Options are those of the command, keys those of a config; what takes no training runs."""
    import typer
    from click.testing import CliRunner

    from leantune.cli import command_line

    app = typer.main.get_command(command_line())
    app.commands[command].make_context(command, list(words))
    if command in ("train", "profile"):
        from leantune.training.parallel.launch import take_nproc

        _, given = take_nproc(list(words))
        path = given.pop(0) if not given[0].startswith("--") else None
        load_config(path, given, planning=command == "profile")
    if command in RUN_HERE:
        done = CliRunner().invoke(app, [command, *words])
        allowed = (0, 3) if command == "plan" else (0, 1) if command == "validate" else (0,)
        assert done.exit_code in allowed, f"{done.output}\n{done.exception!r}"


def test_links_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists():
                lost.append(f"{names(page)}: {target}")
            elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                lost.append(f"{names(page)}: {target} (no such heading)")
    assert not lost


def anchors(page: Path) -> set[str]:
    """The anchors a code host makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

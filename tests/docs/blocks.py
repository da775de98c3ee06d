"""The code blocks of the project's pages."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
]
KINDS = ("python", "yaml", "json", "text", "sh")
PROGRAMS = ("leantune", "make", "python", "pip", "torchrun", "accelerate", "git", "source")


@dataclass(frozen=True)
class Block:
    """``kind``: the language after the fence; "sh" of an indented block."""

    page: Path
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Of a block of commands: the words of each; backslashes at ends of lines, comments and "> FILE" are gone."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        split = (shlex.split(line, comments=True) for line in joined.splitlines())
        return [words[: words.index(">")] if ">" in words else words for words in split if words]


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
            if token.type in ("fence", "code_block") and token.map is not None:
                kind = token.info.strip() if token.type == "fence" else "sh"
                found.append(Block(page, token.map[0] + 1, kind, token.content))
    return found


BLOCKS = blocks()
COMMANDS = [(block, words) for block in BLOCKS if block.kind == "sh" for words in block.commands()]

"""Where a plan is kept."""

from pathlib import Path

from leantune.whole_file import write_whole

PLAN_FILE = "memory_plan.json"


def write_plan(text: str, path: str | Path) -> Path:
    """Write a plan's JSON to ``path`` (a file, or a folder that gets ``memory_plan.json``); returns the file."""
    path = Path(path)
    if path.is_dir():
        path = path / PLAN_FILE
    write_whole(path, text)
    return path

"""The commands of docs/quick_start.md, one after the other, as a reader types them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs.blocks import COMMANDS, ROOT
from docs.folder import reader_folder

PAGE = ROOT / "docs" / "quick_start.md"


@pytest.mark.slow
def test_the_quick_start(tiny_model_path: str, tmp_path: Path) -> None:
    folder = reader_folder(tmp_path / "reader", tiny_model_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    commands = [words[1:] for block, words in COMMANDS if block.page == PAGE and words[0] == "leantune"]
    assert {words[0] for words in commands} == {"validate", "train", "eval", "merge", "plan"}
    for words in commands:
        command = [sys.executable, "-m", "leantune", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    for run in ("first", "lora", "lora-merged", "config"):
        assert any((folder / "runs" / run).glob("*.safetensors")), run
    assert (folder / "runs" / "first" / "run_card.md").exists()

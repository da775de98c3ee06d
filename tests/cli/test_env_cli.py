"""leantune env: what a bug report needs, also where torch is broken or packages are missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leantune import environment as environment_module
from leantune.cli.env import lines

SHOW = "import sys; from leantune.cli import main; sys.argv = ['leantune', 'env', *sys.argv[1:]]; main()"


def shown(first_on_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(first_on_path), *sys.path])
    command = [sys.executable, "-c", SHOW, *flags]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places})


@pytest.mark.parametrize(
    "broken",
    [
        "raise OSError('libcudart.so.12: cannot open shared object file')",
        "__version__ = '0'",
        "raise ImportError('no')",
    ],
)
def test_a_broken_torch_is_told_and_does_not_end_the_report(tmp_path: Path, broken: str) -> None:
    (tmp_path / "torch.py").write_text(broken)
    (tmp_path / "psutil.py").write_text("raise ImportError('gone')")
    said = shown(tmp_path, "--json")
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert "cannot be used" in found["kernels"]["cpu"] and found["cuda"]["usable"] is False
    assert "cannot be used" in found["ram"] and found["gpus"] == []
    assert found["packages"]["torch"] not in ("", "not installed")  # from its metadata
    assert list(lines(found))


def test_nothing_heavier_than_torch_is_imported(tmp_path: Path) -> None:
    """What keeps it under three seconds."""
    for name in ("transformers", "datasets", "trl", "peft", "accelerate", "bitsandbytes", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    said = shown(tmp_path)
    assert said.returncode == 0 and "was imported" not in said.stdout + said.stderr
    assert {line.split()[0] for line in said.stdout.splitlines()} >= {"python", "torch", "CPU", "RAM", "GPU"}


def test_the_driver_names_the_gpus_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    answers = {"driver_version": ["570.1"], "name,memory.total": ["NVIDIA H200, 143771", "broken, N/A"]}
    monkeypatch.setattr(environment_module, "_nvidia_smi", answers.__getitem__)
    found = environment_module.environment()
    assert found["gpus"] == [{"name": "NVIDIA H200", "total": 143771 << 20}]
    assert found["cuda"]["driver"] == "570.1" and "cannot be used" in found["cuda"]["torch"]
    assert ("GPU 0", "NVIDIA H200, 140.4 GiB") in list(lines(found))


def test_a_package_with_broken_metadata_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module.metadata, "version", lambda name: {}["Version"])
    assert "KeyError" in environment_module.version_of("torch")

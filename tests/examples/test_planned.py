"""Every config under examples/ is read, and planned at its model's real sizes fits the memory that it names."""

from pathlib import Path

import pytest
import yaml
from examples.public_models import write_config

import leantune as lt

FOLDER = Path(__file__).resolve().parents[2] / "examples"
CONFIGS = sorted(path.name for path in FOLDER.glob("*.yaml"))
PROCESSES = {"fsdp2_8_cards.yaml": 8}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_fits_the_memory_it_is_for(name: str, tmp_path: Path) -> None:
    keys = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    model = write_config(keys["model_name_or_path"], tmp_path / "model")
    config = tmp_path / name
    config.write_text(yaml.safe_dump(keys | {"model_name_or_path": str(model)}), encoding="utf-8")
    processes = PROCESSES.get(name, 1)
    more = {"world_size": processes} if processes > 1 else {}
    plan = lt.plan(str(config), **more)
    assert plan.fits and plan.free > 2**30, plan.table()
    planned = f"{plan.total / 2**30:.2f} GiB"
    line = next(line for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines() if name in line)
    assert planned in line, f"examples/README.md says {line}, and the plan is {planned}"


def test_every_recipe_is_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    missing = [path.name for path in FOLDER.iterdir() if path.suffix in (".yaml", ".py") and path.name not in table]
    assert not missing


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_that_costs_memory_says_what_it_costs(name: str) -> None:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    for key in ("optim", "method", "memory_budget"):
        line = next((line for line in lines if line.startswith(f"{key}:")), None)
        assert line is not None and ("#" in line or key != "optim" or "lora" in name), (name, key)

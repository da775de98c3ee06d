"""docs/migration.md against the code: every row of its tables, and whole configs of other tools."""

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from training.tiny_runs import without_pictures

from leantune.errors import ConfigError
from leantune.training.config import load_config
from leantune.training.config.keys import ALIASES, REFUSED
from leantune.training.run import train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"


def table_rows(heading: str) -> list[tuple[str, str, str]]:
    """(their key, what the page says to write, the note) of the first table under a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [re.match(r"\| `([^`]+)` \| ([^|]*) \| ([^|]*) \|$", line) for line in section.splitlines()]
    return [(row[1], row[2].strip().strip("`"), row[3].strip()) for row in rows if row]


SECTIONS = ("transformers' Trainer with bitsandbytes", "GaLore", "axolotl", "LLaMA-Factory", "torchtune")
ROWS = [(section, *row) for section in SECTIONS for row in table_rows(section)]


def test_the_page_has_its_tables() -> None:
    assert {section for section, *_ in ROWS} == set(SECTIONS) and len(ROWS) > 70


@pytest.mark.parametrize(("section", "theirs", "ours", "note"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_a_row_says_what_the_code_does(section: str, theirs: str, ours: str, note: str) -> None:
    key = theirs.partition(":")[0]
    if note.startswith("read as"):
        assert ALIASES[key] == ours
    elif note.startswith("refused"):
        named = ours.partition(":")[0]
        assert named in REFUSED[key], f"the page says {ours!r}, the error {REFUSED[key]!r}"
    else:
        assert key not in ALIASES and (key not in REFUSED or key == "optim_target_modules")


def problems(text: str) -> str:
    with pytest.raises(ConfigError) as found:
        build_from(text)
    return str(found.value)


def build_from(text: str):
    path = Path(pytest.tmp_folder) / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)
    monkeypatch.setattr(pytest, "tmp_folder", tmp_path, raising=False)


AXOLOTL = """
base_model: ./model
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: rows.jsonl
    type: completion
dataset_prepared_path:
val_set_size: 0.1
output_dir: ./outputs/lora
adapter: lora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 64
sample_packing: true
eval_sample_packing: false
wandb_project:
gradient_accumulation_steps: 1
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
special_tokens:
"""

FACTORY = """
model_name_or_path: ./model
trust_remote_code: false
stage: sft
do_train: true
finetuning_type: full
dataset: rows.jsonl
template: llama3
cutoff_len: 64
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/full
logging_steps: 1
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 2
learning_rate: 1.0e-5
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
use_galore: true
galore_rank: 128
val_size: 0.1
eval_strategy: epoch
"""


def test_p11_an_axolotl_config_is_told_everything_at_once() -> None:
    text = problems(AXOLOTL)
    told = [line.removeprefix("- ").partition(":")[0].partition(" ")[0] for line in text.splitlines()]
    assert sorted(told) == sorted([
        "model_type", "dataset", "lora_target_linear", "bf16", "flash_attention",
        "warmup_ratio", "evals_per_epoch", "saves_per_epoch",
    ]), text  # fmt: skip


def test_p11_a_llama_factory_config_is_told_everything_at_once() -> None:
    text = problems(FACTORY)
    told = [line.removeprefix("- ").partition(":")[0].partition(" ")[0] for line in text.splitlines()]
    assert sorted(told) == sorted([
        "stage", "do_train", "template", "max_samples", "overwrite_cache",
        "preprocessing_num_workers", "plot_loss", "overwrite_output_dir", "warmup_ratio", "bf16", "use_galore",
        "galore_rank",
    ]), text  # fmt: skip


def followed(text: str, errors: str) -> dict:
    """The config with the refused keys taken out, as the errors say."""
    values = yaml.safe_load(text)
    for line in errors.splitlines():
        values.pop(line.removeprefix("- ").partition(":")[0].partition(" ")[0], None)
    return values


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (AXOLOTL, {"warmup_steps": 0.1, "optimizer": "ternary_adamw"}),
        (FACTORY, {"warmup_steps": 0.1}),
    ],
    ids=["axolotl", "LLaMA-Factory"],
)
def test_what_the_errors_say_gives_a_config_that_trains(
    text: str, written: dict, tiny_model_path: str, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Row {n} of the table says {n * 7 % 11}."}) + "\n" for n in range(40)))
    values = followed(text, problems(text))
    for theirs in ("base_model", "datasets"):
        values.pop(theirs, None)
    values |= written | {
        "model_name_or_path": tiny_model_path, "dataset": str(rows), "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    result = train(build_from(yaml.safe_dump(values)), console=Console(file=io.StringIO()))
    assert result.held_out_after is not None and result.held_out_after > 0


def test_an_empty_key_and_a_false_feature_are_taken_with_a_note() -> None:
    config = build_from("model_name_or_path: m\ndataset: d\nwandb_project:\nload_in_4bit: false\nlora_target: all\n"
                        "method: lora\n")  # fmt: skip
    notes = "\n".join(config.notes)
    assert "wandb_project: empty" in notes and "load_in_4bit: false" in notes
    assert config.lora_target_modules == "all-linear"

"""leantune plan: exit codes, JSON, tiers, other architectures; lt.plan gives the same answers."""

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

import leantune as lt
from leantune.cli import command_line
from leantune.errors import ConfigError, LeantuneError
from leantune.memory.reports.calibration import calibration
from leantune.memory.reports.stages import TOTAL, StageRow
from leantune.training.config import load_config
from leantune.training.config.keys import passed_through
from leantune.training.config.trainer_fields import described_fields

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(command_line(), ["plan", *map(str, arguments)])


def test_exit_0_fits_3_does_not_and_the_json_is_the_python_answer(model):
    common = ("--model_name_or_path", model, "--max_length", "128")
    fits = run(*common, "--memory_budget", "2GiB", "--json")
    assert fits.exit_code == 0, fits.output
    said = json.loads(fits.output)
    assert said["fits"] and said["free"] == 2 * 1024**3 - said["total"]
    config = load_config(None, list(common), planning=True)
    plan = lt.plan(config, memory_budget="2GiB")
    assert plan.total == said["total"] and plan.fits and json.loads(plan.to_json()) == said
    small = run(*common, "--memory_budget", "500MiB")
    assert small.exit_code == 3 and "does not fit: memory:" in small.output
    assert run(*common, "--host_memory_budget", "1GiB").exit_code == 3
    assert run(*common, "--disk_budget", "1KiB").exit_code == 3


def test_p2_p5_the_table_carries_batch_length_and_dtypes(model):
    shown = run("--model_name_or_path", model, "--max_length", "96", "--compare", "--gpu", "RTX 4090",
                "--method", "full")  # fmt: skip
    assert shown.exit_code == 0
    assert "at 8 x 96 tokens" in shown.output and "weights bfloat16" in shown.output and "states trits" in shown.output
    assert "leantune, one-sparse" in shown.output and "largest that fits" in shown.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max_length", "64"], "model_name_or_path is missing"),
        (["--model_name_or_path", "/nowhere/at/all"], "there is no folder"),
        (["--model_name_or_path", "MODEL", "--memory_budget", "lots"], "memory_budget"),
        (["--model_name_or_path", "MODEL", "--gpu", "RTX 4099"], "RTX 4090"),
        (["--model_name_or_path", "MODEL", "--tier", "guessed"], "tier is 'guessed'"),
        (["--model_name_or_path", "MODEL", "--parallel", "ddp", "--world_size", "0"], "at least 1"),
        (["--model_name_or_path", "MODEL", "--cutof_len", "5"], "did you mean"),
        (["--model_name_or_path", "DAMAGED"], "damaged"),
    ],
)
def test_bad_input_is_an_error_of_ours_which_main_turns_into_exit_2(model, tmp_path, arguments, said):
    damaged = tmp_path / "damaged"
    AutoConfig.for_model("llama", **SIZES).save_pretrained(damaged)
    (damaged / "model.safetensors").write_bytes(b"not a header at all")
    arguments = [{"MODEL": model, "DAMAGED": str(damaged)}.get(one, one) for one in arguments]
    result = run(*arguments)
    assert isinstance(result.exception, LeantuneError) and said in str(result.exception)


def test_tiers_are_compared_and_agree(model):
    config = load_config(None, ["--model_name_or_path", model, "--max_length", "64", "--optim", "lomo",
                                "--learning_rate", "1e-3"], planning=True)  # fmt: skip
    plan = lt.plan(config, tier="measured", advice=False)
    assert list(plan.tiers) == ["closed", "traced", "measured"]
    assert plan.tiers["traced"] == pytest.approx(plan.tiers["closed"], rel=0.03)
    assert plan.tiers["measured"] == pytest.approx(plan.tiers["closed"], rel=0.03)
    assert "measured against closed" in plan.table()


def test_another_architecture_is_planned_from_a_trace(tmp_path):
    AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=300).save_pretrained(tmp_path)
    plan = lt.plan(load_config(None, ["--model_name_or_path", str(tmp_path), "--max_length", "64"], planning=True))
    assert list(plan.tiers) == ["traced"] and plan.advice == () and plan.total > plan.tiers["traced"] > 0
    assert any("does not know gpt2 blocks" in note for note in plan.notes)
    assert {stage.name for stage in plan.staged.stages} >= {"load", "steady step", "resume"}


def test_a4_quantised_bases_and_p10_a_plan_that_does_not_fit_says_which_part(model):
    config = load_config(None, ["--model_name_or_path", model, "--method", "qlora", "--optim", "adamw"], planning=True)
    plan = lt.plan(config, memory_budget="1MiB")
    assert plan.dtypes["weights"] == "bfloat16 (base in nf4)"
    assert plan.over[0].startswith("memory: ") and "most of it" in plan.over[0] and plan.advice
    assert plan.largest.batch_size == 0


def test_a_profiles_calibration_corrects_stages_and_states_its_error(model, tmp_path):
    rows = [StageRow("steady step", TOTAL, 1000, 1100), StageRow("load", TOTAL, 1000, 1000)]
    run_ = {"model": "m", "where": "1 x 64 tokens"}
    calibration(rows, machine={"device": "cpu"}, versions={}, run=run_, beside_tensors=5).save(tmp_path)
    config = load_config(None, ["--model_name_or_path", model, "--max_length", "64"], planning=True)
    plain, corrected = (lt.plan(config, advice=False, calibration=one) for one in (None, tmp_path))
    for before, after in zip(plain.staged.stages, corrected.staged.stages, strict=True):
        tensors = before.total - before.parts["context"] - before.parts["fragmentation"]
        assert after.total - before.total == (int(tensors * (1.1 - 1.0)) if before.name == "steady step" else 0)
    assert "off by 4.5 % (median of the stages), 9.1 % at worst" in corrected.table()
    with pytest.raises(LeantuneError, match="cannot be read as a memory calibration"):
        lt.plan(config, calibration=tmp_path / "none.json")


def test_method_auto_is_decided_against_the_budget(model):
    config = load_config(None, ["--model_name_or_path", model, "--max_length", "64", "--method", "auto"], planning=True)
    rich = lt.plan(config, gpu="RTX 4090", advice=False)
    assert rich.settings.dtype == "float32" and rich.fits
    assert "chosen: full, AdamW, fp32 weights, 8 rows a step" in rich.chosen and rich.chosen[1].startswith(
        "because: it needs "
    )
    assert "you set: max_length, model_name_or_path" in rich.chosen and rich.table().startswith("method: auto\n")
    poor = lt.plan(config, memory_budget="1MiB", advice=False)
    assert not poor.fits
    assert "nothing fits 1.0 MiB" in poor.chosen[1]


def test_a_plan_in_closed_form_loads_neither_torch_nor_transformers(model):
    code = (
        "import sys; from leantune.training.config import load_config; "
        "from leantune.training.planning.plan import plan; "
        "found = plan(load_config(None, sys.argv[1:], planning=True), memory_budget='8GiB'); "
        "assert found.advice and found.largest; print({'torch', 'transformers', 'trl'} & set(sys.modules))"
    )
    given = ["--model_name_or_path", model, "--max_length", "64", "--warmup_steps", "3e-2", "--eval_strategy=epoch"]
    given += ["--eval_split", "0.1", "--lr_scheduler_type=cosine"]
    ended = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
    assert ended.stdout.strip() == "set()", ended.stderr


def test_the_trainers_fields_read_from_source_are_those_it_has():
    """Every field a config may pass through, under the same type where that is made of plain ones."""
    described = described_fields()
    for name, (hint, _) in passed_through().items():
        assert name in described, name
        if described[name] is not None and hint in (int, float, str, bool, int | None, float | None, str | None):
            assert described[name] == hint, name


def test_a_plan_tells_a_trainers_key_it_cannot_read(model):
    ended = run("--model_name_or_path", model, "--max_length", "64", "--warmup_steps", "many")
    assert isinstance(ended.exception, ConfigError) and "warmup_steps is 'many'; it takes float" in str(ended.exception)

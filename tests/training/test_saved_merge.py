"""merge: the model read back from disk has the logits of base and adapter; what fails leaves nothing behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from rich.console import Console
from saved_adapters import saved_adapter, untied_copy
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from leantune.errors import ConfigError, NonFiniteError, NotEnoughRoomError, StateMismatchError
from leantune.training.run import train
from leantune.training.saved import merge as merge_module
from leantune.training.saved.merge import MergeResult, merge

QUIET = Console(quiet=True)


def merged(adapter: str, output: Path, **more: object) -> MergeResult:
    return merge(adapter, str(output), console=QUIET, dtype="float32", **more)  # type: ignore[arg-type]


def nothing_left(folder: Path) -> bool:
    return not [path for path in folder.iterdir() if "merge" in path.name]


def test_a_lora_run_merges_into_a_model_with_its_logits(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pictures(monkeypatch)
    run = tmp_path / "run"
    config = tiny_config(tiny_model_path, write_rows(tmp_path, 8), run, method="lora", max_length=32, max_steps=2)
    train(config, console=QUIET)
    result = merge(str(run), console=QUIET)
    assert result.output_dir == tmp_path / "run-merged"
    assert result.merged.relative < 0.05 and abs(result.arrived - 1) < 0.2
    model = AutoModelForCausalLM.from_pretrained(result.output_dir)
    assert model.dtype == torch.bfloat16  # the run's
    assert AutoTokenizer.from_pretrained(result.output_dir).chat_template


SETTINGS: dict[str, dict[str, object]] = {
    "layers alone": {},
    "embeddings trained": {"modules_to_save": ["embed_tokens"]},
    "head trained": {"modules_to_save": ["lm_head"]},
    "both trained": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "adapter on the embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "adapter on the head": {"target_modules": ["lm_head", "q_proj"]},
    "some tokens": {"trainable_token_indices": [5, 9]},
    "rank-stabilised, with DoRA": {"use_dora": True, "use_rslora": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_o17_tied_and_untied_embeddings_keep_what_was_trained(
    tiny_model_path: str, tmp_path: Path, kind: str, tied: bool
) -> None:
    settings = SETTINGS[kind]
    base = tiny_model_path if tied else untied_copy(tiny_model_path, tmp_path / "base")
    result = merged(saved_adapter(base, tmp_path / "adapter", **settings), tmp_path / "merged")
    assert result.adapter.relative > 0.01
    assert result.merged.relative < 1e-4 and abs(result.arrived - 1) < 1e-3


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_added_tokens_are_in_the_merged_model_and_its_tokenizer(
    tiny_model_path: str, tmp_path: Path, tied: bool
) -> None:
    base = tiny_model_path if tied else untied_copy(tiny_model_path, tmp_path / "base")
    adapter = saved_adapter(
        base, tmp_path / "adapter", added_tokens=3, modules_to_save=["embed_tokens", "lm_head"], scale=0.05
    )
    result = merged(adapter, tmp_path / "merged")
    assert result.merged.relative < 1e-4
    model = AutoModelForCausalLM.from_pretrained(result.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(result.output_dir)
    assert model.config.vocab_size == 323 and tokenizer.convert_tokens_to_ids("<new2>") == 322


@pytest.mark.parametrize("base", ["quantised", "full"])
def test_a4_a_four_bit_base_is_dequantised_or_replaced(tiny_model_path: str, tmp_path: Path, base: str) -> None:
    pytest.importorskip("bitsandbytes")
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter")
    result = merged(adapter, tmp_path / "merged", base=base)
    assert result.base == base and result.merged.relative < 1e-3
    model = AutoModelForCausalLM.from_pretrained(result.output_dir)
    assert getattr(model.config, "quantization_config", None) is None
    original = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    layer = "model.layers.0.mlp.down_proj.weight"
    delta = (model.state_dict()[layer] - original.state_dict()[layer]).abs().max()
    assert delta > 0 and any(("quantised base" in note) for note in result.notes) == (base == "quantised")


@pytest.mark.slow
def test_a4_a_qlora_run_is_merged_into_what_it_was_trained_on(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    without_pictures(monkeypatch)
    run = tmp_path / "run"
    config = tiny_config(tiny_model_path, write_rows(tmp_path, 8), run, method="qlora", max_length=32, max_steps=1)
    train(config, console=QUIET)
    result = merge(str(run), console=QUIET)
    assert result.base == "quantised" and result.merged.relative < 0.1
    full = merge(str(run), str(tmp_path / "full"), base="full", console=QUIET)
    assert full.trained is not None and full.trained.relative > full.merged.relative


# --- what fails -------------------------------------------------------------------------------------------------------


def test_p12_a_write_that_fails_leaves_nothing(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter")

    def full_disk(self: object, folder: Path, **rest: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full_disk)
    with pytest.raises(NotEnoughRoomError, match="No space left"):
        merged(adapter, tmp_path / "merged")
    assert nothing_left(tmp_path)


def test_p12_a_killed_merge_does_not_stand_under_the_name_of_a_whole_one(tiny_model_path: str, tmp_path: Path) -> None:
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter")
    program = f"""
import os
from leantune.training.saved import merge
merge._reloaded_logits = lambda *rest: os._exit(9)  # everything is written, nothing checked
merge.merge({adapter!r}, {str(tmp_path / "merged")!r}, dtype="float32")
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 9
    assert (tmp_path / ".merging-merged" / "model.safetensors").exists() and not (tmp_path / "merged").exists()
    merged(adapter, tmp_path / "merged")
    assert not (tmp_path / ".merging-merged").exists()


def test_p4_a_disk_or_memory_too_small_is_told_before_anything_is_loaded(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter")
    monkeypatch.setattr(merge_module, "_unmerged_logits", lambda *rest: pytest.fail("loaded"))
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000))
        with pytest.raises(NotEnoughRoomError, match=r"on disk .* 1000 B left"):
            merged(adapter, tmp_path / "merged")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(NotEnoughRoomError, match="1000 B is available"):
        merged(adapter, tmp_path / "merged")
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(("factor", "share"), [(0.0, "0%"), (2.0, r"(19|20)\d%")])
def test_a_merge_that_loses_or_doubles_the_adapter_is_refused(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, share: str
) -> None:
    """An adapter so small that its loss is within the tolerance for rounding."""
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter", scale=0.02)
    attach = merge_module.attach_adapter

    def rescaled(saved: object, base: object) -> object:
        model = attach(saved, base)
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.set_scale("default", factor)
        return model

    monkeypatch.setattr(merge_module, "attach_adapter", rescaled)
    with pytest.raises(StateMismatchError, match=f"{share} of what the adapter changes"):
        merge(adapter, str(tmp_path / "merged"), console=QUIET, dtype="bfloat16")
    assert nothing_left(tmp_path)


def test_an_adapter_that_bfloat16_would_round_away_is_refused_and_merged_in_float32(
    tiny_model_path: str, tmp_path: Path
) -> None:
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter", scale=1e-3)
    with pytest.raises(StateMismatchError, match=r"rounded away.*--dtype float32"):
        merge(adapter, str(tmp_path / "merged"), console=QUIET, dtype="bfloat16")
    assert nothing_left(tmp_path)
    assert merged(adapter, tmp_path / "merged").arrived == pytest.approx(1, abs=0.05)


def test_weights_that_are_no_numbers_are_refused(tiny_model_path: str, tmp_path: Path) -> None:
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter", scale=float("inf"))
    with pytest.raises((NonFiniteError, StateMismatchError), match="Nothing was"):
        merged(adapter, tmp_path / "merged")
    assert nothing_left(tmp_path)


def test_p11_what_cannot_be_merged_is_said_before_anything_is_loaded(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, "_unmerged_logits", lambda *rest: pytest.fail("loaded"))
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter")
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    cases = [
        (tiny_model_path, {}, "is no adapter"),
        (str(nameless), {}, "holds neither a model"),
        (str(tmp_path / "none"), {}, "cannot be found"),
        (adapter, {"base": "half"}, "write quantised or full"),
        (adapter, {"dtype": "int8"}, "write float32, bfloat16, float16"),
        (adapter, {"output_dir": adapter}, "exists; write another"),
        (adapter, {"model_name_or_path": str(tmp_path / "gone")}, "cannot be found"),
    ]
    for run, more, words in cases:
        with pytest.raises(ConfigError, match=words):
            merge(run, console=QUIET, **more)
    (Path(adapter) / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        merge(adapter, console=QUIET)


def test_an_adapter_of_another_base_is_refused(tiny_model_path: str, tmp_path: Path) -> None:
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter")
    config = AutoModelForCausalLM.from_pretrained(tiny_model_path).config
    config.hidden_size = 32
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="does not fit the base"):
        merged(adapter, tmp_path / "merged", model_name_or_path=str(tmp_path / "other"))

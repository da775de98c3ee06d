"""Exact savings and VeLoRA in whole runs: the same losses, what the header says, what the plan counts."""

import functools
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import Trainer, TrainingArguments

import leantune as lt
from leantune.errors import ConfigError, InvalidArgumentError
from leantune.memory.parts import ACTIVATIONS, RECOMPUTE
from leantune.training.config import EXACT_SAVINGS, load_config
from leantune.training.exact_savings import apply_run_savings
from leantune.training.run import build_trainer, load_model, load_rows, plan_of_run, train

QUIET = Console(quiet=True)
LORA = {"method": "lora", "lora_r": 4, "lora_dropout": 0.1}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path, 20)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


config = functools.partial(tiny_config, max_length=64, save_steps=3, max_steps=4, save_total_limit=10)


def losses(result) -> list[float]:
    return [row["loss"] for row in result.log if "loss" in row]


def trained(result) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in result.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("more", [LORA, {}], ids=["lora", "full"])
def test_a3_g14_savings_on_and_off_train_the_same_losses_and_weights(
    tiny_model_path: str, rows: str, tmp_path: Path, more: dict
) -> None:
    results = []
    for name, savings in (("on", True), ("off", ["loss"])):
        results.append(
            train(config(tiny_model_path, rows, tmp_path / name, exact_savings=savings, **more), console=QUIET)
        )
    on, off = results
    assert losses(on) == losses(off) and len(losses(on)) == 4
    assert all(torch.equal(weight, trained(off)[name]) for name, weight in trained(on).items())
    assert on.plan.saved[ACTIVATIONS] < off.plan.saved[ACTIVATIONS]
    assert on.plan.total <= off.plan.total


def test_the_header_says_which_savings_apply_and_what_was_not_found(
    tiny_model_path: str, rows: str, tmp_path: Path
) -> None:
    console = Console(record=True, quiet=False, width=200, file=(tmp_path / "out.txt").open("w"))
    train(config(tiny_model_path, rows, tmp_path / "out", max_steps=1), console=console)
    said = console.export_text()
    assert "loss without logits" in said and "swiglu: 4 modules" in said
    assert "dropout: nothing found (no nn.Dropout above 0)" in said
    assert "shared_adapter_input: nothing found (no adapters)" in said


def test_a_loss_that_is_not_the_models_is_left_out_unless_it_was_named(tiny_model_path: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    forward = model.forward

    def doubled(*arguments, **more):
        out = forward(*arguments, **more)
        out.logits = out.logits * 5 + torch.arange(out.logits.shape[-1]) / 50
        return out

    model.forward = doubled
    settings = functools.partial(config, tiny_model_path, "rows.jsonl", tmp_path)
    with pytest.raises(ConfigError, match="not known here; leave loss out"):
        apply_run_savings(settings(exact_savings=["loss", "swiglu"]), model)
    savings = apply_run_savings(settings(), model)
    assert not savings.loss and "not known here" in savings.lines()[0]
    savings.modules.remove()
    assert apply_run_savings(settings(exact_savings=False), model).lines() == ["full logits"]


def test_a_list_survives_the_yaml_of_a_run(tmp_path: Path) -> None:
    base = ["--model_name_or_path=m", "--dataset=d.jsonl"]
    written = load_config(None, [*base, "--exact_savings=loss,dropout"])
    assert written.chosen_savings == ("loss", "dropout")
    path = tmp_path / "c.yaml"
    path.write_text(written.to_yaml())
    assert load_config(path) == written
    assert load_config(None, [*base, "--exact_savings=false"]).chosen_savings == ()


def test_a2_where_every_block_is_recomputed_the_loss_alone_is_saved_unless_more_is_named(
    tiny_model_path: str, tmp_path: Path
) -> None:
    settings = functools.partial(config, tiny_model_path, "rows.jsonl", tmp_path, gradient_checkpointing=True)
    loaded = load_model(settings())
    assert loaded.savings.modules is None and "every block is recomputed" in loaded.savings.lines()[1]
    assert settings(gradient_checkpointing_kwargs={"every_n_layers": 2}).chosen_savings == EXACT_SAVINGS
    assert load_model(settings(exact_savings=["loss", "swiglu"])).savings.modules is not None


# -- attach ----------------------------------------------------------------------------------------------------------


def test_g14_attach_saves_and_changes_no_number(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def run(name: str, savings):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=64))
        args = TrainingArguments(
            output_dir=str(tmp_path / name), max_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True,
            save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        ids = torch.randint(50, (12, 40), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row} for row in ids]
        trainer = Trainer(model=model, args=args, train_dataset=data)
        attached = lt.attach(trainer, lt.AdamW(model.parameters(), lr=1e-3), exact_savings=savings)
        assert attached.savings() is None
        trainer.train()
        assert all("forward" not in module.__dict__ for module in model.modules())
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], attached.savings()

    (with_savings, report), (without, nothing) = run("on", True), run("off", False)
    assert with_savings == without and nothing is None
    assert report.saved_bytes > 0 and {"swiglu", "dropout"} <= set(report.by_saving())
    with pytest.raises(InvalidArgumentError, match="the loss is the trainer's own"):
        run("wrong", ["loss"])


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_a2_the_plan_of_a_run_counts_its_gradient_checkpointing(
    tiny_model_path: str, rows: str, tmp_path: Path, more: dict
) -> None:
    found = {}
    for checkpointing in (False, True):
        settings = config(tiny_model_path, rows, tmp_path, gradient_checkpointing=checkpointing, **more)
        settings, tokenizer, data = load_rows(settings)
        trainer = build_trainer(settings, load_model(settings), tokenizer, data)
        found[checkpointing] = plan_of_run(settings, trainer, data)
    assert found[True].parts[RECOMPUTE] > found[False].parts[RECOMPUTE]  # exact savings make activations again too
    assert found[True].saved[ACTIVATIONS] < found[False].saved[ACTIVATIONS] / 2


def test_nothing_but_the_batch_is_among_the_inputs_of_a_measured_step(
    tiny_model_path: str, rows: str, tmp_path: Path
) -> None:
    """What the log samples of the weights is not memory of the step."""
    train(config(tiny_model_path, rows, tmp_path / "out"), console=QUIET)
    measured = json.loads((tmp_path / "out" / "memory_profile.json").read_text())
    assert measured["part_peaks"]["inputs"] < 4 * 64 * 8 * 4  # ids, labels, mask and positions of four short rows


# -- VeLoRA ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["ternary_adamw", "adamw_torch"])
def test_factored_velora_trains_and_resumes_to_the_same_weights(
    tiny_model_path: str, rows: str, tmp_path: Path, optim: str
) -> None:
    import shutil

    more = {"optim": optim, "velora_target_modules": ["o_proj"], "velora_num_groups": 8, "velora_factored": True}
    whole = train(config(tiny_model_path, rows, tmp_path / "whole", **more), console=QUIET)
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    shutil.rmtree(broken / "checkpoint-4")
    (broken / "model.safetensors").unlink()
    resumed = train(config(tiny_model_path, rows, broken, resume=True, **more), console=QUIET)
    weight = "model.layers.0.self_attn.o_proj.weight"
    ours, theirs = whole.model.state_dict()[weight], resumed.model.state_dict()[weight]
    assert torch.equal(ours, theirs)
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.bfloat16).state_dict()
    assert not torch.equal(ours, start[weight])


@pytest.mark.parametrize(("bound", "exact"), [(1.0, 2), (1e-6, 0)])
def test_layers_under_the_cosine_train_exactly(
    tiny_model_path: str, rows: str, tmp_path: Path, bound: float, exact: int
) -> None:
    console = Console(record=True, width=200, file=(tmp_path / "out.txt").open("w"))
    more = {"velora_target_modules": ["o_proj"], "velora_num_groups": 8, "velora_min_cosine": bound, "max_steps": 2}
    result = train(config(tiny_model_path, rows, tmp_path / "out", **more), console=console)
    assert f"{exact} of 2 inputs are kept whole" in console.export_text()
    assert sum(row.exact for row in result.velora.rows) == exact
    projected = 2 * (4 * result.plan.length * 8 * 2 + 8 * 4)  # of two layers: Z in bfloat16, and the direction
    without = train(config(tiny_model_path, rows, tmp_path / "without", max_steps=1), console=QUIET).plan
    kept = result.plan.saved[ACTIVATIONS] - without.saved[ACTIVATIONS]
    assert kept == (0 if exact else projected)


def test_refreshed_directions_in_a_run(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    directions = []
    for every in (1, 100):
        more = {"velora_target_modules": ["o_proj"], "velora_num_groups": 8, "velora_refresh_every": every}
        out = tmp_path / str(every)
        train(config(tiny_model_path, rows, out, max_steps=2, **more), console=QUIET)
        from safetensors.torch import load_file

        directions.append(load_file(out / "velora.safetensors")["model.layers.0.self_attn.o_proj"])
    assert not torch.equal(*directions)


@pytest.mark.parametrize("first", ["exact", "velora"])
def test_velora_reports_what_is_left_after_exact_savings(first: str) -> None:
    """On adapters that keep copies: without savings each its fp32 copy; with them q, k and v keep one bf16 input."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def model():
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4}
        plain = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=320)).to(torch.bfloat16)
        lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
        peft = get_peft_model(plain, lora).train()
        peft.enable_input_require_grads()
        return peft

    def step(model) -> None:
        tokens = torch.randint(320, (1, 96), generator=torch.Generator().manual_seed(0))
        model(input_ids=tokens, labels=tokens).loss.backward()

    names = ["q_proj", "k_proj", "v_proj", "down_proj", "o_proj"]
    alone = model()
    handle = lt.apply_velora(alone, names, num_groups=4)
    step(alone)
    copies = {row.name.split(".")[-3]: row for row in handle.report().rows}
    both = model()
    if first == "exact":
        savings = lt.apply_exact_savings(both)
        velora = lt.apply_velora(both, names, num_groups=4)
    else:
        velora = lt.apply_velora(both, names, num_groups=4)
        savings = lt.apply_exact_savings(both)
    step(both)
    left = {row.name.split(".")[-3]: row for row in velora.report().rows}
    with_mask = 2 * 96 * 64 * 4
    assert [copies[name].exact_bytes for name in ("q_proj", "k_proj", "o_proj")] == [with_mask] * 3
    assert all(row.kept_by is None for row in copies.values())
    # The generator's states are kept by the dropouts anyway.
    assert left["q_proj"].exact_bytes == 96 * 64 * 2
    assert [left[name].exact_bytes for name in ("k_proj", "v_proj", "down_proj", "o_proj")] == [0] * 4
    # Attention keeps its output, the activation and the gate keep what makes the product.
    assert {left[name].kept_by for name in ("down_proj", "o_proj")} == {"made again by exact savings"}
    for one, other in zip(alone.parameters(), both.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)
    for handle in (savings, velora) if first == "exact" else (velora, savings):
        handle.remove()
    assert all("forward" not in module.__dict__ for module in both.modules())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_siblings_of_adapters_count_where_they_read_the_same_tensor(dropout: float) -> None:
    """fp32 on fp32: without dropout the adapters read one tensor, with it each a dropped-out copy of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=320))
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)).train()
    handle = lt.apply_velora(model, ["q_proj"], num_groups=4)
    tokens = torch.randint(320, (1, 96))
    model(input_ids=tokens, labels=tokens).loss.backward()
    (row,) = handle.report().rows
    assert row.kept_by == ("kept by k_proj, v_proj" if dropout == 0 else None)

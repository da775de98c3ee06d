"""Exact savings change no number, and save what arithmetic says, on every architecture."""

import pytest
import torch
from activations.tiny_architectures import (
    ARCHITECTURES,
    INNER,
    LAYERS,
    TOKENS,
    WIDTH,
    add_lora,
    build,
    equal,
    saved_bytes,
    step,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import leantune as lt
from leantune.activations.random_state import state_bytes
from leantune.activations.saved_bytes import SavedBytes
from leantune.memory import plan_run

RNG = state_bytes(torch.device("cpu"))
GATED = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3", "Phi3")


def both(model, **options):
    """((loss, gradients), bytes) of the plain model and of the model under exact savings, and the handle."""
    plain = step(model, **options), saved_bytes(model, **options)
    handle = lt.apply_exact_savings(model)
    changed = step(model, backwards=2, **options), saved_bytes(model, **options)
    return plain, changed, handle


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_g14_losses_and_gradients_are_the_plain_models_to_the_bit(architecture, mode):
    model = build(architecture, torch.bfloat16 if mode == "bfloat16" else torch.float32)
    autocast = torch.bfloat16 if mode == "autocast" else None
    (plain, before), (changed, after), handle = both(model, autocast=autocast)
    assert equal(plain, changed)
    assert 0 < handle.report().saved_bytes <= before - after
    if architecture != "T5":  # one of its dropouts runs twice a forward, and a report is of the last run
        assert handle.report().saved_bytes == before - after


@pytest.mark.parametrize("architecture", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_block_keeps_gate_and_up_alone(architecture, dtype):
    model = build(architecture, dtype)
    before = saved_bytes(model)
    lt.apply_exact_savings(model)
    activation_and_product = 2 * TOKENS * INNER * dtype.itemsize
    assert before - saved_bytes(model) == LAYERS * activation_and_product


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_keep_gate_and_up_alone(architecture, experts):
    model = build(architecture, experts=experts)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batched products' gradients are added up in the order in which threads come
    try:
        (plain, before), (changed, after), _ = both(model)
    finally:
        torch.set_num_threads(threads)
    assert equal(plain, changed)
    assert before - after == LAYERS * 2 * (2 * TOKENS) * INNER * 4  # two experts a token


def test_bert_keeps_the_input_of_gelu_and_no_masks():
    model = build("Bert")
    before = saved_bytes(model)
    lt.apply_exact_savings(model, dropout=False)
    assert before - saved_bytes(model) == LAYERS * TOKENS * INNER * 4 + TOKENS * WIDTH * 4  # and the head's activation
    model = build("Bert")
    lt.apply_exact_savings(model, swiglu=False)
    # The embeddings' dropout, and two in each layer; attention's own is inside torch's attention.
    assert before - saved_bytes(model) == (1 + 2 * LAYERS) * (TOKENS * WIDTH * 4 - RNG)


def test_gpt2_keeps_the_input_of_its_gelu_instead_of_the_steps():
    model = build("GPT2")
    model.eval()
    before = saved_bytes(model)
    handle = lt.apply_exact_savings(model, dropout=False)
    assert handle.report().plain_bytes == 0  # no forward yet
    after = saved_bytes(model)
    inner, inputs = TOKENS * 4 * WIDTH * 4, TOKENS * WIDTH * 4
    rows = {row.name: row for row in handle.report().rows}
    assert rows["transformer.h.0.mlp"].kept_bytes + rows["transformer.h.0.mlp.act"].kept_bytes == inner + inputs
    assert before - after == handle.report().saved_bytes >= LAYERS * 3 * inner


def test_savings_are_switched_separately_and_add_up():
    model = add_lora(build("Llama", torch.bfloat16), dropout=0.2)
    plain, before = step(model), saved_bytes(model)
    after = {}
    for name in ("swiglu", "dropout", "shared_adapter_input"):
        chosen = {one: one == name for one in ("swiglu", "dropout", "shared_adapter_input")}
        handle = lt.apply_exact_savings(model, **chosen)
        assert set(handle.report().by_saving()) == {name}
        assert equal(plain, step(model))
        after[name] = saved_bytes(model)
        handle.remove()
    assert after["swiglu"] < before and after["dropout"] < before
    assert after["shared_adapter_input"] == before  # a dropped copy is made again from the dropout's saving alone
    lt.apply_exact_savings(model)
    assert saved_bytes(model) < before - (before - after["swiglu"]) - (before - after["dropout"])


@pytest.mark.parametrize("activation", [nn.SiLU, nn.GELU, nn.Mish, nn.Softplus, nn.Tanh, nn.ReLU, nn.LeakyReLU])
def test_activations_of_torch_between_two_layers(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 48), activation(), nn.Linear(48, 8))
    x = torch.randn(16, 8)

    def run():
        model.zero_grad()
        with SavedBytes(model) as saved:
            model(x)
        model(x).square().sum().backward()
        return saved.bytes, [p.grad.clone() for p in model.parameters()]

    before, plain = run()
    lt.apply_exact_savings(model)
    after, changed = run()
    assert all(torch.equal(one, other) for one, other in zip(plain, changed))
    keeps_its_result = activation in (nn.Tanh, nn.ReLU)
    assert before - after == (0 if keeps_its_result else 16 * 48 * 4)


def test_a_module_that_only_looks_like_an_activation_is_left_alone():
    class Shift(nn.Module):
        def forward(self, x):
            return x.roll(1, dims=-1)

    model = nn.Sequential(nn.Linear(8, 8), Shift(), nn.Softmax(-1), nn.Identity(), nn.Flatten(), nn.Linear(8, 8))
    assert lt.apply_exact_savings(model).report().rows == []


def test_what_was_written_to_in_place_is_kept_as_it_is():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.second = nn.Linear(8, 48), nn.SiLU(), nn.Linear(48, 8)

        def forward(self, x):
            return self.second(self.act(self.first(x)).mul_(3.0))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(16, 8)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    lt.apply_exact_savings(model)
    changed = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, changed))


def smollm2_block_bytes(lora, exact):
    """Bytes that the blocks of SmolLM2-135M (two of its thirty) keep of 1,024 tokens, as the plan traces them."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    if lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear"))
    if exact:
        lt.apply_exact_savings(model)
    optimizer = lt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    plan = plan_run(model, [optimizer], batch_size=1, length=1024, fused=False, loss=sum_of_hidden_states)
    return plan.saved["activations"]


def sum_of_hidden_states(model, batch):
    decoder = (model.get_base_model() if isinstance(model, PeftModel) else model).model
    return decoder(input_ids=batch["input_ids"], use_cache=False).last_hidden_state.sum()


@pytest.mark.parametrize(("lora", "share"), [(True, 0.30), (False, 0.20)])
def test_a3_smollm2_blocks_keep_a_third_less_under_lora_and_a_fifth_less_in_full_fine_tuning(lora, share):
    assert smollm2_block_bytes(lora, True) <= (1 - share) * smollm2_block_bytes(lora, False)

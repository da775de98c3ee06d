"""Random models of a few thousand parameters of many architectures, with and without LoRA, and one step on them."""

import warnings

import torch
import transformers
from peft import LoraConfig, get_peft_model

from leantune.activations.saved_bytes import SavedBytes

TOKENS, WIDTH, INNER, LAYERS, VOCABULARY = 96, 32, 80, 2, 64

_DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_ENCODER = {name: size for name, size in _DECODER.items() if name not in ("num_key_value_heads", "head_dim")}
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 128}
_EXPERTS = _DECODER | {"num_experts_per_tok": 2}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": INNER, "num_layers": LAYERS, "num_heads": 4, "vocab_size": VOCABULARY}

_CONFIGS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _DECODER),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _DECODER),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", _DECODER),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _DECODER),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _DECODER),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", _DECODER),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "Bert": ("BertForMaskedLM", "BertConfig", _ENCODER),
    "T5": ("T5ForConditionalGeneration", "T5Config", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _EXPERTS | {"num_experts": 4, "moe_intermediate_size": INNER},
    ),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", _EXPERTS | {"num_local_experts": 4}),
}
ARCHITECTURES = list(_CONFIGS)


def build(architecture, dtype=torch.float32, *, experts=None):
    """A model in training mode; ``experts``: how transformers runs experts ("eager", "grouped_mm", "batched_mm")."""
    model_class, config_class, sizes = _CONFIGS[architecture]
    config = getattr(transformers, config_class)(**sizes)
    if architecture == "T5":
        config.decoder_start_token_id = 0
    if architecture == "GPT2":
        config.loss_type = "ForCausalLM"
    if experts is not None:
        config._experts_implementation = experts
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, model_class)(config).to(dtype).train()


def add_lora(model, *, dropout=0.0, adapter_dtype=torch.float32, **options):
    """LoRA of rank 4 on all linear layers, B not zero, so that every gradient is one."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", **options))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(adapter_dtype)
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def batch():
    ids = torch.randint(1, VOCABULARY, (2, TOKENS // 2), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model):
    """The loss of the batch under seed 3, with its graph."""
    torch.manual_seed(3)
    return model(**batch()).loss


def step(model, *, autocast=None, backwards=1):
    """(loss, gradients by name) of one step under seed 3; backward is run ``backwards`` times over the one forward,
    and the gradients are the last one's."""
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = loss_of(model)
    for left in reversed(range(backwards)):
        model.zero_grad()
        loss.backward(retain_graph=left > 0)
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model, *, autocast=None):
    """Bytes that a forward keeps for backward."""
    with SavedBytes(model) as saved, torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss_of(model)
    return saved.bytes


def equal(one, other):
    """Whether two results of `step` are the same to the bit."""
    (loss, gradients), (other_loss, others) = one, other
    return (
        torch.equal(loss, other_loss)
        and gradients.keys() == others.keys()
        and all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())
    )

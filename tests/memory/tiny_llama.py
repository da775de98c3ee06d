"""A two-layer Llama of a few hundred thousand parameters, and real steps on it."""

import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, HIDDEN, LAYERS = 512, 64, 2


def tiny_llama(*, checkpointing=False, tied=False, dtype=torch.bfloat16, layers=LAYERS):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(dtype)
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def tokens(batch_size, length, *, padding=0, seed=1):
    """A batch of random tokens; the last ``padding`` positions of its first sequence are masked out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch_size, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -padding:] = 0
        batch["labels"][0, -padding:] = -100
    return batch

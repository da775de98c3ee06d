"""Adapters made with peft on the tiny model, moved away from zero, and saved as a user would have them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer


def saved_adapter(
    base: str, folder: Path, *, added_tokens: int = 0, scale: float = 0.05, loading: Any = None, **settings: Any
) -> str:
    """An adapter on ``base`` with random weights, in ``folder``; ``settings`` are peft's LoraConfig's.

    ``added_tokens`` grow the embeddings first, and the tokenizer beside the adapter knows them.
    """
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=loading)
        tokenizer = AutoTokenizer.from_pretrained(base)
        if added_tokens:
            tokenizer.add_tokens([f"<new{number}>" for number in range(added_tokens)])
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        lora = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})
        model = get_peft_model(model, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter.data, std=scale)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def untied_copy(base: str, folder: Path) -> str:
    """``base`` with a head of its own, other than its embeddings, in ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.02)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)

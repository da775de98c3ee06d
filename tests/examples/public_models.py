"""The sizes of the public models that the recipes name, as their config.json gives them; nothing is downloaded."""

import json
from pathlib import Path

CONFIGS = {
    "meta-llama/Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "huggyllama/llama-30b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 6656, "intermediate_size": 17920,
        "num_hidden_layers": 60, "num_attention_heads": 52, "num_key_value_heads": 52, "vocab_size": 32000,
    },
    "Qwen/Qwen2.5-14B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    },
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
}  # fmt: skip


def write_config(name: str, folder: Path) -> Path:
    """A folder that holds the config.json of the model ``name`` and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name] | {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder

"""What data need to know of the model, before the model itself is loaded: its tokenizer and its sizes."""

from dataclasses import dataclass
from typing import Any

from leantune.errors import ConfigError


@dataclass(frozen=True)
class ModelLimits:
    """Rows of the embedding and positions the model was made for; None where they are not known."""

    embedding_rows: int | None = None
    positions: int | None = None


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model's folder or hub name, with a pad token; ConfigError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"- model_name_or_path {name!r}: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_limits(name: str) -> ModelLimits:
    """The sizes its config.json gives; nothing is known where a folder holds a tokenizer alone."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError):
        return ModelLimits()
    return ModelLimits(getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None))

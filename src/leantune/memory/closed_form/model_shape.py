"""What a plan needs to know of a model: sizes from its config.json, and every weight's name and shape."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from leantune.errors import InvalidArgumentError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "mixtral", "qwen3_moe")
"""Values of ``model_type`` whose blocks the closed form knows; every other is traced."""
_GEMMAS = ("gemma", "gemma3_text")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model. Numbers of elements, unless they say otherwise."""

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """Width of the MLP; of one expert in a mixture of experts."""
    tied: bool
    """The output head is the embedding."""
    attention_bias: tuple[bool, bool] = (False, False)
    """Of q, k, v; of o."""
    mlp_bias: bool = False
    head_norms: bool = False
    """q and k are normed head by head (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """Attention and MLP are normed behind as well (Gemma 3)."""
    widened_norms: bool = False
    """A norm's weight multiplies in fp32 (Gemma)."""
    scaled_embedding: bool = False
    experts: int = 0
    """0: dense."""
    experts_a_token: int = 0
    normed_scores: bool = False
    """The scores of the chosen experts are divided by their sum."""
    rotary_kinds: int = 1
    """Different rotary tables: Gemma 3 has one for local and one for global attention."""
    softcap: float | None = None
    positions: int = 0
    """Longest sequence the model was made for; 0: unknown."""

    @classmethod
    def of_config(cls, config: Any) -> "ModelShape":
        """The shape a transformers config describes.

        Raises InvalidArgumentError for a family outside `FAMILIES`, or variants whose blocks are built otherwise.
        """
        family = str(config.model_type)
        if family not in FAMILIES:
            raise InvalidArgumentError(
                f"the closed form does not know {family} blocks (it knows {', '.join(FAMILIES)})"
            )
        _refuse_variants(config, family)
        heads = int(config.num_attention_heads)
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            family=family,
            vocabulary=int(config.vocab_size),
            hidden=int(config.hidden_size),
            layers=int(config.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            inner=int(config.moe_intermediate_size if family == "qwen3_moe" else config.intermediate_size),
            tied=bool(config.tie_word_embeddings),
            attention_bias=(True, False) if family == "qwen2" else (bias, bias),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            head_norms=family in ("qwen3", "qwen3_moe", "gemma3_text"),
            post_norms=family == "gemma3_text",
            widened_norms=family in _GEMMAS,
            scaled_embedding=family in _GEMMAS,
            experts=int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0),
            experts_a_token=int(getattr(config, "num_experts_per_tok", None) or 0),
            normed_scores=family == "mixtral" or bool(getattr(config, "norm_topk_prob", False)),
            rotary_kinds=len(set(config.layer_types)) if family == "gemma3_text" else 1,
            softcap=getattr(config, "final_logit_softcapping", None),
            positions=int(getattr(config, "max_position_embeddings", None) or 0),
        )

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every parameter as the model has it, a tied head left out."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            yield from self._block(f"model.layers.{layer}.")
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)

    def block_prefix(self, layer: int) -> str:
        """What the names of a block's weights begin with."""
        return f"model.layers.{layer}."

    def linear_sizes(self, name: str) -> tuple[int, int]:
        """(inputs, outputs) of a linear layer of a block by the last part of its name."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }[name]

    def linears(self) -> tuple[str, ...]:
        """Linear layers of a block, with the module they stand in: what "all-linear" adapters go to."""
        attention = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        return attention if self.experts else (*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

    def _block(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name in self.linears():
            inputs, outputs = self.linear_sizes(name.partition(".")[2])
            yield f"{prefix}{name}.weight", (outputs, inputs)
            if self._has_bias(name):
                yield f"{prefix}{name}.bias", (outputs,)
        if self.head_norms:
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}self_attn.{name}.weight", (self.head_size,)
        if self.experts:
            yield f"{prefix}mlp.gate.weight", (self.experts, self.hidden)
            yield f"{prefix}mlp.experts.gate_up_proj", (self.experts, 2 * self.inner, self.hidden)
            yield f"{prefix}mlp.experts.down_proj", (self.experts, self.hidden, self.inner)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            yield f"{prefix}{name}.weight", (self.hidden,)

    def _has_bias(self, name: str) -> bool:
        if name.startswith("mlp."):
            return self.mlp_bias
        return self.attention_bias[1 if name.endswith("o_proj") else 0]


def _refuse_variants(config: Any, family: str) -> None:
    """Options of these families that build other blocks."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise InvalidArgumentError(f"{family} with attn_logit_softcapping writes its attention out: not in closed form")
    sparse_step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None)
    if family == "qwen3_moe" and (sparse_step != 1 or dense):
        raise InvalidArgumentError("qwen3_moe with some dense layers is not in closed form")
    if float(getattr(config, "attention_dropout", 0.0) or 0.0) > 0:
        raise InvalidArgumentError("attention_dropout keeps what the closed form does not count")

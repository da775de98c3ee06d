"""A decoder block in the style of Llama, Qwen, Mistral and Gemma, as a program of operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from leantune.memory.closed_form.experts import Experts
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.operators import Operators
from leantune.memory.closed_form.tape import Block, Tape, Weight

Linear = Callable[..., Block]


@dataclass(frozen=True)
class DecoderBlock:
    """One block of a model: ``run`` walks its forward over a tape.

    Args:
        shape: the model.
        prefix: of the names of its weights, with a dot at the end.
        weights: by full name.
        linear: how a linear layer runs: (operators, its full name, input) -> output. Adapters, VeLoRA and 4-bit weights
            live there.
    """

    shape: ModelShape
    prefix: str
    weights: Mapping[str, Weight]
    linear: Linear
    ops: Operators
    turn: tuple[Block, Block]
    mask: Block | None = None
    """Of padded or packed rows: a byte for each pair of tokens of a row."""
    swiglu: bool = False
    """The MLP keeps what goes into its activation and its gate, and makes their product again in backward."""

    @property
    def _tape(self) -> Tape:
        return self.ops.tape

    def run(self, x: Block) -> Block:
        """The block's output from ``x``, which stays its caller's."""
        tape, ops = self._tape, self.ops
        normed = self._norm("input_layernorm", x)
        attended = self._attention(normed)
        if self.shape.post_norms:
            attended = self._then_norm("post_attention_layernorm", attended)
        tape.drop(normed)
        middle = ops.add(x, attended)
        tape.drop(attended)
        name = "pre_feedforward_layernorm" if self.shape.post_norms else "post_attention_layernorm"
        normed = self._norm(name, middle)
        moved = self._mlp(normed)
        tape.drop(normed)
        if self.shape.post_norms:
            moved = self._then_norm("post_feedforward_layernorm", moved)
        out = ops.add(middle, moved)
        tape.drop(middle, moved)
        return out

    def _then_norm(self, name: str, x: Block) -> Block:
        out = self._norm(name, x)
        self._tape.drop(x)
        return out

    def _norm(self, name: str, x: Block, rows: int | None = None, width: int | None = None) -> Block:
        rows, width = rows or self.ops.tokens, width or self.shape.hidden
        weight = self.weights[f"{self.prefix}{name}.weight"]
        return self.ops.rms_norm(x, rows, width, weight, widened=self.shape.widened_norms)

    def _attention(self, x: Block) -> Block:
        shape, ops, tape = self.shape, self.ops, self._tape
        heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
        projected = {}
        for name, count in heads.items():
            value = self.linear(ops, f"{self.prefix}self_attn.{name}", x)
            if shape.head_norms and name != "v_proj":
                normed = self._norm(f"self_attn.{name[0]}_norm", value, ops.tokens * count, shape.head_size)
                tape.drop(value)
                value = normed
            projected[name[0]] = value
        q, k = ops.rotary(projected["q"], self.turn), ops.rotary(projected["k"], self.turn)
        tape.drop(projected["q"], projected["k"])
        mixed = self._mixed(q, k, projected["v"])
        out = self.linear(ops, f"{self.prefix}self_attn.o_proj", mixed)
        tape.drop(q, k, projected["v"], mixed)
        return out

    def _mixed(self, q: Block, k: Block, v: Block) -> Block:
        """Attention; with a mask, shared heads are written out for it."""
        times = self.shape.heads // self.shape.kv_heads
        if self.mask is None or times == 1:
            return self.ops.fused_attention(q, k, v, self.shape.heads, self.mask)
        keys, values = self.ops.repeated(k, times), self.ops.repeated(v, times)
        mixed = self.ops.fused_attention(q, keys, values, self.shape.heads, self.mask)
        self._tape.drop(keys, values)
        return mixed

    def _mlp(self, x: Block) -> Block:
        ops, tape, prefix = self.ops, self._tape, f"{self.prefix}mlp."
        if self.shape.experts:
            return Experts(self.shape, ops, lambda name: self.weights[f"{prefix}{name}"], self.swiglu).run(x)
        gate = self.linear(ops, f"{prefix}gate_proj", x)
        active = ops.activation(gate)
        tape.drop(gate)
        up = self.linear(ops, f"{prefix}up_proj", x)
        product = ops.product(active, up, ops.activated_again(gate) if self.swiglu else None)
        tape.drop(active, up)
        remade = ops.product_again(gate, up) if self.swiglu else None
        out = self.linear(ops, f"{prefix}down_proj", product, remade=remade)
        tape.drop(product)
        return out

"""How the linear layers of a block run: plain, under VeLoRA, with an adapter, or with 4-bit weights."""

from dataclasses import dataclass

from leantune.memory.closed_form.dropout import Dropout
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.operators import Operators, Remade
from leantune.memory.closed_form.settings import ITEM_BYTES, RunSettings
from leantune.memory.closed_form.tape import FLOAT, Block, Results, Weight
from leantune.memory.closed_form.weights import WeightTable

_REORDERED = ("q_proj", "k_proj")
"""Their gradients come back from the rotary positions with heads before tokens, and are copied."""


@dataclass(frozen=True)
class Linears:
    """Calls the linear layer of a full name on an input."""

    shape: ModelShape
    settings: RunSettings
    table: WeightTable

    def __call__(self, ops: Operators, name: str, x: Block, *, remade: Remade | None = None) -> Block:
        """``remade``: how the input is made again in backward, where it is not kept."""
        last = name.rpartition(".")[2]
        inner, outer = self.shape.linear_sizes(last)
        weight, bias = self.table[f"{name}.weight"], self.table.get(f"{name}.bias")
        reordered = last in _REORDERED and not self.shape.head_norms
        # Written out for a mask, values come back in that order as well.
        reordered = reordered or (last == "v_proj" and self.settings.padded and self.shape.heads > self.shape.kv_heads)
        adapted = f"{name}.lora_A.default.weight" in self.table
        projected = self._projection(ops, last, ops.size) if weight.trained else None
        out = ops.linear(
            x,
            inner,
            outer,
            weight,
            bias,
            kept=projected,
            remade=remade,
            copies_gradient=reordered and not adapted,
            dequantised=inner * outer * ops.size if self.settings.method == "qlora" else 0,
        )
        if projected is not None:
            ops.tape.drop(projected)
        return self._adapted(ops, name, x, remade, out) if adapted else out

    def _projection(self, ops: Operators, last: str, size: int) -> Block | None:
        """What VeLoRA keeps of the input of a target: its projection, and the direction, fp32."""
        if last not in self.settings.velora_targets:
            return None
        groups, inner = self.settings.velora_groups, self.shape.linear_sizes(last)[0]
        return ops.tape.new(ops.tokens * groups * size + -(-inner // groups) * FLOAT)

    def _adapted(self, ops: Operators, name: str, x: Block, remade: Remade | None, result: Block) -> Block:
        """result + B(A(dropout(x))) * scaling, in the adapters' dtype, narrowed to the result's."""
        tape, settings, last = ops.tape, self.settings, name.rpartition(".")[2]
        inner, outer = self.shape.linear_sizes(last)
        wide, rank, tokens = ITEM_BYTES[settings.adapter_dtype], settings.lora_rank, ops.tokens
        down, up = (self.table[f"{name}.lora_{letter}.default.weight"] for letter in "AB")
        adapter = Operators(tape, tokens, wide)
        cast = dropped = ops.cast(x, tokens * inner, wide, ops.size)
        if wide != ops.size:
            remade = ops.cast_again(x, remade, cast.size) if settings.shared_adapter_input else None
        states: tuple[Block, ...] = ()
        if settings.lora_dropout > 0:
            dropout = Dropout(adapter, settings, cast, inner)
            dropped, remade, states = dropout.run(remade, replayed=last in settings.velora_targets)
        projected = self._projection(ops, last, wide)
        low = adapter.linear(dropped, inner, rank, down, kept=projected, remade=remade)
        tape.drop(*states, *(() if projected is None else (projected,)))
        if dropped is not cast:
            tape.drop(dropped)
        high = adapter.linear(low, rank, outer, up)
        tape.drop(low)
        scaled = adapter.scaled(high)
        tape.drop(high)
        total = self._sum(ops, result, scaled, tokens * outer, wide)
        tape.drop(scaled, result)
        narrow = ops.cast(total, tokens * outer, ops.size, wide)
        tape.drop(total, cast)
        return narrow

    def _sum(self, ops: Operators, result: Block, scaled: Block, elements: int, wide: int) -> Block:
        """The sum of a narrow and a wide tensor: the narrow one's gradient is narrowed."""
        tape = ops.tape
        out = tape.new(elements * max(wide, ops.size))

        def back(gradient: Block) -> Results:
            given: list[tuple[Block | Weight, Block]] = [(scaled, tape.keep(gradient))]
            if not result.constant:
                to_result = tape.keep(gradient) if wide == ops.size else tape.new(elements * ops.size)
                given.insert(0, (result, to_result))
            return given

        return tape.node(out, (), back)

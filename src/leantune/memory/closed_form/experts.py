"""A mixture of experts as transformers runs it: a router, and products grouped by expert over all chosen pairs of a
token and an expert ("grouped_mm", the default)."""

from collections.abc import Callable
from dataclasses import dataclass

from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.operators import INDEX, Operators, Remade
from leantune.memory.closed_form.tape import FLOAT, Block, Results, Weight


@dataclass(frozen=True)
class Experts:
    """The MLP of a block of ``shape`` over ``ops.tokens`` tokens; ``weight`` gives a weight by the end of its name."""

    shape: ModelShape
    ops: Operators
    weight: Callable[[str], Weight]
    swiglu: bool = False
    """The activation and the gated product are made again in backward."""

    @property
    def _pairs(self) -> int:
        return self.ops.tokens * self.shape.experts_a_token

    @property
    def _score_bytes(self) -> int:
        """Mixtral leaves the router's scores in fp32, so that what they weigh is fp32 as well."""
        return FLOAT if self.shape.family == "mixtral" else self.ops.size

    def run(self, x: Block) -> Block:
        """(tokens, hidden) from (tokens, hidden)."""
        tape, pairs = self.ops.tape, self._pairs
        scores, chosen = self._route(x)
        order, sources = tape.new(pairs * INDEX), tape.new(pairs * INDEX)
        gathered = self._gather(x, sources, pairs * self.shape.hidden * self.ops.size)
        score = self._gather(scores, order, pairs * self._score_bytes)
        tape.drop(sources)
        moved = self._expert_products(gathered)
        tape.drop(gathered)
        weighted = self._weigh(moved, score)
        tape.drop(moved, score)
        back = tape.new(pairs * INDEX)
        ordered = self._gather(weighted, back, weighted.size)
        tape.drop(weighted, back, order, chosen)
        out = self._sum_pairs(ordered)
        tape.drop(ordered, scores)
        return out

    def _route(self, x: Block) -> tuple[Block, Block]:
        """(scores of the chosen experts, their numbers)."""
        ops, tape, cells = self.ops, self.ops.tape, self.ops.tokens * self.shape.experts
        logits = ops.linear(x, self.shape.hidden, self.shape.experts, self.weight("gate.weight"))
        wide = ops.cast(logits, cells, FLOAT, ops.size)
        chances = tape.new(cells * FLOAT)
        tape.node(chances, (chances,), lambda g: [(wide, tape.new(cells * FLOAT))], (wide,))
        tape.drop(wide)
        best, chosen = tape.new(self._pairs * FLOAT), tape.new(self._pairs * INDEX)
        tape.node(best, (chosen,), lambda g: self._scatter(chances, cells), (chances,))
        tape.drop(chances)
        if self.shape.normed_scores:
            best = self._normed(best)
        scores = ops.cast(best, self._pairs, self._score_bytes, FLOAT)
        tape.drop(best, logits)
        return scores, chosen

    def _scatter(self, target: Block, cells: int) -> Results:
        zeros, full = self.ops.tape.new(cells * FLOAT), self.ops.tape.new(cells * FLOAT)
        self.ops.tape.drop(zeros)
        return [(target, full)]

    def _normed(self, best: Block) -> Block:
        """Scores over their sum, in place: both are kept."""
        tape, tokens = self.ops.tape, self.ops.tokens
        total = tape.new(tokens * FLOAT)
        tape.node(total, (), lambda g: [(best, tape.keep(g))], (best,))
        scores = tape.new(0)

        def back(gradient: Block) -> Results:
            to_best = tape.new(best.size)
            tape.touch(2 * best.size, "temporaries")
            return [(best, to_best), (total, tape.new(tokens * FLOAT))]

        tape.node(scores, (total, best), back, (best,))
        tape.drop(total, best)
        return scores

    def _gather(self, x: Block, index: Block, size: int) -> Block:
        """Rows of ``x`` in the order of ``index``, which alone is kept; zeros are filled for its gradient."""
        tape = self.ops.tape
        out = tape.new(size)

        def back(gradient: Block) -> Results:
            zeros, full = tape.new(x.size), tape.new(x.size)
            tape.drop(zeros)
            return [(x, full)]

        return tape.node(out, (index,), back, (x,))

    def _expert_products(self, x: Block) -> Block:
        ops, tape, half = self.ops, self.ops.tape, self._pairs * self.shape.inner * self.ops.size
        offsets = tape.new(self.shape.experts * 4)
        both = self._grouped(x, offsets, 2 * half, self.weight("experts.gate_up_proj"))
        gate = tape.new(0)
        of_up: list[Block] = []

        def join(gradient: Block) -> Results:
            whole = tape.new(2 * half)
            tape.drop(of_up.pop())
            return [(both, whole)]

        tape.node(gate, (), join, (both,))
        active = tape.new(half)
        tape.node(active, (both,), lambda g: [(gate, tape.new(half))], (gate,))
        product = tape.new(half)

        def product_back(gradient: Block) -> Results:
            again = tape.new(half) if self.swiglu else None
            to_up, to_active = tape.new(half), tape.new(half)
            of_up.append(to_up)
            if again is not None:
                tape.drop(again)
            return [(active, to_active)]

        tape.node(product, (both,) if self.swiglu else (active, both), product_back, (active,))
        tape.drop(gate, active, both)
        size = self._pairs * self.shape.hidden * ops.size
        again = Remade((both,), lambda: self._product_again(half)) if self.swiglu else None
        out = self._grouped(product, offsets, size, self.weight("experts.down_proj"), again)
        tape.drop(product, offsets)
        return out

    def _product_again(self, size: int) -> Block:
        active, out = self.ops.tape.new(size), self.ops.tape.new(size)
        self.ops.tape.drop(active)
        return out

    def _grouped(self, x: Block, offsets: Block, size: int, weight: Weight, remade: Remade | None = None) -> Block:
        tape = self.ops.tape
        out = tape.new(size)
        if weight.trained:
            tape.uses(weight)

        def back(gradient: Block) -> Results:
            again = remade.make() if remade is not None and weight.trained else None
            results: list[tuple[Block | Weight, Block]] = []
            if weight.trained:
                results.append((weight, tape.new(weight.gradient_bytes)))
            results.append((x, tape.new(x.size)))
            if again is not None:
                tape.drop(again)
            return results

        held = (x,) if remade is None else remade.leaves
        kept = (*held, offsets) if weight.trained else (offsets,)
        return tape.node(out, kept, back, () if weight.trained else (x,), keeps_weight=True)

    def _weigh(self, x: Block, score: Block) -> Block:
        tape, elements = self.ops.tape, self._pairs * self.shape.hidden
        out = tape.new(elements * self._score_bytes)

        def back(gradient: Block) -> Results:
            to_x, whole = tape.new(out.size), tape.new(out.size)
            to_score = tape.new(self._pairs * self._score_bytes)
            tape.drop(whole)
            if self._score_bytes != self.ops.size:
                narrow = tape.new(elements * self.ops.size)
                tape.drop(to_x)
                to_x = narrow
            return [(x, to_x), (score, to_score)]

        return tape.node(out, (x, score), back, (x, score))

    def _sum_pairs(self, x: Block) -> Block:
        """The sum over each token's experts; its gradient is written out for every pair."""
        tape, elements = self.ops.tape, self.ops.tokens * self.shape.hidden
        summed = tape.new(elements * self._score_bytes)
        tape.node(summed, (), lambda g: [(x, tape.new(x.size))], (x,))
        out = self.ops.cast(summed, elements, self.ops.size, self._score_bytes)
        tape.drop(summed)
        return out

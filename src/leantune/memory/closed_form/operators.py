"""What single operators of a transformer make, keep and give back: the vocabulary in which blocks are written.

Each follows torch's derivative formula of that operator. ``taken`` inputs are local names that end with the call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leantune.memory.closed_form.tape import FLOAT, Block, Results, Tape, Weight

INDEX = 8


@dataclass(frozen=True)
class Remade:
    """A tensor that is not kept (an exact saving): backward makes it again.

    Args:
        leaves: what is kept instead.
        make: makes it, with all that this takes for a moment.
    """

    leaves: tuple[Block, ...]
    make: Callable[[], Block]


@dataclass(frozen=True)
class Operators:
    """Operators over ``tokens`` rows on a tape."""

    tape: Tape
    tokens: int
    size: int
    """Bytes of an element of hidden states: of the weights' dtype."""

    # -- elementwise --------------------------------------------------------------------------------------------------

    def cast(self, x: Block, elements: int, size: int, back: int) -> Block:
        """``x`` in a dtype of ``size`` bytes; its gradient is cast back to ``back`` bytes. The same dtype: ``x``."""
        if size == back:
            return self.tape.keep(x)
        out = self.tape.new(elements * size)
        return self.tape.node(out, (), lambda g: [(x, self.tape.new(elements * back))], (x,))

    def add(self, a: Block, b: Block) -> Block:
        """a + b; both get the gradient itself."""
        out = self.tape.new(a.size)

        def back(gradient: Block) -> Results:
            return [(x, self.tape.keep(gradient)) for x in (a, b) if not x.constant]

        return self.tape.node(out, (), back, (a, b))

    def product(self, a: Block, b: Block, remade: Remade | None = None) -> Block:
        """a * b of two activations, both kept, or ``a`` made again."""
        tape = self.tape
        out = tape.new(a.size)

        def back(gradient: Block) -> Results:
            again = None if remade is None else remade.make()
            results = [(a, tape.new(a.size)), (b, tape.new(b.size))]
            if again is not None:
                tape.drop(again)
            return results

        return tape.node(out, (a, b) if remade is None else (*remade.leaves, b), back)

    def activated_again(self, x: Block) -> Remade:
        """`activation` of ``x``, made again."""
        return Remade((x,), lambda: self.tape.new(x.size))

    def product_again(self, x: Block, b: Block) -> Remade:
        """activation(x) * b, made again."""

        def make() -> Block:
            active, out = self.tape.new(x.size), self.tape.new(x.size)
            self.tape.drop(active)
            return out

        return Remade((x, b), make)

    def cast_again(self, x: Block, remade: Remade | None, size: int) -> Remade:
        """``x``, or what ``remade`` makes, cast to ``size`` bytes in all."""

        def make() -> Block:
            source = None if remade is None else remade.make()
            out = self.tape.new(size)
            if source is not None:
                self.tape.drop(source)
            return out

        return Remade((x,) if remade is None else remade.leaves, make)

    def scaled(self, x: Block, kept: Block | None = None) -> Block:
        """x times what needs no gradient (a number, a table): only that is kept."""
        out = self.tape.new(x.size)
        held = () if kept is None else (kept,)
        return self.tape.node(out, held, lambda g: [(x, self.tape.new(x.size))])

    def activation(self, x: Block) -> Block:
        """SiLU, GELU: the input is kept."""
        out = self.tape.new(x.size)
        return self.tape.node(out, (x,), lambda g: [(x, self.tape.new(x.size))])

    # -- norms --------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Block, rows: int, width: int, weight: Weight, *, widened: bool) -> Block:
        """RMSNorm as transformers writes it. ``widened``: Gemma's, whose weight multiplies in fp32."""
        tape, elements = self.tape, rows * width
        wide = self.cast(x, elements, FLOAT, self.size)
        square = tape.new(elements * FLOAT)
        tape.node(square, (wide,), lambda g: self._square_back(wide, elements), (wide,))
        mean = tape.new(rows * FLOAT)
        tape.node(mean, (), lambda g: [(square, tape.new(elements * FLOAT))], (square,))
        tape.drop(square)
        shifted = tape.new(rows * FLOAT)
        tape.node(shifted, (), lambda g: [(mean, tape.keep(g))], (mean,))
        root = tape.new(rows * FLOAT)
        tape.node(root, (root,), lambda g: [(shifted, self._root_back(rows))], (shifted,))
        tape.drop(shifted)
        if widened:
            tape.drop(mean)
        normal = tape.new(elements * FLOAT)
        tape.node(normal, (wide, root), lambda g: self._normal_back(wide, root, elements, rows), (wide,))
        tape.drop(root, wide)
        out = self._gemma_weight(normal, elements, width, weight) if widened else self._weight(normal, elements, weight)
        tape.drop(normal)
        if not widened:
            tape.drop(mean)  # a local name of the module's forward
        return out

    def _square_back(self, x: Block, elements: int) -> Results:
        first = self.tape.new(elements * FLOAT)
        second = self.tape.new(elements * FLOAT)
        gradient = self.tape.new(elements * FLOAT)
        self.tape.drop(first, second)
        return [(x, gradient)]

    def _root_back(self, rows: int) -> Block:
        power = self.tape.new(rows * FLOAT)
        half = self.tape.new(rows * FLOAT)
        gradient = self.tape.new(rows * FLOAT)
        self.tape.drop(power, half)
        return gradient

    def _normal_back(self, x: Block, root: Block, elements: int, rows: int) -> Results:
        tape = self.tape
        to_x, whole = tape.new(elements * FLOAT), tape.new(elements * FLOAT)
        to_root = tape.new(rows * FLOAT)
        tape.drop(whole)
        return [(x, to_x), (root, to_root)]

    def _weight(self, normal: Block, elements: int, weight: Weight) -> Block:
        """weight * x in the weights' dtype."""
        tape = self.tape
        narrow = self.cast(normal, elements, self.size, FLOAT)
        out = tape.new(elements * self.size)
        if weight.trained:
            tape.uses(weight)

        def back(gradient: Block) -> Results:
            results: list[tuple[Block | Weight, Block]] = []
            whole = None
            if weight.trained:
                whole = tape.new(elements * self.size)
            to_x = tape.new(elements * self.size)
            if whole is not None:
                results.append((weight, tape.new(weight.gradient_bytes)))
                tape.drop(whole)
            return [*results, (narrow, to_x)]

        kept = (narrow,) if weight.trained else ()
        tape.node(out, kept, back, () if weight.trained else (narrow,), keeps_weight=True)
        tape.drop(narrow)
        return out

    def _gemma_weight(self, normal: Block, elements: int, width: int, weight: Weight) -> Block:
        """(1 + weight) * x in fp32, then narrowed."""
        tape = self.tape
        factor = tape.new(width * FLOAT)
        wide_out = tape.new(elements * FLOAT)
        if weight.trained:
            tape.uses(weight)

        def back(gradient: Block) -> Results:
            to_x = tape.new(elements * FLOAT)
            if not weight.trained:
                return [(normal, to_x)]
            whole = tape.new(elements * FLOAT)
            summed = tape.new(width * FLOAT)
            tape.drop(whole)
            if self.size == FLOAT:
                return [(normal, to_x), (weight, summed)]
            narrow = tape.new(weight.gradient_bytes)
            tape.drop(summed)
            return [(normal, to_x), (weight, narrow)]

        kept = (factor, normal) if weight.trained else (factor,)
        tape.node(wide_out, kept, back, () if weight.trained else (normal,))
        tape.drop(factor)
        out = self.cast(wide_out, elements, self.size, FLOAT)
        tape.drop(wide_out)
        return out

    # -- products -----------------------------------------------------------------------------------------------------

    def linear(
        self,
        x: Block,
        inner: int,
        outer: int,
        weight: Weight,
        bias: Weight | None = None,
        *,
        kept: Block | None = None,
        remade: Remade | None = None,
        copies_gradient: bool = False,
        dequantised: int = 0,
    ) -> Block:
        """x W^T (+ b): the input is kept where the weight is trained.

        ``kept``: what is kept in the input's place (VeLoRA's projection); ``remade``: the input is made again in
        backward. ``copies_gradient``: the gradient comes in another order of its dimensions and is copied.
        ``dequantised``: bytes of the weight's 16-bit copy, made for each product.
        """
        tape = self.tape
        if dequantised:
            tape.touch(dequantised, "temporaries")
        out = tape.new(self.tokens * outer * self.size)
        for parameter in (weight, bias):
            if parameter is not None and parameter.trained:
                tape.uses(parameter)
        held: tuple[Block, ...] = ()
        if weight.trained and kept is not None:
            held = (kept,)
        elif weight.trained:
            held = (x,) if remade is None else remade.leaves

        def back(gradient: Block) -> Results:
            results: list[tuple[Block | Weight, Block]] = []
            copy = tape.new(gradient.size) if copies_gradient else None
            again = remade.make() if weight.trained and remade is not None and kept is None else None
            if bias is not None and bias.trained:
                results.append((bias, tape.new(bias.gradient_bytes)))
            if weight.trained:
                results.append((weight, tape.new(weight.gradient_bytes)))
            wide = tape.new(dequantised) if dequantised else None
            if not x.constant:
                results.append((x, tape.new(self.tokens * inner * self.size)))
            if wide is not None:
                tape.drop(wide)
            if copy is not None:
                tape.drop(copy)
            if again is not None:
                tape.drop(again)
            return results

        trains = weight.trained or (bias is not None and bias.trained)
        return tape.node(out, held, back, () if trains else (x,), keeps_weight=True)

    # -- attention ----------------------------------------------------------------------------------------------------

    def rotary(self, x: Block, turn: Sequence[Block]) -> Block:
        """x cos + rotate_half(x) sin: ``turn`` holds the tables, which alone are kept."""
        tape, half = self.tape, x.size // 2
        straight = self.scaled(x, turn[0])
        first, second = self._slice(x), self._slice(x)
        negated = tape.new(half)
        tape.node(negated, (), lambda g: [(second, tape.new(half))])
        turned = tape.new(x.size)
        tape.node(turned, (), lambda g: [(negated, tape.keep(g)), (first, tape.keep(g))])
        tape.drop(negated, first, second)
        across = self.scaled(turned, turn[1])
        out = self.add(straight, across)
        tape.drop(straight, turned, across)
        return out

    def _slice(self, x: Block) -> Block:
        """A view of half of ``x``; its gradient is as large as ``x``."""
        return self.tape.node(self.tape.new(0), (), lambda g: [(x, self.tape.new(x.size))])

    def repeated(self, x: Block, times: int) -> Block:
        """Each head ``times`` times, as attention with a mask wants shared heads; nothing is kept."""
        out = self.tape.new(x.size * times)
        return self.tape.node(out, (), lambda g: [(x, self.tape.new(x.size))], (x,))

    def fused_attention(self, q: Block, k: Block, v: Block, heads: int, mask: Block | None = None) -> Block:
        """Scaled dot-product attention without its squares: q, k, v, the output and a log-sum a row and head are
        kept, and a mask in the dtype of q, a byte an element before."""
        tape = self.tape
        added = () if mask is None else (tape.new(mask.size * self.size),)
        out, sums = tape.new(q.size), tape.new(self.tokens * heads * FLOAT)

        def back(gradient: Block) -> Results:
            return [(q, tape.new(q.size)), (k, tape.new(k.size)), (v, tape.new(v.size))]

        tape.node(out, (q, k, v, *added, out, sums), back)
        tape.drop(sums, *added)
        return out

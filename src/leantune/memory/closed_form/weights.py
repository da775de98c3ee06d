"""Every weight of a run with what it costs: storage, state, gradient and the temporaries of its update."""

from collections import Counter
from collections.abc import Iterator, Mapping

from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.optimizer_cost import OptimizerCost, Trained
from leantune.memory.closed_form.settings import ITEM_BYTES, RunSettings, quantised_bytes
from leantune.memory.closed_form.tape import Weight


class WeightTable(Mapping[str, Weight]):
    """The weights of ``shape`` under ``settings`` by name, adapters included.

    ``weight_bytes``: all of them and the model's buffers; ``adapter_bytes``, ``quantised_bytes``: of these, the
    adapters' and the 4-bit ones'. ``state_bytes``: of the optimizer's states. ``trained`` and ``elements``: numbers of
    parameters. ``shapes``, ``stored`` (bytes) and ``dtypes``: by name.
    """

    def __init__(self, shape: ModelShape, settings: RunSettings) -> None:
        self.cost = OptimizerCost(settings.optim, settings.optimizer_options)
        self.tileable = self.cost.tileable
        self.weight_bytes = _buffer_bytes(shape, settings)
        self.adapter_bytes = self.quantised_bytes = 0
        self.elements = self.trained = 0
        self.bytes_by_dtype: Counter[str] = Counter()
        self._weights: dict[str, Weight] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.stored: dict[str, int] = {}
        self.dtypes: dict[str, str] = {}
        states: Counter[Trained] = Counter()
        self._state_sizes: dict[Trained, int] = {}
        for name, size in shape.weights():
            self._add(name, size, settings, states, adapter=False)
        for name, size in _adapters(shape, settings):
            self._add(name, size, settings, states, adapter=True)
        self.state_bytes = self.cost.state_bytes(states, on_host=not settings.cuda)
        updates = [w.update_bytes for w in self._weights.values() if w.trained]
        together = sum if self.cost.all_at_once(settings.cuda) else max
        self.whole_update_bytes = together(updates) if updates else 0
        self.gradient_bytes = sum(w.gradient_bytes for w in self._weights.values() if w.trained)

    def _add(
        self,
        name: str,
        size: tuple[int, ...],
        settings: RunSettings,
        states: "Counter[Trained]",
        *,
        adapter: bool,
    ) -> None:
        dtype = settings.adapter_dtype if adapter else settings.dtype
        count = _count(size)
        trained, state = adapter or not settings.adapts, 0
        stored = count * ITEM_BYTES[dtype]
        if settings.method == "qlora" and not adapter and _is_quantised(name):
            stored, kind = quantised_bytes(count, settings.nested_quantisation), "nf4"
            self.quantised_bytes += stored
        else:
            kind = dtype
        self.bytes_by_dtype[kind] += stored
        self.weight_bytes += stored
        self.elements += count
        self.shapes[name], self.stored[name], self.dtypes[name] = size, stored, dtype
        if adapter:
            self.adapter_bytes += stored
        if trained:
            self.trained += count
            kind_of = Trained(size, dtype, "embed_tokens" in name)
            states[kind_of] += 1
            if kind_of not in self._state_sizes:
                self._state_sizes[kind_of] = self.cost.state_bytes(Counter([kind_of]), on_host=not settings.cuda)
            state = self._state_sizes[kind_of]
        update = self.cost.update_bytes(size, dtype, settings.cuda) if trained else 0
        self._weights[name] = Weight(name, count, trained, count * ITEM_BYTES[dtype] if trained else 0, update, state)

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _adapters(shape: ModelShape, settings: RunSettings) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not settings.adapts:
        return
    for layer in range(shape.layers):
        for name in shape.linears():
            last = name.partition(".")[2]
            if settings.lora_targets == "all-linear" or last in settings.lora_targets:
                inputs, outputs = shape.linear_sizes(last)
                full = f"{shape.block_prefix(layer)}{name}"
                yield f"{full}.lora_A.default.weight", (settings.lora_rank, inputs)
                yield f"{full}.lora_B.default.weight", (outputs, settings.lora_rank)


def _is_quantised(name: str) -> bool:
    """Linear layers of blocks; embeddings, norms and the head keep their dtype."""
    return name.endswith("_proj.weight")


def _buffer_bytes(shape: ModelShape, settings: RunSettings) -> int:
    """Rotary frequencies, twice, in fp32, and the embedding's factor."""
    frequencies = 2 * 4 * (shape.head_size // 2) * shape.rotary_kinds
    return frequencies + (settings.item_bytes if shape.scaled_embedding else 0)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total

"""Table 1 of the LOMO paper (arXiv 2306.09782): the memory of training LLaMA-7B by part, without a GPU and without a
byte of weights.

    python benchmarks/lomo_table1.py                    # a Markdown table; rows in benchmarks/results/lomo_table1.csv
    python benchmarks/lomo_table1.py --rows /tmp/rows.csv

The paper's setting: batches of 8 sequences of 512 tokens, 16-bit weights and gradients; AdamW and SGD keep fp32 master
copies; LOMO applies and frees each gradient inside backward. Each row is one training step walked on fake tensors
(`leantune.memory.traced.trace`), twice over: through the graph of 2023 (`llama_2023.py`), to be held against the
paper's figures, and through today's (transformers' Llama, scaled dot-product attention, the loss without logits), which
is what a run with this package keeps. "Activations" are all that forward keeps for backward, logits included.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from llama_2023 import Llama2023, next_token_loss
from rows import ResultRows
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import leantune as lt
from leantune.memory.measured.timeline import MemoryTimeline
from leantune.memory.measured.tracker import tensors_in
from leantune.memory.parts import ACTIVATIONS, GRADIENTS, LOSS, OPTIMIZER_STATES, WEIGHTS
from leantune.memory.sizes import GIB
from leantune.memory.traced.trace import TracedStep, decoder_and_head, token_batch, trace_step
from leantune.memory.traced.update_cost import UpdateCost

BATCH, LENGTH = 8, 512
COLUMNS = (
    "graph", "method", "checkpointing", "batch", "length", "parameters_bytes", "gradients_bytes", "states_bytes",
    "activations_bytes", "paper_parameters", "paper_gradients", "paper_states", "paper_activations",
)  # fmt: skip
"""Bytes as traced; the paper's figures in GiB as printed, empty where it has none."""


@dataclass(frozen=True)
class Shape:
    """Of a Llama; the defaults are the 7B's: 6.74 billion parameters."""

    vocabulary: int = 32000
    width: int = 4096
    inner: int = 11008
    layers: int = 32
    heads: int = 32


@dataclass(frozen=True)
class Parts:
    """Bytes, or the paper's GiB, of the parts of the table."""

    parameters: float
    gradients: float
    states: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.states + self.activations


PAPER = {
    ("AdamW", False): Parts(12.55, 12.55, 75.31, 45.61),
    ("SGD", False): Parts(12.55, 12.55, 25.10, 45.61),
    ("LOMO", False): Parts(12.55, 0.24, 0.0, 45.61),
    ("AdamW", True): Parts(12.55, 12.55, 75.31, 1.79),
    ("SGD", True): Parts(12.55, 12.55, 25.10, 1.79),
    ("LOMO", True): Parts(12.55, 0.24, 0.0, 1.79),
}
"""GiB by (method, checkpointing). The totals it prints without checkpointing are 1.00 more than these parts."""


def llama_2023(shape: Shape, checkpointing: bool, device: str = "meta") -> nn.Module:
    with torch.device(device):
        model = Llama2023(shape.vocabulary, shape.width, shape.inner, shape.layers, shape.heads, checkpointing)
    return model.to(torch.bfloat16)


def llama_today(shape: Shape, checkpointing: bool, device: str = "meta") -> nn.Module:
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_today(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Labels are taken as shifted already, so that every token counts, as in the trace."""
    decoder, head = decoder_and_head(model)
    hidden = decoder(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    return lt.linear_cross_entropy(hidden, head.weight, batch["labels"])


GRAPHS = {"2023": (llama_2023, next_token_loss), "today": (llama_today, loss_today)}


def with_masters(rule: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[nn.Module], int]:
    """Bytes of fp32 master copies and of what ``rule`` allocates for them at its first step."""

    def states(model: nn.Module) -> int:
        masters = [nn.Parameter(torch.empty_like(p, dtype=torch.float32, device="meta")) for p in model.parameters()]
        optimizer = rule(masters)
        for master in masters:
            master.grad = torch.empty_like(master)
        optimizer.step()
        held = [*masters, *tensors_in(list(optimizer.state.values()))]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    return states


def of_report(rule: Callable[..., lt.Lomo]) -> Callable[[nn.Module], int]:
    """Bytes that one of this package's optimizers keeps, by its report."""
    return lambda model: int(rule(model.named_parameters()).report().state_bytes)


@dataclass(frozen=True)
class Method:
    """``states``: bytes an optimizer keeps for a model; ``fused``: gradients are applied and freed in backward."""

    states: Callable[[nn.Module], int]
    fused: bool


METHODS = {
    "AdamW": Method(with_masters(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False)), fused=False),
    "SGD": Method(with_masters(lambda p: torch.optim.SGD(p, lr=1e-3, foreach=False)), fused=False),
    "LOMO": Method(of_report(lambda p: lt.Lomo(p, lr=1e-3)), fused=True),
    "AdaLomo": Method(of_report(lambda p: lt.AdaLomo(p, lr=1e-3)), fused=True),
    "TernaryAdamW": Method(of_report(lambda p: lt.TernaryAdamW(p, lr=1e-3)), fused=True),
}
ROWS = (
    *(("2023", method, checkpointing) for method, checkpointing in PAPER),
    *(("today", method, checkpointing) for checkpointing in (False, True) for method in METHODS),
)


def walk(graph: str, model: nn.Module, fused: bool, states: int, batch: int, length: int) -> MemoryTimeline:
    """One step on fake tensors, every parameter trained. ``states``: bytes, held throughout."""
    updated = frozenset(map(id, model.parameters()))
    step = TracedStep(
        loss=GRAPHS[graph][1],
        batch=token_batch(batch, length, torch.device("cpu")),
        updated=updated,
        in_tiles=updated,
        fused=fused,
        two_passes=False,
        micro_batches=1,
        accumulate=None,
        autocast=None,
        padded=False,
        cost=UpdateCost(states, {}, 0),
    )
    return trace_step(model, step)


def parts_of(timeline: MemoryTimeline) -> Parts:
    """Bytes: what the parts reach at most, and what forward keeps for backward."""
    peaks, saved = timeline.part_peaks(), timeline.saved_at_forward_end()
    return Parts(peaks[WEIGHTS], peaks[GRADIENTS], peaks[OPTIMIZER_STATES], saved[ACTIVATIONS] + saved[LOSS])


def traced(
    graph: str, method: str, checkpointing: bool, shape: Shape = Shape(), batch: int = BATCH, length: int = LENGTH
) -> Parts:
    """A row of the table, in bytes. Nothing is materialised: the model is on the meta device."""
    model = GRAPHS[graph][0](shape, checkpointing)
    states = METHODS[method].states(model)
    return parts_of(walk(graph, model, METHODS[method].fused, states, batch, length))


def measure(rows: ResultRows) -> None:
    for graph, method, checkpointing in ROWS:
        key = {"graph": graph, "method": method, "checkpointing": checkpointing, "batch": BATCH, "length": LENGTH}
        if rows.has(**key):
            continue
        found = traced(graph, method, checkpointing)
        values = {f"{field.name}_bytes": int(getattr(found, field.name)) for field in fields(Parts)}
        if graph == "2023":
            printed = PAPER[method, checkpointing]
            values |= {f"paper_{field.name}": getattr(printed, field.name) for field in fields(Parts)}
        rows.append(seed=0, **key, **values)


def print_table(rows: ResultRows) -> None:
    """Each part in GiB; behind it, in brackets, the paper's."""
    names = [field.name for field in fields(Parts)]
    print("| graph | method | checkpointing | " + " | ".join(names) + " | total |\n|" + "---|" * (len(names) + 4))
    for row in rows.read():
        ours = [int(row[f"{name}_bytes"]) / GIB for name in names]
        paper = [float(row[f"paper_{name}"]) for name in names] if row["paper_parameters"] else []
        cells = [f"{value:.2f}" for value in (*ours, sum(ours))]
        if paper:
            cells = [f"{cell} ({value:.2f})" for cell, value in zip(cells, (*paper, sum(paper)), strict=True)]
        checkpointing = "every layer" if row["checkpointing"] == "True" else "none"
        print(f"| {row['graph']} | {row['method']} | {checkpointing} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=None, help="CSV file of the rows; for rehearsals")
    rows = ResultRows("lomo_table1", COLUMNS, parser.parse_args().rows)
    measure(rows)
    print_table(rows)


if __name__ == "__main__":
    main()

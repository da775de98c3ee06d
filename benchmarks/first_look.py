"""The evidence under everything: does the ternary scheme train as well as AdamW on a character model?

    python benchmarks/first_look.py PATH/TO/tinyshakespeare.txt [--only batch24,batch96,wide,formats,long]

About 0.8 M parameters (4 layers, width 128), Tiny Shakespeare (public-domain text, 1.1 MB), context 64. The rate warms
up over 25 steps and then falls linearly to a tenth; "long" keeps it constant, which is the
harder test for a scheme whose weights jitter around the smooth path.
Methods: torch AdamW, TernaryAdamW without carry, with a carry of rank 4. For each (part, method) the learning rate
grid is extended until the best is interior, then three seeds run at the best. One row a run in
results/first_look.csv; a run whose row exists is not repeated. ``--summary`` prints the tables from the rows.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
from rows import ResultRows
from torch import Tensor, nn
from torch.nn import functional

import leantune as lt
from leantune.codec.counter_hash import low_fraction, random_bits, stream_key
from leantune.codec.ternary_state import TernaryState
from leantune.codec.tiles import BlockGrid, Tile
from leantune.kernels.half_linear import use_fp32_products

CONTEXT = 64
WARMUP = 25
FINAL_SHARE = 0.1
METHODS = ("adamw", "ternary_r0", "ternary_r4")
GRID = [2.5e-4 * 2**power for power in range(10)]
START = 8e-3
LONG_RATE = 4e-3
COLUMNS = (
    "part", "method", "width", "batch", "steps", "weights", "beta2", "lr", "validation_loss", "seconds",
    "median_log_step", "cosine_n", "cosine_block_mean",
)  # fmt: skip
PARTS = {
    # part: (width, batch, steps, weights, beta2, methods)
    "batch24": (128, 24, 200, "fp32", 0.999, METHODS),
    "batch96": (128, 96, 120, "fp32", 0.999, METHODS),
    "wide24": (256, 24, 120, "fp32", 0.999, ("adamw", "ternary_r4")),
    "wide96": (256, 96, 80, "fp32", 0.999, ("adamw", "ternary_r4")),
    "bf16": (128, 24, 200, "bf16", 0.999, ("adamw", "ternary_r4")),
    "bf16+8": (128, 24, 200, "bf16+8", 0.999, ("adamw", "ternary_r4")),
    "long": (128, 12, 3000, "fp32", 0.999, ("adamw", "ternary_r4")),
}


class CharacterModel(nn.Module):
    """A plain pre-norm transformer with untied embeddings."""

    def __init__(self, vocabulary: int, width: int, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Linear layers keep torch's initialisation. With embeddings of std 0.02, a step at a good rate is as large as
        # they are, and AdamW's seeds end anywhere from 2.13 to 2.59; with this they agree to 0.01.
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Text:
    """The characters as ids; the last tenth is held out. The same seed draws the same batches for every method."""

    def __init__(self, path: Path) -> None:
        raw = path.read_text(encoding="utf-8")
        letters = sorted(set(raw))
        index = {letter: place for place, letter in enumerate(letters)}
        ids = torch.tensor([index[letter] for letter in raw])
        split = int(0.9 * len(ids))
        self.vocabulary, self.train, self.held_out = len(letters), ids[:split], ids[split:]

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(self.train) - CONTEXT - 1, (size,), generator=generator)
        windows = self.train[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]

    def validation_loss(self, model: nn.Module, windows: int = 512) -> float:
        starts = torch.linspace(0, len(self.held_out) - CONTEXT - 1, windows).long()
        block = self.held_out[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
        with torch.no_grad():
            parts = [
                functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1).float(), piece[:, 1:].flatten())
                for piece in block.split(128)
            ]
        return torch.stack(parts).mean().item()


def build_optimizer(
    method: str, model: nn.Module, lr: float, beta2: float, weights: str, seed: int
) -> torch.optim.Optimizer:
    """AdamW is torch's own on fp32 weights. On bf16 weights that would stall by rounding: ours, with fp32 states."""
    master = 24 if weights == "bf16+8" else None
    if method == "adamw":
        if weights == "fp32":
            return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01)
        return lt.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01, master_bits=master, seed=seed)
    rank = int(method.removeprefix("ternary_r"))
    return lt.TernaryAdamW(
        model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01, carry_rank=rank, master_bits=master, seed=seed
    )


def rate_factor(number: int, steps: int, constant: bool) -> float:
    """Share of the peak rate in step ``number`` (from 0)."""
    if number < WARMUP:
        return (number + 1) / WARMUP
    return 1.0 if constant else 1.0 - (1.0 - FINAL_SHARE) * (number - WARMUP) / (steps - WARMUP)


def run(text: Text, part: str, method: str, lr: float, seed: int) -> dict[str, float]:
    """One training run; returns the row's measured columns."""
    width, batch, steps, weights, beta2, _ = PARTS[part]
    torch.manual_seed(seed)
    model = CharacterModel(text.vocabulary, width)
    if weights != "fp32":
        model = model.bfloat16()
        use_fp32_products(model)
    optimizer = build_optimizer(method, model, lr, beta2, weights, seed)
    probe = ExactVariance(model, beta2) if part == "long" and method != "adamw" else None
    generator = torch.Generator().manual_seed(1000 + seed)
    start = time.perf_counter()
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * rate_factor(number, steps, constant=part == "long")
        ids, targets = text.batch(batch, generator)
        loss = functional.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if probe is not None:
            probe.observe()
        optimizer.step()
    result = {"validation_loss": text.validation_loss(model), "seconds": time.perf_counter() - start}
    if not math.isfinite(result["validation_loss"]):
        result["validation_loss"] = float("inf")
    return result | (probe.compare(optimizer, steps) if probe is not None else {})


class ExactVariance:
    """Follows one matrix's exact second moment beside the ternary one: cosine of g / sqrt(v) under each against the
    exact v."""

    def __init__(self, model: nn.Module, beta2: float) -> None:
        self.parameter = model.blocks[1].up.weight
        self.beta2 = beta2
        self.variance = torch.zeros_like(self.parameter)

    def observe(self) -> None:
        grad = self.parameter.grad
        self.variance.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)

    def compare(self, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, float]:
        rows, cols = self.parameter.shape
        state, grid = optimizer.state[self.parameter], BlockGrid(cols, 128, torch.device("cpu"))
        decoded, _ = TernaryState(state, 128).variance(Tile(0, rows, 0, cols), grid)
        noise = low_fraction(random_bits(stream_key(0, steps, 0), 0, rows, 0, grid.blocks, 128, torch.device("cpu")))
        # Gradients drawn from the exact second moment itself: the last batch's alone would compare one sample.
        sample = grid.split(self.variance).sqrt() * (noise - 0.5).sign()
        exact = grid.split(self.variance)
        mean = exact.mean(dim=-1, keepdim=True).expand_as(exact)

        def cosine(variance: Tensor) -> float:
            ours, truth = (sample / (v.sqrt() + 1e-12) for v in (variance, exact))
            return functional.cosine_similarity(ours.flatten(), truth.flatten(), dim=0).item()

        log_steps = [s["variance_step"].float().flatten() for s in optimizer.state.values() if "variance_step" in s]
        return {
            "median_log_step": torch.cat(log_steps).median().item(),
            "cosine_n": cosine(decoded),
            "cosine_block_mean": cosine(mean),
        }


def search(text: Text, rows: ResultRows, part: str, method: str) -> float:
    """The grid's best learning rate with seed 0, extended until both neighbours are worse."""
    losses: dict[float, float] = {}

    def loss(lr: float) -> float:
        if lr not in losses:
            losses[lr] = float(ensure(text, rows, part, method, lr, 0)["validation_loss"])
        return losses[lr]

    place = GRID.index(START)
    while True:
        neighbours = [spot for spot in (place - 1, place, place + 1) if 0 <= spot < len(GRID)]
        best = min(neighbours, key=lambda spot: loss(GRID[spot]))
        if best == place:
            return GRID[place]
        place = best


def ensure(text: Text, rows: ResultRows, part: str, method: str, lr: float, seed: int) -> dict[str, str]:
    found = rows.find(part=part, method=method, lr=lr, seed=seed)
    if found:
        return found[0]
    width, batch, steps, weights, beta2, _ = PARTS[part]
    result = run(text, part, method, lr, seed)
    print(f"{part:8} {method:11} lr {lr:.2e} seed {seed}: {result}", flush=True)
    return rows.append(
        seed=seed,
        part=part,
        method=method,
        width=width,
        batch=batch,
        steps=steps,
        weights=weights,
        beta2=beta2,
        lr=lr,
        **result,
    )


def summary(rows: ResultRows) -> None:
    """Mean and standard error of the seeds at each method's best lr, and the ratio to AdamW's mean."""
    for part in PARTS:
        means: dict[str, float] = {}
        for method in METHODS:
            found = rows.find(part=part, method=method)
            rates: dict[str, list[float]] = {}
            for row in found:
                rates.setdefault(row["lr"], []).append(float(row["validation_loss"]))
            most = max((len(losses) for losses in rates.values()), default=0)
            if most == 0:
                continue
            lr, losses = min(
                ((r, x) for r, x in rates.items() if len(x) == most), key=lambda item: statistics.mean(item[1])
            )
            means[method] = statistics.mean(losses)
            error = statistics.stdev(losses) / most**0.5 if most > 1 else float("nan")
            ratio = means[method] / means.get("adamw", float("nan"))
            print(
                f"{part:8} {method:11} lr {lr:>8}  {means[method]:.4f} +- {error:.4f} ({most} seeds)  {ratio:.4f} of "
                f"AdamW"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="path of tinyshakespeare.txt")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, in order, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods to run, separated by commas")
    parser.add_argument("--summary", action="store_true", help="print the tables from the rows and stop")
    arguments = parser.parse_args()
    rows = ResultRows("first_look", COLUMNS)
    if not arguments.summary:
        text = Text(arguments.text)
        for part in arguments.only.split(","):
            for method in PARTS[part][5]:
                if method not in arguments.methods.split(","):
                    continue
                lr = search(text, rows, part, method) if part != "long" else LONG_RATE
                for seed in range(3 if part != "long" else 1):
                    ensure(text, rows, part, method, lr, seed)
    summary(rows)


if __name__ == "__main__":
    main()

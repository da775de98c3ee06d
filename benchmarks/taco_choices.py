"""Which history makes one-sparse steps train: slots, decay, replacement and storage, on a character model.

    python benchmarks/taco_choices.py TINYSHAKESPEARE.txt GSM8K.jsonl [--only scratch,finetune] [--summary]

The model is that of first_look.py (4 layers, width 128). "scratch": Tiny Shakespeare, 100 steps of 24 x 64 characters.
"finetune": 300 steps of AdamW on Tiny Shakespeare, then 80 steps on GSM8K's questions and answers, whose characters
(digits above all) and manner are new; the loss is on held-out GSM8K text. "noisy": the same with 160 steps of 2 x 64
characters, where gradients are mostly noise. The rate warms up over 10 steps and falls linearly to a tenth. Every
variant of ``VARIANTS`` is the published step with another history; each runs at the rates of ``RATES`` (or ``--rates``)
with one seed. One row a run in results/taco_choices.csv; a run whose row exists is not repeated.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from first_look import CharacterModel
from quality.character import CONTEXT
from rows import ResultRows
from torch import Tensor, nn
from torch.nn import functional

import leantune as lt

COLUMNS = ("part", "variant", "slots", "decay", "entry", "storage", "lr", "validation_loss", "worst_rise", "seconds")
STEPS = {"scratch": 100, "finetune": 80, "noisy": 160}
BATCH = {"scratch": 24, "finetune": 24, "noisy": 2}
TEXT = {"scratch": "scratch", "finetune": "finetune", "noisy": "finetune"}
PRETRAINING = 300
WARMUP = 10
RATES = {"scratch": (1.6e-2, 3.2e-2, 6.4e-2), "finetune": (8e-3, 1.6e-2, 3.2e-2), "noisy": (2e-3, 4e-3, 8e-3)}
ADAM_RATES = {"scratch": (4e-3, 8e-3), "finetune": (1e-3, 2e-3, 4e-3), "noisy": (5e-4, 1e-3, 2e-3)}
ALL = 1 << 20
VARIANTS: dict[str, tuple[int, float, str, str]] = {
    # name: (slots a column, decay, entry, storage)
    "no history": (1, 0.0, "always", "fp32"),
    "every row kept, .9": (ALL, 0.9, "beaten", "fp32"),
    "28 slots, .9": (28, 0.9, "beaten", "fp32"),
    "28 slots, .95": (28, 0.95, "beaten", "fp32"),
    "28 slots, .8": (28, 0.8, "beaten", "fp32"),
    "28 slots, .98": (28, 0.98, "beaten", "fp32"),
    "16 slots, .9": (16, 0.9, "beaten", "fp32"),
    "8 slots, .9": (8, 0.9, "beaten", "fp32"),
    "4 slots, .9": (4, 0.9, "beaten", "fp32"),
    "28 slots, .9, always": (28, 0.9, "always", "fp32"),
    "28 slots, .9, whole": (28, 0.9, "whole", "fp32"),
    "28 slots, .9, fp8 nearest": (28, 0.9, "beaten", "fp8 nearest"),
    "28 slots, .9, fp8 stochastic": (28, 0.9, "beaten", "fp8 stochastic"),
    "28 slots, .9, vectors x .1": (28, 0.9, "beaten", "fp32"),
    "28 slots, .9, vectors x 0": (28, 0.9, "beaten", "fp32"),
}
VECTOR_RATES = {"28 slots, .9, vectors x .1": 0.1, "28 slots, .9, vectors x 0": 0.0}
"""What vectors move, as a share of lr, where that is not 1."""


class Variant(torch.optim.Optimizer):
    """The one-sparse step on whole tensors, with every choice an option.

    ``entry``: how the largest |g| outside the slots replaces the weakest slot. "beaten": at (1 - decay) g, where that
    exceeds the weakest; "always": at (1 - decay) g, always; "whole": at g, where (1 - decay) |g| exceeds the weakest.
    """

    def __init__(
        self, params, lr: float, slots: int, decay: float, entry: str, storage: str, vectors: float = 1.0
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.vectors = vectors
        self.slots, self.decay, self.entry, self.storage = slots, decay, entry, storage

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if param.dim() < 2:
                    momentum = state.setdefault("momentum", torch.zeros_like(param))
                    momentum.lerp_(param.grad, 0.1)
                    param.sub_(momentum.sign(), alpha=group["lr"] * self.vectors)
                else:
                    rows, sign = self._direction(param.grad, state)
                    scale = group["lr"] * param.shape[0] / param.shape[1]
                    param.scatter_add_(0, rows.unsqueeze(0), -scale * sign.unsqueeze(0))

    def _direction(self, grad: Tensor, state: dict) -> tuple[Tensor, Tensor]:
        height, width = grad.shape
        slots = min(self.slots, height)
        if not state:
            state["rows"] = torch.full((slots, width), -1)
            state["values"] = torch.zeros(slots, width)
            if slots == height:
                state["rows"] = torch.arange(height).unsqueeze(1).repeat(1, width)
        rows, values = state["rows"], state["values"]
        values = torch.where(rows >= 0, self.decay * values + (1 - self.decay) * grad.gather(0, rows.clamp(min=0)), 0)
        if slots < height:
            outside = torch.cat([grad.abs(), torch.zeros(1, width)])
            outside.scatter_(0, torch.where(rows >= 0, rows, height), -1.0)
            candidate = outside[:height].argmax(0)
            entering = (1 - self.decay) * grad.gather(0, candidate.unsqueeze(0))[0]
            strength = torch.where(rows >= 0, values.abs(), -1.0)
            weakest = strength.argmin(0)
            enters = entering.abs() > strength.gather(0, weakest.unsqueeze(0))[0]
            if self.entry == "always":
                enters = torch.ones_like(enters)
            if self.entry == "whole":
                entering = entering / (1 - self.decay)
            here = (torch.arange(slots).unsqueeze(1) == weakest) & enters
            rows = torch.where(here, candidate, rows)
            values = torch.where(here, entering, values)
        best = values.abs().argmax(0, keepdim=True)
        state["rows"], state["values"] = rows, self._stored(values)
        return rows.gather(0, best)[0].clamp(min=0), values.gather(0, best)[0].sign()

    def _stored(self, values: Tensor) -> Tensor:
        if self.storage == "fp32":
            return values
        largest = values.abs().amax(0).clamp(min=1e-30)
        scale = torch.exp2(largest.log2().floor() - 7)
        scaled = values / scale
        if self.storage == "fp8 nearest":
            return scaled.to(torch.float8_e4m3fn).float() * scale
        step = torch.exp2(scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
        return (scaled / step + torch.rand_like(scaled)).floor() * step * scale


class Texts:
    """Shakespeare and GSM8K as ids of their joint characters; the last tenth of each is held out."""

    def __init__(self, shakespeare: Path, gsm8k: Path) -> None:
        lines = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()]
        raw = {
            "scratch": shakespeare.read_text(encoding="utf-8"),
            "finetune": "\n\n".join(f"{line['question']}\n{line['answer']}" for line in lines),
        }
        letters = sorted(set("".join(raw.values())))
        index = {letter: place for place, letter in enumerate(letters)}
        self.vocabulary = len(letters)
        self.ids = {name: torch.tensor([index[letter] for letter in text]) for name, text in raw.items()}

    def batch(self, part: str, generator: torch.Generator) -> Tensor:
        ids = self.ids[TEXT[part]]
        train = ids[: int(0.9 * len(ids))]
        starts = torch.randint(0, len(train) - CONTEXT - 1, (BATCH[part],), generator=generator)
        return train[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]

    def validation_loss(self, part: str, model: nn.Module) -> float:
        ids = self.ids[TEXT[part]]
        held_out = ids[int(0.9 * len(ids)) :]
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, 256).long()
        with torch.no_grad():
            return loss_of(model, held_out[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]).item()


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(
    texts: Texts, part: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int
) -> list[float]:
    """Losses of the batches of a run."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for number in range(steps):
        factor = (number + 1) / WARMUP if number < WARMUP else 1 - 0.9 * (number - WARMUP) / (steps - WARMUP)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * factor
        loss = loss_of(model, texts.batch(part, generator))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def started_model(texts: Texts, part: str, seed: int) -> CharacterModel:
    """A fresh model, for the others pretrained once and kept beside the results."""
    torch.manual_seed(seed)
    model = CharacterModel(texts.vocabulary, 128)
    if part != "scratch":
        kept = Path(f"/tmp/taco_choices_{texts.vocabulary}_{seed}.pt")
        if not kept.exists():
            train(texts, "scratch", model, torch.optim.AdamW(model.parameters(), lr=4e-3), PRETRAINING, seed)
            torch.save(model.state_dict(), kept)
        model.load_state_dict(torch.load(kept))
    return model


def ensure(texts: Texts, rows: ResultRows, part: str, variant: str, lr: float, seed: int) -> None:
    if rows.has(part=part, variant=variant, lr=lr, seed=seed):
        return
    model = started_model(texts, part, seed)
    slots, decay, entry, storage = VARIANTS.get(variant, ("", "", "", ""))
    if variant == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    elif variant == "TernaryAdamW":
        optimizer = lt.TernaryAdamW(model.parameters(), lr=lr)
    elif variant == "TacoOneSparse":
        optimizer = lt.TacoOneSparse(model.parameters(), lr=lr)
    else:
        optimizer = Variant(model.parameters(), lr, slots, decay, entry, storage, VECTOR_RATES.get(variant, 1.0))
    began = time.perf_counter()
    losses = train(texts, part, model, optimizer, STEPS[part], seed)
    found = texts.validation_loss(part, model)
    # How far the batch loss, averaged over 8 steps, ever climbs above its lowest so far: 0 is a smooth run.
    smooth = [sum(losses[i : i + 8]) / 8 for i in range(len(losses) - 7)]
    rise = max(value - min(smooth[: i + 1]) for i, value in enumerate(smooth))
    row = rows.append(
        seed=seed, part=part, variant=variant, slots=slots, decay=decay, entry=entry, storage=storage, lr=lr,
        validation_loss=found if math.isfinite(found) else float("inf"), worst_rise=rise,
        seconds=time.perf_counter() - began,
    )  # fmt: skip
    text = f"{row['validation_loss']:>8}  rise {rise:.3f}  {row['seconds']} s"
    print(f"{part:9} {variant:30} lr {lr:.1e}  {text}", flush=True)


def summary(rows: ResultRows) -> None:
    for part in STEPS:
        for variant in dict.fromkeys(row["variant"] for row in rows.find(part=part)):
            found = {row["lr"]: float(row["validation_loss"]) for row in rows.find(part=part, variant=variant, seed=0)}
            best = min(found, key=found.__getitem__)
            print(f"{part:9} {variant:30} best lr {best:>7}: {found[best]:.3f}   {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shakespeare", type=Path)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--variants", default=";".join([*VARIANTS, "AdamW", "TernaryAdamW"]), help="separated by ;")
    parser.add_argument("--rates", default="", help="separated by commas, instead of RATES")
    parser.add_argument("--summary", action="store_true")
    arguments = parser.parse_args()
    rows = ResultRows("taco_choices", COLUMNS)
    if not arguments.summary:
        texts = Texts(arguments.shakespeare, arguments.gsm8k)
        for part in arguments.only.split(","):
            for variant in arguments.variants.split(";"):
                known = ADAM_RATES if variant in ("AdamW", "TernaryAdamW") else RATES
                rates = [float(rate) for rate in arguments.rates.split(",")] if arguments.rates else known[part]
                for lr in rates:
                    ensure(texts, rows, part, variant, lr, 0)
    summary(rows)


if __name__ == "__main__":
    main()

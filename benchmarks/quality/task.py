"""What a task is: data, a model, a loss, and how the trained model is judged."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class MissingData(Exception):
    """A task's data or model is not on this machine; the message says where it comes from. The task is skipped."""


@dataclass
class Evaluation:
    """Held-out loss of a trained model and, for classification, whether each held-out example was right."""

    loss: float
    correct: Tensor | None = None
    """Bool, one an example, in a fixed order."""

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else self.correct.float().mean().item()


class Task:
    """Base of the tasks. ``model(seed)``, ``batch(size, generator)``, ``loss(model, batch)``, ``evaluate(model)``.

    ``data``: the folder of the data files; raises MissingData where one is not there.
    """

    name = ""
    weights = "fp32"
    """Format of the weights: "fp32" or "bf16"."""
    pretrained = False
    """Whether training begins with a trained model."""
    smoke = False
    """A smoke test: it can fail a method, not rank it."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def model(self, seed: int) -> nn.Module:
        raise NotImplementedError

    def batch(self, size: int, generator: torch.Generator) -> Any:
        """The next batch; the same generator state gives the same batch whatever the method."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> Evaluation:
        raise NotImplementedError

    def file(self, name: str, source: str) -> Path:
        path = self.data / name
        if not path.is_file():
            raise MissingData(f"{path} is not there ({source})")
        return path

    def gsm8k(self, name: str) -> list[str]:
        """Question and answer of each row of a GSM8K file."""
        path = self.file(name, "GSM8K, github.com/openai/grade-school-math, MIT; one JSON object a line")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows]


class Windows:
    """Windows of ``length`` tokens at random places of a long text, and evenly spaced ones of its held-out part."""

    def __init__(self, train: Tensor, held_out: Tensor, length: int) -> None:
        self.train, self.held_out, self.length = train, held_out, length

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each (size, length): the targets are the inputs' successors."""
        starts = torch.randint(0, len(self.train) - self.length - 1, (size,), generator=generator)
        windows = self.train[starts.unsqueeze(1) + torch.arange(self.length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def held_out_windows(self, count: int) -> Tensor:
        """(count, length + 1)."""
        starts = torch.linspace(0, len(self.held_out) - self.length - 1, count).long()
        return self.held_out[starts.unsqueeze(1) + torch.arange(self.length + 1)]

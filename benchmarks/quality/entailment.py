"""RTE as the LOMO paper trains it: a language model reads a premise and a question and is scored by the likelihood of
its answer. SmolLM2-135M with bf16 weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from leantune.kernels.half_linear import use_fp32_products
from leantune.memory.traced.trace import decoder_and_head
from quality.sentence_pairs import RTE_SOURCE
from quality.task import Evaluation, MissingData, Task

ANSWERS = (" no", " yes")
"""Of "not_entailment" and "entailment": the text that follows the prompt."""
PROMPT = '{premise}\nQuestion: Does this imply that "{hypothesis}"? Yes or no?\nAnswer:'
PREMISE_TOKENS = 160
"""Premises are cut to so many tokens: 3 in a hundred are longer."""
TRAINED = 1000
"""Rows trained on, drawn once; all others of the training and development set (1,490 and 277) are held out."""


@dataclass
class Judged:
    """Held-out rows in their order: the answer's negative log-likelihood, fp32, and whether it beat the other one."""

    losses: Tensor
    correct: Tensor


class EntailmentTask:
    """``batches``, ``loss``, ``judge`` over RTE's rows.

    ``data``: the folder with its two files; ``layers``: the model's first ones alone, to rehearse (None: all).
    """

    def __init__(self, data: Path, layers: int | None = None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from leantune.errors import ConfigError
        from leantune.training.demo_model import demo_model_path

        rows = _rows(data)
        try:
            folder = demo_model_path()
        except ConfigError as error:
            raise MissingData(str(error)) from error
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.answers = torch.tensor([self._single_token(answer) for answer in ANSWERS])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        self.prompts = [self._prompt(rows[place]) for place in order]
        self.labels = torch.tensor([int(rows[place][3] == "entailment") for place in order])
        self.pristine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        if layers is not None:
            self.pristine.model.layers = self.pristine.model.layers[:layers]
            self.pristine.config.num_hidden_layers, self.pristine.config.layer_types = layers, None

    def _single_token(self, answer: str) -> int:
        ids = self.tokenizer.encode(answer)
        if len(ids) != 1:
            raise ValueError(f"{answer!r} is {len(ids)} tokens for this tokenizer; the scoring takes answers of one")
        return ids[0]

    def _prompt(self, row: list[str]) -> Tensor:
        """Token ids, int64."""
        cut = self.tokenizer(row[1], truncation=True, max_length=PREMISE_TOKENS)["input_ids"]
        premise = self.tokenizer.decode(cut)
        return torch.tensor(self.tokenizer.encode(PROMPT.format(premise=premise, hypothesis=row[2])))

    @property
    def trained(self) -> range:
        return range(TRAINED)

    @property
    def held_out(self) -> range:
        return range(TRAINED, len(self.labels))

    def model(self) -> nn.Module:
        """A fresh copy of SmolLM2, in training mode."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self.pristine.config, dtype=torch.bfloat16)
        model.load_state_dict(self.pristine.state_dict())
        use_fp32_products(model)
        return model.train()

    def batches(self, rows: range, size: int, epochs: int, generator: torch.Generator) -> list[list[int]]:
        """Places of the rows of each step. Rows of like length go together, within eight batches drawn at random."""
        steps = []
        for _ in range(epochs):
            order = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
            groups = []
            for first in range(0, len(order), 8 * size):
                near = sorted(order[first : first + 8 * size], key=lambda place: len(self.prompts[place]))
                groups += [near[start : start + size] for start in range(0, len(near), size)]
            steps += [groups[place] for place in torch.randperm(len(groups), generator=generator).tolist()]
        return steps

    def tokens(self, places: list[int]) -> int:
        return sum(len(self.prompts[place]) for place in places)

    def loss(self, model: nn.Module, places: list[int]) -> Tensor:
        """Mean negative log-likelihood of the right answers, over the whole vocabulary."""
        return functional.cross_entropy(self._logits(model, places), self.answers[self.labels[places]])

    def judge(self, model: nn.Module, rows: range, size: int = 32) -> Judged:
        """Every row of ``rows``, in their order."""
        order = sorted(rows, key=lambda place: len(self.prompts[place]))
        losses, correct = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.bool)
        model.eval()
        with torch.no_grad():
            for first in range(0, len(order), size):
                places = order[first : first + size]
                logits, labels = self._logits(model, places), self.labels[places]
                where = torch.tensor(places) - rows.start
                losses[where] = functional.cross_entropy(logits, self.answers[labels], reduction="none")
                correct[where] = logits[:, self.answers].argmax(dim=1) == labels
        return Judged(losses, correct)

    def _logits(self, model: nn.Module, places: list[int]) -> Tensor:
        """fp32 (rows, vocabulary) after each prompt's last token. Causal attention: padding behind needs no mask."""
        ids = [self.prompts[place] for place in places]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        decoder, head = decoder_and_head(model.get_base_model() if hasattr(model, "get_base_model") else model)
        hidden = decoder(input_ids=padded, use_cache=False).last_hidden_state
        last = torch.tensor([len(one) - 1 for one in ids])
        return head(hidden[torch.arange(len(ids)), last]).float()


class AnswerTask(Task):
    """The same as a `Task`: ``JUDGED`` of the held-out rows, and batches drawn row by row."""

    name = "rte-smollm"
    weights = "bf16"
    pretrained = True
    JUDGED = 400
    """The standard error of an accuracy is 2.5 points."""

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self.rte = EntailmentTask(data)

    def model(self, seed: int) -> nn.Module:
        return self.rte.model()

    def batch(self, size: int, generator: torch.Generator) -> list[int]:
        return torch.randint(0, TRAINED, (size,), generator=generator).tolist()

    def loss(self, model: nn.Module, batch: list[int]) -> Tensor:
        return self.rte.loss(model, batch)

    def evaluate(self, model: nn.Module) -> Evaluation:
        judged = self.rte.judge(model, range(TRAINED, TRAINED + self.JUDGED))
        return Evaluation(judged.losses.mean().item(), judged.correct)


def _rows(data: Path) -> list[list[str]]:
    """(index, premise, hypothesis, label) of both files. Raises MissingData."""
    rows = []
    for name in ("rte_train.tsv", "rte_dev.tsv"):
        if not (data / name).is_file():
            raise MissingData(f"{data / name} is not there ({RTE_SOURCE})")
        rows += [line.split("\t") for line in (data / name).read_text(encoding="utf-8").splitlines()[1:]]
    return rows

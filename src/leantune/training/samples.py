"""What the model answers while it is trained, and how many of its answers end by themselves.

A model that never learnt to end its turn has a fine loss and talks on until it is cut: only generating shows it.
"""

import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from transformers import GenerationConfig, TrainerCallback

from leantune.training.config import TrainConfig
from leantune.training.data.chat import IGNORED
from leantune.training.data.load import PreparedData

SAMPLES_FILE = "samples.jsonl"
_SHOWN = 400
"""Characters of a prompt's end, and of an answer, on the console; the file has all."""


@dataclass(frozen=True)
class Prompt:
    """Token ids that the model is asked to continue, and how the row does."""

    ids: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Sample:
    """An answer after ``step`` optimizer steps: greedy, of ``tokens`` tokens; ``stopped`` says that it ended itself."""

    step: int
    prompt: str
    answer: str
    reference: str
    tokens: int
    stopped: bool


def prompts_of(data: PreparedData, count: int) -> list[Prompt]:
    """The first ``count`` held-out rows as prompts, or training rows where none are held out."""
    rows = itertools.islice(data.train if data.held_out is None else data.held_out, count)
    return [split_row(row["input_ids"], row["labels"]) for row in rows]


def split_row(ids: Sequence[int], labels: Sequence[int]) -> Prompt:
    """A row before and after the point from which it is learnt; of text, learnt from its start, a first half of at most
    16 tokens is the prompt.

    >>> split_row([5, 6, 7, 8], [-100, -100, 7, 8])
    Prompt(ids=[5, 6], reference=[7, 8])
    >>> split_row([5, 6, 7, 8], [5, 6, 7, 8])
    Prompt(ids=[5, 6], reference=[7, 8])
    """
    start = next((place for place, label in enumerate(labels) if label != IGNORED), 0)
    if start < 2:  # text; a BOS token may be left out of what is learnt
        start = max(1, min(16, len(ids) // 2))
    end = next((place for place in range(start, len(labels)) if labels[place] == IGNORED), len(labels))
    return Prompt(list(ids[:start]), list(ids[start:end]))


@torch.no_grad()
def answers(
    model: Any, prompts: Sequence[Prompt], tokenizer: Any, max_new_tokens: int, batch_size: int
) -> list[list[int]]:
    """The tokens of a greedy answer to each prompt; the token that ends one is its last, where it came in time.

    Args:
        model: a causal language model; left in the mode it was in, random numbers too.
        prompts: of any lengths.
        tokenizer: the model's, with a padding token.
        max_new_tokens: where an answer that does not end is cut.
        batch_size: prompts answered at once; each keeps keys and values of all its tokens meanwhile.
    """
    ends = end_tokens(model, tokenizer)
    how = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id
    )
    training, random_state = model.training, torch.get_rng_state()
    model.eval()
    found: list[list[int]] = []
    try:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            width = max(len(prompt.ids) for prompt in batch)
            ids = torch.full((len(batch), width), tokenizer.pad_token_id)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(batch):
                ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
                mask[row, width - len(prompt.ids) :] = 1
            given = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
            out: Tensor = model.generate(**given, generation_config=how)
            found += [_until_end(row, ends) for row in out[:, width:].tolist()]
    finally:
        model.train(training)
        torch.set_rng_state(random_state)
    return found


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation config."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    return {int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None}


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def stopped_share(samples: Sequence[Sample]) -> float | None:
    """The share of answers that ended by themselves; None where there are none."""
    return sum(sample.stopped for sample in samples) / len(samples) if samples else None


class Sampler(TrainerCallback):
    """Every ``sample_every`` steps, and by `take` at the end: answers on the console and in samples.jsonl.

    ``last`` holds the latest answers, ``seconds`` what all of them took. Nothing is done where ``num_samples`` is 0.
    """

    def __init__(
        self, config: TrainConfig, trainer: Any, data: PreparedData, tokenizer: Any, folder: Path, console: Console
    ) -> None:
        self._config, self._trainer, self._tokenizer, self._console = config, trainer, tokenizer, console
        self._prompts = prompts_of(data, config.num_samples) if config.num_samples else []
        self.path = folder / SAMPLES_FILE
        self.last: list[Sample] = []
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Keep what was answered before the step a resumed run goes on from, and nothing else."""
        if not self._prompts:
            return
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() and state.global_step else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= state.global_step]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(aside, self.path)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Ask, where it is time; the answers after the last step are `take`'s."""
        every = self._config.sample_every
        if every and state.global_step % every == 0 and state.global_step < state.max_steps:
            self.take(state.global_step)

    def take(self, step: int) -> list[Sample]:
        """Answer every prompt with the weights as they are, and tell."""
        if not self._prompts:
            return []
        start = time.perf_counter()
        limit, batch = self._config.sample_tokens, self._config.per_device_train_batch_size
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        with self._trainer.accelerator.autocast():
            found = answers(model, self._prompts, self._tokenizer, limit, batch)
        ends = end_tokens(model, self._tokenizer)
        self.last = [
            Sample(
                step,
                self._tokenizer.decode(prompt.ids),
                self._tokenizer.decode(answer, skip_special_tokens=True),
                self._tokenizer.decode(prompt.reference, skip_special_tokens=True),
                len(answer),
                bool(answer) and answer[-1] in ends,
            )
            for prompt, answer in zip(self._prompts, found, strict=True)
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in self.last)
        self._tell(step)
        self.seconds += time.perf_counter() - start
        return self.last

    def _tell(self, step: int) -> None:
        for sample in self.last:
            how = "" if sample.stopped else " [dim](cut)[/dim]"
            asked, answer = escape(sample.prompt[-_SHOWN:]), escape(sample.answer[:_SHOWN])
            self._console.print(f"[bold]step {step}[/bold] [dim]{asked}[/dim]{answer}{how}", highlight=False)
        self._console.print(f"step {step}: {stopping(self.last, self._config.sample_tokens)}", highlight=False)


def stopping(samples: Sequence[Sample], limit: int) -> str:
    """ "3 of 4 answers stopped by themselves within 64 tokens"."""
    return f"{sum(s.stopped for s in samples)} of {len(samples)} answers stopped by themselves within {limit} tokens"

"""Task (c): SmolLM2-135M with bf16 weights, all of it fine-tuned on GSM8K text; whole, and cut to 4 layers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from leantune.kernels.half_linear import use_fp32_products
from quality.task import Evaluation, MissingData, Task, Windows

LENGTH = 128


class SmolTask(Task):
    """The whole model, 135 M parameters. It is the folder ``leantune demo`` keeps (see training/demo_model.py)."""

    name = "smollm"
    pretrained = True
    weights = "bf16"
    evaluated = 32
    """Held-out windows, of the test file's text."""
    layers: tuple[int, ...] | None = None
    """The layers kept; None: all."""

    def __init__(self, data: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from leantune.errors import ConfigError
        from leantune.training.demo_model import demo_model_path

        super().__init__(data)
        train, test = self.gsm8k("gsm8k_train_2000.jsonl"), self.gsm8k("gsm8k_test_400.jsonl")
        try:
            folder = demo_model_path()
        except ConfigError as error:
            raise MissingData(str(error)) from error
        tokenizer = AutoTokenizer.from_pretrained(folder)
        parts = [torch.cat([torch.tensor(tokenizer.encode(row)) for row in rows]) for rows in (train, test)]
        self.text = Windows(parts[0], parts[1], LENGTH)
        # Before cutting: use_fp32_products changes a model's layers, so every run gets a copy of untouched weights.
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.config, self.values = self._cut(loaded)

    def _cut(self, model: Any) -> tuple[Any, dict[str, Tensor]]:
        """The config and weights that a run starts from."""
        if self.layers is not None:
            model.model.layers = nn.ModuleList(model.model.layers[place] for place in self.layers)
            model.config.num_hidden_layers = len(self.layers)
            model.config.layer_types = None
        return model.config, model.state_dict()

    def model(self, seed: int) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        model.load_state_dict(self.values)
        use_fp32_products(model)
        torch.manual_seed(seed)
        return model.train()

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.text.batch(size, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch
        logits = model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        with torch.no_grad():
            windows = self.text.held_out_windows(self.evaluated).split(8)
            parts = [self.loss(model, (part[:, :-1], part[:, 1:])) for part in windows]
        return Evaluation(torch.stack(parts).mean().item())


class SmolCutTask(SmolTask):
    """Its first four layers and the vocabulary of the text: real width at a tenth of the cost.

    Only the embedding rows of tokens that occur are kept (the others would only be pushed away by the softmax). The
    last norm is scaled to a quarter: the head was made for the thirtieth layer's output, and on the fourth's it is so
    sure of itself that the loss starts at 16.3 and AdamW's seeds end 4 % apart. Scaled, they agree to 0.1 %.
    """

    name = "smollm-cut"
    evaluated = 64
    layers = (0, 1, 2, 3)
    norm_scale = 0.25

    def _cut(self, model: Any) -> tuple[Any, dict[str, Tensor]]:
        kept, places = torch.unique(torch.cat([self.text.train, self.text.held_out]), return_inverse=True)
        self.text.train, self.text.held_out = places.split([len(self.text.train), len(self.text.held_out)])
        embedding = model.get_input_embeddings()
        embedding.weight = nn.Parameter(embedding.weight.detach()[kept].clone())
        model.tie_weights()
        model.config.vocab_size = len(kept)
        for special in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(model.config, special, None)
        model.model.norm.weight.data.mul_(self.norm_scale)
        return super()._cut(model)

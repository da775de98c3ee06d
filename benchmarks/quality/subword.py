"""Tasks (b) and (e): small language models from scratch on subword text, dense and mixture-of-experts.

The text is Tiny Shakespeare and GSM8K's training questions and answers, cut by a byte-level BPE of 1,024 tokens learnt
on the spot from both training parts.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from quality.task import Evaluation, Task, Windows

VOCABULARY = 1024
LENGTH = 64
EVALUATED = 256
"""Held-out windows."""


class SubwordText(Windows):
    """Both texts as tokens, the last tenth of each held out."""

    def __init__(self, texts: list[str]) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        cuts = [int(0.9 * len(text)) for text in texts]
        train = [text[:cut] for text, cut in zip(texts, cuts)]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet)
        # By lines: as one piece, a text is one training sequence and its words are counted in one go all the same.
        tokenizer.train_from_iterator((line for text in train for line in text.splitlines(keepends=True)), trainer)

        def tokens(parts: list[str]) -> Tensor:
            return torch.cat([torch.tensor(tokenizer.encode(part).ids) for part in parts])

        super().__init__(tokens(train), tokens([text[cut:] for text, cut in zip(texts, cuts)]), LENGTH)


class SubwordTask(Task):
    def __init__(self, data: Path) -> None:
        super().__init__(data)
        plays = self.file("tinyshakespeare.txt", "Tiny Shakespeare, 1.1 MB of public-domain text")
        self.text = SubwordText([plays.read_text(encoding="utf-8"), "".join(self.gsm8k("gsm8k_train_2000.jsonl"))])

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.text.batch(size, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch
        logits = model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        windows = self.text.held_out_windows(EVALUATED)
        with torch.no_grad():
            parts = [SubwordTask.loss(self, model, (part[:, :-1], part[:, 1:])) for part in windows.split(32)]
        return Evaluation(torch.stack(parts).mean().item())


class LlamaTask(SubwordTask):
    """(b) transformers' Llama, 3 layers of width 192, tied head: 1.4 M parameters."""

    name = "llama"

    def model(self, seed: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.05,
        )
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


class WideTask(SubwordTask):
    """A Llama as wide as real ones, bf16 weights, tied head; shallow, so that it can be trained again and again."""

    weights = "bf16"
    width, layers = 0, 0

    def model(self, seed: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 128,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.02,
        )
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).bfloat16()


class Wide1024Task(WideTask):
    """2 layers of width 1,024: 19 M parameters."""

    name = "wide-1024"
    width, layers = 1024, 2


class Wide2048Task(WideTask):
    """1 layer of width 2,048: 40 M parameters."""

    name = "wide-2048"
    width, layers = 2048, 1


class MixtureTask(SubwordTask):
    """(e) transformers' Qwen3-MoE, 2 layers of width 128, 3-D weights of 8 experts, 2 answering: 1.8 M parameters.

    Trained on the library's own loss (cross-entropy and its load-balancing term), judged by cross-entropy.
    """

    name = "mixture"

    def model(self, seed: int) -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.05,
            output_router_logits=True,
        )
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch[0], batch[1].contiguous()
        # The library shifts labels itself; shift_labels takes ours, so that a window gives as many targets as inputs.
        return model(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss

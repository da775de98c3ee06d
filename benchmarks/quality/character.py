"""The character model and its text (also first_look.py's), and task (a) made of them."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from quality.task import Evaluation, Task, Windows

CONTEXT = 64


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
    """Attention (causal where asked) and an MLP of four times the width, each behind a norm."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Text(Windows):
    """The characters as ids; the last tenth is held out. The same seed draws the same batches for every method."""

    def __init__(self, path: Path) -> None:
        raw = path.read_text(encoding="utf-8")
        letters = sorted(set(raw))
        index = {letter: place for place, letter in enumerate(letters)}
        ids = torch.tensor([index[letter] for letter in raw])
        split = int(0.9 * len(ids))
        self.vocabulary = len(letters)
        super().__init__(ids[:split], ids[split:], CONTEXT)

    def validation_loss(self, model: nn.Module, windows: int = 512) -> float:
        with torch.no_grad():
            parts = [
                functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1).float(), piece[:, 1:].flatten())
                for piece in self.held_out_windows(windows).split(128)
            ]
        return torch.stack(parts).mean().item()


class CharacterTask(Task):
    """(a) 0.8 M parameters from scratch on Tiny Shakespeare."""

    name = "characters"
    width = 128

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self.text = Text(self.file("tinyshakespeare.txt", "Tiny Shakespeare, 1.1 MB of public-domain text"))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return CharacterModel(self.text.vocabulary, self.width)

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.text.batch(size, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch
        return functional.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        return Evaluation(self.text.validation_loss(model))

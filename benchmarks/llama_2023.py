"""The Llama of mid-2023, when the LOMO paper was measured: what its graph kept for backward.

It computes what today's Llama computes, but attention is written out and everything that autograd kept of it is kept
here too: the scores that ``max`` compares with the dtype's least number, the softmax once in fp32 and once in the
weights' dtype, an fp32 copy of each norm's input. Today's kernels (scaled dot-product attention) keep none of the
attention's squares. The loss keeps a log-softmax of the logits, and the trainers of the time held the model's output,
so the logits themselves, until backward was over.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Norm2023(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        normalised = x * torch.rsqrt(variance + 1e-6)
        return self.weight * normalised.to(self.weight.dtype)


class Attention2023(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """``x``: (batch, length, width); ``mask``: additive (length, length); ``turn``: cosines and sines of RoPE."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _turned(q, *turn), _turned(k, *turn)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(shape[-1]) + mask
        scores = torch.max(scores, torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype, device=x.device))
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width)
        return self.o_proj(mixed)


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Block2023(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm2023(width), Attention2023(width, heads)
        self.mlp_norm = Norm2023(width)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, turn)
        y = self.mlp_norm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama2023(nn.Module):
    """``forward(input_ids)``: logits. ``checkpointed``: each block keeps its input alone.

    ``vocabulary``, ``width``, ``inner`` (of the MLP), ``layers``, ``heads``; weights are fp32 until converted.
    """

    def __init__(
        self, vocabulary: int, width: int, inner: int, layers: int, heads: int, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block2023(width, inner, heads) for _ in range(layers))
        self.norm = Norm2023(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head_width, self.checkpointed = width // heads, checkpointed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        length = input_ids.shape[1]
        mask = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)
        turn = self._turn(x)
        for block in self.blocks:
            x = checkpoint(block, x, mask, turn, use_reentrant=False) if self.checkpointed else block(x, mask, turn)
        return self.head(self.norm(x))

    def _turn(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1], device=x.device)
        frequencies = 10000.0 ** (-torch.arange(0, self.head_width, 2, device=x.device) / self.head_width)
        angles = torch.outer(places, frequencies).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of "input_ids" and "labels", both (batch, length); the logits live as long as the loss."""
    logits = model(batch["input_ids"])
    shifted = logits[:, :-1].contiguous()
    loss = functional.cross_entropy(shifted.flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.output = logits  # type: ignore[attr-defined]
    return loss

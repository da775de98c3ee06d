"""An LSTM over characters, one cell a time step: VeLoRA's recurrent layers have a task."""

import torch
from torch import Tensor, nn

from quality.character import CharacterTask


class LSTMModel(nn.Module):
    """Embeddings, one `nn.LSTMCell` run along the text, and a head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """(rows, length, vocabulary) logits of (rows, length) ids."""
        state = None
        outputs = []
        for x in self.tokens(ids).unbind(dim=1):
            state = self.cell(x, state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, dim=1))


class RecurrentTask(CharacterTask):
    """Tiny Shakespeare, 0.15 M parameters."""

    name = "lstm"

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return LSTMModel(self.text.vocabulary, self.width)

"""Task (f), a smoke test: a small vision transformer and a CNN on scikit-learn's 1,797 digits of 8 x 8 pixels."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from quality.character import Block
from quality.task import Evaluation, MissingData, Task

HELD_OUT = 597


class VisionTransformer(nn.Module):
    """Sixteen patches of 2 x 2 pixels, two blocks of width 64."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.places = nn.Parameter(0.2 * torch.randn(16, width))
        self.blocks = nn.Sequential(Block(width, 4, causal=False), Block(width, 4, causal=False))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class Convolutions(nn.Sequential):
    """Two layers of 3 x 3 and a linear head."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 16, 10),
        )


class DigitsTask(Task):
    smoke = True
    architecture: type[nn.Module] = VisionTransformer

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise MissingData("scikit-learn is not installed (pip install scikit-learn)") from error
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        self.images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
        self.labels = torch.tensor(digits.target)[order].long()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.architecture()

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        places = torch.randint(HELD_OUT, len(self.labels), (size,), generator=generator)
        return self.images[places], self.labels[places]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> Evaluation:
        with torch.no_grad():
            logits = model(self.images[:HELD_OUT])
        labels = self.labels[:HELD_OUT]
        return Evaluation(functional.cross_entropy(logits, labels).item(), logits.argmax(dim=1) == labels)


class DigitsTransformerTask(DigitsTask):
    name = "digits-vit"


class DigitsConvolutionTask(DigitsTask):
    name = "digits-cnn"
    architecture = Convolutions

"""Readable oracles of the update rules, in float64 on whole tensors."""

import torch
from torch import Tensor


class LaProp:
    """Momentum of normalised gradients, exact states."""

    def __init__(self, weight: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.weight = weight.double().clone()
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.momentum, self.variance, self.steps = torch.zeros_like(self.weight), torch.zeros_like(self.weight), 0

    def step(self, grad: Tensor) -> None:
        beta1, beta2 = self.betas
        grad = grad.double()
        self.steps += 1
        self.variance = beta2 * self.variance + (1 - beta2) * grad**2
        normalised = grad / ((self.variance / (1 - beta2**self.steps)).sqrt() + self.eps)
        self.momentum = beta1 * self.momentum + (1 - beta1) * normalised
        self.weight = self.weight * (1 - self.lr * self.weight_decay) - self.lr * self.momentum


class AdaLomo:
    """Factored second moment, update brought to RMS 1 and scaled to the weight's RMS."""

    def __init__(self, weight: Tensor, lr: float) -> None:
        self.weight, self.lr, self.steps = weight.double().clone(), lr, 0
        self.rows = torch.zeros(weight.shape[0], dtype=torch.float64)
        self.cols = torch.zeros(weight.shape[1], dtype=torch.float64)

    def step(self, grad: Tensor) -> None:
        self.steps += 1
        beta = 1 - self.steps**-0.8
        square = grad.double() ** 2 + 1e-30
        self.rows = beta * self.rows + (1 - beta) * square.mean(dim=1)
        self.cols = beta * self.cols + (1 - beta) * square.mean(dim=0)
        update = grad.double() / (torch.outer(self.rows, self.cols) / self.rows.mean()).sqrt()
        rms = update.square().mean().sqrt().item()
        scale = max(1e-3, self.weight.square().mean().sqrt().item())
        self.weight = self.weight - self.lr * update / max(1.0, rms) * scale

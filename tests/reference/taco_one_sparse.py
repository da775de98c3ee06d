"""Readable oracle of the one-sparse rule: column after column, slot after slot, in float32 as the optimizer does it."""

import math

import numpy as np
import torch
from torch import Tensor

from leantune.codec.counter_hash import random_bits, splitmix64, stream_key

f32 = np.float32


class TacoOneSparse:
    """One fp32 matrix (m, n), the only parameter of its optimizer."""

    def __init__(self, weight: Tensor, lr: float, beta: float, slots: int, weight_decay: float = 0.0) -> None:
        self.weight = weight.numpy().copy()
        self.lr, self.beta, self.slots, self.weight_decay = lr, beta, slots, weight_decay
        height, width = weight.shape
        self.columns = [[(0, f32(0))] * slots for _ in range(width)]
        self.size = lr * height / width
        self.steps = 0
        self.evictions = 0

    def step(self, grad: Tensor) -> None:
        self.steps += 1
        key = splitmix64(stream_key(0, self.steps, 0))
        width = len(self.columns)
        noise = random_bits(key, 0, self.slots, 0, -(-width // 128), 128, torch.device("cpu")).view(self.slots, -1)
        self.weight *= f32(1 - self.lr * self.weight_decay)
        for j in range(width):
            row, sign = self.remember(j, grad[:, j].numpy())
            self.weight[row, j] -= f32(self.size) * sign
            self.columns[j] = as_stored(self.columns[j], [(int(bits) >> 16) & 0xFFFF for bits in noise[:, j]])

    def remember(self, j: int, grad: np.ndarray) -> tuple[int, np.float32]:
        """Update the history of column j; the entry that moves and the sign of its history."""
        beta, gain = f32(self.beta), f32(1 - self.beta)
        column = self.columns[j]
        known = {row for row, value in column if value != 0}
        column = [(row, beta * value + gain * grad[row] if value != 0 else value) for row, value in column]
        unknown = [row for row in range(len(grad)) if row not in known]
        if unknown:
            newcomer = max(unknown, key=lambda row: (abs(grad[row]), -row))
            weakest = min(range(len(column)), key=lambda slot: (abs(column[slot][1]), slot))
            if abs(gain * grad[newcomer]) > abs(column[weakest][1]):
                self.evictions += column[weakest][1] != 0
                column[weakest] = newcomer, gain * grad[newcomer]
        self.columns[j] = column
        row, value = max(column, key=lambda item: (abs(item[1]), -item[0]))
        return row, np.sign(value)


def as_stored(column: list, noise: list[int]) -> list:
    """What a column decodes to after it was kept as e4m3 numbers under one power-of-two scale."""
    largest = max(abs(value) for _, value in column)
    if largest < 2.0**-119:
        return [(row, f32(0)) for row, _ in column]
    scale = 2.0 ** (math.frexp(largest)[1] - 1 - 7)  # the largest becomes 128 or more, under 256
    return [(row, f32(rounded(float(value) / scale, bits) * scale)) for (row, value), bits in zip(column, noise)]


def rounded(value: float, bits: int) -> float:
    """Stochastically to 3 bits of mantissa, or to the grid of 2^-9 below 2^-6."""
    if abs(value) < 2.0**-6:
        return math.floor(f32(value * 2.0**9) + f32(bits / 65536)) * 2.0**-9
    unit = 2.0 ** (math.frexp(value)[1] - 1 - 3)
    return math.copysign(math.floor(abs(value) / unit + bits / 65536) * unit, value)

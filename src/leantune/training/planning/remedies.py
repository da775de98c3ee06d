"""What would make room: changes of a config, the one that frees the most first."""

from leantune.memory import format_bytes
from leantune.memory.parts import (
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    OPTIMIZER_STATES,
    RECOMPUTE,
    TEMPORARIES,
    WEIGHTS,
)
from leantune.training.config import TrainConfig


def remedies(config: TrainConfig, parts: dict[str, int]) -> list[str]:
    """Advice for a run whose peak is made of ``parts`` (bytes each): only what is not done already.

    Each line names the bytes it works on; how much of them it frees is for a plan of the changed config to say.
    """
    c = config
    passing = sum(parts.get(part, 0) for part in (ACTIVATIONS, RECOMPUTE, LOSS, TEMPORARIES))
    found: list[tuple[int, str]] = []

    def advise(size: int, text: str) -> None:
        if size > 0:
            found.append((size, text))

    states, gradients = parts.get(OPTIMIZER_STATES, 0), parts.get(GRADIENTS, 0)
    if c.optim not in ("ternary_adamw", "lomo", "adalomo", "taco_one_sparse"):
        advise(
            states, f"optim: ternary_adamw keeps about 0.45 bytes a parameter where states take {format_bytes(states)}"
        )
    if not c.fused:
        advise(gradients, f"fused_backward: true frees gradients inside backward ({format_bytes(gradients)} now)")
    if c.accumulate == "float32":
        advise(gradients // 2, "accumulate: bfloat16 halves the sums of gradients, which are then rounded")
    activations = parts.get(ACTIVATIONS, 0)
    if not c.gradient_checkpointing:
        text = (
            f"gradient_checkpointing: true keeps a block's input instead of all it makes ({format_bytes(activations)})"
        )
        advise(activations, f"{text}; a step takes about a third longer")
    if "loss" not in c.chosen_savings:
        loss = parts.get(LOSS, 0)
        advise(loss, f"exact_savings: true never makes the logits ({format_bytes(loss)} now)")
    if c.per_device_train_batch_size > 1:
        half = c.per_device_train_batch_size // 2
        text = f"per_device_train_batch_size: {half} in place of {c.per_device_train_batch_size}"
        advise(passing // 2, f"{text} takes about half of what grows with the batch ({format_bytes(passing)})")
    if c.max_length > 128:
        advise(passing // 2, f"max_length: {c.max_length // 2} takes about half of the same, and cuts longer rows")
    if c.method == "full":
        weights = parts.get(WEIGHTS, 0)
        if c.dtype == "float32":
            advise(weights // 2, f"dtype: bfloat16 halves the weights ({format_bytes(weights)})")
        advise(states + gradients, "method: lora trains adapters only: states and gradients shrink to theirs")
    return [text for _, text in sorted(found, key=lambda item: -item[0])]

"""VeLoRA's layers that train exactly because their approximate gradients point elsewhere: looked at before a run."""

from typing import Any

import torch

from leantune.activations.velora.handle import VeloraHandle
from leantune.training.trainer import LeanTrainer


def exact_where_poor(trainer: LeanTrainer, velora: VeloraHandle, min_cosine: float) -> str:
    """Probe a run's first batch; layers whose cosine is under ``min_cosine`` train exactly from now on. Returns what
    was found, a line a layer.

    No weight, gradient, direction or random state changes. Costs three forwards and a backward, with the activations of
    plain layers and, for a moment, one layer's exact gradient in fp32.
    """
    with torch.random.fork_rng(devices=[trainer.args.device] if trainer.args.device.type == "cuda" else []):
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    model: Any = trainer.model
    training = model.training
    model.train()
    try:
        report = velora.probe(model, batch, lambda model, batch: trainer.compute_loss(model, batch), min_cosine)
    finally:
        model.train(training)
    exact = sum(site.exact for site in velora.sites)
    return f"{report}\n{exact} of {len(velora.sites)} inputs are kept whole: cosine under {min_cosine:g}"

"""The balancing loss of a mixture of experts' router, which the trainer leaves out, as transformers' own does."""

from typing import Any


def leave_out_router_loss(model: Any) -> None:
    """Have ``model`` return no router logits: nothing is made of them, and they would be kept for backward."""
    if router_coefficient(model) is not None:
        model.config.get_text_config().output_router_logits = False


def router_coefficient(model: Any) -> float | None:
    """The weight that a mixture of experts gives its router's balancing loss; None of a model that has no such loss."""
    config = model.config.get_text_config()
    return getattr(config, "router_aux_loss_coef", None) if hasattr(config, "output_router_logits") else None


def keep_router_coefficient(model: Any, coefficient: float | None) -> None:
    """Write ``coefficient`` back where TRL, told to add no such loss, has set 0: the trained model keeps its own."""
    if coefficient is not None:
        model.config.get_text_config().router_aux_loss_coef = coefficient

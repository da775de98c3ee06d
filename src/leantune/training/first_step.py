"""What is checked once, when the first step of a run has its gradients."""

from collections.abc import Callable

from torch import Tensor, nn

from leantune.errors import BackwardError


def check_all_reached(model: nn.Module, reached: Callable[[Tensor], bool]) -> None:
    """Raise BackwardError naming the trainable parameters of ``model`` that got no gradient in the first step.

    ``reached`` says of a parameter whether it did. One that did not would silently stay as it is.
    """
    missed = [name for name, param in model.named_parameters() if param.requires_grad and not reached(param)]
    if missed:
        raise BackwardError(
            f"{len(missed)} trainable parameter(s) got no gradient in the first step "
            f"({', '.join(missed[:3])}{', ...' if len(missed) > 3 else ''}): they would never be trained. Freeze "
            "them (requires_grad_(False)) if that is meant; otherwise look for a detach(), an unused module, or "
            "checkpointing below frozen embeddings."
        )

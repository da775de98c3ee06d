"""bitsandbytes' 8-bit layers keep their input for backward even where the weight is frozen: let go of it.

``Linear8bitLt`` stores its input on the autograd node (outside of what saved-tensor hooks see) for the gradient of the
weight, which a frozen weight never has. The gradient of the input needs the weight alone.
"""

from typing import Any

from torch import Tensor, nn

_NODES = ("MatMul8bitFpBackward", "MatMul8bitLtBackward")
"""bitsandbytes 0.46 to 0.50: the first runs on a CPU in training, the second on CUDA."""


def is_int8_linear(module: nn.Module) -> bool:
    """Whether a module is bitsandbytes' ``Linear8bitLt``; bitsandbytes is not imported for it."""
    return any(
        kind.__name__ == "Linear8bitLt" and kind.__module__.startswith("bitsandbytes.") for kind in type(module).__mro__
    )


def release_input(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Forward hook for a ``Linear8bitLt``: drops the kept input from the node that has just been made.

    Does nothing where the weight is trained, where nothing is recorded for backward, and for an empty input.
    """
    weight = module.weight
    node: Any = output.grad_fn
    if node is None or (isinstance(weight, Tensor) and weight.requires_grad):
        return
    while node is not None and type(node).__name__ not in _NODES:
        following = node.next_functions
        node = following[0][0] if following else None
    if node is None or getattr(node, "is_empty", False):
        return
    if type(node).__name__ == "MatMul8bitFpBackward":
        node.A = None
    else:
        transposed, outliers, _ = node.tensors
        node.tensors = (transposed, outliers, None)

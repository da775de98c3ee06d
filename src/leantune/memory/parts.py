"""The parts into which training memory is divided: the same names in a plan, a measurement and a picture."""

WEIGHTS = "weights"
"""Parameters and buffers of the model."""
OPTIMIZER_STATES = "optimizer_states"
"""Tensors in ``optimizer.state``."""
GRADIENTS = "gradients"
"""What is, or becomes, some parameter's ``.grad``."""
ACTIVATIONS = "activations"
"""Made by forward and still alive when backward starts: what forward keeps for backward."""
RECOMPUTE = "recompute"
"""Made by a forward repeated inside backward (gradient checkpointing)."""
LOSS = "loss"
"""Tensors as wide as the vocabulary (logits, whole or in tiles), and what the loss's own autograd node makes."""
TEMPORARIES = "temporaries"
"""Everything else that lives for a moment: intermediate results of forward, gradients of activations."""
UPDATE = "update"
"""Temporaries of the optimizer's update of a parameter."""
INPUTS = "inputs"
"""Tensors that existed before the step and belong to none of the other parts: the batch, position tables."""

PARTS = (
    WEIGHTS,
    OPTIMIZER_STATES,
    GRADIENTS,
    ACTIVATIONS,
    RECOMPUTE,
    LOSS,
    TEMPORARIES,
    UPDATE,
    INPUTS,
)
"""Every part, in the order in which tables list them and pictures stack them."""

LABELS = {
    WEIGHTS: "weights",
    OPTIMIZER_STATES: "optimizer states",
    GRADIENTS: "gradients",
    ACTIVATIONS: "saved activations",
    RECOMPUTE: "recomputed activations",
    LOSS: "logits and loss",
    TEMPORARIES: "temporaries",
    UPDATE: "update temporaries",
    INPUTS: "batch and other inputs",
}
"""What a reader sees for each part."""

"""What a step or a stage used: tensors by part, and the process from outside."""

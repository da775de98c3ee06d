"""What a step will use, from one step on fake tensors."""

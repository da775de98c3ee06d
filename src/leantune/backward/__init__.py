"""When a gradient is ready: apply it and free it, inside backward."""

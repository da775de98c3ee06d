"""States of torch's and transformers' optimizers, loaded in the dtypes they were saved in.

``torch.optim.Optimizer.load_state_dict`` casts every state of a parameter to that parameter's dtype: float32 statistics
of a bfloat16 weight (Adafactor's) would go on rounded. leantune's own optimizers have a load of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


@contextmanager
def state_dtypes_kept(optimizer: Optimizer) -> Iterator[None]:
    """Inside, ``optimizer.load_state_dict`` keeps the dtype of every state tensor. No further copy is made of them."""
    saved: dict[tuple[Any, str], torch.Tensor] = {}

    def remember(loading: Optimizer, state_dict: dict[str, Any]) -> None:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in loading.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=False):  # torch refuses groups of other lengths itself
            for name, value in state_dict["state"].get(number, {}).items():
                if torch.is_tensor(value) and value.is_floating_point() and value.dtype != param.dtype:
                    saved[param, name] = value

    def restore(loaded: Optimizer) -> None:
        for (param, name), value in saved.items():
            device = loaded.state[param][name].device  # torch leaves step counts on the CPU
            loaded.state[param][name] = value.to(device)
        saved.clear()

    before = optimizer.register_load_state_dict_pre_hook(remember)
    after = optimizer.register_load_state_dict_post_hook(restore)
    try:
        yield
    finally:
        before.remove()
        after.remove()

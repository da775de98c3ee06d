"""States of optimizers that are not leantune's keep their dtypes when they are loaded."""

import copy

import torch
from transformers.optimization import Adafactor

from leantune.training.state_dtypes import state_dtypes_kept


def test_o1_float32_statistics_of_a_bfloat16_weight_stay_float32() -> None:
    param = torch.nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).bfloat16())
    first, plain, kept = (Adafactor([param], lr=1e-3, relative_step=False) for _ in range(3))
    param.grad = torch.full_like(param, 0.3)
    first.step()
    saved = copy.deepcopy(first.state_dict())
    plain.load_state_dict(copy.deepcopy(saved))
    assert plain.state[param]["exp_avg_sq_row"].dtype == torch.bfloat16  # what torch does by itself
    with state_dtypes_kept(kept):
        kept.load_state_dict(saved)
    assert kept.state[param].keys() == first.state[param].keys()
    for name, value in first.state[param].items():
        if torch.is_tensor(value):
            assert kept.state[param][name].dtype == value.dtype and torch.equal(kept.state[param][name], value), name
    kept.load_state_dict(saved)  # the hooks are gone
    assert kept.state[param]["exp_avg_sq_row"].dtype == torch.bfloat16

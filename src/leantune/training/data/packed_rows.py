"""Whether a model keeps packed rows apart, found out on the model itself."""

from typing import Any

import torch

from leantune.errors import ConfigError

_FIRST, _SECOND = 5, 6
_ROUNDING = 0.01  # of the largest logit: some kernels sum in another order when the first row changes


@torch.no_grad()
def check_packed_rows_apart(model: Any) -> None:
    """Raise ConfigError where a row of a packed batch can see the row before it (trap P9).

    Eleven tokens are run twice as two packed rows, of which the first is another one each time: the second must come
    out the same. ``model`` is a causal language model; its mode and the random state are left as they were.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    device = model.get_input_embeddings().weight.device
    second = (torch.arange(_SECOND) * 37 + 11) % rows
    places = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None].to(device)
    training, random_state = model.training, torch.get_rng_state()
    model.eval()
    try:
        outs = []
        for step in (1, 7):
            first = (torch.arange(_FIRST) * step + step) % rows
            ids = torch.cat([first, second])[None].to(device)
            logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
            outs.append(logits[0, _FIRST:].float())
    except TypeError as error:
        raise ConfigError(
            f"- packing: {type(model).__name__} takes no position_ids, so that {_LEAK}: {error}"
        ) from error
    finally:
        model.train(training)
        torch.set_rng_state(random_state)
    if (outs[0] - outs[1]).abs().max() > _ROUNDING * outs[0].abs().max():
        raise ConfigError(
            f"- packing: in {type(model).__name__} {_LEAK} (its attention reads no position_ids); write packing: false"
        )


_LEAK = "rows that are packed together would see one another"

"""Which steps enter the stored second moment."""

import pytest

from leantune.optim.sampling import LONGEST_INTERVAL, SAMPLES, last_stored, sampling, stored_share


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.99999])
def test_every_gradient_has_the_weight_its_step_would_have_had(beta2: float) -> None:
    """A stored v has the weights of a running mean over all steps, gathered on those that are stored; what a step uses
    is divided by the sum of its weights."""
    weights: dict[int, float] = {}
    for step in range(1, 600):
        stored, decay, bias = sampling(step, beta2)
        used = {number: weight * decay for number, weight in weights.items()} | {step: 1 - decay}
        assert sum(used.values()) * bias == pytest.approx(1)
        if stored:
            assert step == last_stored(step, beta2)
            weights = used
        assert sum(weights.values()) == pytest.approx(stored_share(step, beta2) * (1 - beta2**step))
        assert step - last_stored(step, beta2) < LONGEST_INTERVAL
    for number, weight in weights.items():
        assert weight == pytest.approx(sum(beta2 ** (max(weights) - k) * (1 - beta2) for k in covered(number, beta2)))


def covered(step: int, beta2: float) -> range:
    return range(last_stored(step - 1, beta2) + 1, step + 1)


@pytest.mark.parametrize("beta2", [0.9, 0.98, 0.99, 0.999])
def test_the_window_holds_enough_samples(beta2: float) -> None:
    stored = [0]
    for step in range(1, 3000):
        stored.append(stored[-1] + sampling(step, beta2).stored)
        window = int(min(step, 1 / (1 - beta2)))
        assert stored[step] - stored[step - window] >= min(window, SAMPLES - 1)

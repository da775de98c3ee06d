"""Pictures are written, and hold what they should."""

import pytest
import torch
from torch import nn

from leantune.errors import InvalidArgumentError
from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.reports.plots import plot_loss, plot_memory


@pytest.fixture(scope="module")
def timeline():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as tracker:
        model(torch.ones(128, 64)).sum().backward()
        optimizer.step()
    return tracker.timeline()


def pixels(path):
    from matplotlib.image import imread

    return imread(path)[..., :3]


def has_colour(image, colour, at_least):
    wanted = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    near = (torch.tensor(image) - wanted).abs().amax(-1) < 0.02
    return int(near.sum()) >= at_least


def test_memory_picture_shows_each_part(timeline, tmp_path):
    from leantune.memory.reports.plots import COLOURS

    path = plot_memory(timeline, tmp_path / "deep" / "memory.png", plan_total=timeline.peak_bytes * 2, title="128 x 1")
    image = pixels(path)
    for part in ("weights", "optimizer_states", "gradients", "activations"):
        assert has_colour(image, COLOURS[part], at_least=300), part
    assert not has_colour(image, COLOURS["recompute"], at_least=100)
    assert image.shape[1] > image.shape[0] > 400


def test_loss_picture_with_and_without_held_out_points(tmp_path):
    from leantune.memory.reports.plots import COLOURS

    steps = list(range(1, 61))
    losses = [3.0 / step for step in steps]
    losses[10] = float("nan")
    both = pixels(plot_loss(steps, losses, tmp_path / "loss.png", heldout=[(0, 3.2), (60, 0.4)]))
    alone = pixels(plot_loss(steps, losses, tmp_path / "alone.png"))
    assert has_colour(both, COLOURS["gradients"], at_least=200)
    assert not has_colour(alone, COLOURS["gradients"], at_least=1)
    plot_loss([], [], tmp_path / "empty.png")
    plot_loss([1], [2.0], tmp_path / "one.png")


def test_pictures_leave_the_users_backend_alone(timeline, tmp_path):
    import sys

    before = "matplotlib.pyplot" in sys.modules
    plot_memory(timeline, tmp_path / "memory.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="2 steps and 1 losses"):
        plot_loss([1, 2], [1.0], tmp_path / "loss.png")
    with pytest.raises(InvalidArgumentError, match="smooth is 1"):
        plot_loss([1], [1.0], tmp_path / "loss.png", smooth=1.0)

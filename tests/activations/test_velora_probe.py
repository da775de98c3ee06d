"""A probe tells the truth about weight gradients and bytes, and leaves no trace; checkpointing is warned of."""

import copy
import warnings

import pytest
import torch
from memory.tiny_llama import tiny_llama
from torch import Tensor, nn

import leantune as lt
from leantune.errors import InvalidArgumentError

WIDTH, GROUPS = 64, 8


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH + 2)
    )


def batch(seed: int = 1) -> Tensor:
    return torch.rand(10, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("groups", [GROUPS, 7])  # the second leaves a padded tail
def test_the_cosine_is_that_of_the_two_gradients_of_a_step(groups: int) -> None:
    exact = network()
    changed = copy.deepcopy(exact)
    handle = lt.apply_velora(changed, ["0", "4"], num_groups=groups)
    square(changed, batch(0))  # sets the directions
    changed.zero_grad()
    torch.manual_seed(3)
    report = handle.probe(changed, batch(), square)
    for model in (exact, changed):
        torch.manual_seed(3)
        square(model, batch()).backward()
    for row, name in zip(report.rows, ("0", "4"), strict=True):
        grads = [model.get_submodule(name).weight.grad.flatten() for model in (exact, changed)]
        assert row.cosine == pytest.approx(float(torch.cosine_similarity(*grads, dim=0)), abs=1e-5)
        assert 0 < row.kept_energy < 1
    assert [row.cosine for row in handle.report().rows] == [row.cosine for row in report.rows]
    assert "cosine of the weight gradient" in str(report)


def test_a_probe_changes_nothing() -> None:
    model = network()
    handle = lt.apply_velora(model, ["0", "4"], num_groups=GROUPS)
    optimizer = lt.Lomo(model.named_parameters(), lr=0.1)
    lt.FusedBackward(optimizer, model)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = handle.probe(model, batch(), square)
    assert report.rows[0].cosine is not None
    assert handle.state_dict() == {} and torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert handle.report().exact_bytes == 0
    model.eval()
    with pytest.raises(InvalidArgumentError, match=r"model\.train"):
        handle.probe(model, batch(), square)


def test_the_bytes_are_those_that_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    handle = lt.apply_velora(model, ["2", "4"], num_groups=GROUPS)
    report = handle.probe(model, batch(), square)
    # What follows the ReLU is kept by it: there Z comes on top.
    exact, kept, vector = 10 * WIDTH * 4, 10 * GROUPS * 4, WIDTH // GROUPS * 4
    assert report.saved_bytes == exact - 2 * (kept + vector)
    frozen = lt.apply_velora(copy_of(model, handle), ["2"], num_groups=GROUPS, factored=True)
    report = frozen.probe(frozen._model, batch(), square)
    norms = GROUPS * 4
    assert report.saved_bytes == exact - kept - vector - norms


def copy_of(model: nn.Module, handle: lt.apply_velora) -> nn.Module:
    handle.remove()
    return copy.deepcopy(model)


def test_recurrent_cells_are_probed_over_all_their_steps() -> None:
    torch.manual_seed(0)
    exact = nn.LSTMCell(WIDTH, WIDTH)
    model = nn.Sequential(copy.deepcopy(exact))

    def through_time(layer: nn.Module, x: Tensor) -> Tensor:
        state, total = None, 0.0
        for token in x:
            state = layer(token, state)
            total = total + state[0].square().sum()
        return total

    handle = lt.apply_velora(model, ["0"], num_groups=GROUPS)
    x = torch.rand(4, 3, WIDTH)
    through_time(model[0], x)
    report = handle.probe(model, x, lambda model, x: through_time(model[0], x))
    through_time(exact, x).backward()
    through_time(model[0], x).backward()
    for row, name in zip(report.rows, ("weight_ih", "weight_hh"), strict=True):
        grads = [getattr(layer, name).grad.flatten() for layer in (exact, model[0])]
        assert row.cosine == pytest.approx(float(torch.cosine_similarity(*grads, dim=0)), abs=1e-5)


def test_layers_under_the_threshold_go_back_to_exact_gradients(tmp_path) -> None:
    model = network()
    handle = lt.apply_velora(model, ["0", "4"], num_groups=GROUPS)
    square(model, batch())
    low, high = sorted(row.cosine for row in handle.probe(model, batch(), square).rows)
    handle.probe(model, batch(), square, min_cosine=(low + high) / 2)
    fallen = [row.name for row in handle.report().rows if row.exact]
    assert len(fallen) == 1 and "under the threshold" in str(handle.report())
    plain = nn.Linear(WIDTH, model.get_submodule(fallen[0]).out_features)
    layer = model.get_submodule(fallen[0])
    plain.load_state_dict(layer.state_dict())
    for one in (plain, layer):
        one.zero_grad()
        one(batch()).square().sum().backward()
    assert torch.equal(plain.weight.grad, layer.weight.grad)
    handle.save(tmp_path / "velora.safetensors")
    again = lt.apply_velora(network(), ["0", "4"], num_groups=GROUPS)
    again.load(tmp_path / "velora.safetensors")
    assert [row.name for row in again.report().rows if row.exact] == fallen
    with pytest.raises(InvalidArgumentError, match="factored"):
        lt.apply_velora(network(), ["0"], num_groups=GROUPS, factored=True).probe(model, batch(), square, 0.5)


def test_a2_checkpointed_blocks_are_warned_of_before_training_and_counted() -> None:
    model = tiny_llama(checkpointing=True)
    with pytest.warns(UserWarning, match="under gradient checkpointing"):
        handle = lt.apply_velora(model, ["down_proj"], num_groups=GROUPS)
    assert [row.block for row in handle.report().rows] == ["model.layers.0", "model.layers.1"]
    ids = torch.randint(0, 500, (2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input_ids=ids, labels=ids).loss.backward()
    report = handle.report()
    assert report.saved_bytes == 0 and report.recomputation_bytes == 12 * (160 - GROUPS) * 2
    assert "made again by gradient checkpointing" in str(report)
    report = handle.probe(model, ids, lambda model, ids: model(input_ids=ids, labels=ids).loss)
    assert report.saved_bytes == 0 and all(row.cosine is not None for row in report.rows)


def test_a2_every_other_block_is_told_apart() -> None:
    model = tiny_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, every_n_layers=2)
    with pytest.warns(UserWarning, match="under gradient checkpointing"):
        handle = lt.apply_velora(model, ["down_proj"], num_groups=GROUPS)
    assert [row.block for row in handle.report().rows] == ["model.layers.0", None]


def test_targets_are_told_which_siblings_keep_their_input() -> None:
    model = tiny_llama(dtype=torch.float32)
    handle = lt.apply_velora(model, ["q_proj", "up_proj", "gate_proj"], num_groups=GROUPS)
    ids = torch.randint(0, 500, (2, 6))
    model(input_ids=ids, labels=ids).loss.backward()
    rows = {row.name.rpartition(".")[2]: row for row in handle.report().rows}
    assert rows["q_proj"].kept_by == "kept by k_proj, v_proj" and rows["q_proj"].saved_bytes == 0
    assert rows["up_proj"].kept_by is None and rows["gate_proj"].kept_by is None
    assert rows["gate_proj"].saved_bytes + rows["up_proj"].saved_bytes == 12 * (64 - 2 * GROUPS) * 4

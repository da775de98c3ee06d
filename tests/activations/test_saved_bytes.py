"""Counted bytes are the real ones: each storage once, no parameter, and the same on tensors without data."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import leantune as lt
from leantune.activations.saved_bytes import SavedBytes
from leantune.errors import InvalidArgumentError


def test_a_shared_input_is_counted_once_and_attributed_to_the_first_that_saves_it():
    model = nn.ModuleDict({name: nn.Linear(16, 8) for name in ("q", "k")})
    x = torch.randn(5, 16)
    with SavedBytes(model) as saved:
        model["q"](x) + model["k"](x)
    assert saved.bytes == x.nbytes
    assert saved.by_module == {"q": x.nbytes}


@pytest.mark.parametrize("given", [True, False])
def test_parameters_and_views_of_them_are_not_counted(given):
    layer = nn.Linear(16, 8)
    x = torch.randn(5, 16, requires_grad=True)
    with SavedBytes(layer if given else None) as saved:
        layer(x)
    assert saved.bytes == x.nbytes


def test_a_small_view_counts_its_whole_storage():
    big = torch.randn(100, 16)
    with SavedBytes() as saved:
        nn.Linear(16, 8)(big[:1])
    assert saved.bytes == big.nbytes


def test_storages_whose_address_is_reused_are_counted_each():
    layer = nn.Linear(16, 16)
    with SavedBytes(layer) as saved:
        for _ in range(20):
            layer(torch.randn(64, 16))
    assert saved.bytes == 20 * 64 * 16 * 4


def test_meta_and_fake_tensors_count_as_real_ones():
    def count(device):
        model = nn.Sequential(nn.Linear(16, 32, device=device), nn.GELU(), nn.Linear(32, 4, device=device))
        with SavedBytes(model) as saved:
            model(torch.randn(5, 16, device=device))
        return saved.bytes, saved.by_module

    with FakeTensorMode():
        fake = count("cpu")
    assert count("cpu") == count("meta") == fake
    assert fake[0] == 4 * (5 * 16 + 5 * 32 + 5 * 32)


def test_gradients_are_unchanged_and_hooks_are_gone_afterwards():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(5, 16)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with SavedBytes(model):
        y = model(x)
    y.sum().backward()
    assert all(torch.equal(p.grad, expected) for p, expected in zip(model.parameters(), plain))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_inside_leaves_no_hook():
    model = nn.Sequential(nn.Linear(16, 4))
    with pytest.raises(RuntimeError), SavedBytes(model):
        model(torch.randn(5, 3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_used_counter_is_refused():
    saved = SavedBytes()
    with saved:
        pass
    with pytest.raises(InvalidArgumentError, match="used already"), saved:
        pass


@pytest.mark.parametrize("features", [48, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a8_velora_saves_its_prediction_to_the_byte(features, dtype):
    model = nn.Sequential(nn.Linear(20, features), nn.GELU(), nn.Linear(features, 24)).to(dtype)
    x = torch.randn(2, 5, 20).to(dtype)
    with SavedBytes(model) as plain:
        model(x)
    handle = lt.apply_velora(model, ["2"], num_groups=8)
    with SavedBytes(model) as changed:
        model(x)
    exact, kept = handle.predicted_bytes(10)
    vector = handle.state_dict()["2"].nbytes
    assert plain.by_module["2"] == exact == 10 * features * dtype.itemsize
    assert changed.by_module["2"] == kept + vector
    assert plain.bytes - changed.bytes == exact - kept - vector == handle.report().saved_bytes - vector


def test_an_operator_that_saves_its_own_result_is_freed_with_it() -> None:
    x = torch.randn(100, requires_grad=True)
    with SavedBytes() as saved:
        y = x.exp()
    storage = StorageWeakRef(y.untyped_storage())
    y.sum().backward()
    assert saved.bytes == y.nbytes and torch.equal(x.grad, y)
    del y
    assert storage.expired()

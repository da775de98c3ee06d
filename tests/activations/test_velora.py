"""VeLoRA: exact where it says exact, equal to its oracle where it approximates, and as small as predicted."""

import copy

import pytest
import torch
from reference.velora import weight_gradient
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import leantune as lt
from leantune.activations.velora.direction import FeatureSums, mean_direction
from leantune.activations.velora.projection import SubTokens, kept_energy, project
from leantune.errors import InvalidArgumentError, InvalidTypeError, StateMismatchError


def layer_pair(
    features: int, groups: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, nn.Linear, lt.apply_velora]:
    torch.manual_seed(0)
    plain = nn.Linear(features, 24).to(dtype)
    changed = nn.Sequential(copy.deepcopy(plain))
    return plain, changed[0], lt.apply_velora(changed, ["0"], num_groups=groups)


def run(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_(True)
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.parametrize(("features", "groups"), [(48, 8), (48, 48), (48, 1), (50, 8), (7, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a8_forward_and_dx_are_exact_and_dw_is_the_oracles(features: int, groups: int, dtype: torch.dtype) -> None:
    plain, changed, handle = layer_pair(features, groups, dtype)
    x, grad = (torch.randn(3, 5, size).to(dtype) + 0.5 for size in (features, 24))
    (y, dx), (y2, dx2) = run(plain, x, grad), run(changed, x, grad)
    assert torch.equal(y, y2) and torch.equal(dx, dx2)
    torch.testing.assert_close(changed.bias.grad, plain.bias.grad)
    size = SubTokens.of(features, groups).size
    expected = weight_gradient(x.flatten(0, 1), grad.flatten(0, 1), handle.state_dict()["0"], size)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert changed.weight.grad.dtype == dtype
    error = (changed.weight.grad.double() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.mark.parametrize(("features", "groups"), [(48, 8), (50, 8)])
def test_saved_bytes_are_the_predicted_ones(features: int, groups: int) -> None:
    _, changed, handle = layer_pair(features, groups)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        changed(torch.randn(10, features))
    kept = sum(t.nbytes for t in saved if t is not changed.weight and t.dim() == 2)
    assert kept == handle.predicted_bytes(10)[1] == handle.report().kept_bytes
    assert handle.predicted_bytes(10)[0] == 10 * features * 4 == handle.report().exact_bytes
    assert not any(t.numel() == 10 * features for t in saved)


def test_autocast_computes_as_the_plain_layer_does() -> None:
    plain, changed, _ = layer_pair(48, 8)
    x = torch.randn(6, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = plain(x), changed(x)
    assert a.dtype == b.dtype == torch.bfloat16 and torch.equal(a, b)
    b.float().sum().backward()
    assert changed.weight.grad.dtype == torch.float32


def test_evaluation_is_exact_and_never_sets_the_direction() -> None:
    plain, changed, handle = layer_pair(48, 8)
    changed.eval()
    x = torch.randn(4, 48)
    assert torch.equal(changed(x), plain(x))
    changed.train()
    with torch.no_grad():
        changed(x)
    assert handle.state_dict() == {}
    changed(x)
    first = handle.state_dict()["0"]
    changed(x + 5)
    assert torch.equal(handle.state_dict()["0"], first)
    assert first.norm().item() == pytest.approx(1, abs=1e-6)


def test_g14_two_backwards_over_one_forward_are_equal_and_checkpointing_works() -> None:
    _, changed, _ = layer_pair(48, 8)
    x = torch.randn(6, 48, requires_grad=True)
    loss = changed(x).square().sum()
    loss.backward(retain_graph=True)
    first = changed.weight.grad.clone()
    changed.weight.grad = None
    loss.backward()
    assert torch.equal(first, changed.weight.grad)
    changed.weight.grad = None
    checkpoint(changed, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(first, changed.weight.grad)


def test_a9_directions_survive_saving(tmp_path) -> None:
    _, changed, handle = layer_pair(48, 8)
    changed(torch.randn(4, 48))
    handle.save(tmp_path / "velora.safetensors")
    _, _, other = layer_pair(48, 8)
    other.load(tmp_path / "velora.safetensors")
    assert torch.equal(other.state_dict()["0"], handle.state_dict()["0"])
    _, _, wrong = layer_pair(48, 4)
    with pytest.raises(StateMismatchError, match="num_groups"):
        wrong.load(tmp_path / "velora.safetensors")


def test_a10_a_target_that_matches_nothing_lists_close_names() -> None:
    model = nn.ModuleDict({"down_proj": nn.Linear(8, 8), "up_proj": nn.Linear(8, 8)})
    with pytest.raises(InvalidArgumentError, match="down_proj"):
        lt.apply_velora(model, ["donw_proj"])
    with pytest.raises(InvalidArgumentError, match="matches no module"):
        lt.apply_velora(model, r"layers\.\d+\.x")


def test_what_cannot_work_is_refused_before_anything_changes() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 8), "b": nn.Bilinear(4, 4, 4), "c": nn.Linear(64, 8)})
    model["c"].requires_grad_(False)
    for targets, error in ((["a", "b"], InvalidTypeError), (["a", "c"], InvalidArgumentError)):
        with pytest.raises(error):
            lt.apply_velora(model, targets, num_groups=8)
        assert "forward" not in model["a"].__dict__
    with pytest.raises(InvalidArgumentError, match="num_groups"):
        lt.apply_velora(model, ["a"], num_groups=65)
    with pytest.raises(InvalidArgumentError, match="regular expression"):
        lt.apply_velora(model, "(")
    for targets in (None, [0]):
        with pytest.raises(InvalidTypeError, match="list of names"):
            lt.apply_velora(model, targets)  # type: ignore[arg-type]
    handle = lt.apply_velora(model, ["a"], num_groups=8)
    with pytest.raises(InvalidArgumentError, match="already"):
        lt.apply_velora(model, ["a"], num_groups=8)
    with pytest.raises(InvalidTypeError, match="deep-copied"):
        copy.deepcopy(model)
    handle.remove()
    copy.deepcopy(model)
    assert "forward" not in model["a"].__dict__ and set(model.state_dict()) == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
        "c.weight",
        "c.bias",
    }


def test_an_input_kept_by_a_sibling_is_said_to_save_nothing() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q_proj", "k_proj", "v_proj", "down_proj")})
    block = nn.ModuleDict({"block": model})
    handle = lt.apply_velora(block, ["q_proj", "down_proj"])
    x = torch.randn(5, 64)
    for name, layer in model.items():
        layer(x.clone() if name == "down_proj" else x)
    rows = {row.name: row for row in handle.report().rows}
    assert rows["block.q_proj"].kept_anyway and rows["block.q_proj"].saved_bytes == 0
    assert rows["block.down_proj"].saved_bytes == 5 * (64 - 32) * 4
    assert "nothing saved" in str(handle.report())


def test_kept_energy_is_one_for_a_rank_one_batch() -> None:
    _, changed, handle = layer_pair(48, 8)
    direction = torch.randn(6)
    x = torch.outer(torch.rand(10) + 0.5, direction.repeat(8))
    changed(x)
    assert handle.report().rows[0].kept_energy == pytest.approx(1.0, abs=1e-4)


def test_a_trace_on_fake_tensors_changes_neither_direction_nor_report() -> None:
    for trained_first in (False, True):
        _, changed, handle = layer_pair(48, 8)
        if trained_first:
            changed(torch.randn(4, 48))
        before, report = handle.state_dict(), str(handle.report())
        x = torch.randn(7, 48)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(x)
            assert changed(fake).shape == (7, 24)
        assert str(handle.report()) == report and handle.state_dict().keys() == before.keys()
        assert all(torch.equal(v, before[name]) for name, v in handle.state_dict().items())


def test_remove_refuses_to_drop_a_later_change_of_forward() -> None:
    _, changed, handle = layer_pair(48, 8)
    ours = changed.forward
    changed.forward = later = lambda x: ours(x)
    with pytest.raises(StateMismatchError, match="replaced after apply_velora"):
        handle.remove()
    assert changed.__dict__["forward"] is later
    changed.forward = ours
    handle.remove()
    assert "forward" not in changed.__dict__


@pytest.mark.parametrize("features", [1536, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a8_nothing_of_the_inputs_size_is_allocated(features: int, dtype: torch.dtype) -> None:
    cut = SubTokens.of(features, 32)
    x, v = (torch.randn(2048, features) + 0.5).to(dtype), torch.randn(cut.size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        z = project(x, v, cut)
        energy = kept_energy(x, z)
        direction = mean_direction(FeatureSums.of(x), cut)
    events = profiler.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert z.nbytes <= largest < x.nbytes / 4
    wide = x.double()
    assert float(energy) == pytest.approx(float(z.double().square().sum() / wide.square().sum()), rel=1e-4)
    padded = torch.nn.functional.pad(wide.mean(dim=0), (0, cut.groups * cut.size - features))
    mean = padded.view(cut.groups, cut.size).mean(dim=0)
    torch.testing.assert_close(direction.double(), mean / mean.norm(), rtol=1e-5, atol=1e-7)

"""What VeLoRA claims to save is what autograd no longer keeps; and batches without a direction, or without data."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import leantune as lt
from leantune.activations.saved_bytes import SavedBytes
from leantune.errors import InvalidArgumentError

TOKENS, WIDTH, GROUPS = 10, 64, 8
EXACT, KEPT, VECTOR = TOKENS * WIDTH * 4, TOKENS * GROUPS * 4, WIDTH // GROUPS * 4


class Attention(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1.0
        return self.q_proj(x) + self.k_proj(x) + self.v_proj(x)


def really_saved(model: nn.Module, targets: list[str]) -> tuple[int, int]:
    """(bytes that autograd keeps less with VeLoRA, the vectors' apart; bytes the report claims after a step)."""
    x = torch.randn(TOKENS, WIDTH)
    with SavedBytes(model) as plain:
        model(x)
    handle = lt.apply_velora(model, targets, num_groups=GROUPS)
    model(x)
    with SavedBytes(model) as changed:
        model(x)
    model(x.clone()).sum().backward()
    vectors = VECTOR * len(handle.state_dict())
    return plain.bytes - changed.bytes + vectors, handle.report().saved_bytes


def test_siblings_that_are_all_targets_would_have_kept_their_input_once():
    real, claimed = really_saved(nn.Sequential(Attention()), ["q_proj", "k_proj", "v_proj"])
    assert claimed == real == EXACT - 3 * KEPT


def test_frozen_siblings_keep_nothing():
    model = Attention()
    model.k_proj.requires_grad_(False)
    model.v_proj.requires_grad_(False)
    real, claimed = really_saved(model, ["q_proj"])
    assert claimed == real == EXACT - KEPT


@pytest.mark.parametrize(("between", "saving"), [(nn.ReLU(), 0), (nn.GELU(), EXACT - KEPT)])
def test_an_input_that_the_activation_before_keeps_is_said_to_save_nothing(between, saving):
    real, claimed = really_saved(nn.Sequential(nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, WIDTH)), ["2"])
    assert claimed == saving
    assert max(real, 0) == saving


def test_a2_a_checkpointed_layer_is_said_to_save_nothing():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    handle = lt.apply_velora(model, ["2"], num_groups=GROUPS)
    checkpoint(model, torch.randn(TOKENS, WIDTH), use_reentrant=False).sum().backward()
    assert handle.report().saved_bytes == 0


def test_tensors_without_data_leave_direction_and_report_alone():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    handle = lt.apply_velora(model, ["0"], num_groups=GROUPS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(torch.randn(3, WIDTH)))
    assert handle.state_dict() == {}
    model(torch.rand(TOKENS, WIDTH))
    before = str(handle.report())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(torch.randn(3, WIDTH)))
    assert str(handle.report()) == before


@pytest.mark.parametrize("empty", [torch.zeros(4, WIDTH), torch.zeros(0, WIDTH)])
def test_a_batch_without_a_direction_trains_exactly_and_the_next_one_sets_it(empty):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    handle = lt.apply_velora(model, ["0"], num_groups=GROUPS)
    model(empty).sum().backward()
    assert handle.state_dict() == {} and not model[0].weight.grad.any()
    model(torch.rand(4, WIDTH))
    assert list(handle.state_dict()) == ["0"]


def test_sub_tokens_that_cancel_are_refused():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    lt.apply_velora(model, ["0"], num_groups=GROUPS)
    x = torch.ones(2, WIDTH)
    x[1] = -1
    with pytest.raises(InvalidArgumentError, match="average to zero"):
        model(x)


def test_float64_layers_train_and_report():
    model = nn.Sequential(nn.Linear(WIDTH, 4)).double()
    handle = lt.apply_velora(model, ["0"], num_groups=WIDTH)
    x = torch.rand(TOKENS, WIDTH, dtype=torch.float64)
    model(x).sum().backward()
    # Sub-tokens of one feature: v is 1 and the gradient is the exact one.
    torch.testing.assert_close(model[0].weight.grad, x.sum(0).expand(4, -1), rtol=1e-12, atol=0)
    assert handle.report().rows[0].kept_energy == pytest.approx(1)


def test_a_parameter_as_input_sets_the_direction():
    model = nn.Sequential(nn.Linear(WIDTH, 4))
    handle = lt.apply_velora(model, ["0"], num_groups=GROUPS)
    model(nn.Parameter(torch.rand(3, WIDTH))).sum().backward()
    assert list(handle.state_dict()) == ["0"]

"""Plans and measurements of models on bitsandbytes bases: every byte of the scales, and the dequantised weight."""

import pytest
import torch
from memory.tiny_llama import tiny_llama, tokens
from quantised import quantise
from torch import nn

import leantune as lt
from leantune.memory import MemoryTracker, plan_run
from leantune.memory.quantised import elements, scales, storage
from leantune.memory.traced.trace import exact_loss

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")


@pytest.fixture(params=["nf4", "nf4 nested", "int8"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A tiny Llama with LoRA on a quantised base."""
    base = quantise(tiny_llama(layers=1), request.param)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config).train()


def every_tensor(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_plan_is_what_a_step_is_measured_to_take_and_changes_nothing(model: nn.Module) -> None:
    base = model.get_base_model()
    optimizer = lt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    before = every_tensor(model)
    plan = plan_run(base, optimizer, batch_size=2, length=32, fused=False)
    after = every_tensor(model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for _ in range(2):
        with MemoryTracker(base, optimizer) as tracker:
            exact_loss(base, tokens(2, 32)).backward()
            optimizer.step()
            optimizer.zero_grad()
    measured = tracker.timeline().part_peaks()
    assert measured["weights"] == plan.parts["weights"]
    assert measured["optimizer_states"] == plan.parts["optimizer_states"]
    for part in ("activations", "temporaries"):
        assert measured[part] == pytest.approx(plan.parts[part], rel=0.02)
    assert plan_run(base, optimizer, batch_size=2, length=32, fused=False).parts == plan.parts  # after real steps
    once = {
        tensor.untyped_storage()._cdata: tensor for tensor in [*model.parameters(), *model.buffers(), *scales(model)]
    }
    assert plan.parts["weights"] == sum(tensor.untyped_storage().nbytes() for tensor in once.values())
    linear = next(module for module in model.modules() if type(module).__module__.startswith("bitsandbytes"))
    assert elements(linear.weight) == linear.in_features * linear.out_features
    assert storage(linear.weight) in ("nf4", "int8")


@pytest.mark.parametrize("nested", [False, True])
def test_the_dequantised_weight_is_a_temporary_of_forward(nested: bool) -> None:
    layer = bnb.nn.LinearNF4(256, 512, bias=False, compress_statistics=nested).to("cpu")
    with MemoryTracker(layer) as tracker:
        layer(torch.ones(1, 256, requires_grad=True))
    output_and_input, weights = 4 * (512 + 256), 256 * 512
    maxima = 4 * weights // 64 if nested else 0
    assert tracker.timeline().part_peaks()["temporaries"] == output_and_input + 4 * weights + maxima

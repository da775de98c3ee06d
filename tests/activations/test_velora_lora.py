"""VeLoRA on PEFT's LoRA layers, on plain and on quantised bases: PEFT's own numbers to the bit, but for dA."""

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from memory.tiny_llama import tiny_llama
from quantised import KINDS, quantise
from reference.velora import weight_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leantune as lt
from leantune.activations.random_state import state_bytes
from leantune.activations.saved_bytes import SavedBytes
from leantune.activations.velora.projection import SubTokens
from leantune.errors import InvalidArgumentError, InvalidTypeError
from leantune.memory import plan_run

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

IN, OUT, GROUPS = 160, 48, 8


class Block(nn.Module):
    """A gated input, so that nothing but the layer keeps it, into one linear layer."""

    def __init__(self, conv: bool = False) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.down = Conv1D(OUT, IN) if conv else nn.Linear(IN, OUT)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.down(x * 2 + 0.5, **kwargs)


def lora(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A block with LoRA on a base of ``kind`` (of `KINDS`, or "conv1d"), B away from zero."""
    torch.manual_seed(0)
    block = Block(conv=kind == "conv1d").to(dtype)
    base = block if kind == "conv1d" else quantise(block, kind)
    config = peft.LoraConfig(r=4, target_modules=["down"], fan_in_fan_out=kind == "conv1d", **settings)
    model = peft.get_peft_model(base, config).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def run(model: nn.Module, dtype: torch.dtype, **kwargs: Any) -> dict[str, Tensor]:
    """Output, gradient of the input and of every trained parameter, of one seeded forward and backward."""
    torch.manual_seed(1)
    x = torch.randn(3, 7, IN, dtype=torch.float32).to(dtype).requires_grad_()
    y = model(x, **kwargs)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(y.dtype))
    trained = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"y": y.detach(), "dx": x.grad, **trained}


def assert_only_da_differs(plain: dict[str, Tensor], velora: dict[str, Tensor], adapters: list[str]) -> None:
    assert plain.keys() == velora.keys()
    for name, value in plain.items():
        approximate = any(f"lora_A.{adapter}" in name for adapter in adapters)
        assert torch.equal(value, velora[name]) != approximate, name


@pytest.mark.parametrize("kind", [*KINDS, "conv1d"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_everything_but_da_is_pefts_to_the_bit_and_da_is_the_oracles(
    kind: str, dropout: float, base: torch.dtype
) -> None:
    model = lora(kind, base, lora_dropout=dropout, use_rslora=True)
    changed = copy.deepcopy(model)
    handle = lt.apply_velora(changed, ["down"], num_groups=GROUPS)
    seen: dict[str, Tensor] = {}

    def watch(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen["x"] = inputs[0].detach().flatten(0, 1)
        output.register_hook(lambda grad: seen.update(grad=grad.flatten(0, 1)))

    layer = model.base_model.model.down
    hook = layer.lora_A["default"].register_forward_hook(watch)
    plain, velora = run(model, base), run(changed, base)
    hook.remove()
    assert_only_da_differs(plain, velora, ["default"])
    (v,) = handle.state_dict().values()
    expected = weight_gradient(seen["x"], seen["grad"], v, SubTokens.of(IN, GROUPS).size)
    found = next(value for name, value in velora.items() if "lora_A" in name).double()
    assert (found - expected).norm() / expected.norm() < 1e-5
    handle.remove()
    again = run(changed, base)
    assert all(torch.equal(value, again[name]) for name, value in plain.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_the_predicted_ones(kind: str, dropout: float, base: torch.dtype) -> None:
    model = lora(kind, base, lora_dropout=dropout)

    def saved() -> int:
        with SavedBytes(model) as counted:
            model(torch.randn(2, 5, IN).to(base).requires_grad_())
        return counted.bytes

    plain = saved()
    handle = lt.apply_velora(model, ["down"], num_groups=GROUPS)
    velora, tokens = saved(), 10
    exact, kept = handle.predicted_bytes(tokens)
    if dropout:
        exact, kept = exact + tokens * IN * 4, kept + state_bytes(torch.device("cpu"))
    report = handle.report()
    assert (report.exact_bytes, report.kept_bytes) == (exact, kept)
    v_bytes = sum(v.nbytes for v in handle.state_dict().values())
    assert plain - velora == exact - kept - v_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_holds_the_input_not_even_an_8_bit_base(kind: str) -> None:
    model = lora(kind, torch.float32)

    def alive() -> bool:
        held: list[Any] = []
        hook = model.base_model.model.down.register_forward_pre_hook(
            lambda module, inputs: held.append(weakref.ref(inputs[0].untyped_storage()))
        )
        y = model(torch.randn(2, 5, IN, requires_grad=True))
        hook.remove()
        lives = held[0]() is not None
        y.sum().backward()
        return lives

    assert alive()
    handle = lt.apply_velora(model, ["down"], num_groups=GROUPS)
    assert not alive() and handle.report().saved_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_several_adapters_disabled_merged_and_mixed_ones(kind: str) -> None:
    model = lora(kind)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["down"], lora_dropout=0.1))
    nn.init.normal_(model.base_model.model.down.lora_B["other"].weight)
    changed = copy.deepcopy(model)
    handle = lt.apply_velora(changed, ["down"], num_groups=GROUPS)
    both = (model, changed)
    for active in (["default"], ["other"], ["default", "other"]):
        for one in both:
            one.base_model.set_adapter(active)
        assert_only_da_differs(run(model, torch.float32), run(changed, torch.float32), active)
    assert len(handle.state_dict()) == 2
    with model.disable_adapter(), changed.disable_adapter():
        assert_only_da_differs(run(model, torch.float32), run(changed, torch.float32), [])
    mixed = {"adapter_names": ["default", "__base__", "other"]}
    with torch.no_grad():
        assert torch.equal(*(one.eval()(torch.ones(3, 7, IN), **mixed) for one in both))
    if kind != "plain":  # merging into quantised weights changes them
        return
    for one in both:
        one.train().merge_adapter()
    assert_only_da_differs(run(model, torch.float32), run(changed, torch.float32), [])
    for one in both:
        one.unmerge_adapter()
        one.add_adapter("late", peft.LoraConfig(r=2, target_modules=["down"]))
        one.base_model.set_adapter("late")
    changed.load_state_dict(model.state_dict())
    assert any("lora_A.late" in name for name in run(model, torch.float32))
    assert_only_da_differs(run(model, torch.float32), run(changed, torch.float32), [])


def test_autocast_checkpointing_and_two_backwards() -> None:
    for kind in ("plain", "nf4 nested"):
        model = lora(kind, lora_dropout=0.25)
        changed = copy.deepcopy(model)
        handle = lt.apply_velora(changed, ["down"], num_groups=GROUPS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_only_da_differs(run(model, torch.float32), run(changed, torch.float32), ["default"])
        first = run(changed, torch.float32)
        inner = changed.base_model.model
        whole, inner.forward = inner.forward, partial(checkpoint, inner.forward, use_reentrant=False)
        again = run(changed, torch.float32)
        assert all(torch.equal(value, again[name]) for name, value in first.items())
        assert handle.report().saved_bytes == 0  # trap A2
        inner.forward = whole
        torch.manual_seed(1)
        loss = changed(torch.randn(3, 7, IN)).square().sum()
        loss.backward(retain_graph=True)
        grads = [p.grad.clone() for p in changed.parameters() if p.grad is not None]
        changed.zero_grad()
        loss.backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(grads, (p for p in changed.parameters() if p.requires_grad)))


def test_evaluation_is_pefts_and_sets_no_direction() -> None:
    model = lora("nf4")
    x = torch.randn(2, 5, IN)
    expected = model.eval()(x)
    handle = lt.apply_velora(model, ["down"], num_groups=GROUPS)
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        model.train()(x)
    assert handle.state_dict() == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        (
            {"velora_config": peft.VeloraConfig(num_groups=4) if hasattr(peft, "VeloraConfig") else None},
            "velora_config",
        ),
        ({"inference_mode": True}, "is_trainable"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(settings: dict[str, Any], words: str) -> None:
    if settings.get("velora_config", 0) is None:
        pytest.skip("this peft has no VeLoRA of its own")
    model = lora("plain", **settings)
    with pytest.raises(InvalidArgumentError, match=words):
        lt.apply_velora(model, ["down"])
    assert "forward" not in model.base_model.model.down.__dict__


def test_adapters_of_embeddings_are_refused_and_a10_a_wrong_name_gets_close_ones() -> None:
    model = peft.get_peft_model(tiny_llama(layers=1), peft.LoraConfig(r=4, target_modules=["embed_tokens", "up_proj"]))
    with pytest.raises(InvalidTypeError, match="Embedding"):
        lt.apply_velora(model, ["up_proj", "embed_tokens"])
    with pytest.raises(InvalidArgumentError, match=r"up_proj"):
        lt.apply_velora(model, ["upp_proj"])
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(InvalidArgumentError, match="frozen"):
        lt.apply_velora(model, ["down_proj"])  # it has no adapter


def test_the_same_gradients_as_pefts_own_velora() -> None:
    if not hasattr(peft, "VeloraConfig"):
        pytest.skip("this peft has no VeLoRA of its own")
    own = peft.VeloraConfig(num_groups=GROUPS, init_type="batch_average_once")
    theirs, ours = lora("plain", velora_config=own), lora("plain")
    ours.load_state_dict(theirs.state_dict(), strict=False)
    handle = lt.apply_velora(ours, ["down"], num_groups=GROUPS)
    first, second = run(theirs, torch.float32), run(ours, torch.float32)
    (v,) = handle.state_dict().values()
    (embed,) = [value for name, value in theirs.state_dict().items() if "velora_embed" in name]
    torch.testing.assert_close(v, embed)
    for name, value in second.items():
        torch.testing.assert_close(value, first[name], rtol=1e-4, atol=1e-5)
    # And where PEFT's own does not go: a quantised base, and (there is nothing it refuses) dropout with its mask.
    with pytest.raises(ValueError, match="VeLoRA"):
        lora("nf4", velora_config=own)


@pytest.mark.parametrize("kind", ["plain", "nf4 nested", "int8"])
def test_a_plan_sees_what_is_saved(kind: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(quantise(tiny_llama(layers=1), kind), config).train()
    optimizer = lt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def activations() -> int:
        sizes = {"batch_size": 2, "length": 32, "fused": False}
        return plan_run(model.get_base_model(), optimizer, **sizes).saved["activations"]

    plain = activations()
    handle = lt.apply_velora(model, ["down_proj"], num_groups=GROUPS)
    velora = activations()
    assert handle.state_dict() == {}
    exact, kept = handle.predicted_bytes(64)
    mask, state, v = exact, state_bytes(torch.device("cpu")), handle.sites[0].product.cut.size * 4
    held_by_bitsandbytes = 64 * 160 * 2 if kind == "int8" else 0
    assert plain - velora == exact + mask + held_by_bitsandbytes - kept - state - v

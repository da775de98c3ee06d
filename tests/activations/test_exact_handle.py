"""Exact savings beside everything else that touches a model: adapters, checkpointing, copies, other transforms."""

import copy
import io

import pytest
import torch
from activations.tiny_architectures import (
    INNER,
    LAYERS,
    TOKENS,
    WIDTH,
    add_lora,
    build,
    equal,
    loss_of,
    saved_bytes,
    step,
)
from torch import nn

import leantune as lt
from leantune.activations.exact.apply import ExactSavings
from leantune.activations.random_state import state_bytes
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError, StateMismatchError
from leantune.kernels import half_linear
from leantune.memory import MemoryTracker, plan_run
from leantune.memory.traced.trace import full_logits_loss

RNG = state_bytes(torch.device("cpu"))
WIDE, NARROW = 4, 2  # bytes of fp32 and bf16


def changed_forwards(model):
    return [module for module in model.modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Bert"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_a3_adapters_give_pefts_numbers_to_the_bit_and_the_bytes_reported(architecture, dropout, mode):
    model = add_lora(build(architecture, torch.bfloat16 if mode == "bfloat16" else torch.float32), dropout=dropout)
    autocast = torch.bfloat16 if mode == "autocast" else None
    plain, before = step(model, autocast=autocast), saved_bytes(model, autocast=autocast)
    handle = lt.apply_exact_savings(model)
    assert equal(plain, step(model, autocast=autocast, backwards=2))
    assert before - saved_bytes(model, autocast=autocast) == handle.report().saved_bytes > 0


def test_a3_fp32_adapters_on_a_bf16_base_share_one_bf16_input():
    model = add_lora(build("Llama", torch.bfloat16))
    before = saved_bytes(model)
    lt.apply_exact_savings(model)
    copies = TOKENS * (6 * WIDTH + INNER) * WIDE  # of q, k, v, o, gate, up and of down
    shared = (
        2 * TOKENS * WIDTH * NARROW
    )  # of q, k, v and of gate, up; attention keeps that of o, the product that of down
    activation = TOKENS * INNER * NARROW
    assert before - saved_bytes(model) == LAYERS * (copies - shared + activation)


def test_a3_with_dropout_no_adapter_keeps_a_copy_or_a_mask():
    model = add_lora(build("Llama", torch.bfloat16))
    lt.apply_exact_savings(model)
    without = saved_bytes(model)
    model = add_lora(build("Llama", torch.bfloat16), dropout=0.2)
    lt.apply_exact_savings(model)
    assert saved_bytes(model) - without == LAYERS * 7 * RNG


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_bases(bits):
    bnb = pytest.importorskip("bitsandbytes")
    model = build("Llama", torch.bfloat16)
    for name, module in list(model.model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        sizes = (module.in_features, module.out_features)
        if bits == 4:
            layer = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
            layer.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=layer)
        else:
            layer = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            layer.weight = bnb.nn.Int8Params(module.weight.data, requires_grad=False, has_fp16_weights=False)
        parent, _, own = name.rpartition(".")
        setattr(model.model.get_submodule(parent), own, layer.to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    model = add_lora(model, dropout=0.2)
    assert any("bnb" in type(module).__module__ for module in model.modules())
    plain, before = step(model), saved_bytes(model)
    handle = lt.apply_exact_savings(model)
    assert equal(plain, step(model, backwards=2))
    assert before - saved_bytes(model) == handle.report().saved_bytes > 0.3 * before


def two_adapters():
    model = add_lora(build("Llama", torch.bfloat16), dropout=0.2)
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    return model


@pytest.mark.parametrize("kind", ["two", "rslora", "dora"])
def test_other_kinds_of_adapters(kind):
    options = {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
    model = two_adapters() if kind == "two" else add_lora(build("Llama", torch.bfloat16), dropout=0.2, **options[kind])
    plain, before = step(model), saved_bytes(model)
    lt.apply_exact_savings(model)
    assert equal(plain, step(model, backwards=2))
    assert saved_bytes(model) < before


def test_evaluation_disabled_and_merged_adapters_are_pefts():
    model = add_lora(build("Llama"), dropout=0.2).eval()

    def outputs():
        found = [step(model)[0]]
        with torch.no_grad():
            found.append(loss_of(model).detach())
        with model.disable_adapter(), torch.no_grad():
            found.append(loss_of(model).detach())
        model.merge_adapter()
        found.append(loss_of(model).detach())
        model.unmerge_adapter()
        return found

    # Merging and unmerging rounds weights: twice the same way only from the same weights.
    model_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = outputs()
    lt.apply_exact_savings(model)
    model.load_state_dict(model_state)
    again = outputs()
    assert list(map(float, plain)) == list(map(float, again)) and len(set(map(float, again))) > 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("architecture", ["Llama", "Bert", "Mixtral"])
def test_a2_gradient_checkpointing_keeps_no_more_than_without_the_savings(architecture, reentrant):
    model = build(architecture)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    plain, before = step(model), kept_alive(model)
    handle = lt.apply_exact_savings(model)
    assert equal(plain, step(model, backwards=1 if reentrant else 2))
    assert any(row.recomputed for row in handle.report().rows) and "recomputed by" in str(handle.report())
    assert kept_alive(model) <= before + 7 * RNG


@pytest.mark.parametrize("lora", [False, True])
def test_nothing_else_stays_alive_than_what_is_saved(lora):
    model = build("Llama", torch.bfloat16)
    if lora:
        model = add_lora(model, dropout=0.2)
    before, saved_before = kept_alive(model), saved_bytes(model)
    lt.apply_exact_savings(model)
    assert before - kept_alive(model) == saved_before - saved_bytes(model)


def kept_alive(model):
    """Bytes of tensors alive at the end of forward, those that hooks of checkpointing hold included."""
    with MemoryTracker(model) as tracker:
        loss = loss_of(model)
    assert loss.requires_grad
    return tracker.kept_bytes


def test_the_generator_moves_on_as_without_savings():
    model = build("Bert")
    step(model)
    plain = torch.rand(1)
    lt.apply_exact_savings(model)
    step(model, backwards=2)
    assert torch.equal(torch.rand(1), plain)


def test_remove_restores_every_module_and_keys_stay():
    model = add_lora(build("Bert", torch.bfloat16), dropout=0.2)
    names, plain, before = list(model.state_dict()), step(model), saved_bytes(model)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    handle = lt.apply_exact_savings(model)
    assert list(model.state_dict()) == names and changed_forwards(model)
    handle.remove()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert saved_bytes(model) == before and equal(plain, step(model))


def test_remove_between_forward_and_backward_leaves_the_graph_right():
    model = build("Llama")
    _, gradients = step(model)
    handle = lt.apply_exact_savings(model)
    loss = loss_of(model)
    handle.remove()
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


def test_remove_refuses_to_drop_a_later_change_of_forward():
    model = build("Llama")
    handle = lt.apply_exact_savings(model)
    block = model.model.layers[1].mlp
    ours = block.forward
    block.forward = later = lambda *args: ours(*args)
    with pytest.raises(StateMismatchError, match="replaced after apply_exact_savings"):
        handle.remove()
    assert block.__dict__["forward"] is later and "forward" in model.model.layers[0].mlp.__dict__
    block.forward = ours
    handle.remove()
    assert not changed_forwards(model)


def test_a_forward_that_was_replaced_before_is_used_and_given_back():
    model = build("Llama")
    block = model.model.layers[0].mlp
    calls = []

    def counted(x):
        calls.append(1)
        return type(block).forward(block, x)

    block.forward = counted
    before = saved_bytes(model)
    handle = lt.apply_exact_savings(model)
    assert saved_bytes(model) < before and len(calls) == 2
    handle.remove()
    assert block.forward is counted


def test_a_copy_and_a_pickle_have_savings_of_their_own():
    model = build("Bert")
    plain = step(model)
    handle = lt.apply_exact_savings(model)
    after = saved_bytes(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(module.__dict__["forward"].module is module for module in changed_forwards(other))
        assert saved_bytes(other) == after and equal(plain, step(other))
        with pytest.raises(InvalidArgumentError, match=r"ExactSavings\.of"):
            lt.apply_exact_savings(other)
        ExactSavings.of(other).remove()
        assert not changed_forwards(other) and equal(plain, step(other))
    assert changed_forwards(model)
    handle.remove()


def test_what_cannot_work_is_refused_before_anything_changes():
    with pytest.raises(InvalidTypeError, match=r"nn\.Module"):
        lt.apply_exact_savings("model")  # type: ignore[arg-type]
    model = build("Llama")
    with pytest.raises(InvalidArgumentError, match="no saving"):
        lt.apply_exact_savings(model, swiglu=False, dropout=False, shared_adapter_input=False)
    lt.apply_exact_savings(model)
    with pytest.raises(InvalidArgumentError, match="already"):
        lt.apply_exact_savings(model)


def test_what_is_left_alone_is_reported():
    layers = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout1d(0.1), nn.Dropout(0.1, inplace=True), nn.Linear(8, 8)]
    report = lt.apply_exact_savings(nn.Sequential(*layers)).report()
    assert {name for name, _ in report.left} == {"1", "2", "3"} and not report.rows
    assert "left alone" in str(report) and "nothing found" in str(report)


def test_a_change_in_place_of_what_backward_needs_is_an_error():
    model = nn.Sequential(nn.Linear(8, 48), nn.SiLU(), nn.Linear(48, 8))
    inputs = []
    model[1].register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    lt.apply_exact_savings(model)
    loss = model(torch.randn(4, 8)).sum()
    with torch.no_grad():
        inputs[0].add_(1.0)
    with pytest.raises(BackwardError, match="modified by an in-place"):
        loss.backward()


@pytest.mark.parametrize("first", ["products", "savings"])
def test_fp32_products_before_or_after(first, monkeypatch):
    monkeypatch.setattr(half_linear, "needs_fp32_products", lambda dtype: dtype == torch.bfloat16)
    model = build("Llama", torch.bfloat16)
    products = half_linear.use_fp32_products(model)
    plain, before = step(model), saved_bytes(model)
    if first == "savings":
        products.remove()
    lt.apply_exact_savings(model)
    if first == "savings":
        half_linear.use_fp32_products(model)
    assert equal(plain, step(model))
    assert before - saved_bytes(model) == LAYERS * 2 * TOKENS * INNER * NARROW


def test_beside_velora_the_activation_alone_is_left_to_save():
    model = build("Llama", torch.bfloat16)
    lt.apply_velora(model, ["down_proj", "v_proj"], num_groups=16)
    step(model)  # sets the directions
    plain, before = step(model), saved_bytes(model)
    lt.apply_exact_savings(model)
    assert equal(plain, step(model))
    assert before - saved_bytes(model) == LAYERS * TOKENS * INNER * NARROW


@pytest.mark.parametrize("clip", ["per_tensor", "global"])
def test_fused_backward_updates_the_same_weights(clip):
    trained = []
    for savings in (False, True):
        model = build("Llama", torch.bfloat16)
        if savings:
            lt.apply_exact_savings(model)
        optimizer = lt.TernaryAdamW(model.parameters(), lr=1e-3)
        options = {"max_grad_norm": 0.5} if clip == "global" else {}
        fused = lt.FusedBackward(optimizer, model=model, clip=clip, **options)
        for _ in range(2):
            loss = loss_of(model)
            if clip == "global":
                fused.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        trained.append(model.state_dict())
    assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items())


@pytest.mark.parametrize("lora", [False, True])
def test_a_plan_sees_the_savings_and_leaves_no_trace_in_the_report(lora):
    def planned(model):
        optimizer = lt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return plan_run(model, [optimizer], batch_size=2, length=TOKENS // 2, fused=False, loss=full_logits_loss)

    model = build("Llama", torch.bfloat16)
    if lora:
        model = add_lora(model, dropout=0.2)
    before, plain = planned(model), saved_bytes(model)
    handle = lt.apply_exact_savings(model)
    after = planned(model)
    assert handle.report().plain_bytes == 0
    saved = plain - saved_bytes(model)
    assert before.saved["activations"] - after.saved["activations"] == saved > 0


def test_torch_compile_takes_the_plain_forward():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 48), nn.SiLU(), nn.Dropout(0.1), nn.Linear(48, 8)), torch.randn(16, 8)

    def compiled_gradients():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.manual_seed(3)
        return torch.autograd.grad(compiled(x).sum(), list(model.parameters()))

    plain = compiled_gradients()
    lt.apply_exact_savings(model)
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled_gradients()))
    torch._dynamo.reset()

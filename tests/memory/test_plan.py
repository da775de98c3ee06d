"""Plans against what a tracker sees in a real step of a tiny Llama."""

import json

import pytest
import torch
from memory.tiny_llama import tiny_llama, tokens
from torch import nn

import leantune as lt
from leantune.errors import InvalidArgumentError
from leantune.memory.measured.tracker import MemoryTracker, track
from leantune.memory.traced.plan import Plan, plan_run
from leantune.memory.traced.trace import exact_loss, full_logits_loss
from leantune.memory.traced.update_cost import update_cost

LOSSES = {"exact": exact_loss, "full_logits": full_logits_loss}


def measure(model, optimizer, batch, *, loss, fused=None, clip="per_tensor", micro_batches=1):
    """The timeline of the second of two real steps."""
    for step in range(2):
        tracker = MemoryTracker(model, optimizer)
        if step == 1:
            tracker.start()
        for _ in range(micro_batches):
            value = loss(model, batch)
            if fused is not None:
                fused.backward(value)
            else:
                value.backward()
            del value
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            tracker.stop()
    return tracker.timeline()


def close(found, planned, tolerance):
    assert abs(found - planned) <= tolerance * planned, f"measured {found}, planned {planned}"


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("batch_size, length", [(1, 32), (2, 96)])
def test_ordinary_step_with_full_logits_to_the_byte(batch_size, length, checkpointing, padding):
    model = tiny_llama(checkpointing=checkpointing, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = plan_run(
        model, optimizer, batch_size=batch_size, length=length, fused=False, loss="full_logits", padded=padding > 0
    )
    found = measure(model, optimizer, tokens(batch_size, length, padding=padding), loss=full_logits_loss)
    assert found.part_peaks() == plan.parts
    assert found.at_peak() == plan.at_peak
    assert found.saved_at_forward_end() == plan.saved
    assert found.peak_bytes == plan.total


@pytest.mark.parametrize(
    ("length", "tied", "checkpointing", "clip"),
    [
        (32, False, False, "per_tensor"),
        (128, True, False, "per_tensor"),
        (96, False, True, "per_tensor"),
        (64, True, True, "per_tensor"),
        (128, False, False, "global"),
        (64, True, True, "global"),
    ],
)
def test_fused_ternary_step(length, tied, checkpointing, clip):
    model = tiny_llama(checkpointing=checkpointing, tied=tied)
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-3)
    plan = plan_run(model, optimizer, batch_size=2, length=length, fused=True, clip=clip, loss="exact")
    fused = lt.FusedBackward(optimizer, clip=clip, max_grad_norm=1.0 if clip == "global" else None)
    found = measure(model, optimizer, tokens(2, length), loss=exact_loss, fused=fused)
    fused.remove()
    peaks = found.part_peaks()
    assert peaks["weights"] == plan.parts["weights"]
    assert peaks["optimizer_states"] == plan.parts["optimizer_states"]
    assert peaks["gradients"] == plan.parts["gradients"]
    # The loss keeps a copy of the labelled rows alone; a plan takes every row for labelled.
    close(found.saved_at_forward_end()["activations"], plan.saved["activations"], 0.02)
    close(peaks["recompute"], plan.parts["recompute"], 0.01)
    close(found.peak_bytes, plan.total, 0.03)


@pytest.mark.parametrize("rule", ["TernaryAdamW", "AdaLomo", "TacoOneSparse"])
@pytest.mark.parametrize("clip", ["per_tensor", "global"])
def test_a_head_whose_gradient_comes_in_tiles_is_planned(rule, clip):
    """A head larger than all else, in many tiles of its rows."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(128, 128, bias=False)
            self.head = nn.Linear(128, 24_000, bias=False)

        def get_output_embeddings(self):
            return self.head

    def loss(model, batch):
        hidden = torch.tanh(model.body(batch["hidden"]))
        return lt.linear_cross_entropy(hidden, model.head.weight, batch["labels"], tile_bytes=1 << 20)

    model = Head()
    optimizer = getattr(lt, rule)(model.parameters(), lr=1e-3)
    batch = {"hidden": torch.randn(64, 128), "labels": torch.zeros(64, dtype=torch.int64)}
    plan = plan_run(model, optimizer, batch_size=1, length=64, fused=True, clip=clip, loss=loss, batch=batch)
    fused = lt.FusedBackward(optimizer, model, clip=clip)
    found = measure(model, optimizer, batch, loss=loss, fused=fused)
    assert ("in tiles" in fused.report()) == (rule != "TacoOneSparse")
    size, grown = model.head.weight.nbytes, found.peak_bytes - plan.parts["weights"] - plan.parts["optimizer_states"]
    assert (grown < size) == (rule != "TacoOneSparse")
    close(found.peak_bytes, plan.total, 0.03)


@pytest.mark.parametrize("rule", ["TernaryAdamW", "AdamW", "Lomo", "AdaLomo", "TacoOneSparse"])
def test_every_rule_ordinary_and_its_states(rule):
    model = tiny_llama(tied=True)
    optimizer = getattr(lt, rule)(model.named_parameters(), lr=1e-3)
    plan = plan_run(model, optimizer, batch_size=1, length=64, fused=False, loss="exact")
    found = measure(model, optimizer, tokens(1, 64), loss=exact_loss)
    peaks = found.part_peaks()
    assert peaks["optimizer_states"] == plan.parts["optimizer_states"]
    assert peaks["gradients"] == plan.parts["gradients"]
    close(peaks["update"], plan.parts["update"], 0.05)
    close(found.peak_bytes, plan.total, 0.03)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("length", [32, 96])
def test_velora_is_planned_and_left_untouched(length, checkpointing):
    model = tiny_llama(checkpointing=checkpointing, dtype=torch.float32)
    plain = plan_run(model, [], batch_size=2, length=length, fused=False, loss="exact")
    handle = lt.apply_velora(model, target_modules=["down_proj"], num_groups=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-3)
    plan = plan_run(model, optimizer, batch_size=2, length=length, fused=False, loss="exact")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = measure(model, optimizer, tokens(2, length), loss=exact_loss)
    close(found.saved_at_forward_end()["activations"], plan.saved["activations"], 0.01)
    close(found.peak_bytes, plan.total, 0.03)
    if not checkpointing:
        assert plan.saved["activations"] < plain.saved["activations"]
    handle.remove()


def test_accumulated_gradients_are_planned():
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = plan_run(model, optimizer, batch_size=1, length=48, fused=False, loss="full_logits", micro_batches=3)
    found = measure(model, optimizer, tokens(1, 48), loss=full_logits_loss, micro_batches=3)
    assert found.part_peaks() == plan.parts
    assert "3 micro-batches" in plan.where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
def test_sums_of_a_fused_backward_are_planned(accumulate, dtype):
    model = tiny_llama().to(dtype)
    optimizer = lt.TernaryAdamW(model.parameters(), lr=1e-3)
    batch, share = tokens(1, 48), 1 / 3
    plan = plan_run(
        model, optimizer, batch_size=1, length=48, fused=True, loss="exact", micro_batches=3, accumulate=accumulate
    )
    fused = lt.FusedBackward(optimizer, model, accumulate=accumulate)
    for step in range(2):
        tracker = MemoryTracker(model, optimizer)
        if step == 1:
            tracker.start()
        for micro in range(3):
            fused.backward(share * exact_loss(model, batch), last=micro == 2)
        optimizer.step()
        if step == 1:
            tracker.stop()
    close(tracker.timeline().peak_bytes, plan.total, 0.03)
    count = sum(parameter.numel() for parameter in model.parameters())
    without = plan_run(model, optimizer, batch_size=1, length=48, fused=True, loss="exact")
    assert plan.total - without.total > 0.8 * count * (4 if accumulate == "float32" else 2)


def test_frozen_parameters_have_no_gradients():
    model = tiny_llama()
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([model.lm_head.weight], lr=1e-3)
    plan = plan_run(model, optimizer, batch_size=1, length=48, fused=False, loss="full_logits")
    head = model.lm_head.weight.numel() * 2
    assert plan.parts["gradients"] == head
    assert plan.dtypes["gradients"] == {"bfloat16": head}
    assert measure(model, optimizer, tokens(1, 48), loss=full_logits_loss).part_peaks() == plan.parts


def test_autocast_copies_of_weights_are_planned():
    model = tiny_llama(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return full_logits_loss(model, batch)

    inside = plan_run(model, optimizer, batch_size=1, length=48, fused=False, loss=loss)
    outside = plan_run(
        model, optimizer, batch_size=1, length=48, fused=False, loss="full_logits", autocast=torch.bfloat16
    )
    assert inside.parts == outside.parts
    assert measure(model, optimizer, tokens(1, 48), loss=loss).part_peaks() == inside.parts


def test_planning_changes_nothing():
    model = tiny_llama(checkpointing=True, tied=True).eval()
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-3)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = gradient
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    plan_run(model, optimizer, batch_size=1, length=16, fused=True, loss="exact")
    assert torch.equal(torch.rand(3), expected)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.grad is gradient
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert not optimizer.state
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_p2_every_figure_carries_batch_and_length(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters())
    plan = plan_run(model, optimizer, batch_size=3, length=40, fused=False, loss="full_logits")
    assert "3 x 40 tokens" in plan.table()
    written = plan.save(tmp_path)
    assert written.name == "memory_plan.json"
    values = json.loads(written.read_text())
    assert (values["batch_size"], values["length"], values["total"]) == (3, 40, plan.total)
    assert Plan.load(written) == plan
    assert sum(plan.at_peak.values()) == plan.total
    longer = plan_run(
        model, torch.optim.SGD(model.parameters()), batch_size=3, length=80, fused=False, loss="full_logits"
    )
    assert longer.parts["activations"] > 1.9 * plan.parts["activations"]


def test_what_cannot_be_planned_is_said():
    class Growing(torch.optim.SGD):
        def __init__(self, params, lr, *, secret):
            super().__init__(params, lr=lr)

    model = nn.Linear(8, 8)
    optimizer = Growing(model.parameters(), 0.1, secret=1)
    batch = {"x": torch.zeros(4, 8)}

    def loss(model, batch):
        return model(batch["x"]).sum()

    plan = plan_run(model, optimizer, batch_size=4, length=1, fused=False, loss=loss, batch=batch)
    assert any("could not be tried" in note for note in plan.notes)
    orphaned = plan_run(
        model, torch.optim.SGD([model.weight], lr=0.1), batch_size=4, length=1, fused=True, loss=loss, batch=batch
    )
    assert any("belong to no optimizer (bias)" in note for note in orphaned.notes)
    assert orphaned.parts["gradients"] == (64 + 8) * 4

    def peeks(model, batch):
        return model(batch["x"]).sum() * float(batch["x"].max().item())

    with pytest.raises(InvalidArgumentError, match="looks at tensors' values"):
        plan_run(model, optimizer, batch_size=4, length=1, fused=False, loss=peeks, batch=batch)
    for arguments, said in (
        ({"batch_size": 0}, "batch_size is 0"),
        ({"length": -1}, "length is -1"),
        ({"loss": "chunked"}, "full_logits"),
    ):
        wrong = {"batch_size": 1, "length": 1, "fused": False, "loss": loss, "batch": batch} | arguments
        with pytest.raises(InvalidArgumentError, match=said):
            plan_run(model, optimizer, **wrong)
    with pytest.raises(InvalidArgumentError, match="no parameters"):
        plan_run(nn.Identity(), [], batch_size=1, length=1, fused=False, loss=loss)


@pytest.mark.parametrize("length", [32, 96])
def test_saved_activations_are_what_autograd_saves(length):
    """An independent count: the distinct storages that autograd packs, less weights and inputs."""
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters())
    plan = plan_run(model, optimizer, batch_size=2, length=length, fused=False, loss="full_logits")
    batch = tokens(2, length)
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *batch.values()]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # keeping it keeps its address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = full_logits_loss(model, batch)
    counted = sum(size for size, _ in saved.values())
    close(plan.saved["activations"] + plan.saved["loss"], counted, 0.01)
    del loss


@pytest.mark.parametrize("shape", [(400, 28_672), (24, 60_000), (16, 1024, 64)])
def test_one_sparse_updates_of_wide_matrices_are_planned_as_they_run(shape):
    """A stand-in of a few rows would keep fp32 momentum, and plan for that."""
    param = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    optimizer = lt.TacoOneSparse([param], lr=1e-3)
    planned = update_cost([optimizer])
    param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    with track() as found:
        optimizer.step()
    close(found.peak_temporary_bytes, planned.whole_step, 0.01)
    assert planned.state_bytes == optimizer.report().state_bytes + 8

"""Parts of gpu_check about whole models: fused backward, the loss, VeLoRA, checkpoints, memory against the plan."""

import copy
import io
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_check_machine import Case, Machine
from torch import Tensor, nn
from torch.nn import functional

import leantune as lt
from leantune.activations.saved_bytes import SavedBytes
from leantune.activations.velora.projection import SubTokens
from leantune.backward.clip import clip_factor, combined_norm
from leantune.codec.trits import unpack_trits
from leantune.memory.traced.plan import plan_run
from leantune.memory.traced.trace import exact_loss
from leantune.optim.base import LeanOptimizer
from leantune.optim.gradient import squared_norm

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from reference.velora import weight_gradient

RULES = {
    "TernaryAdamW": lambda params: lt.TernaryAdamW(params, lr=1e-3),
    "AdamW": lambda params: lt.AdamW(params, lr=1e-3),
    "Lomo": lambda params: lt.Lomo(params, lr=0.1),
    "AdaLomo": lambda params: lt.AdaLomo(params, lr=1e-2),
}


def tiny_llama(machine: Machine, dtype: torch.dtype = torch.float32) -> Any:
    """Two layers, attention whose backward adds in a fixed order, the same weights every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(machine.device, dtype).train()


def token_batch(machine: Machine, vocabulary: int, batch: int, length: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens.to(machine.device), "labels": tokens.to(machine.device)}


# -- fused backward -------------------------------------------------------------------------------------------------


def fused(machine: Machine) -> Iterator[Case]:
    """Steps of a tiny Llama inside backward equal ordinary steps bit for bit."""
    for rule in RULES:
        for clip in ("none", "per_tensor", "global"):
            yield Case(
                f"{rule}, clip {clip}", lambda rule=rule, clip=clip: _fused_or_not(machine, rule, clip), "equal bits"
            )


def _fused_or_not(machine: Machine, rule: str, clip: str) -> tuple[bool, dict[str, Any]]:
    with machine.fixed_order():
        sides = [_few_steps(machine, rule, clip, inside) for inside in (False, True)]
    ends, norms = [side[0] for side in sides], [side[1] for side in sides]
    apart = int((ends[0] != ends[1]).sum())
    return apart == 0 and bool(torch.isfinite(ends[0]).all()), {"weights apart": apart, "norms": norms}


def _few_steps(machine: Machine, rule: str, clip: str, inside: bool) -> tuple[Tensor, float]:
    """(all weights, the last gradient norm) after a few steps, inside backward or after it."""
    model = tiny_llama(machine)
    optimizer = RULES[rule](model.named_parameters())
    handle = lt.FusedBackward(optimizer, model, clip, None if clip == "none" else 0.3) if inside else None
    norm = 0.0
    for number in range(2 if machine.small else 5):
        value = exact_loss(model, token_batch(machine, 320, 2, 24, number))
        if handle is None:
            norm = _ordinary_step(value, model, optimizer, clip, 0.3)
        else:
            handle.backward(value)
            optimizer.step()
            norm = handle.grad_norm
    return torch.cat([p.detach().flatten() for p in model.parameters()]), norm


def _ordinary_step(value: Tensor, model: nn.Module, optimizer: LeanOptimizer, clip: str, bound: float) -> float:
    optimizer.zero_grad()
    value.backward()
    params = [p for p in model.parameters() if p.grad is not None]
    norm = combined_norm(squared_norm(p.grad).item() for p in params)
    for param in params:
        if clip == "global":
            param.grad.mul_(clip_factor(norm, bound))
        elif clip == "per_tensor":
            param.grad.mul_(clip_factor(math.sqrt(squared_norm(param.grad).item()), bound))
    optimizer.step()
    return norm


# -- loss -----------------------------------------------------------------------------------------------------------


def loss(machine: Machine) -> Iterator[Case]:
    """The loss without logits against the loss with them: values, gradients, peak bytes, seconds."""
    sizes = [(64, 32, 500)] if machine.small else [(4096, 4096, 128256), (2000, 576, 49152)]
    for tokens, hidden, vocabulary in sizes:
        name = f"{tokens} x {hidden} -> {vocabulary}, bfloat16"
        yield Case(name, lambda size=(tokens, hidden, vocabulary): _both_losses(machine, *size), "equal to 1 %")


def _both_losses(machine: Machine, tokens: int, hidden: int, vocabulary: int) -> tuple[bool, dict[str, Any]]:
    torch.manual_seed(0)
    states = torch.randn((tokens, hidden), device=machine.device, dtype=torch.bfloat16).requires_grad_()
    head = torch.randn((vocabulary, hidden), device=machine.device) * hidden**-0.5
    head = head.to(torch.bfloat16).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=machine.device)
    labels[::7] = -100
    figures: dict[str, Any] = {}
    found = {}
    losses = {
        "full": lambda: functional.cross_entropy(functional.linear(states, head).float(), labels),
        "exact": lambda: lt.linear_cross_entropy(states, head, labels),
    }
    for name, function in losses.items():

        def once(name: str = name, function: Any = function) -> None:
            value = function()
            found[name] = (value.item(), *torch.autograd.grad(value, (states, head)))

        once()
        found.clear() if name == "full" else found.pop(name)
        before, peak = machine.peak_bytes(once)
        gradients = sum(tensor.nbytes for tensor in found[name][1:])
        figures[name] = {"loss": found[name][0], "bytes beside gradients": peak - before - gradients}
        figures[name]["ms"] = round(1e3 * machine.seconds(once), 2)
        if name == "full":
            found[name] = (found[name][0], *(tensor.cpu() for tensor in found[name][1:]))
    apart = [
        float((mine.cpu().float() - theirs.float()).norm() / theirs.float().norm())
        for mine, theirs in zip(found["exact"][1:], found["full"][1:])
    ]
    figures["gradients apart"] = apart
    close = abs(found["exact"][0] - found["full"][0]) <= 1e-3 * abs(found["full"][0])
    return close and max(apart) < 1e-2, figures


# -- VeLoRA ---------------------------------------------------------------------------------------------------------


def velora(machine: Machine) -> Iterator[Case]:
    """Forward and dX exact, dW the oracle's, the predicted bytes kept."""
    for features, groups, dtype in ((1536, 32, torch.float32), (1537, 32, torch.bfloat16)):
        name = f"{features} features, {groups} sub-tokens, {str(dtype)[6:]}"
        yield Case(name, lambda case=(features, groups, dtype): _projected(machine, *case))


def _projected(machine: Machine, features: int, groups: int, dtype: torch.dtype) -> tuple[bool, dict[str, Any]]:
    torch.manual_seed(0)
    tokens, out = (40, 24) if machine.small else (2000, 576)
    plain = nn.Linear(features, out).to(machine.device, dtype)
    changed = nn.Sequential(copy.deepcopy(plain))
    handle = lt.apply_velora(changed, ["0"], num_groups=groups)
    x, grad = (torch.randn((tokens, size), device=machine.device).to(dtype) + 0.5 for size in (features, out))
    ends = []
    for layer in (plain, changed[0]):
        leaf = x.clone().requires_grad_()
        with SavedBytes(layer) as saved:
            y = layer(leaf)
        y.backward(grad)
        ends.append((y.detach(), leaf.grad, saved.bytes))
    size = SubTokens.of(features, groups).size
    direction = handle.state_dict()["0"].cpu()
    expected = weight_gradient(x.cpu(), grad.cpu(), direction, size)
    error = float((changed[0].weight.grad.cpu().double() - expected).norm() / expected.norm())
    report = handle.report()
    exact = torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])
    figures = {
        "exact forward and dX": exact,
        "dW from the oracle": error,
        "saved bytes, plain": ends[0][2],
        "saved bytes, VeLoRA": ends[1][2],
        "predicted": report.kept_bytes,
    }
    # v and what rounding Z to its dtype keeps come beside Z.
    small = report.kept_bytes <= ends[1][2] <= report.kept_bytes + 64 * size
    return exact and error < (1e-5 if dtype is torch.float32 else 2e-2) and small, figures


# -- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoints(machine: Machine) -> Iterator[Case]:
    """A run saved on this device goes on on the CPU, and back."""
    yield Case("saved here, loaded on the CPU and back", lambda: _in_order(machine), "equal bits back here")


def _in_order(machine: Machine) -> tuple[bool, dict[str, Any]]:
    with machine.fixed_order():
        return _there_and_back(machine)


def _there_and_back(machine: Machine) -> tuple[bool, dict[str, Any]]:
    def build(device: torch.device) -> tuple[nn.Module, lt.TernaryAdamW]:
        model = tiny_llama(Machine(device, machine.small), torch.bfloat16)
        return model, lt.TernaryAdamW(model.named_parameters(), lr=1e-3)

    def restore(device: torch.device, saved: bytes) -> tuple[nn.Module, lt.TernaryAdamW]:
        model, optimizer = build(device)
        loaded = torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        return model, optimizer

    def save(model: nn.Module, optimizer: lt.TernaryAdamW) -> bytes:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    model, optimizer = build(machine.device)
    for number in range(2):
        _step(model, optimizer, exact_loss(model, token_batch(machine, 320, 2, 24, number)))
    saved = save(model, optimizer)
    on_cpu = restore(torch.device("cpu"), saved)
    back = restore(machine.device, save(*on_cpu))
    gradients = {}
    exact_loss(model, token_batch(machine, 320, 2, 24, 9)).backward()
    for name, param in model.named_parameters():
        gradients[name] = param.grad.cpu()
    for other, its_optimizer in ((model, optimizer), on_cpu, back):
        for name, param in other.named_parameters():
            param.grad = gradients[name].to(param.device)
        its_optimizer.step()
    apart_back = _states_apart(optimizer, back[1])
    apart_cpu = _states_apart(optimizer, on_cpu[1])
    figures = {"trits apart on the CPU": apart_cpu[0], "anything apart back here": apart_back[1]}
    return apart_back[1] == 0 and apart_cpu[0] <= 1e-4, figures


def _step(model: nn.Module, optimizer: LeanOptimizer, value: Tensor) -> None:
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def _states_apart(one: lt.TernaryAdamW, other: lt.TernaryAdamW) -> tuple[float, int]:
    """(share of trits, number of elements of anything, weights included) that differ."""
    trits, counted, anything = 0, 0, 0
    params = [[p for group in side.param_groups for p in group["params"]] for side in (one, other)]
    for mine, theirs in zip(*params, strict=True):
        for name, value in one.state[mine].items():
            twin = other.state[theirs][name].to(value.device)
            anything += int((value != twin).sum())
            if name.endswith("trits"):
                sides = (unpack_trits(side, mine.shape[1], 128) for side in (value, twin))
                trits += int(torch.ne(*sides).sum())
                counted += mine.numel()
        anything += int((mine.detach().cpu() != theirs.detach().cpu()).sum())
    return trits / counted, anything


# -- memory ---------------------------------------------------------------------------------------------------------

MEMORY_CASES = {
    "fused, checkpointing, 1 x 1024": {"batch": 1, "length": 1024, "checkpointing": True, "clip": "per_tensor"},
    "fused, checkpointing, 4 x 1024": {"batch": 4, "length": 1024, "checkpointing": True, "clip": "per_tensor"},
    "fused, clip global, 1 x 1024": {"batch": 1, "length": 1024, "checkpointing": True, "clip": "global"},
    "fused, no checkpointing, 1 x 1024": {"batch": 1, "length": 1024, "checkpointing": False, "clip": "per_tensor"},
}


def memory(machine: Machine) -> Iterator[Case]:
    """The second step of a full fine-tune of random weights: most bytes allocated, against the plan."""
    for name, case in MEMORY_CASES.items():
        yield Case(name, lambda case=case: _planned_and_measured(machine, **case), "within 5 % of the plan")


def _planned_and_measured(
    machine: Machine, batch: int, length: int, checkpointing: bool, clip: str
) -> tuple[bool, dict[str, Any]]:
    length = 16 if machine.small else length
    model = _random_llama(machine, checkpointing)
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-5)
    plan = plan_run(model, optimizer, batch_size=batch, length=length, fused=True, clip=clip, loss="exact")
    handle = lt.FusedBackward(optimizer, model, clip)
    vocabulary = model.config.vocab_size
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "planned": plan.total}

    def step() -> None:
        value = exact_loss(model, token_batch(machine, vocabulary, batch, length, 0))
        handle.backward(value)
        optimizer.step()
        figures["loss"] = value.item()

    step()
    _, figures["measured"] = machine.peak_bytes(step)
    figures["seconds"] = round(machine.seconds(step), 3)
    figures["weights and states planned"] = plan.parts["weights"] + plan.parts["optimizer_states"]
    figures["measured to planned"] = round(figures["measured"] / plan.total, 4)
    handle.remove()
    return machine.small or abs(figures["measured"] / plan.total - 1) <= 0.05, figures


def _random_llama(machine: Machine, checkpointing: bool) -> Any:
    """The shape of Llama 3.2 1B (1.24 billion parameters, tied head), bf16, allocated once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = machine.small
    config = LlamaConfig(
        hidden_size=64 if small else 2048,
        intermediate_size=160 if small else 8192,
        num_hidden_layers=2 if small else 16,
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        vocab_size=320 if small else 128256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=machine.device)
    model.tie_weights()
    # Its frequencies are a formula, not weights: the meta device kept no values of them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(machine.device)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.ndim < 2 else param.normal_(0.0, 0.02)
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()

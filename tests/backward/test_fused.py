"""FusedBackward equals the ordinary step, holds one gradient at a time, and refuses what would go wrong in silence."""

import copy
import functools
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import leantune as lt
from leantune.backward.clip import clip_factor, combined_norm
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError, NonFiniteError
from leantune.optim.gradient import squared_norm

RULES = {
    "ternary": lambda p: lt.TernaryAdamW(p, lr=1e-3),
    "ternary_two_planes": lambda p: lt.TernaryAdamW(p, lr=1e-3, momentum_planes=2),
    "ternary_exact": lambda p: lt.TernaryAdamW(p, lr=1e-3, states="exact"),
    "adamw": lambda p: lt.AdamW(p, lr=1e-3, weight_decay=0.1),
    "lomo": lambda p: lt.Lomo(p, lr=0.1, weight_decay=0.1),
    "adalomo": lambda p: lt.AdaLomo(p, lr=1e-2),
    "taco_one_sparse": lambda p: lt.TacoOneSparse(p, lr=1e-3, weight_decay=0.1),
}


class Model(nn.Module):
    """Embedding, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in range(2))
        self.head = nn.Linear(64, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    ids, targets = torch.randint(0, 50, (2, 4, 9), generator=generator)
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def clip_ordinary(params: list[nn.Parameter], clip: str, bound: float) -> float:
    """Clip living gradients; the global norm before that."""
    norm = combined_norm(squared_norm(p.grad).item() for p in params)
    for param in params:
        if clip == "global":
            param.grad.mul_(clip_factor(norm, bound))
        elif clip == "per_tensor":
            param.grad.mul_(clip_factor(math.sqrt(squared_norm(param.grad).item()), bound))
    return norm


def ordinary_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: str, bound: float, number: int) -> float:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    norm = clip_ordinary([p for p in model.parameters() if p.grad is not None], clip, bound)
    optimizer.step()
    return norm


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", ["per_tensor", "global", "none"])
def test_g1_g5_g10_fused_equals_the_ordinary_step_bit_for_bit(rule: str, clip: str) -> None:
    """Twenty steps, more variants of the rules and a frozen block: what test_matrix.py, two steps long, leaves out."""
    ends, bound = [], 0.3
    for fuse in (False, True):
        model = Model()
        model.blocks[0].requires_grad_(False)
        optimizer = RULES[rule]([pair for pair in model.named_parameters() if pair[1].requires_grad])
        fused = lt.FusedBackward(optimizer, model, clip, None if clip == "none" else bound) if fuse else None
        norms = []
        for number in range(20):
            if fused is None:
                norms.append(ordinary_step(model, optimizer, clip, bound, number))
            else:
                fused.backward(loss_of(model, number))
                optimizer.step()
                norms.append(fused.grad_norm)
        ends.append((torch.cat([p.detach().flatten() for p in model.parameters()]), norms))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-6)


def test_global_clipping_is_torchs() -> None:
    model, other = Model(), Model()
    optimizer, reference = lt.Lomo(model.parameters(), lr=0.5), torch.optim.SGD(other.parameters(), lr=0.5)
    fused = lt.FusedBackward(optimizer, model, "global", 0.2)
    for number in range(5):
        fused.backward(loss_of(model, number))
        optimizer.step()
        reference.zero_grad()
        loss_of(other, number).backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.2)
        reference.step()
        assert fused.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip", ["per_tensor", "global"])
def test_one_gradient_lives_at_a_time(clip: str) -> None:
    model = Model()
    optimizer = lt.TernaryAdamW(model.parameters())
    alive = []
    fused = lt.FusedBackward(optimizer, model, clip)
    update = optimizer.update

    def watching(param, grad, *rest):
        alive.append(sum(p.grad is not None for p in model.parameters()))
        return update(param, grad, *rest)

    optimizer.update = watching
    fused.backward(loss_of(model, 0))
    optimizer.step()
    assert alive == [1] * len(list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_g3_schedulers_see_the_same_rates() -> None:
    ends = []
    for fuse in (False, True):
        model = Model()
        optimizer = lt.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if fuse:
            lt.FusedBackward(optimizer, model, "none")
        for number in range(5):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
            scheduler.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_g9_weight_decay_and_g11_state_survive_under_fused_backward() -> None:
    model = Model()
    optimizer = lt.AdaLomo(model.named_parameters(), lr=1e-3, weight_decay=0.1)
    fused = lt.FusedBackward(optimizer, model)
    for number in range(3):
        fused.backward(loss_of(model, number))
        optimizer.step()
    saved, twin = copy.deepcopy(optimizer.state_dict()), Model()
    twin.load_state_dict(model.state_dict())
    resumed = lt.AdaLomo(twin.named_parameters(), lr=1.0)
    resumed.load_state_dict(saved)
    again = lt.FusedBackward(resumed, twin)
    for one, handle, steps in ((model, fused, optimizer), (twin, again, resumed)):
        handle.backward(loss_of(one, 3))
        steps.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_g12_each_gradient_is_handled_once_and_touches_no_other() -> None:
    """Work a backward grows with the parameters, not with their square: one update, one norm each."""
    counts = []
    for layers in (10, 40):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers)))
        optimizer = lt.Lomo(model.parameters(), lr=0.1)
        fused = lt.FusedBackward(optimizer, model)
        calls = []
        check = optimizer.check_gradient
        optimizer.check_gradient = lambda *a, check=check, calls=calls: calls.append(1) or check(*a)
        fused.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        counts.append(len(calls))
    assert counts == [10, 40]


def test_plain_backward_with_global_clipping_is_refused_before_anything_moves() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model, "global")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BackwardError, match=r"fused\.backward"):
        loss_of(model, 0).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(BackwardError, match="no gradient"):
        optimizer.step()
    fused.backward(loss_of(model, 0))
    optimizer.step()


def test_g2_a_second_backward_before_step_is_refused() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    loss_of(model, 0).backward()
    with pytest.raises(BackwardError, match="accumulation"):
        loss_of(model, 1).backward()
    with pytest.raises(BackwardError):
        fused.backward(loss_of(model, 1))


def test_g6_reentrant_checkpointing_is_refused() -> None:
    layer, tail = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.ModuleList([layer, tail])
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    lt.FusedBackward(optimizer, model)
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(BackwardError, match="use_reentrant=False"):
        tail(checkpoint(layer, x, use_reentrant=True)).sum().backward()


def test_g7_lost_hooks_and_steps_without_backward_are_noticed() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    lt.FusedBackward(optimizer, model)
    with pytest.raises(BackwardError, match="no gradient"):
        optimizer.step()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(BackwardError, match=r"head\.weight"):
        optimizer.step()


@pytest.mark.parametrize("how", ["copied", "assigned", "thawed"])
def test_g7_a_model_copied_assigned_or_thawed_after_its_hooks_is_noticed(how: str) -> None:
    """What trains then is not what has hooks: the step says so."""
    model = Model()
    model.head.weight.requires_grad_(how != "thawed")
    optimizer = lt.Lomo(model.named_parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    trained = copy.deepcopy(model) if how == "copied" else model
    if how == "assigned":
        trained.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    trained.head.weight.requires_grad_(True)
    before = copy.deepcopy(trained.state_dict())
    with pytest.raises(BackwardError, match=r"head\.weight.*has no hook" if how == "thawed" else "no gradient"):
        fused.backward(loss_of(trained, 0))
        optimizer.step()
    if how != "thawed":
        assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())


def test_o19_a_non_finite_loss_moves_nothing_and_a_gradient_names_what_moved() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    fused = lt.FusedBackward(optimizer, model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteError, match="nothing has been updated"):
        fused.backward(loss_of(model, 0) * float("nan"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    handle = model.blocks[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * float("inf"),))
    with pytest.raises(NonFiniteError, match=r"embed\.weight.*head\.weight"):
        fused.backward(loss_of(model, 0))
    handle.remove()
    with pytest.raises(BackwardError):
        optimizer.step()


def test_o19_two_pass_is_whole_or_not_at_all() -> None:
    model = Model()
    optimizer = lt.TernaryAdamW(model.parameters())
    fused = lt.FusedBackward(optimizer, model, "global")
    before = copy.deepcopy(model.state_dict())
    model.blocks[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * float("inf"),))
    with pytest.raises(NonFiniteError, match="Nothing"):
        fused.backward(loss_of(model, 0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_several_optimizers_in_one_backward_and_overlap_refused() -> None:
    model = Model()
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    first, second = lt.AdamW(vectors, lr=1e-3), lt.Lomo(matrices, lr=0.1)
    fused = lt.FusedBackward([first, second], model)
    for number in range(2):
        fused.backward(loss_of(model, number))
        first.step()
        second.step()
        assert fused.grad_norm > 0
    fused.remove()
    with pytest.raises(InvalidArgumentError, match="two of the optimizers"):
        lt.FusedBackward([first, lt.Lomo(vectors + matrices, lr=0.1)])


def test_remove_restores_the_ordinary_step() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    lt.FusedBackward(optimizer, model).remove()
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    lt.FusedBackward(optimizer, model)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"clip": "value"}, InvalidArgumentError),
        ({"clip": "none", "max_grad_norm": 1.0}, InvalidArgumentError),
        ({"max_grad_norm": -1.0}, InvalidArgumentError),
        ({"optimizer": "torch"}, InvalidTypeError),
        ({"optimizer": "partial"}, InvalidArgumentError),
    ],
)
def test_g1_what_cannot_be_honoured_is_refused(arguments: dict, error: type[Exception]) -> None:
    model = Model()
    kind = arguments.pop("optimizer", None)
    optimizer = lt.Lomo(model.blocks.parameters() if kind == "partial" else model.parameters(), lr=0.1)
    if kind == "torch":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error):
        lt.FusedBackward(optimizer, model, **arguments)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_closure_under_fused_backward_is_refused() -> None:
    model = Model()
    optimizer = lt.Lomo(model.parameters(), lr=0.1)
    lt.FusedBackward(optimizer, model)
    with pytest.raises(BackwardError, match="closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("clip", ["per_tensor", "global", "none"])
def test_a_batch_whose_gradients_are_not_finite_can_be_skipped(clip: str) -> None:
    model = nn.Linear(64, 64)
    optimizer = lt.TernaryAdamW(model.named_parameters())
    fused = lt.FusedBackward(optimizer, model=model, clip=clip)
    done = []
    for number in range(4):
        out = model(torch.randn(8, 64))
        if number == 1:
            out.register_hook(lambda grad: grad * float("nan"))
        before = model.weight.detach().clone()
        try:
            fused.backward(out.square().mean())
            optimizer.step()
            done.append(number)
        except NonFiniteError as error:
            assert "Nothing had been updated" in str(error)
            assert torch.equal(model.weight, before)
    assert done == [0, 2, 3]


def test_a_backward_interrupted_from_outside_is_not_a_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = lt.TernaryAdamW(model.named_parameters())
    fused = lt.FusedBackward(optimizer, model=model)
    middle = model[0](torch.randn(8, 64))

    def out_of_memory(grad: torch.Tensor) -> None:
        raise MemoryError("not enough")

    middle.register_hook(out_of_memory)
    with pytest.raises(MemoryError):
        fused.backward(model[1](middle).square().mean())
    with pytest.raises(BackwardError, match="stopped in the middle"):
        optimizer.step()


def test_a_plain_backward_interrupted_from_outside_is_not_a_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = lt.TernaryAdamW(model.named_parameters())
    lt.FusedBackward(optimizer, model=model)
    middle = model[0](torch.randn(8, 64))

    def interrupt(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = middle.register_hook(interrupt)
    loss = model[1](middle).square().mean()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    with pytest.raises(BackwardError, match="interrupted before its end"):
        optimizer.step()
    handle.remove()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


def test_a_parameter_unfrozen_later_and_a_gradient_left_over_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    optimizer = lt.TernaryAdamW(model.named_parameters())
    fused = lt.FusedBackward(optimizer, model=model)
    model[0].requires_grad_(True)
    fused.backward(model(torch.randn(8, 64)).square().mean())
    with pytest.raises(BackwardError, match=r"0\.(weight|bias) .*unfrozen or added"):
        optimizer.step()
    fused.remove()
    with pytest.raises(InvalidArgumentError, match="already has a gradient"):
        lt.FusedBackward(optimizer, model=model)


def test_a_compiled_model_s_donated_buffers_are_refused_under_two_passes() -> None:
    from torch._functorch import config

    torch._dynamo.reset()
    inner = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    )
    model, batch = torch.compile(inner, backend="aot_eager"), torch.randn(4, 16)
    optimizer = lt.Lomo(inner.named_parameters(), lr=0.1)
    with config.patch(donated_buffer=True):
        model(batch).square().mean().backward()  # compiled for one backward
        optimizer.zero_grad()
        before = [param.detach().clone() for param in inner.parameters()]
        fused = lt.FusedBackward(optimizer, model=model, clip="global", max_grad_norm=1.0)
        with pytest.raises(BackwardError, match="donated_buffer = False"):
            fused.backward(model(batch).square().mean())
    assert all(torch.equal(param, old) for param, old in zip(inner.parameters(), before, strict=True))
    torch._dynamo.reset()
    with config.patch(donated_buffer=False):
        for _ in range(2):
            fused.backward(model(batch).square().mean())
            optimizer.step()
    assert fused.grad_norm > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.7, 1.0])
def test_gradients_kept_by_the_first_pass_change_nothing_and_end_the_second_early(
    share: float, checkpointed: bool
) -> None:
    """Six blocks, a share of all gradients' bytes kept: the same bits, and the first blocks are not walked again."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    kept = copy.deepcopy(plain)
    x = torch.randn(16, 32)
    walks = [0] * 6
    results = []
    for model, keep in ((plain, 0), (kept, int(share * sum(param.nbytes for param in plain.parameters())))):
        optimizer = lt.TernaryAdamW(model.named_parameters(), lr=1e-2)
        fused = lt.FusedBackward(optimizer, model=model, clip="global", max_grad_norm=0.1, keep_bytes=keep)
        for _ in range(3):
            hidden = x
            for number, block in enumerate(model):
                call = functools.partial(lambda block, h: torch.tanh(block(h)), block)
                hidden = checkpoint(call, hidden, use_reentrant=False) if checkpointed else call(hidden)
                if model is kept:
                    hidden.register_hook(lambda grad, number=number: walks.__setitem__(number, walks[number] + 1))
            loss = hidden.square().mean()
            fused.backward(loss)
            optimizer.step()
        results.append((fused.grad_norm, [param.detach().clone() for param in model.parameters()]))
        assert not keep or loss.grad_fn is None
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1]))
    whole = int(share * 6 + 1e-9)  # blocks whose gradients fit
    assert walks == [3] * whole + [6] * (6 - whole)


def test_what_the_first_pass_keeps_stays_within_its_bytes_and_frees_the_graph() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    optimizer = lt.Lomo(model.named_parameters(), lr=1e-2)
    fused = lt.FusedBackward(optimizer, model=model, clip="global", keep_bytes=2 * 64 * 64 * 4 + 100)
    held = []
    offer = fused._kept.offer
    fused._kept.offer = lambda param, grad: (offer(param, grad), held.append(fused._kept._bytes))[0]
    saved = torch.ones(8, 64, requires_grad=True)
    alive = weakref.ref(hidden := saved * 1.0)
    loss = model(hidden).square().mean()
    del hidden
    fused.backward(loss)
    optimizer.step()
    assert max(held) == 2 * 64 * 64 * 4 and fused._kept._bytes == 0
    assert alive() is None and loss.item() > 0


@pytest.mark.parametrize("arguments", [{"keep_bytes": -1, "clip": "global"}, {"keep_bytes": 1 << 20}])
def test_keeping_that_cannot_work_is_refused(arguments: dict) -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(InvalidArgumentError, match="keep_bytes"):
        lt.FusedBackward(lt.Lomo(layer.named_parameters(), lr=0.1), model=layer, **arguments)
    assert not layer.weight._post_accumulate_grad_hooks

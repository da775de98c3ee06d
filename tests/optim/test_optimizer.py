"""What a torch.optim.Optimizer owes its user: groups, schedulers, state dicts, refusals."""

import copy
import io
import pickle

import psutil
import pytest
import torch
from torch import Tensor, nn

import leantune as lt
from leantune.errors import InvalidArgumentError, InvalidTypeError, NonFiniteError, StateMismatchError

RULES = {
    "ternary": lambda p: lt.TernaryAdamW(p, lr=1e-2),
    "two_planes": lambda p: lt.TernaryAdamW(p, lr=1e-2, momentum_planes=2, master_bits=24),
    "adamw": lambda p: lt.AdamW(p, lr=1e-2),
    "lomo": lambda p: lt.Lomo(p, lr=1e-1),
    "adalomo": lambda p: lt.AdaLomo(p, lr=1e-2),
    "taco_one_sparse": lambda p: lt.TacoOneSparse(p, lr=1e-2),
}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(72, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        x = torch.randn(16, 72, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_o1_o2_resume_is_bit_exact_and_loads_weights_only(rule: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = RULES[rule](model.named_parameters())
    train(model, optimizer, 0, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True, map_location="cpu")
    other = small_model(dtype)
    resumed = RULES[rule](other.named_parameters())
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for mine, theirs in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in theirs.items()}
    for number in (5, 6):
        train(model, optimizer, number, 1)
        train(other, resumed, number, 1)
        assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("rule", RULES)
def test_o2_deepcopy_pickle_and_safetensors_keep_the_state(rule: str, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    model = small_model(torch.bfloat16)
    optimizer = RULES[rule](model.named_parameters())
    train(model, optimizer, 0, 3)
    saved = optimizer.state_dict()
    flat = {f"{number}.{name}": value for number, state in saved["state"].items() for name, value in state.items()}
    save_file(flat, tmp_path / "state.safetensors")
    read = load_file(tmp_path / "state.safetensors")
    states = {number: {name: read[f"{number}.{name}"] for name in state} for number, state in saved["state"].items()}
    ends = []
    for way in ("itself", "deepcopy", "pickle", "safetensors"):
        both = (copy.deepcopy if way != "pickle" else lambda pair: pickle.loads(pickle.dumps(pair)))((model, optimizer))
        if way == "safetensors":
            both[1].load_state_dict({**saved, "state": states})
        train(*both, 3, 2)
        ends.append(weights(both[0]))
    assert all(torch.equal(ends[0], end) for end in ends[1:])


def test_o3_saves_and_loads_before_any_step_and_with_frozen_parameters() -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = lt.TernaryAdamW(model.parameters())
    lt.TernaryAdamW(small_model().parameters()).load_state_dict(optimizer.state_dict())
    train(model, optimizer, 0, 1)
    assert model[0].weight not in optimizer.state
    fresh = lt.TernaryAdamW(small_model().parameters())
    fresh.load_state_dict(optimizer.state_dict())


def test_saving_does_not_change_state() -> None:
    model = small_model()
    optimizer = lt.TernaryAdamW(model.parameters())
    train(model, optimizer, 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.state_dict()
    for a, b in zip(before["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda p: lt.TernaryAdamW(p, block_size=64), "block_size=128"),
        (lambda p: lt.TernaryAdamW(p, momentum_planes=2), "momentum_planes=1"),
        (lambda p: lt.TernaryAdamW(p, carry_rank=0), "carry_rank=4"),
        (lambda p: lt.AdamW(p), "AdamW keeps"),
    ],
)
def test_o7_a_state_of_other_settings_is_refused_whole(other, words: str) -> None:
    model = small_model()
    optimizer = lt.TernaryAdamW(model.parameters())
    train(model, optimizer, 0, 1)
    target = other(small_model().parameters())
    with pytest.raises(StateMismatchError, match=words):
        target.load_state_dict(optimizer.state_dict())
    assert not target.state


def test_a_damaged_state_is_refused() -> None:
    model = small_model()
    optimizer = lt.TernaryAdamW(model.parameters())
    train(model, optimizer, 0, 1)
    saved = optimizer.state_dict()
    saved["state"][1]["momentum"] = saved["state"][1]["momentum"] * float("nan")
    with pytest.raises(StateMismatchError, match="NaN"):
        optimizer.load_state_dict(saved)
    with pytest.raises(StateMismatchError, match="format version"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(StateMismatchError, match="takes what state_dict"):
        optimizer.load_state_dict({"model": 1})


def test_o8_lr_as_float_tensor_or_schedule_in_every_group() -> None:
    ends = []
    for lr in (0.05, torch.tensor(0.05)):
        model = small_model()
        optimizer = lt.TernaryAdamW([{"params": model[0].parameters()}], lr=lr)
        optimizer.add_param_group({"params": list(model[2].parameters()), "weight_decay": 0.0})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for number in range(3):
            train(model, optimizer, number, 1)
            scheduler.step()
        ends.append(weights(model))
        assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(0.05 / 4)
    assert torch.equal(*ends)


def test_o11_no_state_takes_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = small_model(torch.bfloat16)
        optimizer = lt.TernaryAdamW(model.parameters())
        train(model, optimizer, 0, 2)
        dtypes = {name: value.dtype for state in optimizer.state.values() for name, value in state.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes["momentum"] == torch.float32 and dtypes["momentum_scale"] == torch.bfloat16
    assert dtypes["momentum_trits"] == torch.uint8 and dtypes["step"] == torch.int64


def test_o12_report_names_storage_bits_bytes_and_reason() -> None:
    model = small_model()
    groups = [{"params": [model[0].weight, model[0].bias]}, {"params": list(model[2].parameters()), "states": "exact"}]
    optimizer = lt.TernaryAdamW(groups)
    before = optimizer.report()
    assert [row.storage for row in before.rows] == ["ternary", "exact fp32", "exact fp32", "exact fp32"]
    assert before.rows[1].reason == "vector" and "asked for" in before.rows[2].reason
    train(model, optimizer, 0, 1)
    kept = sum(v.nbytes for state in optimizer.state.values() for name, v in state.items() if name != "step")
    assert before.state_bytes == kept
    assert "B/param" in str(before)


@pytest.mark.parametrize("rule", RULES)
def test_o14_non_contiguous_gradients_are_right_and_weights_refused(rule: str) -> None:
    grad = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    ends = []
    for make in (lambda g: g.t().contiguous(), lambda g: g.t()):
        param = nn.Parameter(torch.ones(64, 96))
        optimizer = RULES[rule]([param])
        param.grad = make(grad)
        optimizer.step()
        ends.append(param.detach())
    assert torch.equal(*ends)
    with pytest.raises(InvalidTypeError, match="not contiguous"):
        RULES[rule]([nn.Parameter(torch.ones(96, 64).t())])


def test_o16_unknown_arguments_and_group_settings_raise() -> None:
    model = small_model()
    with pytest.raises(TypeError):
        lt.TernaryAdamW(model.parameters(), amsgrad=True)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="wieght_decay"):
        lt.TernaryAdamW([{"params": model.parameters(), "wieght_decay": 0.1}])
    with pytest.raises(TypeError):
        lt.Lomo(model.parameters())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0}, {"lr": float("nan")}, {"betas": (1.0, 0.9)}, {"betas": (-0.1, 0.9)}, {"eps": 0.0},
        {"weight_decay": -1}, {"carry_rank": -1}, {"momentum_planes": 3}, {"block_size": 100}, {"states": "int8"},
        {"rounding": "up"}, {"master_bits": 16},
        {"lr": None}, {"betas": 0.9}, {"betas": ("a", 0.9)}, {"eps": None}, {"weight_decay": "x"},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(InvalidArgumentError):
        lt.TernaryAdamW(small_model().parameters(), **settings)


def test_a_remainder_for_float16_weights_is_refused_and_swa_s_group_key_taken() -> None:
    with pytest.raises(InvalidArgumentError, match="is float16"):
        lt.TernaryAdamW(small_model().half().named_parameters(), master_bits=24)
    optimizer = lt.TernaryAdamW(small_model().parameters())
    torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    again = lt.TernaryAdamW(small_model().parameters())
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["swa_lr"] == 0.05


def test_o17_tied_weights_are_stepped_once() -> None:
    model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 40, bias=False))
    model[1].weight = model[0].weight
    optimizer = lt.TernaryAdamW(model.parameters())
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    assert int(optimizer.state[model[0].weight]["step"]) == 1
    assert len(optimizer.state_dict()["state"]) == 1
    with pytest.raises(InvalidArgumentError, match="twice"):
        lt.TernaryAdamW([model[0].weight, model[0].weight])
    with pytest.raises(InvalidArgumentError, match="twice"):
        lt.TernaryAdamW([{"params": [model[0].weight]}, {"params": [model[0].weight]}])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_o19_a_non_finite_gradient_stops_the_whole_step_by_name(rule: str, bad: float) -> None:
    model = small_model()
    optimizer = RULES[rule](model.named_parameters())
    train(model, optimizer, 0, 1)
    before, saved = weights(model).clone(), copy.deepcopy(optimizer.state_dict()["state"])
    model(torch.ones(2, 72)).sum().backward()
    model[2].bias.grad[3] = bad
    with pytest.raises(NonFiniteError, match=r"2\.bias"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    for a, b in zip(saved.values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("rule", RULES)
def test_o20_unusual_parameters_work_or_are_refused(rule: str) -> None:
    usual = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.ones(2, 3, 20))]
    optimizer = RULES[rule](usual)
    for param in usual:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert usual[0].item() < 1 and usual[2].mean() < 1
    for wrong in (torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(InvalidTypeError, match="trains float32"):
            RULES[rule]([nn.Parameter(wrong)])
    with pytest.raises(InvalidTypeError):
        RULES[rule]([torch.ones(3, dtype=torch.int64)])
    table = nn.Embedding(10, 20, sparse=True)
    sparse = RULES[rule](table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidTypeError, match="sparse"):
        sparse.step()


def test_pickle_and_deepcopy_keep_the_state() -> None:
    model = small_model()
    optimizer = lt.TernaryAdamW(model.parameters())
    train(model, optimizer, 0, 2)
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, 2)
    train(twin_model, twin, 2, 2)
    assert torch.equal(weights(model), weights(twin_model))


def test_a_parameter_resized_after_its_first_step_is_refused() -> None:
    for shape in ((64, 640), (6400, 64), (32, 64)):
        param = nn.Parameter(torch.randn(64, 64))
        optimizer = lt.TernaryAdamW([param], carry_rank=0)
        param.grad = torch.randn(64, 64)
        optimizer.step()
        param.grad = None
        param.data = torch.randn(shape)
        param.grad = torch.randn(shape)
        before = param.detach().clone()
        with pytest.raises(StateMismatchError, match="replaced or resized"):
            optimizer.step()
        assert torch.equal(param, before)


def test_a_weight_that_became_non_contiguous_is_refused_and_a_strided_state_is_loaded_whole() -> None:
    param = nn.Parameter(torch.randn(64, 64))
    optimizer = lt.TernaryAdamW([param])
    param.grad = torch.randn(64, 64)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = {
        name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in saved["state"][0].items()
    }
    twin = nn.Parameter(param.detach().clone())
    loaded = lt.TernaryAdamW([twin])
    loaded.load_state_dict(saved)
    param.grad = twin.grad = torch.randn(64, 64)
    optimizer.step()
    loaded.step()
    assert torch.equal(param, twin)
    param.data = param.data.t()
    with pytest.raises(InvalidTypeError, match="no longer contiguous"):
        optimizer.step()


@pytest.mark.parametrize("states", ["ternary", "exact"])
def test_denormal_gradients_leave_weights_finite(states: str) -> None:
    param = nn.Parameter(torch.randn(64, 256))
    optimizer = lt.TernaryAdamW([param], eps=1e-3, states=states)
    param.grad = torch.full((64, 256), 1.4e-45)
    optimizer.step()
    assert torch.isfinite(param).all()


@pytest.mark.slow
def test_o15_offsets_hold_beyond_2_to_the_31_elements() -> None:
    """524,289 x 4,096 in bfloat16: 4.3 GB of weights, 1 GB of state. One gradient for all rows: all are coded alike."""
    if psutil.virtual_memory().available < 9 << 30:
        pytest.skip("needs 9 GiB of free memory")
    row = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    param = torch.nn.Parameter(torch.zeros(524_289, 4096, dtype=torch.bfloat16))
    assert param.numel() > 1 << 31
    optimizer = lt.TernaryAdamW([param], lr=1e-2)
    param.grad = row.expand(param.shape)
    optimizer.step()
    state = optimizer.state[param]
    for at in (1, 262_144, 524_287, 524_288):
        for name in ("momentum_trits", "momentum_scale", "carry_rows"):
            assert torch.equal(state[name][at], state[name][0]), (name, at)
        assert (param[at].float() - param[0].float()).abs().max() <= 2**-7 * param[0].abs().max()
        assert torch.equal(param[at].sign(), -row.sign())

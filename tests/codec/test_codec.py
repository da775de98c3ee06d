"""The storage formats: what is stored comes back, is as small as said, and is rounded without bias."""

import pytest
import torch

from leantune.codec import log_ternary, ternary
from leantune.codec.column_factors import ColumnFactors
from leantune.codec.counter_hash import high_half, low_fraction, random_bits, splitmix64, stream_key
from leantune.codec.low_rank import initial_basis, next_basis
from leantune.codec.rounding import join_24, round_stochastic_, split_24
from leantune.codec.tiles import BlockGrid
from leantune.codec.trits import pack_trits, packed_bytes, unpack_trits

CPU = torch.device("cpu")


@pytest.mark.parametrize("cols", [1, 4, 5, 127, 128, 129, 576, 639, 640, 641, 1536, 4096])
@pytest.mark.parametrize("block", [16, 128])
def test_trits_round_trip_in_the_bytes_promised(cols: int, block: int) -> None:
    trits = torch.randint(-1, 2, (3, cols), generator=torch.Generator().manual_seed(cols))
    packed = pack_trits(trits, block)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, packed_bytes(cols, block))
    assert packed.max() <= 242
    assert torch.equal(unpack_trits(packed, cols, block), trits.float())


def test_a_full_group_keeps_block_k_in_digit_k() -> None:
    trits = torch.zeros(1, 640)
    trits[0, 256:384] = 1
    assert set(pack_trits(trits, 128).flatten().tolist()) == {121 + 9}


def test_splitmix64_on_tensors_is_splitmix64_on_integers() -> None:
    key = stream_key(3, 7, 11)
    bits = random_bits(key, 5, 2, 9, 2, 1, CPU)
    for row in range(2):
        for block in range(2):
            word = splitmix64(splitmix64((5 + row) ^ key) ^ (9 + block)) & 0xFFFFFFFF
            word = (word ^ (word >> 16)) * 0x7FEB352D & 0xFFFFFFFF
            word = (word ^ (word >> 15)) * 0x846CA68B & 0xFFFFFFFF
            word ^= word >> 16
            assert bits[row, block, 0].item() & 0xFFFFFFFF == word


def test_o10_bits_are_uniform_and_belong_to_the_global_row() -> None:
    key = stream_key(0, 1, 2)
    bits = random_bits(key, 0, 256, 0, 4, 128, CPU)
    for half in (low_fraction(bits), high_half(bits).float() / 65536):
        assert abs(half.mean().item() - 0.5) < 0.004
        assert abs(half.var().item() * 12 - 1) < 0.01
    neighbours = torch.corrcoef(torch.stack([low_fraction(bits).flatten()[:-1], low_fraction(bits).flatten()[1:]]))
    assert abs(neighbours[0, 1].item()) < 0.01
    assert torch.equal(random_bits(key, 100, 8, 1, 2, 128, CPU), bits[100:108, 1:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0 + 1e-3, -3.1e-2, 2e-6])
def test_stochastic_rounding_is_unbiased_and_lands_on_neighbours(dtype: torch.dtype, value: float) -> None:
    values = torch.full((1 << 16,), value)
    noise = torch.arange(1 << 16, dtype=torch.int32)
    rounded = round_stochastic_(values.clone(), dtype, noise)
    assert torch.equal(rounded.to(dtype).float(), rounded)
    assert len(rounded.unique()) <= 2
    assert rounded.double().mean().item() == pytest.approx(value, rel=2e-6, abs=2e-12)


def test_stochastic_rounding_keeps_infinities_and_nan() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    rounded = round_stochastic_(values, torch.bfloat16, torch.full((4,), 65535, dtype=torch.int32))
    assert rounded[0] == float("inf") and rounded[1] == float("-inf") and rounded[2].isnan() and rounded[3] == 0


def test_a_24_bit_weight_is_the_nearest_bf16_and_a_remainder() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    weight, remainder = split_24(values, None)
    assert remainder.dtype == torch.int8
    joined = join_24(weight, remainder)
    assert ((joined - values).abs() / values.abs()).max() < 2.0**-15
    assert ((weight.float() - values).abs() / values.abs()).max() <= 2.0**-8
    again = split_24(joined.clone(), None)
    assert torch.equal(again[0], weight) and torch.equal(again[1], remainder)


def test_ternary_quantiser_matches_its_definition() -> None:
    grid = BlockGrid(300, 128, CPU)
    values = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    trits, scale = ternary.quantise(grid.split(values), grid.counts)
    for row in range(4):
        for block in range(3):
            part = values[row, block * 128 : (block + 1) * 128]
            chosen = part.abs() > 0.612 * part.square().mean().sqrt()
            assert torch.equal(trits[row, block, : len(part)], part.sign() * chosen)
            assert scale[row, block].item() == pytest.approx(part[chosen].abs().mean().item(), rel=2**-8)
    distortion = (grid.split(values) - ternary.dequantise(trits, scale)).square().sum() / values.square().sum()
    assert 0.16 < distortion < 0.22  # 0.19 for a Gaussian


def test_an_all_zero_block_stays_zero() -> None:
    zeros = torch.zeros(1, 1, 128)
    counts = torch.full((1,), 128.0)
    trits, scale = ternary.quantise(zeros, counts)
    assert trits.abs().sum() == 0 and scale.item() == 0
    none = torch.zeros(1, 1, dtype=torch.bfloat16)
    values = log_ternary.decode(zeros, none, none)
    assert values.abs().sum() == 0
    tiny = torch.full_like(zeros, 2.0**-125)  # what is stored of it must not make a block of its own
    x, level, step = log_ternary.encode(tiny, torch.ones(1, 128), zeros, none, torch.full_like(zeros, 0.99))
    assert x.abs().sum() == 0 and level.item() == 0 and step.item() == 0


@pytest.mark.parametrize("cols", [100, pytest.param(128, marks=pytest.mark.slow)])
def test_log_ternary_keeps_the_spread_over_thousands_of_steps(cols: int) -> None:
    """The log-step follows the spread: it neither shrinks to its floor nor grows, and v keeps each element's size."""
    grid = BlockGrid(cols, 128, CPU)
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(torch.randn(8, cols, generator=generator))
    beta2, exact = 0.999, torch.zeros(8, grid.blocks, 128)
    x, live = torch.zeros(8, grid.blocks, 128), grid.split(torch.ones(1, cols))[0]
    level, step = (torch.zeros(8, grid.blocks, dtype=torch.bfloat16) for _ in range(2))
    for number in range(3000):
        square = grid.split((scale * torch.randn(8, cols, generator=generator)) ** 2)
        exact = beta2 * exact + (1 - beta2) * square
        values = live * (beta2 * log_ternary.decode(x, level, step) + (1 - beta2) * square)
        bits = random_bits(stream_key(0, number, 0), 0, 8, 0, grid.blocks, 128, CPU)
        x, level, step = log_ternary.encode(values, live, x, step, low_fraction(bits))
    assert 0.5 < step.float().median() < 8
    decoded = log_ternary.decode(x, level, step)
    sample = grid.split(scale * torch.randn(8, cols, generator=generator))
    cosine = lambda v: torch.cosine_similarity(  # noqa: E731
        (sample / v.sqrt())[sample != 0], (sample / exact.sqrt())[sample != 0], dim=0
    ).item()
    mean = (exact.sum(-1) / grid.counts).unsqueeze(-1).expand_as(exact)
    assert cosine(decoded) > cosine(mean) + 0.05


def test_a_fallen_gradient_lets_v_fall() -> None:
    generator = torch.Generator().manual_seed(0)
    x, none = torch.zeros(4, 1, 128), torch.zeros(4, 1, dtype=torch.bfloat16)
    level, step, beta2, exact = none, none.clone(), 0.99, torch.zeros(4, 1, 128)
    for number in range(2000):
        size = 1.0 if number < 500 else 1e-2
        square = (size * torch.randn(4, 1, 128, generator=generator)) ** 2
        exact = beta2 * exact + (1 - beta2) * square
        values = beta2 * log_ternary.decode(x, level, step) + (1 - beta2) * square
        bits = random_bits(stream_key(0, number, 0), 0, 4, 0, 1, 128, CPU)
        x, level, step = log_ternary.encode(values, torch.ones(1, 128), x, step, low_fraction(bits))
    ratio = log_ternary.decode(x, level, step).mean() / exact.mean()
    assert 0.7 < ratio < 1.5


def test_orthogonal_iteration_finds_the_low_rank_part() -> None:
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(60, 3, generator=generator) @ torch.randn(3, 80, generator=generator)
    matrix = signal + 0.1 * torch.randn(60, 80, generator=generator)
    basis = initial_basis(80, 4, 1, CPU)
    for _ in range(4):
        basis = next_basis(matrix.t() @ (matrix @ basis.float()), basis)
    projected = (matrix @ basis.float()) @ basis.float().t()
    assert (projected - signal).norm() / signal.norm() < 0.05
    # A direction that the matrix lacks, or a matrix of zeros, leaves a whole basis: nothing is lost or not a number.
    for products in (torch.zeros(80, 4), matrix.t() @ (signal @ basis.float()), 1e-30 * torch.eye(80, 4)):
        after = next_basis(products, basis).float()
        assert (after.t() @ after - torch.eye(4)).abs().max() < 0.02


def test_column_factors_leave_dead_columns_out() -> None:
    factors = ColumnFactors(torch.tensor([0.0, 1.0, 2.0, 1e-30]))
    assert factors.live.tolist() == [0, 1, 1, 1]
    assert factors.times[0] == factors.over[0] == 0
    torch.testing.assert_close(factors.times * factors.over, factors.live)
    assert factors.times[1] == pytest.approx(4 / 3) and factors.times[3] == 2.0**-40
    nothing = ColumnFactors(torch.zeros(3))
    assert not (nothing.times.any() or nothing.over.any() or nothing.live.any())

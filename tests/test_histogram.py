"""`determined_amp.finder.histogram`: counted exponents against torch's own rounding to float16."""

from __future__ import annotations

import math

import pytest
import torch

from determined_amp.finder.histogram import BINS, Histogram, exponent_counts


def histogram(values: torch.Tensor) -> Histogram:
    return Histogram(exponent_counts(values).numpy())


def wide_values(dtype: torch.dtype) -> torch.Tensor:
    """(20000,), over eighty powers of two, with zeros and exact powers of two among them."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 20, (20000,), generator=generator)
    mantissas = 1.0 + torch.rand(20000, generator=generator)
    mantissas[::5] = 1.0
    values = torch.ldexp(mantissas, exponents)
    values[::7] = 0.0
    values[1::3] *= -1.0
    return values.to(dtype)


class TestAgainstTorch:
    @pytest.mark.parametrize("scale_log2", [-40, -8, 0, 3, 16, 24, 40])
    def test_flush_and_overflow_are_what_a_cast_does(self, scale_log2: int) -> None:
        values = wide_values(torch.bfloat16)
        there = values[values != 0].double()
        cast = (there * 2.0**scale_log2).to(torch.float16)
        counted = histogram(values)
        assert counted.flushed_share(scale_log2) == (cast == 0).double().mean().item()
        assert counted.overflow_share(scale_log2) == cast.isinf().double().mean().item()

    def test_the_flush_bound_itself_goes_to_zero_and_the_next_value_does_not(self) -> None:
        at, above = histogram(torch.tensor([2.0**-25])), histogram(torch.tensor([2.0**-25 * 1.001]))
        assert (at.flushed_share(0), above.flushed_share(0)) == (1.0, 0.0)
        assert (at.flushed_share(1), at.flushed_share(-1)) == (0.0, 1.0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_every_value_is_in_one_bin(self, dtype: torch.dtype) -> None:
        values = wide_values(dtype)
        counted = histogram(values)
        assert counted.counts.shape == (BINS,)
        assert counted.zeros == (values == 0).sum()
        assert counted.nonzero + counted.zeros == values.numel()
        assert sum(counted.by_power().values()) == counted.nonzero

    def test_float16_subnormals_keep_their_exponent(self) -> None:
        assert histogram(torch.tensor([2.0**-24], dtype=torch.float16)).largest_log2 == -24


class TestHistogram:
    def test_largest_is_the_floor_of_log2(self) -> None:
        assert histogram(torch.tensor([3.9, -4.1, 0.0])).largest_log2 == 2
        assert histogram(torch.tensor([0.5])).largest_log2 == -1

    def test_zeros_have_no_largest(self) -> None:
        counted = histogram(torch.zeros(3))
        assert counted.largest_log2 is None
        assert counted.quantile_log2(0.5) is None
        assert counted.flushed_share(0) == counted.overflow_share(0) == 0.0

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_not_finite_is_seen_and_overflows_at_every_scale(self, value: float) -> None:
        counted = histogram(torch.tensor([1.0, value]))
        assert not counted.is_finite
        assert counted.overflow_share(-100) == 0.5
        assert histogram(torch.tensor([1.0])).is_finite

    def test_quantile_is_the_power_below_which_that_share_lies(self) -> None:
        counted = histogram(torch.tensor([2.0**-q for q in range(100)]))
        assert counted.quantile_log2(0.01) == -99
        assert counted.quantile_log2(0.5) == -50
        assert counted.quantile_log2(1.0) == 0

    def test_sum_counts_both(self) -> None:
        both = histogram(torch.tensor([1.0, 0.0])) + histogram(torch.tensor([8.0]))
        assert both.by_power() == {0: 1, 3: 1}
        assert both.zeros == 1

    def test_far_scales_are_all_or_nothing(self) -> None:
        counted = histogram(torch.tensor([1.0]))
        assert (counted.flushed_share(-200), counted.flushed_share(200)) == (1.0, 0.0)
        assert (counted.overflow_share(-200), counted.overflow_share(200)) == (0.0, 1.0)

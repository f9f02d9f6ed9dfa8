"""`determined_amp.finder.histogram`: counted exponents against torch's own rounding to float16."""

from __future__ import annotations

import math

import pytest
import torch

from determined_amp.finder.histogram import BINS, Histogram, Tally
from tests.fake_cuda import fake_cuda, needs_fake_cuda


def histogram(values: torch.Tensor) -> Histogram:
    tally = Tally()
    tally.add(values)
    return tally.histograms([0])[0]


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
        flushed = there.where(cast == 0, 0.0).norm() / there.norm()
        assert counted.flushed_share(scale_log2) == pytest.approx(flushed.item(), rel=1e-12)
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

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_histogram_in_parts_or_on_the_host_is_that_of_the_whole(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = wide_values(dtype).view(100, 200).t()
        whole = histogram(values)
        for limit, value in (("_PART", 777), ("_SMALL", 20000)):
            monkeypatch.setattr(f"determined_amp.finder.histogram.{limit}", value)
            again = histogram(values)
            assert (again.counts == whole.counts).all()
            assert again.squares == pytest.approx(whole.squares, rel=1e-12)
            assert again.largest == whole.largest

    def test_tensors_are_told_apart(self) -> None:
        tally = Tally()
        for values in ([1.0, 2.0], [3.0] * 5000, [0.0], [4.0]):
            tally.add(torch.tensor(values))
        of_three, none, of_two = tally.histograms([1, 2, 0])
        assert (of_three.by_power(), none.zeros, of_two.by_power()) == ({1: 5000}, 1, {0: 1, 1: 1})
        assert (of_three.largest, none.largest, of_two.largest) == (3.0, 0.0, 2.0)
        assert tally.histograms([]) == []

    @needs_fake_cuda
    def test_histogram_is_counted_on_a_gpu_without_waiting_for_it(self) -> None:
        with fake_cuda() as syncs, syncs.during("counting"):
            for size in (100, 5000):
                Tally().add(torch.ones(size, device="cuda", dtype=torch.bfloat16))
        assert not syncs.waits["counting"]
        assert syncs.calls["counting"]["histc"] == 1

    def test_float16_subnormals_keep_their_exponent(self) -> None:
        assert histogram(torch.tensor([2.0**-24], dtype=torch.float16)).largest_log2 == -24


class TestHistogram:
    def test_largest_is_the_floor_of_log2(self) -> None:
        assert histogram(torch.tensor([3.9, -4.1, 0.0])).largest_log2 == 2
        assert histogram(torch.tensor([0.5])).largest_log2 == -1

    def test_zeros_have_no_largest_and_the_smallest_scale_there_is(self) -> None:
        counted = histogram(torch.zeros(3))
        assert counted.largest_log2 is None
        assert counted.flushed_share(0) == counted.overflow_share(0) == 0.0
        assert counted.smallest_scale_log2(0.001) == -126

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_value_that_is_not_finite_is_seen_and_overflows_at_every_scale(
        self, value: float
    ) -> None:
        counted = histogram(torch.tensor([1.0, value]))
        assert not counted.is_finite
        assert counted.overflow_share(-100) == 0.5
        assert histogram(torch.tensor([1.0])).is_finite
        assert counted.finite().by_power() == {0: 1}
        assert (counted.largest, counted.finite().is_finite) == (1.0, True)

    def test_a_value_counts_by_what_it_contributes(self) -> None:
        """Three near-zero values in four are next to nothing; by their number they are 75 %."""
        counted = histogram(torch.tensor([1.0, 2.0**-30, 2.0**-30, 2.0**-30]))
        assert counted.flushed_share(0) == pytest.approx(3**0.5 * 2.0**-30)
        assert histogram(torch.full((3,), 2.0**-30)).flushed_share(0) == 1.0

    def test_smallest_scale_is_the_first_that_flushes_no_more_than_the_share(self) -> None:
        counted = histogram(wide_values(torch.bfloat16))
        for share in (1e-6, 1e-3, 0.1, 0.9):
            scale = counted.smallest_scale_log2(share)
            assert counted.flushed_share(scale) <= share < counted.flushed_share(scale - 1)

    def test_faintest_values_are_those_that_a_scale_flushes_first(self) -> None:
        counted = histogram(torch.tensor([0.0, 1.0, 2.0, 4.0]))
        assert counted.faintest_share(0, -30) == 0.0
        assert counted.faintest_share(2, -30) == pytest.approx((5 / 21) ** 0.5)
        assert counted.faintest_share(3, -30) == counted.faintest_share(9, -30) == 1.0

    def test_zeros_among_values_well_above_the_bound_are_no_flush(self) -> None:
        counted = histogram(torch.tensor([1.0, 2.0, 4.0]))
        assert counted.faintest_share(3, -21) == 0.0
        assert counted.faintest_share(3, -22) == pytest.approx((1 / 21) ** 0.5)

    def test_unscaling_moves_everything_but_zeros_by_the_scale(self) -> None:
        values = torch.tensor([0.0, 3.0, -(2.0**-24)])
        moved = histogram(values * 2.0**10).unscaled(10)
        assert (moved.counts == histogram(values).counts).all()
        assert moved.squares == pytest.approx(histogram(values).squares)
        assert moved.largest == 3.0

    @pytest.mark.parametrize(("scale", "bin_of_it"), [(300, 1), (-300, BINS - 1)])
    def test_value_unscaled_beyond_float32_is_neither_zero_nor_lost(
        self, scale: int, bin_of_it: int
    ) -> None:
        moved = histogram(torch.tensor([0.0, 3.0])).unscaled(scale)
        assert (moved.zeros, moved.nonzero, moved.counts[bin_of_it]) == (1, 1, 1)

    def test_far_scales_are_all_or_nothing(self) -> None:
        """Of the smallest value there is, too."""
        one, smallest = histogram(torch.tensor([1.0])), histogram(torch.tensor([2.0**-149]))
        assert (one.flushed_share(-200), one.flushed_share(200)) == (1.0, 0.0)
        assert (one.overflow_share(-200), one.overflow_share(200)) == (0.0, 1.0)
        assert (smallest.overflow_share(300), smallest.overflow_share(16)) == (1.0, 0.0)
        assert (smallest.faintest_share(1, 300), smallest.faintest_share(1, 0)) == (0.0, 1.0)

    def test_empty_histogram_adds_nothing(self) -> None:
        counted, empty = histogram(torch.tensor([1.0, 0.0])), Histogram.empty()
        assert ((empty + counted).counts == counted.counts).all()
        assert (empty.nonzero, empty.zeros, empty.counts.dtype) == (0, 0, counted.counts.dtype)

    def test_sum_of_histograms_counts_both(self) -> None:
        both = histogram(torch.tensor([1.0, 0.0])) + histogram(torch.tensor([8.0]))
        whole = histogram(torch.tensor([1.0, 0.0, 8.0]))
        assert (both.by_power(), both.zeros) == ({0: 1, 3: 1}, 1)
        assert (both.counts == whole.counts).all()
        assert both.squares == pytest.approx(whole.squares)
        assert both.largest == 8.0

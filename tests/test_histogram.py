"""`finder.histogram`: counted magnitudes against torch's own rounding to float16."""

import math

import pytest
import torch

from determined_amp.finder.histogram import Histogram
from tests.loss_scale import powers_in


def histogram(values):
    return Histogram.of(values.bfloat16())


def wide_values():
    """(20000,), bfloat16, over eighty powers of two, with zeros and exact powers of
    two.
    """
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 20, (20000,), generator=generator)
    mantissas = 1.0 + torch.rand(20000, generator=generator)
    mantissas[::5] = 1.0
    values = torch.ldexp(mantissas, exponents)
    values[::7] = 0.0
    values[1::3] *= -1.0
    return values.bfloat16()


class TestAgainstTorch:
    @pytest.mark.parametrize("scale_log2", [-40, -8, 0, 3, 16, 24, 40])
    def test_flushed_and_overflowing_shares_are_those_of_torchs_cast(self, scale_log2):
        values = wide_values()
        there = values[values != 0].double()
        cast = (there * 2.0**scale_log2).to(torch.float16)
        counted = histogram(values)
        flushed = there.where(cast == 0, 0.0).norm() / there.norm()
        assert counted.flushed_share(scale_log2) == pytest.approx(
            flushed.item(), rel=1e-12
        )
        assert counted.overflow_share(scale_log2) == cast.isinf().double().mean().item()

    def test_smallest_bfloat16_and_a_strided_matrix_are_counted(self):
        tiny = 2.0**-133
        counted = histogram(torch.tensor([[tiny, 4.0], [3.0, 3.0]]).t())
        assert powers_in(counted) == {-133: 1, 1: 2, 2: 1}


class TestHistogram:
    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_value_that_is_not_finite_is_not_counted(self, value):
        counted = histogram(torch.tensor([1.0, value]))
        assert (powers_in(counted), counted.largest) == ({0: 1}, 1.0)
        assert histogram(torch.tensor([value])).largest == 0.0

    def test_smallest_scale_is_the_first_that_flushes_no_more_than_the_share(self):
        counted = histogram(wide_values())
        for share in (1e-6, 1e-3, 0.1, 0.9):
            scale = counted.smallest_scale_log2(share)
            assert (
                counted.flushed_share(scale) <= share < counted.flushed_share(scale - 1)
            )

"""How many values lie in each power of two, and what a loss scale of 2^k would make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# Two bins for each of float32's 256 biased exponents: 2^q itself, and the open interval above it.
# The flush to zero has its bound in between: 2^-25 goes to 0, anything larger to 2^-24.
BINS = 512
_BIAS = 127
_NOT_FINITE = 2 * 255

# The smallest power of two that float16 rounds to infinity; 65520 does, but bfloat16 has no value
# in between. And the largest magnitude that it rounds to 0 (to nearest, ties to even).
OVERFLOW_LOG2 = 16
FLUSH_LOG2 = -25

# A kernel that adds up in float16 may lose a value some bits above the bound, but not from here on.
_KEPT_LOG2 = FLUSH_LOG2 + 4

# The square of a bin's values. Between two powers of two, values are spread evenly over the
# logarithm, as gradients nearly are: their mean square is 1.5 / ln 2 times that of the lower power.
_SQUARES = np.ldexp(1.0, 2 * (np.arange(BINS) // 2 - _BIAS))
_SQUARES[1::2] *= 1.5 / math.log(2)
_SQUARES[0] = 0.0

# float32's whole range of exponents: beyond it no scale can be stored.
_LEAST_LOG2 = -126


def exponent_counts(values: torch.Tensor) -> torch.Tensor:
    """Count the values of a float16, bfloat16 or float32 tensor by magnitude, on its device.

    Returns:
        (512,), int64. Bin `2 * (q + 127)` holds what is +-2^q exactly and the bin after it what is
        larger, below 2^(q+1). Bin 0 holds the zeros, the last two infinity and NaN.
    """
    bits = values.detach().float().contiguous().view(torch.int32).flatten()
    exponent = (bits >> 23) & 0xFF
    between = (bits & 0x7FFFFF) != 0
    return torch.bincount(exponent * 2 + between, minlength=BINS)


@dataclass(frozen=True)
class Histogram:
    """The magnitudes of a set of values.

    Args:
        counts: (512,), int64, as `exponent_counts` makes them.
    """

    counts: npt.NDArray[np.int64]

    @staticmethod
    def empty() -> Histogram:
        return Histogram(np.zeros(BINS, dtype=np.int64))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.counts + other.counts)

    @property
    def zeros(self) -> int:
        return int(self.counts[0])

    @property
    def nonzero(self) -> int:
        return int(self.counts[1:].sum())

    @property
    def is_finite(self) -> bool:
        return not self.counts[_NOT_FINITE:].any()

    @property
    def largest_log2(self) -> int | None:
        """The floor of log2 of the largest magnitude; None if all values are 0."""
        filled = np.flatnonzero(self.counts[1:]) + 1
        return int(filled[-1]) // 2 - _BIAS if len(filled) else None

    def by_power(self) -> dict[int, int]:
        """Number of values in [2^q, 2^(q+1)), by q, where there are any."""
        pairs = self.counts.reshape(-1, 2).sum(axis=1)
        pairs[0] -= self.zeros
        return {int(q) - _BIAS: int(pairs[q]) for q in np.flatnonzero(pairs)}

    def unscaled(self, scale_log2: int) -> Histogram:
        """What it would be had the values been made without that loss scale."""
        counts = np.zeros_like(self.counts)
        moved = np.flatnonzero(self.counts[1:]) + 1
        counts[np.clip(moved - 2 * scale_log2, 1, BINS - 1)] = self.counts[moved]
        counts[0] = self.zeros
        return Histogram(counts)

    def flushed_share(self, scale_log2: int) -> float:
        """The 2-norm of what float16 makes 0 at that loss scale, over the norm of all values.

        So a value counts by what it contributes: it is the relative error that the flush makes.
        """
        last = 2 * (FLUSH_LOG2 - scale_log2 + _BIAS)
        return self._share_of_norm(np.where(np.arange(BINS) <= last, self.counts, 0))

    def faintest_share(self, count: int, scale_log2: float) -> float:
        """The same of that many values, the smallest that are not 0.

        Values that are well above the bound at that scale are left out: they are 0 for another
        reason, as behind a ReLU whose input two dtypes round to either side of 0.
        """
        faint = self.counts.copy()
        faint[0] = 0
        faint[max(2 * (math.floor(_KEPT_LOG2 - scale_log2) + _BIAS), 1) :] = 0
        below = np.cumsum(faint) - faint
        return self._share_of_norm(np.clip(count - below, 0, faint))

    def smallest_scale_log2(self, flushed: float) -> int:
        """The smallest power of two at which `flushed_share` is no more than that."""
        squares = np.cumsum((self.counts * _SQUARES)[1:])
        bins = int(np.searchsorted(squares, flushed**2 * squares[-1], side="right"))
        return max(FLUSH_LOG2 + _BIAS - bins // 2, _LEAST_LOG2)

    def overflow_share(self, scale_log2: int) -> float:
        """The share of the values that are not 0 which float16 makes infinite at that scale."""
        first = max(2 * (OVERFLOW_LOG2 - scale_log2 + _BIAS), 1)
        return self._share(int(self.counts[min(first, _NOT_FINITE) :].sum()))

    def _share_of_norm(self, part: npt.NDArray[np.int64]) -> float:
        whole = float(self.counts @ _SQUARES)
        return math.sqrt(float(part @ _SQUARES) / whole) if whole else 0.0

    def _share(self, count: int) -> float:
        return count / self.nonzero if self.nonzero else 0.0

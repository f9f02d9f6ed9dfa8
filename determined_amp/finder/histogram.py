"""How many values lie in each power of two, and what a loss scale of 2^k does to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# Two bins for each of float32's 256 biased exponents: one for 2^q itself, one for the open interval
# above it. The flush limit lies between two bins: 2^-25 becomes 0, values just above become 2^-24.
BINS = 512
_BIAS = 127

# How many values to count at a time. Counting takes several times the memory of these values, and
# the model and the gradient of a large activation may fill nearly all memory.
_PART = 2**24

_NOT_FINITE = 2 * 255

# The smallest power of two that float16 rounds to infinity. The exact limit is 65520, but bfloat16
# has no value between that and 2^16.
OVERFLOW_LOG2 = 16
# The largest magnitude that float16 rounds to 0 (to nearest, ties to even).
FLUSH_LOG2 = -25

# A kernel that accumulates in float16 may flush values a few bits above that limit, but none from
# this magnitude up.
_KEPT_LOG2 = FLUSH_LOG2 + 4

# The mean square of the values in each bin. Between two powers of two, log2 of the gradients is
# nearly uniform, so their mean square is 1.5 / ln 2 times the square of the lower power.
_SQUARES = np.ldexp(1.0, 2 * (np.arange(BINS) // 2 - _BIAS))
_SQUARES[1::2] *= 1.5 / math.log(2)
_SQUARES[0] = 0.0

# log2 of the smallest normal float32: no smaller scale can be stored.
_LEAST_LOG2 = -126


def exponent_counts(values: torch.Tensor) -> torch.Tensor:
    """Count the values of a float16, bfloat16 or float32 tensor by magnitude, on its device.

    Returns:
        (512,), int64. Bin `2 * (q + 127)` counts the values that are exactly +-2^q, and the next
        bin those between 2^q and 2^(q+1). Bin 0 counts zeros, the last two infinities and NaNs.
    """
    flat = values.detach().contiguous().flatten()
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device)
    for part in torch.split(flat, _PART):
        bits = part.float().view(torch.int32)
        between = (bits & 0x7FFFFF) != 0
        bins = ((bits >> 23) & 0xFF) * 2 + between
        if values.device.type == "cuda":  # here bincount would read the largest bin on the host
            counts += torch.histc(bins, bins=BINS, min=0, max=BINS)
        else:
            counts += torch.bincount(bins, minlength=BINS)
    return counts


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
        """The histogram of the same values divided by a loss scale."""
        counts = np.zeros_like(self.counts)
        moved = np.flatnonzero(self.counts[1:]) + 1
        counts[np.clip(moved - 2 * scale_log2, 1, BINS - 1)] = self.counts[moved]
        counts[0] = self.zeros
        return Histogram(counts)

    def flushed_share(self, scale_log2: int) -> float:
        """2-norm of the values flushed to 0 at a loss scale, divided by the 2-norm of all values.

        This is the relative error that the flush in float16 causes.
        """
        last = 2 * (FLUSH_LOG2 - scale_log2 + _BIAS)
        return self._share_of_norm(np.where(np.arange(BINS) <= last, self.counts, 0))

    def faintest_share(self, count: int, scale_log2: float) -> float:
        """2-norm of the `count` smallest nonzero values, divided by the 2-norm of all values.

        Values well above the flush limit at that scale are left out. They became 0 for another
        reason: for instance, two dtypes round the input of a ReLU to different sides of 0.
        """
        faint = self.counts.copy()
        faint[0] = 0
        faint[max(2 * (math.floor(_KEPT_LOG2 - scale_log2) + _BIAS), 1) :] = 0
        below = np.cumsum(faint) - faint
        return self._share_of_norm(np.clip(count - below, 0, faint))

    def smallest_scale_log2(self, flushed: float) -> int:
        """log2 of the smallest power of two at which `flushed_share` is at most `flushed`."""
        squares = np.cumsum((self.counts * _SQUARES)[1:])
        bins = int(np.searchsorted(squares, flushed**2 * squares[-1], side="right"))
        return max(FLUSH_LOG2 + _BIAS - bins // 2, _LEAST_LOG2)

    def overflow_share(self, scale_log2: int) -> float:
        """The share of the nonzero values that float16 makes infinite at a loss scale."""
        first = max(2 * (OVERFLOW_LOG2 - scale_log2 + _BIAS), 1)
        return self._share(int(self.counts[min(first, _NOT_FINITE) :].sum()))

    def _share_of_norm(self, part: npt.NDArray[np.int64]) -> float:
        whole = float(self.counts @ _SQUARES)
        return math.sqrt(float(part @ _SQUARES) / whole) if whole else 0.0

    def _share(self, count: int) -> float:
        return count / self.nonzero if self.nonzero else 0.0

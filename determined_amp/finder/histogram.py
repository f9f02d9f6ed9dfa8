"""How many values lie in each power of two, and what a loss scale of 2^k would make of them."""

from __future__ import annotations

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

    def quantile_log2(self, share: float) -> int | None:
        """The power of two that holds this quantile of the magnitudes that are not 0."""
        if not self.nonzero:
            return None
        below = np.cumsum(self.counts[1:])
        return int(np.searchsorted(below, share * below[-1]) + 1) // 2 - _BIAS

    def by_power(self) -> dict[int, int]:
        """Number of values in [2^q, 2^(q+1)), by q, where there are any."""
        pairs = self.counts.reshape(-1, 2).sum(axis=1)
        pairs[0] -= self.zeros
        return {int(q) - _BIAS: int(pairs[q]) for q in np.flatnonzero(pairs)}

    def flushed_share(self, scale_log2: int) -> float:
        """The share of the values that are not 0 which float16 makes 0 at that loss scale."""
        last = 2 * (FLUSH_LOG2 - scale_log2 + _BIAS)
        return self._share(int(self.counts[1 : max(last + 1, 1)].sum()))

    def overflow_share(self, scale_log2: int) -> float:
        """The share of the values that are not 0 which float16 makes infinite at that scale."""
        first = max(2 * (OVERFLOW_LOG2 - scale_log2 + _BIAS), 1)
        return self._share(int(self.counts[min(first, _NOT_FINITE) :].sum()))

    def _share(self, count: int) -> float:
        return count / self.nonzero if self.nonzero else 0.0

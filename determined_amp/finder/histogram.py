"""The magnitudes of bfloat16 values, and what float16 does to them at a loss scale."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

# The smallest power of two that float16 rounds to infinity. The exact limit is 65520,
# but bfloat16 has no value between that and 2^16.
OVERFLOW_LOG2 = 16
# The largest magnitude that float16 rounds to 0 (to nearest, ties to even).
FLUSH_LOG2 = -25

# The bits of a bfloat16 without its sign, and those of infinity; NaNs are above.
_MAGNITUDE, _INFINITY = 0x7FFF, 0x7F80


@dataclass(frozen=True)
class Histogram:
    """How often each finite magnitude occurs in a set of values."""

    counts: Counter[float] = field(default_factory=Counter)

    @staticmethod
    def of(values: torch.Tensor) -> Histogram:
        """The histogram of a bfloat16 tensor; synchronises."""
        flat = values.detach().contiguous().flatten()
        counts = torch.bincount(flat.view(torch.int16) & _MAGNITUDE)[:_INFINITY]
        bits = counts.nonzero().flatten()
        magnitudes = bits.to(torch.int16).view(torch.bfloat16).tolist()
        return Histogram(
            Counter(dict(zip(magnitudes, counts[bits].tolist(), strict=True)))
        )

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.counts + other.counts)

    @property
    def nonzero(self) -> int:
        """How many values are not 0."""
        return self.counts.total() - self.counts[0.0]

    @property
    def largest(self) -> float:
        """The largest magnitude; 0 if there is none."""
        return max(self.counts, default=0.0)

    def flushed_share(self, scale_log2: float) -> float:
        """2-norm of the values flushed to 0 at a loss scale, divided by the 2-norm of
        all values.

        This is the relative error that the flush in float16 causes.
        """
        flushed = self._magnitudes <= 2.0 ** (FLUSH_LOG2 - scale_log2)
        whole = self._squares.sum()
        return math.sqrt(self._squares[flushed].sum() / whole) if whole else 0.0

    def smallest_scale_log2(self, flushed: float) -> int:
        """log2 of the smallest power of two at which `flushed_share` is at most
        `flushed`.

        There must be a value that is not 0.
        """
        running = np.cumsum(self._squares)
        first_kept = np.searchsorted(running, flushed**2 * running[-1], side="right")
        return math.floor(FLUSH_LOG2 - math.log2(self._magnitudes[first_kept])) + 1

    def overflow_share(self, scale_log2: float) -> float:
        """The share of nonzero values that float16 makes infinite at a loss scale."""
        least = 2.0 ** (OVERFLOW_LOG2 - scale_log2)
        infinite = sum(n for value, n in self.counts.items() if value >= least)
        return infinite / self.nonzero if self.nonzero else 0.0

    @cached_property
    def _magnitudes(self) -> npt.NDArray[np.float64]:
        return np.array(sorted(self.counts))

    @cached_property
    def _squares(self) -> npt.NDArray[np.float64]:
        """For each magnitude, the sum of the squares of its values."""
        return np.array([self.counts[each] * each**2 for each in self._magnitudes])

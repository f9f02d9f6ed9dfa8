"""How many values lie in each power of two, and what a loss scale of 2^k does to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# Two bins for each of float32's 256 biased exponents: one for 2^q itself, one for the open interval
# above it. The flush limit lies between two bins: 2^-25 becomes 0, values just above become 2^-24.
BINS = 512
_BIAS = 127

# The upper half of a float32 without its sign: 8 bits of exponent, 7 of the significand. That is a
# whole bfloat16.
_PATTERNS, _SIGNIFICANDS = 2**15, 2**7
_INFINITY = 255 * _SIGNIFICANDS

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

# Tensors of at most this many values are counted together on the host.
_SMALL = 2**12

_SIGNIFICAND = 1.0 + np.arange(_SIGNIFICANDS) / _SIGNIFICANDS

# The square of the power of two at which each bin begins; bin 0 holds zeros.
_POWERS_SQUARED = np.ldexp(1.0, 2 * (np.arange(BINS) // 2 - _BIAS))
_POWERS_SQUARED[0] = 0.0

# log2 of the smallest normal float32: no smaller scale can be stored.
_LEAST_LOG2 = -126


class Tally:
    """Counts the values of tensors by magnitude, on their device, without keeping large tensors.

    Counting a small tensor costs more than keeping it, so small ones are counted at the end.
    """

    def __init__(self) -> None:
        self._counted: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._counted)

    def add(self, values: torch.Tensor) -> None:
        """Count a float16, bfloat16 or float32 tensor, which must not be empty."""
        flat = values.detach().contiguous().flatten()
        small = len(flat) <= _SMALL
        self._counted.append(_patterns(flat).short() if small else _magnitudes(flat))

    def histograms(self, chosen: Sequence[int]) -> list[Histogram]:
        """The histograms of the chosen tensors, by their number in the order of `add`.

        Synchronises twice, however many there are.
        """
        counted = [self._counted[number] for number in chosen]
        small = [patterns for patterns in counted if not patterns.is_floating_point()]
        large = [row for row in counted if row.is_floating_point()]
        lengths = np.cumsum([len(patterns) for patterns in small])[:-1]
        of_small = iter(np.split(torch.cat(small).cpu().numpy(), lengths) if small else ())
        of_large = iter(torch.stack(large).cpu().numpy() if large else ())
        return [
            Histogram.of_row(next(of_large))
            if row.is_floating_point()
            else Histogram.of_patterns(next(of_small))
            for row in counted
        ]


def _magnitudes(flat: torch.Tensor) -> torch.Tensor:
    """Count values by magnitude, on their device.

    Returns:
        (769,), float64. For each of the 256 exponents: how many values are a power of two, how many
        are not, and the sum of the squares of the latter's significands. Then the pattern of the
        largest finite value.
    """
    significand = 1.0 + torch.arange(_SIGNIFICANDS, device=flat.device).double() / _SIGNIFICANDS
    others = (significand > 1.0).double()
    columns = torch.stack((1.0 - others, others, others * significand.square()), dim=1)
    table, largest = [], []
    for part in torch.split(flat, _PART):
        patterns = _patterns(part)
        table.append(_counts(patterns).double().view(-1, _SIGNIFICANDS) @ columns)
        largest.append(patterns.masked_fill(patterns >= _INFINITY, 0).max())
    return torch.cat(
        (torch.stack(table).sum(dim=0).flatten(), torch.stack(largest).max().double().view(1))
    )


def _patterns(values: torch.Tensor) -> torch.Tensor:
    """Exponent and seven bits of the significand of each value, as int16 or int32.

    The last bit is also set if any of the dropped bits is, so that only powers of two look like
    powers of two.
    """
    if values.dtype is torch.bfloat16:
        return values.view(torch.int16) & (_PATTERNS - 1)
    bits = values.float().view(torch.int32)
    return ((bits >> 16) & (_PATTERNS - 1)) | ((bits & 0xFFFF) != 0)


def _counts(patterns: torch.Tensor) -> torch.Tensor:
    # On CUDA bincount makes the host wait for the largest pattern. But with deterministic
    # algorithms torch 2.3 to 2.7 refuse histc of integers (pytorch issue 151610).
    if patterns.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return torch.histc(patterns.int(), bins=_PATTERNS, min=0, max=_PATTERNS).long()
    return torch.bincount(patterns, minlength=_PATTERNS)


@dataclass(frozen=True)
class Histogram:
    """The magnitudes of a set of values."""

    # (512,), int64. Bin `2 * (q + 127)` counts the values that are exactly +-2^q, and the next bin
    # those between 2^q and 2^(q+1). Bin 0 counts zeros, the last two infinities and NaNs.
    counts: npt.NDArray[np.int64]
    # (512,), float64. The sum of the squares of the values in each bin.
    squares: npt.NDArray[np.float64]
    largest: float  # the largest finite magnitude

    @staticmethod
    def of_row(row: npt.NDArray[np.float64]) -> Histogram:
        """The histogram of one tensor: (769,), see `_magnitudes`."""
        by_exponent = row[:-1].reshape(-1, 3)
        squares = by_exponent[:, ::2].flatten() * _POWERS_SQUARED
        return Histogram(by_exponent[:, :2].flatten().astype(np.int64), squares, _value(row[-1]))

    @staticmethod
    def of_patterns(patterns: npt.NDArray[np.int16]) -> Histogram:
        """The histogram of one tensor: the patterns of its values, see `_patterns`."""
        significand = _SIGNIFICAND[patterns & (_SIGNIFICANDS - 1)]
        bins = patterns // _SIGNIFICANDS * 2 + (significand > 1.0)
        counts = np.bincount(bins, minlength=BINS)
        squares = np.bincount(bins, significand**2, minlength=BINS).astype(np.float64)
        squares *= _POWERS_SQUARED
        return Histogram(counts, squares, _value(patterns[patterns < _INFINITY].max(initial=0)))

    @staticmethod
    def empty() -> Histogram:
        return Histogram(np.zeros(BINS, dtype=np.int64), np.zeros(BINS), 0.0)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.counts + other.counts,
            self.squares + other.squares,
            max(self.largest, other.largest),
        )

    def finite(self) -> Histogram:
        """The histogram without infinities and NaNs."""
        counts, squares = self.counts.copy(), self.squares.copy()
        counts[_NOT_FINITE:] = squares[_NOT_FINITE:] = 0
        return Histogram(counts, squares, self.largest)

    @property
    def zeros(self) -> int:
        return int(self.counts[0])

    @property
    def nonzero(self) -> int:
        return int(self.counts[1:].sum())

    @property
    def norm(self) -> float:
        """The 2-norm of the finite values."""
        return math.sqrt(self.squares[:_NOT_FINITE].sum())

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
        counts, squares = np.zeros_like(self.counts), np.zeros_like(self.squares)
        moved = np.flatnonzero(self.counts[1:]) + 1
        to = np.clip(moved - 2 * scale_log2, 1, BINS - 1)
        np.add.at(counts, to, self.counts[moved])
        np.add.at(squares, to, np.ldexp(self.squares[moved], -2 * scale_log2))
        counts[0] = self.zeros
        return Histogram(counts, squares, math.ldexp(self.largest, -scale_log2))

    def flushed_share(self, scale_log2: int) -> float:
        """2-norm of the values flushed to 0 at a loss scale, divided by the 2-norm of all values.

        This is the relative error that the flush in float16 causes.
        """
        last = max(2 * (FLUSH_LOG2 - scale_log2 + _BIAS), 0)
        return self._share_of_norm(self.squares[: last + 1].sum())

    def faintest_share(self, count: int, scale_log2: float) -> float:
        """2-norm of the `count` smallest nonzero values, divided by the 2-norm of all values.

        Values well above the flush limit at that scale are left out. They became 0 for another
        reason: for instance, two dtypes round the input of a ReLU to different sides of 0.
        """
        faint = self.counts.copy()
        faint[0] = 0
        faint[max(2 * (math.floor(_KEPT_LOG2 - scale_log2) + _BIAS), 1) :] = 0
        below = np.cumsum(faint) - faint
        share_of_bin = np.clip(count - below, 0, faint) / np.maximum(self.counts, 1)
        return self._share_of_norm(self.squares @ share_of_bin)

    def smallest_scale_log2(self, flushed: float) -> int:
        """log2 of the smallest power of two at which `flushed_share` is at most `flushed`."""
        squares = np.cumsum(self.squares[1:])
        bins = int(np.searchsorted(squares, flushed**2 * squares[-1], side="right"))
        return max(FLUSH_LOG2 + _BIAS - bins // 2, _LEAST_LOG2)

    def overflow_share(self, scale_log2: int) -> float:
        """The share of the nonzero values that float16 makes infinite at a loss scale."""
        first = max(2 * (OVERFLOW_LOG2 - scale_log2 + _BIAS), 1)
        count = int(self.counts[min(first, _NOT_FINITE) :].sum())
        return count / self.nonzero if self.nonzero else 0.0

    def _share_of_norm(self, squares: float) -> float:
        whole = self.squares.sum()
        return math.sqrt(min(squares / whole, 1.0)) if whole else 0.0


def _value(pattern: float) -> float:
    exponent, significand = divmod(int(pattern), _SIGNIFICANDS)
    return math.ldexp(_SIGNIFICAND[significand], exponent - _BIAS) if pattern else 0.0

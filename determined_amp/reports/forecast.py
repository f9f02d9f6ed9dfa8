"""What the finder says that every loss scale does, from the JSON that it writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.reports.sources import ReportError


@dataclass(frozen=True)
class Predicted:
    """What one bfloat16 backward per batch says of one loss scale.

    Args:
        scale_log2: The loss scale is 2 to that power.
        overflow_share: Share of the gradient values, by number.
        flushed_share: Share of the norm of the gradient that suffers most.
    """

    scale_log2: int
    overflow_share: float
    flushed_share: float


@dataclass(frozen=True)
class Measured:
    """What a float16 backward at one loss scale showed."""

    scale_log2: float
    overflow: bool
    flushed_share: float


@dataclass(frozen=True)
class Module:
    """The gradients of one module, unscaled.

    Args:
        name: Of the module.
        values_by_log2: Number of values in [2^q, 2^(q+1)), by q.
    """

    name: str
    values_by_log2: Mapping[int, int]


@dataclass(frozen=True)
class Window:
    """The safe loss scales, in log2.

    Args:
        low: The smallest at which hardly any of a gradient is flushed to 0.
        top: The largest at which nothing overflows; below `low` if no scale is safe.
        choice: The finder's; None if no scale helps.
    """

    low: int
    top: int
    choice: int | None

    def __contains__(self, scale_log2: float) -> bool:
        return self.low <= scale_log2 <= self.top

    def expected_skips(self, scale_log2: float) -> int:
        """Steps that a training from this scale skips at its start: each halves the scale."""
        return max(0, math.ceil(scale_log2 - self.top))


@dataclass(frozen=True)
class Forecast:
    """A finding of `determined_amp.finder.find`.

    Args:
        run: What it is about: name, device, torch, date, batches, samples and more.
        sentences: Window and verdict in words.
        window: Safe scales and choice.
        predicted: By scale, ascending.
        measured: By scale, ascending.
        modules: In the order of the backward.
        yaml: What to change in the `amp` section.
    """

    run: Mapping[str, Any]
    sentences: tuple[str, ...]
    window: Window
    predicted: tuple[Predicted, ...]
    measured: tuple[Measured, ...]
    modules: tuple[Module, ...]
    yaml: Mapping[str, Any]

    @property
    def passed_samples(self) -> int:
        """Samples of all forwards and backwards: one in bfloat16, the others in float16."""
        return int(self.run["samples"]) * (1 + len(self.measured))

    @staticmethod
    def of_json(found: Any, source: str) -> Forecast:
        """Read what `determined_amp.finder.advice.as_json` makes.

        Raises:
            ReportError: if it is anything else.
        """
        try:
            return _parsed(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReportError(
                f"{source}: is not a finding: {type(error).__name__} {error}; allowed: what "
                "`python -m determined_amp find CONFIG --json FILE` of this version writes"
            ) from error

    @staticmethod
    def read(path: Path) -> Forecast:
        """The finding in a file.

        Raises:
            ReportError: if there is none.
        """
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            raise ReportError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ReportError(f"{path}: is not JSON: {error}") from error
        return Forecast.of_json(found, str(path))


def _parsed(found: Any) -> Forecast:
    low, top = found["window_log2"]
    choice = found["choice_log2"]
    measured = [
        Measured(float(m["scale_log2"]), bool(m["overflow"]), float(m["flushed_share"]))
        for m in found["measured"]
    ]
    return Forecast(
        run={**found["run"], "samples": int(found["run"]["samples"])},
        sentences=tuple(map(str, found["sentences"])),
        window=Window(int(low), int(top), None if choice is None else int(choice)),
        predicted=tuple(
            Predicted(int(p["scale_log2"]), float(p["overflow_share"]), float(p["flushed_share"]))
            for p in found["predicted"]
        ),
        measured=tuple(sorted(measured, key=lambda seen: seen.scale_log2)),
        modules=tuple(
            Module(str(m["name"]), {int(q): int(n) for q, n in m["values_by_log2"].items()})
            for m in found["modules"]
        ),
        yaml=dict(found["yaml"]),
    )

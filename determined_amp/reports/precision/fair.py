"""Only runs that differ in precision and seed say something about precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from determined_amp.config.amp import SCALER_KEYS, Precision
from determined_amp.reports.precision.run import Run, State
from determined_amp.reports.precision.settings import AMP, PRECISION, SEED
from determined_amp.reports.sources import ReportError

# Names, and how the points of a search are chosen, do not reach the training.
_MAY_DIFFER = frozenset(
    {"name", "searcher.name", SEED, PRECISION, *(f"{AMP}.{key}" for key in SCALER_KEYS)}
)
_NAMED_RUNS = 2


def check(runs: Sequence[Run]) -> None:
    """See that these runs can be compared.

    Args:
        runs: Finished and failed ones; what is unfinished counts for nothing.

    Raises:
        ReportError: naming everything in which they differ but may not; or if there are not two
            precisions, no finished baseline, or two finished runs of one precision and seed.
    """
    problems = [*_differences(runs), *_twins(runs)]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ReportError(
            f"these runs cannot be compared: {len(problems)} problem{'s' * (len(problems) > 1)}\n"
            f"{listed}\nallowed: runs that differ in precision, scaler settings, seed and name only"
        )
    for problem in _missing(runs):
        raise ReportError(
            f"{problem}; allowed: at least two precisions, and of fp32 or tf32 a finished run"
        )


def baseline(runs: Sequence[Run]) -> Precision:
    """What the others are held against: fp32 if a run of it has finished, else tf32."""
    finished = {run.precision for run in runs if run.state is State.FINISHED}
    return Precision.FP32 if Precision.FP32 in finished else Precision.TF32


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    """One sentence per key, device or version that is not the same for all."""
    for key in sorted({key for run in runs for key in run.settings} - _MAY_DIFFER):
        yield from _difference(key, [(run, run.settings.get(key, "not set")) for run in runs])
    # One that failed may have done so before it said what it ran on.
    finished = [run for run in runs if run.state is State.FINISHED]
    yield from _difference("device", [(run, run.machine.device) for run in finished])
    yield from _difference("torch", [(run, run.machine.torch) for run in finished])


def _difference(what: str, values: Sequence[tuple[Run, Any]]) -> Iterator[str]:
    by_value: dict[str, list[str]] = {}
    for run, value in values:
        by_value.setdefault(str(value), []).append(run.short_name)
    if len(by_value) > 1:
        told = (f"{value} in {_some(names)}" for value, names in by_value.items())
        yield f"{what}: {'; '.join(told)}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_RUNS
    return ", ".join(names[:_NAMED_RUNS]) + (f" and {rest} more" if rest > 0 else "")


def _twins(runs: Sequence[Run]) -> Iterator[str]:
    by_seed: dict[tuple[Precision, int], list[str]] = {}
    for run in runs:
        if run.state is State.FINISHED and run.seed is not None:
            by_seed.setdefault((run.precision, run.seed), []).append(run.name)
    for (precision, seed), names in by_seed.items():
        if len(names) > 1:
            yield (
                f"{precision.value} has finished {len(names)} times with seed {seed}: "
                f"{', '.join(names)}; give one of them"
            )


def _missing(runs: Sequence[Run]) -> Iterator[str]:
    if not any(run.state is State.FINISHED for run in runs):
        reasons = dict.fromkeys(run.reason for run in runs)
        yield f"no run has finished: {'; '.join(reasons)}"
    if len({Precision.FP32 if is_only_fp32(run) else run.precision for run in runs}) < 2:
        given = sorted({run.precision.value for run in runs})
        same = ", which is fp32 on this device," if any(map(is_only_fp32, runs)) else ""
        yield f"all runs are {' and '.join(given)}{same} and there is nothing to compare"
    if not any(run.state is State.FINISHED and run.precision is baseline(runs) for run in runs):
        yield "there is no baseline"


def is_only_fp32(run: Run) -> bool:
    """Whether it asked for TF32 on a device that has none."""
    return run.precision is Precision.TF32 and not run.machine.has_tf32

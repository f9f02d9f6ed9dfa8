"""Judges from the rows of `benchmarks.gpu` whether its goals are met.

A ratio compares two values of one round, which were measured shortly after each other.
An answer is yes or no only if all rounds agree; otherwise it cannot be told. Only the
ratio of Determined's loop to the bare loop is judged by its median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]

# The highest published images/s of ResNet-50 with AMP on one H200; with TF32, 2259.
# Measured with NVIDIA's script, in NCHW, at batch 2560:
# github.com/lambdal/deeplearning-benchmark, results of 1xH200.
RECORD, RECORD_DEVICE = 3079.0, "H200"
RECORD_OVER_TF32 = 1.36
AMP = ("amp_fp16", "amp_bf16")
# The batch size in the YAML.
BATCH = 256


def goals(rows: Rows, device: str) -> list[dict[str, Any]]:
    """Judge every goal.

    Returns:
        For each its `goal` and `answer`, and `measured`, `low` and `high`, or `why`
        nothing was measured.
    """
    record = f"more than {RECORD:,.0f} images/s with AMP on one {RECORD_DEVICE}"
    same_device = RECORD_DEVICE in device
    best = max((_speeds(rows, p) for p in AMP), key=_median, default=[])
    found = [
        _goal(f"{record}, bare loop", best * same_device, lambda v: v > RECORD),
        _goal(
            f"{record}, in Determined's loop",
            max((_loop(rows, p, "determined_amp") for p in AMP), key=_median)
            * same_device,
            lambda v: v > RECORD,
        ),
        _goal(
            f"at least {RECORD_OVER_TF32} times TF32, batch {BATCH}",
            _best_ratio(rows, "tf32", "images_per_second", max),
            lambda v: v >= RECORD_OVER_TF32,
        ),
        _goal(
            f"at least 3 times FP32, batch {BATCH}",
            _best_ratio(rows, "fp32", "images_per_second", max),
            lambda v: v >= 3.0,
        ),
        _goal(
            f"at most 60 % of FP32's memory, batch {BATCH}",
            _best_ratio(rows, "fp32", "peak_bytes", min),
            lambda v: v <= 0.6,
        ),
    ]
    for precision in AMP:
        bare, ours = (
            _loop(rows, precision, name) for name in ("bare", "determined_amp")
        )
        ratios = [our / alone for our, alone in zip(ours, bare, strict=False)]
        # The median, because other work on the device slows single turns of a loop.
        found.append(
            _goal(
                f"at least 97 % of the bare loop, {precision}",
                [_median(ratios)] * bool(ratios),
                lambda v: v >= 0.97,
                ratios,
            )
        )
    counts = [
        row
        for row in rows
        if "synchronisations" in row and row["of_a_planted_one"] == 1
    ]
    per_batch = [float(row["synchronisations"]) for row in counts]
    batches = counts[0]["batches"] if counts else 40
    found.append(
        _goal(
            f"no synchronisation in {batches} training batches",
            per_batch,
            lambda v: v == 0,
        )
    )
    return found


def _goal(
    goal: str,
    values: Sequence[float],
    reached: Callable[[float], bool],
    spread: Sequence[float] | None = None,
) -> dict[str, Any]:
    if not values:
        return {"goal": goal, "answer": "cannot be told", "why": "not measured here"}
    answers = set(map(reached, values))
    answer = (
        "cannot be told" if len(answers) > 1 else "yes" if answers == {True} else "no"
    )
    shown = spread or values
    return {
        "goal": goal,
        "answer": answer,
        "measured": statistics.median(shown),
        "low": min(shown),
        "high": max(shown),
    }


def by_round(
    rows: Rows, precision: str, key: str, batch: int = BATCH
) -> dict[int, float]:
    """A value of the bare loop in each round."""
    return {
        row["round"]: float(row[key])
        for row in rows
        if row["part"] == "resnet"
        and row.get("precision") == precision
        and row.get("batch") == batch
        and row.get(key) is not None
    }


def _speeds(rows: Rows, precision: str) -> list[float]:
    """Images per second in each round, at the fastest batch size of this precision."""
    batches = {
        row["batch"] for row in rows if row["part"] == "resnet" and "batch" in row
    }
    of_each = [
        list(by_round(rows, precision, "images_per_second", b).values())
        for b in batches
    ]
    return max(of_each, key=_median, default=[])


def _loop(rows: Rows, precision: str, loop: str) -> list[float]:
    return [
        row["images_per_second"]
        for row in rows
        if row["part"] == "loops"
        and (row.get("precision"), row.get("loop")) == (precision, loop)
    ]


def _best_ratio(
    rows: Rows, baseline: str, key: str, better: Callable[..., list[float]]
) -> list[float]:
    """The ratio of the better AMP precision to `baseline`, in each round."""
    base = by_round(rows, baseline, key)
    each = [
        [
            value / base[n]
            for n, value in by_round(rows, precision, key).items()
            if n in base
        ]
        for precision in AMP
    ]
    return better([ratios for ratios in each if ratios], key=_median, default=[])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def words(found: Sequence[Mapping[str, Any]]) -> str:
    """The goals and their answers, one per line."""
    return "\n".join(
        f"{goal['answer']:>14}: {goal['goal']}{_value(goal)}" for goal in found
    )


def _value(goal: Mapping[str, Any]) -> str:
    if "measured" not in goal:
        return f" ({goal['why']})"
    return f" ({goal['measured']:,.4g}; {goal['low']:,.4g} to {goal['high']:,.4g})"

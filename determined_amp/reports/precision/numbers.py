"""All numbers of a report, as JSON holds them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from determined_amp.reports.precision.advice import Advice
from determined_amp.reports.precision.claims import claims
from determined_amp.reports.precision.comparison import Comparison
from determined_amp.reports.precision.findings import Findings
from determined_amp.reports.precision.run import Run
from determined_amp.reports.precision.summary import Summary


def numbers(findings: Findings, advice: Advice) -> dict[str, Any]:
    """Per run, per precision and per comparison; null is what was not measured or not finite."""
    machine = findings.machine
    found: dict[str, Any] = _finite(
        {
            "device": machine.device,
            "torch": machine.torch,
            "versions": machine.versions,
            "dates": findings.dates,
            "metric": findings.metric,
            "smaller_is_better": findings.smaller_is_better,
            "margin": findings.margin,
            "baseline": findings.baseline.value,
            "use": advice.precision.value,
            "why": advice.why,
            "precisions": [_of_summary(summary) for summary in findings.summaries],
            "comparisons": [_of_comparison(comparison) for comparison in findings.comparisons],
            "runs": [_of_run(run, findings) for run in findings.runs],
            "left_out": findings.left_out,
        }
    )
    return found


def _of_run(run: Run, findings: Findings) -> dict[str, Any]:
    curve = run.curve(findings.metric)
    best = min if findings.smaller_is_better else max
    return {
        "name": run.name,
        "precision": run.precision.value,
        "seed": run.seed,
        "state": run.state.value,
        "reason": run.reason,
        "device": run.machine.device,
        "torch": run.machine.torch,
        "versions": run.machine.versions,
        "date": run.machine.date,
        "final": run.final(findings.metric),
        "best": best((value for _, value in curve), default=None),
        "curve": curve,
        "samples_per_second": _plain(run.speed),
        "training_seconds": run.training_seconds,
        "peak_memory_mib": run.last("peak_memory_mib"),
        "peak_reserved_memory_mib": run.last("peak_reserved_memory_mib"),
        "applied_steps": run.last("applied_steps"),
        "skipped_steps": run.last("skipped_steps"),
        "loss_scale_log2": run.last("loss_scale_log2"),
        "data_wait_share": run.data_wait_share,
        "audit_share": run.audit_share,
    }


def _of_summary(summary: Summary) -> dict[str, Any]:
    return {
        "precision": summary.name,
        "n": len(summary.runs),
        "failed": len(summary.failed),
        "seeds": summary.seeds,
        "mean": summary.mean,
        "standard_deviation": summary.deviation,
        "samples_per_second": _plain(summary.speed),
        "peak_memory_mib": _plain(summary.memory),
        "peak_reserved_memory_mib": _plain(summary.reserved_memory),
        "data_wait_share": summary.data_wait_share,
    }


def _of_comparison(comparison: Comparison) -> dict[str, Any]:
    found = comparison.difference
    return {
        "precision": comparison.ours.name,
        "against": comparison.base.name,
        "speed": _plain(comparison.speed),
        "memory": _plain(comparison.memory),
        "difference": {**dataclasses.asdict(found), "low": found.low, "high": found.high},
        "verdict": comparison.verdict.value,
        "seeds_to_tell": found.seeds_to_tell(comparison.margin),
        "claims": [
            {"claim": c.words, "judgement": c.judgement.value, "figure": c.figure}
            for c in (claims(comparison) if comparison.ours.precision.autocast_dtype else ())
        ],
    }


def _plain(found: Any) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)


def _finite(value: Any) -> Any:
    """JSON has no number for infinity and NaN."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

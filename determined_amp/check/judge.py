"""Judges what a training did: invariants that were measured first, then rules that name
lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from determined_amp.check import invariants, rules  # noqa: F401  # they list themselves
from determined_amp.check.finding import CheckFinding, CheckFindings, Level
from determined_amp.check.record import Record
from determined_amp.check.ruling import REMEDIES, RULES

_WRONG_GRADIENTS = {
    "unscaled_loss",
    "unscaled_twice",
    "step_without_scaler",
    "unscale_in_window",
    "clip_scaled",
    "clip_value_scaled",
    "penalty_scaled",
    "step_twice",
    "scales_mixed",
    "half_weights",
    "no_loss_scale",
    "nan_hidden",
    "update_missing",
    "update_in_window",
    "not_zeroed",
    "no_gradients",
    "scaler_made_anew",
}
# What is measured, and the faults that are its cause: one cause is one finding.
EXPLAINED = {
    "overflow_hidden": {"clip_value_scaled", "nan_hidden", "depends_on_scale"},
    "depends_on_scale": _WRONG_GRADIENTS,
    "no_steps": {*_WRONG_GRADIENTS, "depends_on_scale", "loss_16_bits", "left_out"},
    "not_finite": {
        *_WRONG_GRADIENTS,
        *(
            "no_steps",
            "overflow_hidden",
            "depends_on_scale",
            "loss_16_bits",
            "left_out",
        ),
    },
    "left_out": {"loss_16_bits"},
    "unscaled_loss": {"no_loss_scale"},
    "unscaled_twice": {"unscale_in_window"},
    "update_in_window": {"step_without_scaler"},
    "update_missing": {"unscale_in_window"},
    "autocast_backward": {"stale_casts"},
    "autocast_covers_nothing": {"half_weights"},
    "loss_16_bits": {"half_weights"},
    "scales_mixed": {"not_zeroed", "unscale_in_window", "update_in_window"},
    "schedule_not_saved": {"scaler_not_saved", "resume_fails"},
    "schedule_per_batch": {"schedule_twice"},
}
# Suspicions that what was measured proves, so that they are faults.
PROVEN_BY = {
    "depends_on_scale": {"penalty_scaled", "autocast_backward"},
    "overflow_hidden": {"nan_hidden"},
}


def judge_record(record: Record) -> CheckFindings:
    """All findings of one run: one for each kind of mistake, with all of its lines."""
    told = merged(finding for judge in RULES for finding in judge(record))
    trained = bool(record.of("backward") or record.of("left_out"))
    seen = _seen(record) if trained else ""
    findings = CheckFindings(without_consequences(told), seen=seen, trained=trained)
    findings.amp = record.is_amp
    if not record.determined:
        findings.all = [_in_a_loop(finding) for finding in findings]
    if record.disturbed and not record.determined:
        findings.all = [finding for finding in findings if finding.key != "raised"]
        findings.notes.append(
            "the training raises an error on an overflow, and the doctor made one "
            f"here: {record.raised}; watching(overflows=()) makes none"
        )
    off = [scaler.where for scaler in record.scalers if not scaler.enabled]
    if off and not record.is_amp:
        findings.notes.append(
            f"the GradScaler of {off[0]} is switched off, so no AMP was examined"
        )
    findings.sort()
    return findings


def _in_a_loop(finding: CheckFinding) -> CheckFinding:
    """The finding with the advice for a loop, unless what was tried is its advice."""
    remedy = REMEDIES[finding.key]
    lines = remedy.get("in_a_loop")
    is_of_trial = finding.write == "\n".join(remedy.get("write") or remedy["look"])
    return (
        replace(finding, write="\n".join(lines)) if lines and is_of_trial else finding
    )


def merged(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """One finding of those with the same key: as sure as the surest."""
    by_key: dict[str, list[CheckFinding]] = defaultdict(list)
    for finding in findings:
        by_key[finding.key].append(finding)
    return [_merged(same) for same in by_key.values()]


def _merged(same: Sequence[CheckFinding]) -> CheckFinding:
    findings = CheckFindings([*same])
    findings.sort()
    lines = dict.fromkeys(line for finding in findings for line in finding.where)
    surest = findings.all[0]
    equal = (finding for finding in findings if finding.level is surest.level)
    effects = dict.fromkeys(finding.effect for finding in equal)
    return replace(surest, where=tuple(lines), effect="; ".join(effects))


def without_consequences(findings: list[CheckFinding]) -> list[CheckFinding]:
    """The findings, without what another one explains that is as sure."""
    known = {finding.key: finding for finding in findings}
    for effect, causes in PROVEN_BY.items():
        for cause in causes & known.keys() if effect in known else ():
            orders = "write" in REMEDIES[cause]
            text = f"{known[cause].effect}; {known[effect].effect}"
            known[cause] = replace(
                known[cause], level=Level.FAULT, effect=text, orders=orders
            )
    faults = {key for key, each in known.items() if each.level is Level.FAULT}
    return [
        each
        for each in known.values()
        if (faults if each.key in faults else known.keys()).isdisjoint(
            EXPLAINED.get(each.key, ())
        )
    ]


def interventions(record: Record) -> list[str]:
    """In which windows the doctor made an overflow or moved a scale, for the notes."""
    overflown = {window.place for window in record.complete if window.forced}
    moved = {window.place for window in record.complete if window.steps[0].moved}
    texts = {"made an overflow": overflown, "divided the loss scale": moved}
    return [
        f"the doctor {text} in these steps of an optimizer: "
        f"{', '.join(map(str, sorted(places)))}"
        for text, places in texts.items()
        if places
    ]


def _seen(record: Record) -> str:
    backwards = record.of("backward")
    dtypes = sorted({region.dtype for region in record.regions})
    amp = f"autocast in {' and '.join(dtypes)}" if dtypes else "no autocast"
    scaler = "a GradScaler" if record.scales else "no GradScaler"
    # Where no loader gives batches, nobody knows how many there were.
    count = (
        f"{record.batches} batches" if record.batches else f"{len(backwards)} backwards"
    )
    applied, skipped = (len(record.of("step", skipped=each)) for each in (False, True))
    return f"{count}, {applied} steps, {skipped} skipped, {amp}, {scaler}"

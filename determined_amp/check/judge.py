"""Judges what a training did: invariants that were measured first, then rules that name lines."""

from __future__ import annotations

from dataclasses import replace

from determined_amp.check import invariants, rules  # noqa: F401  # they list themselves
from determined_amp.check.finding import CheckFinding, CheckFindings, Where
from determined_amp.check.record import Record
from determined_amp.check.remedies import REMEDIES
from determined_amp.check.ruling import RULES

_WRONG_GRADIENTS = {
    *("unscaled_loss", "unscaled_twice", "step_without_scaler", "unscale_in_window"),
    *("clip_scaled", "clip_value_scaled", "penalty_scaled", "step_twice", "scales_mixed"),
    *("half_weights", "no_loss_scale", "nan_hidden", "update_missing", "update_in_window"),
    *("not_zeroed", "no_gradients"),
}
# What is measured, and the faults that are its cause: one cause is one finding.
EXPLAINED = {
    "overflow_hidden": {"clip_value_scaled", "nan_hidden", "depends_on_scale"},
    "depends_on_scale": _WRONG_GRADIENTS,
    "no_steps": {*_WRONG_GRADIENTS, "depends_on_scale", "loss_16_bits"},
    "not_finite": {
        *_WRONG_GRADIENTS,
        *("no_steps", "overflow_hidden", "depends_on_scale", "loss_16_bits"),
    },
    "unscaled_loss": {"no_loss_scale"},
    "scales_mixed": {"not_zeroed", "unscale_in_window", "update_in_window"},
    "schedule_not_saved": {"scaler_not_saved", "resume_fails"},
}


def judge_record(record: Record) -> CheckFindings:
    """All findings of one run. What two rules find on one line is one finding."""
    by_place: dict[tuple[str, Where | None], CheckFinding] = {}
    for finding in (each for rule in RULES for each in rule(record)):
        place = finding.key, finding.where[0] if finding.where else None
        same = by_place.get(place)
        effect = f"{same.effect}; {finding.effect}" if same else finding.effect
        by_place[place] = replace(same or finding, effect=effect)
    findings = CheckFindings(without_consequences([*by_place.values()]), seen=_seen(record))
    if not record.determined:
        findings.all = [replace(f, write=REMEDIES[f.key].in_a_loop or f.write) for f in findings]
    if record.disturbed and not record.determined:
        findings.all = [finding for finding in findings if finding.key != "raised"]
        findings.notes.append(
            f"the training raises an error on an overflow, and the doctor made one here: "
            f"{record.raised}; watching(overflows=()) makes none"
        )
    off = [scaler.where for scaler in record.scalers if not scaler.enabled]
    if off and not record.is_amp:
        findings.notes.append(f"the GradScaler of {off[0]} is switched off, so no AMP was examined")
    findings.sort()
    return findings


def without_consequences(findings: list[CheckFinding]) -> list[CheckFinding]:
    """The findings, without what a fault among them explains."""
    faults = {finding.key for finding in CheckFindings(findings).faults}
    return [each for each in findings if not EXPLAINED.get(each.key, set()) & faults]


def interventions(record: Record) -> list[str]:
    """In which windows the doctor made an overflow or moved a scale, for the notes."""
    overflown, moved = set(), set()
    for optimizer in range(record.optimizers):
        windows = [window for window in record.complete if window.optimizer == optimizer]
        for count, window in enumerate(windows, 1):
            overflown |= {count} if window.forced else set()
            moved |= {count} if window.steps[0].moved else set()
    texts = {"made an overflow": overflown, "divided the loss scale": moved}
    return [
        f"the doctor {text} in these steps of an optimizer: {', '.join(map(str, sorted(counts)))}"
        for text, counts in texts.items()
        if counts
    ]


def _seen(record: Record) -> str:
    backwards = record.of("backward")
    if not backwards:
        return "nothing was trained, so nothing was examined"
    skipped, steps = record.of("step", skipped=True), record.of("step")
    dtypes = sorted({region.dtype for region in record.regions})
    amp = f"autocast in {' and '.join(dtypes)}" if dtypes else "no autocast"
    scaler = "a GradScaler" if record.scales else "no GradScaler"
    applied = len(steps) - len(skipped)
    # Where no loader gives batches, nobody knows how many there were.
    count = f"{record.batches} batches" if record.batches else f"{len(backwards)} backwards"
    return f"{count}, {applied} steps, {len(skipped)} skipped, {amp}, {scaler}"

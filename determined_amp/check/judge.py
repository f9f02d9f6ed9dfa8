"""Judges what a training did: invariants that were measured first, then rules that name
lines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from determined_amp.check import invariants, rules  # noqa: F401  # they list themselves
from determined_amp.check.finding import (
    CheckFinding,
    CheckFindings,
    Level,
    code_of,
)
from determined_amp.check.record import Record
from determined_amp.check.ruling import REMEDIES, RULES

# So many lines before and behind the line of a finding are near it.
_NEAR = 8
_CALL = re.compile(r"\w+\(\)?")


def judge_record(record: Record) -> CheckFindings:
    """All findings of one run: one for each kind of mistake, with all of its lines."""
    told = merged(finding for judge in RULES for finding in judge(record))
    kinds = {event.kind for event in record.events}
    trained = not kinds.isdisjoint({"backward", "left_out", "step"})
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
    findings.all = [_fitted_to_script(finding) for finding in findings]
    findings.sort()
    return findings


def _fitted_to_script(finding: CheckFinding) -> CheckFinding:
    """The finding with the numbers of lines that the script has, not to be repeated.

    Where all of its calls stand near, in this order, no order is given: they may be
    those of another object, or stand in another place than they should.
    """
    if not (finding.orders and finding.where):
        return finding
    lines = finding.write.splitlines()
    near = finding.where[0].code_around(_NEAR)
    write = "\n".join(_with_its_number(line, near) for line in lines)
    orders = _calls_in(map(code_of, lines))
    stands = False
    for where in finding.where if orders else ():
        calls_near = iter(_calls_in(where.code_around(_NEAR).values()))
        stands |= all(calls in calls_near for calls in orders)
    return replace(finding, write=write, orders=not stands)


def _with_its_number(line: str, near: dict[int, str]) -> str:
    """A line of an order, with the number of the script's own that is the same."""
    code = code_of(line)
    same = [number for number, its in near.items() if code and its.endswith(code)]
    return f"{line}  # your line {same[0]}" if same else line


def _calls_in(code: Iterable[str]) -> list[list[str]]:
    """What each line calls, with the bracket that follows."""
    lines = (line for line in code if not line.startswith("leave "))
    return [calls for calls in map(_CALL.findall, lines) if calls]


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
    level = findings.all[0].level
    equal = [finding for finding in findings if finding.level is level]
    # An order must hold at all of its lines.
    surest = min(equal, key=lambda finding: finding.orders)
    effects = dict.fromkeys(finding.effect for finding in equal)
    return replace(surest, where=tuple(lines), effect="; ".join(effects))


def without_consequences(findings: list[CheckFinding]) -> list[CheckFinding]:
    """The findings, without what another one explains that is as sure."""
    known = {finding.key: finding for finding in findings}
    for key in [*known]:
        for proof in known.keys() & REMEDIES[key].get("proven_by", ()):
            known[key] = replace(
                known[key],
                level=Level.FAULT,
                effect=f"{known[key].effect}; {known[proof].effect}",
                orders="write" in REMEDIES[key],
            )
    explained: dict[str, list[Level]] = defaultdict(list)
    for key, cause in known.items():
        for effect in REMEDIES[key].get("explains", ()):
            explained[effect].append(cause.level)
    return [
        each
        for key, each in known.items()
        if not {each.level, Level.FAULT}.intersection(explained[key])
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

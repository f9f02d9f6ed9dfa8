"""Judges what a training did: asks all rules, and leaves out what others explain."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from determined_amp.amp.rehearse.backward_graph import OUTSIDE
from determined_amp.check import invariants, rules
from determined_amp.check.finding import (
    ROWS,
    CheckFinding,
    CheckFindings,
    Level,
    Seen,
    Words,
    code_of,
)
from determined_amp.check.record import Cause, Event, Record

_RULES: dict[str, Any] = {**vars(invariants), **vars(rules)}
_STOPS = "the training stops {place}: {error}"

# So many lines before and behind the line of a finding are near it.
_NEAR = 8
_CALL = re.compile(r"\w+\(\)?")
# What a statement calls, up to its arguments.
_CALLED = re.compile(r"[\w.]+\(")


def judge_record(record: Record) -> CheckFindings:
    """All findings of one run: one for each kind of mistake, with all of its lines."""
    kinds = {event.kind for event in record.events}
    trained = not kinds.isdisjoint({"backward", "left_out", "step"})
    seen = _seen(record) if trained else ""
    all_told = chain(told("seen", record), _told_by_error(record))
    fitted = [_fitted_to_script(each) for each in concluded(all_told)]
    findings = CheckFindings(fitted, seen=seen, trained=trained)
    findings.amp = record.is_amp
    if record.disturbed and not record.determined:
        findings.notes.append(
            "the training raises an error on an overflow, and the doctor made one "
            f"here: {record.raised}; watching(overflows=()) makes none"
        )
    off = [scaler.where for scaler in record.scalers if not scaler.enabled]
    if off and not record.is_amp:
        findings.notes.append(
            f"the GradScaler of {off[0]} is switched off, so no AMP was examined"
        )
    return findings


def told(kind: str, record: Record, *resumed: Record) -> Iterator[CheckFinding]:
    """What the rules of a kind tell.

    Args:
        kind: `seen`, or `resumed`.
        record: The run that is judged.
        resumed: One that has resumed it, for the rules of that kind.
    """
    for key, row in ROWS.items():
        if record.is_amp or not row.get("needs_amp"):
            for name, words in row.get(kind, {}).items():
                seen = _RULES[name](record, *resumed)
                yield from _findings(record, key, words, seen)


def _told_by_error(record: Record) -> Iterator[CheckFinding]:
    """What the error tells that has ended a training, if it is not by the doctor."""
    key, seen = rules.cause_of_error(record) if record.error else ("raised", Seen([]))
    backwards = len(record.of("backward"))
    place = f"in batch {record.batches}" if record.batches else "before a backward"
    if backwards and not record.batches:
        place = f"after backward {backwards}"
    seen.words |= {"place": place, "error": record.first_line_of_error}
    if key != "raised" or record.determined or not record.disturbed:
        yield from _findings(record, key, _STOPS, [seen])


def _findings(
    record: Record, key: str, words: str, seen: Iterable[Seen]
) -> Iterator[CheckFinding]:
    """What has been seen, as findings.

    Args:
        record: Where.
        key: The name of the finding.
        words: What was seen, with the names of the words in braces.
        seen: What a rule has seen.
    """
    row = ROWS[key]
    has_cause = bool(row.get("has_cause"))
    for each in seen:
        if not each.at:
            continue
        events = [line for line in each.at if isinstance(line, Event)]
        of = record.of(events[0].kind) if events else []
        effect = Words().format(words, **{"of": of, **each.words})
        kind = "write" if "write" in row and each.holds else "look"
        of_a_loop = [] if record.determined else row.get(f"in_a_loop_{kind}")
        lines = each.write or of_a_loop or row[kind]
        at = [line.where if isinstance(line, Event) else line for line in each.at]
        if has_cause:
            effect += _cause_of(record)
        if has_cause and record.cause:
            at.insert(0, record.cause.where)
            kind, lines = _tried(record.cause)
        level = Level(row["level"].split(" or ")[0 if each.proven else -1])
        yield CheckFinding(
            key,
            level,
            row["sentence"],
            tuple(dict.fromkeys(line for line in at if line is not None)),
            effect,
            "\n".join(lines),
            orders=kind == "write" and level is not Level.SUSPICION,
        )


def _cause_of(record: Record) -> str:
    """What is known of why losses or gradients are not finite."""
    bad, losses = record.of("backward", finite=False), record.of("backward")
    words = "; {bad} of {losses} backwards began at a loss that is not finite"
    told = Words().format(words, bad=bad, losses=losses) if bad else ""
    return told + (f"; first: {record.cause.text}" if record.cause else "")


def _tried(cause: Cause) -> tuple[str, list[str]]:
    """What was tried, to write, or where to look."""
    if f"with {cause.module} in float32" in cause.helps:
        if cause.module == OUTSIDE:  # all of it was tried, from any line
            return "look", [
                "all that is computed outside of modules: in float32 the loss is finite"
            ]
        return "write", [
            "# tried: the loss of this batch is finite then",
            "with torch.autocast(device_type, enabled=False):"
            f"  # around {cause.module}",
            "    output = module(inputs.float())",
        ]
    if "in bfloat16" in cause.helps:
        return "write", [
            "dtype=torch.bfloat16  # tried: the loss is finite, without a scale"
        ]
    if cause.helps:
        return "look", ["float32 from there to the loss: the loss is finite in float32"]
    return "look", [cause.text]


# From what was told to what is shown.


def concluded(told: Iterable[CheckFinding]) -> list[CheckFinding]:
    """One finding of each kind, without what another one explains that is as sure.

    Faults come first.
    """
    by_key: dict[str, list[CheckFinding]] = defaultdict(list)
    for finding in told:
        by_key[finding.key].append(finding)
    known = {key: _merged(same) for key, same in by_key.items()}
    for key, each in known.items():
        row = ROWS[key]
        for proof in known.keys() & row.get("proven_by", ()):
            effect = f"{each.effect}; {known[proof].effect}"
            proven = replace(each, level=Level.FAULT, effect=effect)
            known[key] = replace(proven, orders="write" in row)
    explained: dict[str, set[Level]] = defaultdict(set)
    for key, cause in known.items():
        for effect in _explained_by(key):
            explained[effect].add(cause.level)
    left = [
        each
        for key, each in known.items()
        if explained[key].isdisjoint({each.level, Level.FAULT})
    ]
    return sorted(left, key=_rank)


def _explained_by(key: str) -> Iterator[str]:
    """The findings that one explains, with those that they explain."""
    for effect in ROWS[key].get("explains", ()):
        yield effect
        yield from _explained_by(effect)


def _merged(same: list[CheckFinding]) -> CheckFinding:
    """One finding of those with the same key: as sure as the surest."""
    same = sorted(same, key=_rank)
    equal = [finding for finding in same if finding.level is same[0].level]
    lines = dict.fromkeys(where for finding in same for where in finding.where)
    effects = dict.fromkeys(finding.effect for finding in equal)
    # An order must hold at all of its lines.
    least = min(equal, key=lambda finding: finding.orders)
    return replace(least, where=tuple(lines), effect="; ".join(effects))


def _rank(finding: CheckFinding) -> int:
    return [*Level].index(finding.level)


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
    """A line of an order, with the number of the script's own that calls the same."""
    code = code_of(line)
    called = _CALLED.match(code)
    same = [
        number
        for number, its in near.items()
        if code and (its.endswith(code) or (called and its.startswith(called[0])))
    ]
    return f"{line}  # your line {same[0]}" if same else line


def _calls_in(code: Iterable[str]) -> list[list[str]]:
    """What each line calls, with the bracket that follows."""
    lines = (line for line in code if not line.startswith("leave "))
    return [calls for calls in map(_CALL.findall, lines) if calls]


# What is told beside the findings.


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
    dtypes = sorted({region.dtype for region in record.regions})
    autocast = f"autocast in {' and '.join(dtypes)}" if dtypes else "no autocast"
    is_there = any(scaler.enabled for scaler in record.scalers)
    scaler = "a GradScaler" if is_there else "no GradScaler"
    # Where no loader gives batches, nobody knows how many there were.
    count = f"{record.batches} batches"
    if not record.batches:
        count = f"{len(record.of('backward'))} backwards"
    applied, skipped = (len(record.of("step", skipped=each)) for each in (False, True))
    return f"{count}, {applied} steps, {skipped} skipped, {autocast}, {scaler}"

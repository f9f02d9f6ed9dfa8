"""Judges what a training did: asks all rules, and leaves out what others explain."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

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
from determined_amp.check.record import Event, Record

_RULES: dict[str, Any] = {**vars(invariants), **vars(rules)}
_STOPS = "the training stops, {backwards} backwards after its begin: {error}"

# So many lines before and behind the line of a finding are near it.
_NEAR = 8
# In so many, lines of the script are not to be repeated.
_FAR = 24
_CALL = re.compile(r"\w+\(\)?")
# What a statement calls, up to its arguments.
_CALLED = re.compile(r"[\w.]+\(")


def judge_record(record: Record, resumed: Record | None = None) -> CheckFindings:
    """All findings of one run: one for each kind of mistake, with all of its lines.

    Args:
        record: The run.
        resumed: One that has resumed it.
    """
    kinds = {event.kind for event in record.events}
    trained = not kinds.isdisjoint({"backward", "left_out", "step"})
    all_told = [*_told("seen", record), *_told_by_error(record)]
    if resumed is not None:
        all_told += _told("resumed", record, resumed)
    fitted = [_fitted_to_script(each) for each in concluded(all_told)]
    findings = CheckFindings(fitted, trained=trained, amp=record.is_amp)
    findings.seen = _seen(record) if trained else ""
    if record.disturbed:
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


def _told(kind: str, record: Record, *resumed: Record) -> Iterator[CheckFinding]:
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
    if not record.error:
        return
    key, seen = rules.cause_of_error(record)
    seen.words |= {
        "backwards": record.of("backward"),
        "error": record.first_line_of_error,
    }
    if key != "raised" or not record.disturbed:
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
    for each in seen:
        if not each.at:
            continue
        events = [line for line in each.at if isinstance(line, Event)]
        of = record.of(events[0].kind) if events else []
        effect = Words().format(words, **{"of": of, **each.words})
        at = [line.where if isinstance(line, Event) else line for line in each.at]
        orders, advice = _advice(row, each, in_a_loop=not record.determined)
        if row.get("has_cause"):
            effect += _bad_losses(record)
            if cause := record.cause:
                effect += f"; first: {cause.text}"
                at.insert(0, cause.where)
                orders, advice = False, cause.advice
        level = Level(row["level"].split(" or ")[0 if each.proven else -1])
        where = tuple(dict.fromkeys(line for line in at if line is not None))
        orders = orders and level is not Level.SUSPICION
        sentence = row["sentence"]
        yield CheckFinding(key, level, sentence, where, effect, advice, orders)


def _advice(row: dict[str, Any], seen: Seen, *, in_a_loop: bool) -> tuple[bool, str]:
    """Whether a row orders lines where this was seen, and which."""
    orders = "write" in row and seen.holds
    kind = "write" if orders else "look"
    of_a_trial = row.get(kind, [])
    lines = row.get(f"in_a_loop_{kind}", of_a_trial) if in_a_loop else of_a_trial
    return orders, "\n".join(lines)


def _bad_losses(record: Record) -> str:
    bad, losses = record.of("backward", finite=False), record.of("backward")
    told = f"; {len(bad)} of {len(losses)} backwards began at a loss that is not finite"
    return told if bad else ""


# From what was told to what is shown.


def concluded(told: Iterable[CheckFinding]) -> list[CheckFinding]:
    """One finding of each kind, without what another one explains that is as sure.

    Faults come first.
    """
    by_key: dict[str, list[CheckFinding]] = defaultdict(list)
    for finding in told:
        by_key[finding.key].append(finding)
    known = {key: _merged(same) for key, same in by_key.items()}
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
    code = finding.where[0].code_around(_FAR)
    numbered = [_with_its_number(line, code) for line in lines]
    calls = [_calls_in(code_of(line)) for line in lines]
    wanted = [each for each in calls if each]
    stands = False
    for where in finding.where if wanted else ():
        near = map(_calls_in, where.code_around(_NEAR).values())
        # They are read once, and a line may call more in its arguments.
        found = [any(its[: len(each)] == each for its in near) for each in wanted]
        stands |= all(found)
    return replace(finding, write="\n".join(numbered), orders=not stands)


def _with_its_number(line: str, near: dict[int, str]) -> str:
    """A line of an order, with the number of the script's own that calls the same."""
    code = "" if "in place of" in line else code_of(line)
    called = _CALLED.match(code)
    for number, its in near.items():
        if code and (its.endswith(code) or (called and its.startswith(called[0]))):
            return f"{line}  # your line {number}"
    return line


def _calls_in(code: str) -> list[str]:
    """What a line calls, by its last name and the bracket that follows."""
    return [] if code.startswith("leave ") else _CALL.findall(code)


# What is told beside the findings.


def interventions(record: Record) -> list[str]:
    """In which windows the doctor made an overflow, for the notes."""
    places = {window.place for window in record.complete if window.forced}
    steps = ", ".join(map(str, sorted(places)))
    note = f"the doctor made an overflow in these steps of an optimizer: {steps}"
    return [note] if places else []


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

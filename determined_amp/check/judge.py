"""Judges what a training did: asks all rules, and leaves out what others explain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from determined_amp.check import invariants, rules
from determined_amp.check.advice import fitted_to_script
from determined_amp.check.finding import (
    ROWS,
    CheckFinding,
    CheckFindings,
    Level,
    Seen,
    Words,
)
from determined_amp.check.record import Event, Record
from determined_amp.check.stand_in import ONLY_ON_A_GPU

_RULES: dict[str, Any] = {**vars(invariants), **vars(rules)}
_STOPS = "the training stops, {backwards} backwards after its begin: {error}"


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
    known = [_with_cause(each, record) for each in concluded(all_told)]
    fitted = [fitted_to_script(each) for each in known]
    return CheckFindings(
        fitted,
        notes=[*_notes(record)],
        seen=_seen(record) if trained else "",
        trained=trained,
        amp=record.is_amp,
        record=record,
    )


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
        lines = [line.where if isinstance(line, Event) else line for line in each.at]
        where = tuple(dict.fromkeys(filter(None, lines)))
        levels = row["level"].split(" or ")
        level = Level(levels[0] if each.proven else levels[-1])
        orders, advice = _advice(row, each, in_a_loop=not record.determined)
        orders = orders and level is Level.FAULT
        yield CheckFinding(key, level, row["sentence"], where, effect, advice, orders)


def _advice(row: dict[str, Any], seen: Seen, *, in_a_loop: bool) -> tuple[bool, str]:
    """Whether a row orders lines where this was seen, and which."""
    orders = "write" in row and seen.holds
    kind = "write" if orders else "look"
    of_a_trial = row.get(kind, [])
    lines = row.get(f"in_a_loop_{kind}", of_a_trial) if in_a_loop else of_a_trial
    return orders, "\n".join(lines)


# From what was told to what is shown.


def concluded(told: Iterable[CheckFinding]) -> list[CheckFinding]:
    """One finding of each kind, without what another one explains that is as sure.

    Faults come first.
    """
    by_key: dict[str, list[CheckFinding]] = defaultdict(list)
    for finding in told:
        by_key[finding.key].append(finding)
    known = {key: _merged(same) for key, same in by_key.items()}
    explained = {
        (effect, cause.level)
        for key, cause in known.items()
        for effect in _effects(key)
    }
    left = [
        each
        for key, each in known.items()
        if explained.isdisjoint({(key, each.level), (key, Level.FAULT)})
    ]
    return sorted(left, key=_rank)


def _effects(key: str) -> Iterator[str]:
    """The findings that one explains, with those that they explain."""
    for effect in ROWS[key].get("explains", ()):
        yield effect
        yield from _effects(effect)


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


def _with_cause(finding: CheckFinding, record: Record) -> CheckFinding:
    """The finding; one of what is not finite says why that is so."""
    if not ROWS[finding.key].get("has_cause"):
        return finding
    cause, effect = record.cause, finding.effect
    bad, of = record.of("backward", finite=False), record.of("backward")
    if bad:
        count = f"{len(bad)} of {len(of)}"
        effect = f"{effect}; {count} backwards began at a loss that is not finite"
    if cause is None:
        finite_look = ROWS[finding.key].get("finite_look", [])
        look = finding.write if bad else "\n".join(finite_look) or finding.write
        return replace(finding, effect=effect, write=look)
    effect = f"{effect}; first: {cause.text}"
    where = tuple(dict.fromkeys(filter(None, (cause.where, *finding.where))))
    told = replace(finding, where=where, effect=effect)
    return replace(told, write=cause.advice, orders=False)


# What is told beside the findings.


def _notes(record: Record) -> Iterator[str]:
    """What the doctor has done to a training, and what it has not examined."""
    if record.disturbed:
        yield (
            "the training raises an error on an overflow, and the doctor made one "
            f"here: {record.raised}; watching(overflows=()) makes none"
        )
    if record.forces_none:
        yield "it raises an error on an overflow, so none was forced"
    off = [scaler.where for scaler in record.scalers if not scaler.enabled]
    if off and not record.is_amp:
        yield f"the GradScaler of {off[0]} is switched off, so no AMP was examined"
    forced = {window.place for window in record.complete if window.forced}
    if record.scales and not (forced or record.forces_none or record.error):
        yield "no overflow was made, so what this training does on one is not known"
    if forced:
        steps = ", ".join(map(str, sorted(forced)))
        yield f"the doctor made an overflow in these steps of an optimizer: {steps}"
    if record.lacks_cuda:
        yield ONLY_ON_A_GPU


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

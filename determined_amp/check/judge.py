"""Turns the record of a training into findings.

`any_loop.py` and `doctor.py` call `judge_record` when the training has ended. It asks
all rules of `invariants.py` and `rules.py`, leaves out what another finding explains,
and lets `advice.py` adapt the advice to the script.
"""

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
    """Judge a run: one finding for each kind of mistake, with all of its lines.

    Args:
        record: What the run did.
        resumed: What a run did that resumed from its checkpoint, if there is one.
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
    """Yield what the rules of a kind find.

    Args:
        kind: The key of the rules in a row: `seen` or `resumed`.
        record: The run that is judged.
        resumed: The run that resumed it, for the rules of the kind `resumed`.
    """
    for key, row in ROWS.items():
        if record.is_amp or not row.get("needs_amp"):
            for name, words in row.get(kind, {}).items():
                seen = _RULES[name](record, *resumed)
                yield from _findings(record, key, words, seen)


def _told_by_error(record: Record) -> Iterator[CheckFinding]:
    """Yield the finding for the error that ended the training.

    An error that no row knows is not reported if a forced overflow may have raised it.
    """
    if not record.error:
        return
    key, seen = rules.cause_of_error(record)
    seen.words |= {
        "backwards": record.of("backward"),
        "error": record.first_line_of_error,
    }
    if key != "raised" or not record.error_after_overflow:
        yield from _findings(record, key, _STOPS, [seen])


def _findings(
    record: Record, key: str, words: str, seen: Iterable[Seen]
) -> Iterator[CheckFinding]:
    """Turn what a rule has seen into findings.

    Args:
        record: The run that is judged.
        key: The key of the finding's row.
        words: The rule's text, with names in braces.
        seen: What the rule has seen.
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
    """The advice of a row.

    Args:
        row: The row of the finding.
        seen: What a rule has seen.
        in_a_loop: Whether the training does not run in Determined's loop.

    Returns:
        Whether the advice is lines to write, and the advice.
    """
    orders = "write" in row and seen.holds
    kind = "write" if orders else "look"
    of_a_trial = row.get(kind, [])
    lines = row.get(f"in_a_loop_{kind}", of_a_trial) if in_a_loop else of_a_trial
    return orders, "\n".join(lines)


# Merge findings, and leave some out.


def concluded(told: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Merge findings of the same key, leave out explained ones, and sort faults first.

    A finding is left out if another finding that is a fault, or has the same level,
    explains it.
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
    """The keys that a finding explains, with those that they explain in turn."""
    for effect in ROWS[key].get("explains", ()):
        yield effect
        yield from _effects(effect)


def _merged(same: list[CheckFinding]) -> CheckFinding:
    """Merge findings with the same key into one, with the highest of their levels."""
    same = sorted(same, key=_rank)
    equal = [finding for finding in same if finding.level is same[0].level]
    lines = dict.fromkeys(where for finding in same for where in finding.where)
    effects = dict.fromkeys(finding.effect for finding in equal)
    # Lines to write must be right at every line of the finding.
    least = min(equal, key=lambda finding: finding.orders)
    return replace(least, where=tuple(lines), effect="; ".join(effects))


def _rank(finding: CheckFinding) -> int:
    return [*Level].index(finding.level)


def _with_cause(finding: CheckFinding, record: Record) -> CheckFinding:
    """Add the cause of numbers that are not finite, if the row has `has_cause`."""
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


# Notes, and the first line.


def _notes(record: Record) -> Iterator[str]:
    """Yield what the doctor did to the training, and what it did not examine."""
    if record.error_after_overflow:
        yield (
            "the training raises an error on an overflow, and the doctor made one "
            f"here: {record.raised}; watching(overflows=()) makes none"
        )
    if record.without_overflows:
        yield "it raises an error on an overflow, so none was forced"
    off = [scaler.where for scaler in record.scalers if not scaler.enabled]
    if off and not record.is_amp:
        yield f"the GradScaler of {off[0]} is switched off, so no AMP was examined"
    forced = {window.place for window in record.stepped_windows if window.forced}
    if record.scales_the_loss and not (
        forced or record.without_overflows or record.error
    ):
        yield "no overflow was made, so what this training does on one is not known"
    if forced:
        steps = ", ".join(map(str, sorted(forced)))
        yield f"the doctor made an overflow in these steps of an optimizer: {steps}"
    compared = record.at_two_scales
    if compared is not None and compared.reason and record.scales_the_loss:
        yield f"two loss scales were not compared in float32: {compared.reason}"
    if record.lacks_cuda:
        yield ONLY_ON_A_GPU


def _seen(record: Record) -> str:
    """Counts of batches and steps, and the kind of AMP, for the first line."""
    dtypes = sorted({region.dtype for region in record.regions})
    autocast = f"autocast in {' and '.join(dtypes)}" if dtypes else "no autocast"
    is_there = any(scaler.enabled for scaler in record.scalers)
    scaler = "a GradScaler" if is_there else "no GradScaler"
    # Without a `DataLoader`, the number of batches is unknown.
    count = f"{record.batches} batches"
    if not record.batches:
        count = f"{len(record.of('backward'))} backwards"
    applied, skipped = (len(record.of("step", skipped=each)) for each in (False, True))
    return f"{count}, {applied} steps, {skipped} skipped, {autocast}, {scaler}"

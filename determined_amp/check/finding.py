"""What `check` prints: a finding for each fault and each suspicion.

The rules yield what they have seen (`Seen`), and `judge.py` makes findings of it.

`findings.json` has a row for each kind of finding. The order of the rows is the order
in which findings of the same level are printed. A row has these keys:

    sentence    what is wrong
    level       the level; of two levels, the second unless the fault is proven
    evidence    how it is measured, for docs/check.md and `--explain`
    means       what it means, also for docs/check.md and `--explain`
    seen        its rules, which are functions of `invariants.py` or `rules.py`; each
                with a text that says what the rule has seen
    resumed     the same for rules that compare a run and its resume
    errors      parts of the error messages that torch raises for it
    needs_amp   whether it is looked for only in a training with AMP
    has_cause   whether it also reports why a loss is not finite
    write       the lines to write
    look        what to look at instead where these lines may be wrong
    in_a_loop_write, in_a_loop_look
                the same for a training that Determined's loop does not run
    finite_look the same where all losses are finite
    explains    findings that are not printed beside this one, nor are those that they
                explain in turn
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from linecache import getlines
from pathlib import Path
from string import Formatter
from typing import Any

NOTHING = "nothing was trained, nothing was examined"
NO_AMP = "no AMP was used"

ROWS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("findings.json").read_text()
)


class Level(str, enum.Enum):
    """How sure the doctor is of a finding."""

    FAULT = "fault"  # measured, or an error of torch
    SUSPICION = "suspicion"  # looks wrong, but this run does not prove it


def code_of(line: str) -> str:
    """A line of code without its comment and its indentation."""
    return line.partition("#")[0].strip()


@dataclass(frozen=True)
class Where:
    """A line of the user's code."""

    file: str  # relative if the file is in the working directory
    line: int  # from 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def code_around(self, count: int) -> dict[int, str]:
        """The code of this line and of the lines around it.

        Args:
            count: How many lines to take before the line, and behind it.

        Returns:
            The code by line number, the nearest line first, without comments and
            indentation; empty if the file cannot be read.
        """
        lines = [(n, code_of(line)) for n, line in enumerate(getlines(self.file), 1)]
        near = [(n, code) for n, code in lines if abs(n - self.line) <= count]
        return dict(sorted(near, key=lambda line: abs(line[0] - self.line)))


class Seen:
    """What a rule has seen.

    Args:
        at: The events or lines that the finding names. If empty, the rule has seen
            nothing.
        proven: Whether it is a fault, if its row has two levels.
        holds: Whether the row's `write` lines are right in this training.
        words: The values of the names in the rule's text. The text may also name `at`
            as `part`, and its last element as `last`. A list is printed as its length.
    """

    def __init__(
        self,
        at: Sequence[Any],
        *,
        proven: bool = True,
        holds: bool = True,
        **words: Any,
    ) -> None:
        self.at = at
        self.proven = proven
        self.holds = holds
        self.words: dict[str, Any] = {"part": at, "last": [None, *at][-1], **words}


Found = Iterator[Seen]


class Words(Formatter):
    """A formatter that shortens numbers and prints a list as its length."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            return str(len(value))
        if isinstance(value, float) and not format_spec:
            return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
        return str(super().format_field(value, format_spec))


@dataclass(frozen=True)
class CheckFinding:
    """A fault or a suspicion, as it is printed."""

    key: str  # the key of its row in findings.json
    level: Level
    sentence: str  # what is wrong
    where: tuple[Where, ...]  # the lines of the user's code; may be empty
    effect: str  # what was measured in this training
    write: str  # the lines to write, or what to look at
    orders: bool = False  # whether `write` has lines to write
    page: str = "docs/check.md"  # the page that explains it

    def text(self) -> str:
        """The finding as lines for the terminal."""
        places = ", ".join(map(str, self.where))
        head = f"{self.level.value}: {self.sentence}" + (
            f" ({places})" if places else ""
        )
        label = "write:" if self.orders else "look at:"
        advice = self.write.replace("\n", "\n  " + " " * (len(label) + 1))
        shown = f"\n  {label} {advice}" if advice else ""
        more = f"det-amp check --explain {self.key}"
        return f"{head}\n  {self.effect}{shown}\n  more: {more}"


@dataclass
class CheckFindings:
    """The findings of one examination, faults first."""

    all: list[CheckFinding] = field(default_factory=list)
    # What the doctor did to the training, and what it did not examine.
    notes: list[str] = field(default_factory=list)
    seen: str = ""  # counts of batches and steps, and the kind of AMP
    trained: bool = False  # whether there was a backward or a step
    amp: bool = True  # whether it used autocast or scaled a loss
    record: Any = None  # the `Record` that was judged

    def __iter__(self) -> Iterator[CheckFinding]:
        return iter(self.all)

    @property
    def faults(self) -> list[CheckFinding]:
        """The findings that are faults."""
        return [finding for finding in self.all if finding.level is Level.FAULT]

    @property
    def are_right(self) -> bool:
        """Whether something was trained and has no fault."""
        return self.trained and not self.faults

    def __str__(self) -> str:
        counts = Counter(finding.level for finding in self.all)
        told = [
            f"{counts[level]} {level.value}{'' if counts[level] == 1 else 's'}"
            for level in Level
            if counts[level]
        ]
        if not self.trained:
            told.insert(0, "nothing was trained" if self.faults else NOTHING)
        elif not self.amp:
            told.insert(0, NO_AMP)
        elif not self.faults:
            told.insert(0, "0 faults")
        head = ", ".join(told) + (f": {self.seen}" if self.seen else "")
        body = [finding.text() for finding in self.all]
        notes = "\n".join(f"note: {note}" for note in self.notes)
        return "\n\n".join(filter(None, [head, *body, notes]))

    def to_json(self) -> str:
        """The findings as JSON, for programs.

        `faults` is the number of faults, as in the first line of the text.
        """
        content = {
            "faults": len(self.faults),
            "trained": self.trained,
            "amp": self.amp,
            "seen": self.seen,
            "findings": [asdict(finding) for finding in self.all],
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)

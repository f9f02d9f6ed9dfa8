"""What the doctor says: one finding for each fault or suspicion.

`findings.json` has a row for each, in the order in which equal levels are told:

    sentence    what is wrong
    level       of the finding; of two the second, where it is not proven
    evidence    what it is measured by, for docs/check.md and `--explain`
    means       what it means, likewise
    seen        the rules that see it, each a function of `invariants.py` or `rules.py`,
                with what each has seen in words
    resumed     the same for a run and its resume, of `doctor.py`
    errors      parts of the errors that torch raises for it
    needs_amp   whether it is looked for in a training with AMP alone
    has_cause   whether the cause of losses that are not finite is told with it
    write, look the lines to write, or what to look at where these do not hold;
                `in_a_loop_write` and `in_a_loop_look` where the loop is the user's,
                `finite_look` where all losses are finite
    explains    what is not told beside it, with all that those explain
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
    """How sure the doctor is, and of what."""

    FAULT = "fault"  # seen to do harm
    SUSPICION = "suspicion"  # looks wrong, and this run does not prove it


def code_of(line: str) -> str:
    """A line without its comment and its indentation."""
    return line.partition("#")[0].strip()


@dataclass(frozen=True)
class Where:
    """A line of the user's code."""

    file: str  # its path, relative to the working directory where it lies inside
    line: int  # from 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def code_around(self, count: int) -> dict[int, str]:
        """The line with as many before and behind it, as far as they can be read.

        Without comments and indentation, by their numbers, the nearest first.
        """
        lines = [(n, code_of(line)) for n, line in enumerate(getlines(self.file), 1)]
        near = [(n, code) for n, code in lines if abs(n - self.line) <= count]
        return dict(sorted(near, key=lambda line: abs(line[0] - self.line)))


class Seen:
    """What a rule has seen.

    Args:
        at: The events to name, or lines; without any, nothing was seen.
        proven: Whether it is a fault, where its row has two levels.
        holds: Whether the lines to write are right in this training.
        words: What the words of the rule name. They know these events as `part`, and
            the newest as `last`; a list is told by its length.
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
    """Fills words with numbers that can be read, and with the lengths of lists."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            return str(len(value))
        if isinstance(value, float) and not format_spec:
            return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
        return str(super().format_field(value, format_spec))


@dataclass(frozen=True)
class CheckFinding:
    """One thing that is wrong, or may be."""

    key: str  # its name, for programs
    level: Level
    sentence: str  # what is wrong
    where: tuple[Where, ...]  # the lines of the user's that do it; empty if none does
    effect: str  # what it does to this training, in numbers
    write: str  # the lines to write instead, or where to look
    orders: bool = False  # whether `write` holds, or was tried
    page: str = "docs/check.md"  # explains it

    def text(self) -> str:
        """Some lines for the terminal."""
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
    """What one examination found: faults first."""

    all: list[CheckFinding] = field(default_factory=list)
    # What was not examined, and why: a line each.
    notes: list[str] = field(default_factory=list)
    seen: str = ""  # what was examined, in one sentence
    trained: bool = False  # something was, so that something was examined
    amp: bool = True  # with autocast, or a loss that was scaled
    record: Any = None  # the `Record` that was judged

    def __iter__(self) -> Iterator[CheckFinding]:
        return iter(self.all)

    @property
    def faults(self) -> list[CheckFinding]:
        return [finding for finding in self.all if finding.level is Level.FAULT]

    @property
    def are_right(self) -> bool:
        """Whether something was examined, and has no fault."""
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
        """The same for programs; `faults` is the number of the first line."""
        content = {
            "faults": len(self.faults),
            "trained": self.trained,
            "amp": self.amp,
            "seen": self.seen,
            "findings": [asdict(finding) for finding in self.all],
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)

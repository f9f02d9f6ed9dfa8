"""What the doctor says: one finding for each fault, suspicion or cost."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from linecache import getlines

NOTHING = "nothing was trained, nothing was examined"
NO_AMP = "no AMP was used"


class Level(str, enum.Enum):
    """How sure the doctor is, and of what."""

    FAULT = "fault"  # seen to do harm
    SUSPICION = "suspicion"  # looks wrong, and this run does not prove it
    COST = "cost"  # right, but it takes time


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

        Without comments and indentation, by their numbers.
        """
        lines = enumerate(getlines(self.file), start=1)
        return {n: code_of(line) for n, line in lines if abs(n - self.line) <= count}


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
        anchor = self.key.replace("_", "-")
        return f"{head}\n  {self.effect}{shown}\n  read: {self.page}#{anchor}"


@dataclass
class CheckFindings:
    """What one examination found: faults first."""

    all: list[CheckFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not examined, and why
    seen: str = ""  # what was examined, in one sentence
    trained: bool = True  # something was, so that something was examined
    amp: bool = True  # with autocast, or a loss that was scaled

    def __iter__(self) -> Iterator[CheckFinding]:
        return iter(self.all)

    @property
    def faults(self) -> list[CheckFinding]:
        return [finding for finding in self.all if finding.level is Level.FAULT]

    @property
    def are_right(self) -> bool:
        """Whether something was examined, and has no fault."""
        return self.trained and not self.faults

    def sort(self) -> None:
        order = list(Level)
        self.all.sort(key=lambda finding: order.index(finding.level))

    def __str__(self) -> str:
        counts = Counter(finding.level for finding in self.all)
        parts = []
        if not self.trained:
            parts = [NOTHING]
        elif not self.amp:
            parts = [NO_AMP]
        for level in Level:
            plural = "" if counts[level] == 1 else "s"
            if counts[level] or (level is Level.FAULT and not parts):
                parts.append(f"{counts[level]} {level.value}{plural}")
        head = ", ".join(parts) + (f": {self.seen}" if self.seen else "")
        body = [finding.text() for finding in self.all]
        return "\n\n".join([head, *body, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> str:
        """The same for programs; `faults` is the number of the first line."""
        findings = [asdict(finding) for finding in self.all]
        content = {
            **{"faults": len(self.faults), "trained": self.trained, "amp": self.amp},
            "seen": self.seen,
            "findings": findings,
        }
        return json.dumps({**content, "notes": self.notes}, indent=2)

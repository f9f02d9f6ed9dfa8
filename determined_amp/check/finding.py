"""What the doctor says: one finding for each fault, suspicion or cost."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field


class Level(str, enum.Enum):
    """How sure the doctor is, and of what."""

    FAULT = "fault"  # seen to do harm
    SUSPICION = "suspicion"  # looks wrong, and this run does not prove it
    COST = "cost"  # right, but it takes time


@dataclass(frozen=True)
class Where:
    """A line of the user's code.

    Args:
        file: Its path, relative to the working directory where it lies inside.
        line: From 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Args:
        key: Its name, for programs.
        level: Fault, suspicion or cost.
        sentence: What is wrong.
        where: The lines of the user's code that do it; empty if no line of theirs does.
        effect: What it does to this training, in numbers.
        write: The lines to write instead.
        page: The page that explains it.
    """

    key: str
    level: Level
    sentence: str
    where: tuple[Where, ...]
    effect: str
    write: str
    page: str = "docs/check.md"

    def text(self) -> str:
        """Some lines for the terminal."""
        places = ", ".join(map(str, self.where))
        lines = [f"{self.level.value}: {self.sentence}" + (f" ({places})" if places else "")]
        lines.append(f"  {self.effect}")
        first, *more = self.write.splitlines()
        lines += [f"  write: {first}", *(f"         {line}" for line in more)]
        return "\n".join([*lines, f"  read: {self.page}#{self.key.replace('_', '-')}"])


_ORDER = list(Level)


@dataclass
class Findings:
    """What one examination found: faults first.

    Args:
        all: The findings.
        notes: What was not examined, and why.
        seen: What was examined, in one sentence.
    """

    all: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: str = ""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.all if finding.level is Level.FAULT]

    def sort(self) -> None:
        self.all.sort(key=lambda finding: _ORDER.index(finding.level))

    def __str__(self) -> str:
        count = len(self.faults)
        parts = [f"{count} fault{'' if count == 1 else 's'}"]
        for level, plural in ((Level.SUSPICION, "suspicions"), (Level.COST, "costs")):
            number = sum(finding.level is level for finding in self.all)
            if number:
                parts.append(f"{number} {level.value if number == 1 else plural}")
        head = ", ".join(parts) + (f": {self.seen}" if self.seen else "")
        body = [finding.text() for finding in self.all]
        return "\n\n".join([head, *body, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> str:
        """The same for programs; `faults` is the number of the first line."""
        content = {
            "faults": len(self.faults),
            "seen": self.seen,
            "findings": [{**asdict(each), "level": each.level.value} for each in self.all],
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)

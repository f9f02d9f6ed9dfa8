"""Says what to write in the words of the script that is to be changed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from determined_amp.check.finding import CheckFinding, code_of

# So many lines before and behind the line of a finding are near it.
_NEAR = 8
# In so many, lines of the script are not to be repeated, and its names are looked for.
FAR = 24
# The first call of a line, up to its arguments.
_CALL = re.compile(r"[\w.]+\(")

# Words of an order for which a script has names of its own: neither attributes, nor
# keys, nor names of arguments.
_WORDS = "scaler|optimizer|scheduler|loss|parameters|max_norm|limit"
_WORD = re.compile(rf'(?<![.\w"])({_WORDS})\b(?!=)')
_NAME = r"[\w.]+(?:\[\w+\]|\(\))?"
# How lines around that of a finding show these names.
_AROUND = {
    "scaler": re.compile(rf"({_NAME})\.(?:scale|unscale_)\("),
    "optimizer": re.compile(rf"\.(?:unscale_|step)\(({_NAME})[,)]"),
}

Code = dict[int, str]  # lines of a script by their numbers, the nearest first


def fitted_to_script(finding: CheckFinding) -> CheckFinding:
    """The finding with the names and the numbers of lines that the script has.

    Where all that it orders stands near, in this order, no order is given: the lines
    may be those of another object, or stand in another place than they should.
    """
    if not finding.orders:
        return finding
    lines, around = finding.write.splitlines(), _code_around(finding)
    names = _names_around(around) | _names_in_its_lines(finding, lines)
    own = [_WORD.sub(lambda word: names.get(word[1], word[1]), line) for line in lines]
    numbers = [_number_of(line, around) for line in own]
    fitted = []
    for at, line in enumerate(own):
        behind = filter(None, numbers[at + 1 :])
        fitted.append(_told(line, numbers[at], min(behind, default=math.inf), names))
    wanted = [_number_of(line, around) for line in own if _calls(line)]
    stands = wanted and _stand_near(finding, wanted)
    return replace(finding, write="\n".join(fitted), orders=not stands)


def _code_around(finding: CheckFinding) -> Code:
    if not finding.where:
        return {}
    where = finding.where[0]
    lines = where.code_around(FAR).items()
    return dict(sorted(lines, key=lambda line: abs(line[0] - where.line)))


def _told(line: str, number: int | None, behind: float, names: dict[str, str]) -> str:
    """A line of an order, with what stands behind it, if it has no comment.

    Args:
        line: The line, with the names of the script.
        number: That of the script's own.
        behind: The least number of those that are ordered behind it.
        names: The names of the script that are known.
    """
    if "#" in line:
        return line
    if number is not None:
        moves = ": move it here" if number > behind else ""
        return f"{line}  # your line {number}{moves}"
    is_unknown = "optimizer" not in names and "optimizer" in _WORD.findall(line)
    return f"{line}  # your optimizer" if is_unknown else line


# Lines that a script has already.


def _calls(line: str) -> str:
    """What a line of an order calls; nothing if it is a sentence."""
    found = _CALL.search(_code_of(line))
    return found[0] if found and not line.startswith("leave ") else ""


def _code_of(line: str) -> str:
    """A line of an order without its comment, as one that imports `nn` has it."""
    return code_of(line).replace("torch.nn.utils.", "")


def _number_of(line: str, around: Code) -> int | None:
    """The number of the nearest line of the script that is this one, or calls the same.

    Where an order says more in a comment, it must be this one.
    """
    for wanted in (_code_of(line), "" if "#" in line else _calls(line)):
        its_own = wanted.removeprefix("self.")  # from outside it has another name
        for number, its in around.items():
            if wanted and its_own in its:
                return number
    return None


def _stand_near(finding: CheckFinding, numbers: list[int | None]) -> bool:
    """Whether lines with these numbers are near that of a finding, in their order."""
    known = [number for number in numbers if number is not None]
    is_near = all(abs(number - finding.where[0].line) <= _NEAR for number in known)
    return known == numbers == sorted(known) and is_near


# The names of a script.


def _names_around(around: Code) -> dict[str, str]:
    """What the script calls its scaler and its optimizer, if it has one name for it."""
    names: dict[str, str] = {}
    for word, shows in _AROUND.items():
        found = {name for code in around.values() for name in shows.findall(code)}
        if len(found) == 1:
            names[word] = found.pop()
    return names


def _names_in_its_lines(finding: CheckFinding, lines: Iterable[str]) -> dict[str, str]:
    """The names in the lines of a finding, in place of which others are ordered."""
    names: dict[str, str] = {}
    its = [code for where in finding.where for code in where.code_around(0).values()]
    for line in filter(_calls, lines):
        code = line.partition("in place of ")[2] or _code_of(line)
        for found in map(_pattern_of(code).search, its):
            names |= found.groupdict() if found else {}
    return names


def _pattern_of(code: str) -> re.Pattern[str]:
    """What finds a line of an order where its words have other names."""
    named = _WORD.sub(lambda word: f"(?P<{word[1]}>{_NAME})", re.escape(code))
    return re.compile(named)

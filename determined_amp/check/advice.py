"""Says what to write in the words of the script that is to be changed."""

from __future__ import annotations

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
    if not (finding.orders and finding.where):
        return finding
    place, lines = finding.where[0], finding.write.splitlines()
    around = place.code_around(FAR)
    names = _names_around(around) | _names_in_its_lines(finding, lines)
    own = [_WORD.sub(lambda word: names.get(word[1], word[1]), line) for line in lines]
    numbers = [_number_of(line, around) for line in own]
    fitted = []
    for at, line in enumerate(own):
        is_below = any(0 < number < numbers[at] for number in numbers[at:])
        fitted.append(_told(line, numbers[at], is_below, "optimizer" in names))
    wanted = [_number_of(line, around) for line in own if _calls(line)]
    is_near = all(abs(number - place.line) <= _NEAR for number in wanted)
    stands = any(wanted) and all(wanted) and is_near and wanted == sorted(wanted)
    return replace(finding, write="\n".join(fitted), orders=not stands)


def _told(line: str, number: int, is_below: bool, is_known: bool) -> str:
    """A line of an order, with what stands behind it, if it has no comment.

    Args:
        line: The line, with the names of the script.
        number: That of the script's own; 0 if it has none.
        is_below: Whether that is below one that is ordered behind it.
        is_known: Whether the name of the optimizer is known.
    """
    if "#" in line:
        return line
    if number:
        return f"{line}  # your line {number}" + (": move it here" if is_below else "")
    is_unknown = "optimizer" in _WORD.findall(line) and not is_known
    return f"{line}  # your optimizer" if is_unknown else line


# Lines that a script has already.


def _calls(line: str) -> str:
    """What a line of an order calls; nothing if it is a sentence."""
    found = _CALL.search(_code_of(line))
    return found[0] if found and not line.startswith("leave ") else ""


def _code_of(line: str) -> str:
    """A line of an order without its comment, as one that imports `nn` has it."""
    return code_of(line).replace("torch.nn.utils.", "")


def _number_of(line: str, around: Code) -> int:
    """The number of the nearest line of the script that is this one, or calls the same.

    Where an order says more in a comment, it must be this one. 0 if there is none.
    """
    for wanted in (_code_of(line), "" if "#" in line else _calls(line)):
        its_own = wanted.removeprefix("self.")  # from outside it has another name
        for number, its in around.items():
            if wanted and its_own in its:
                return number
    return 0


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

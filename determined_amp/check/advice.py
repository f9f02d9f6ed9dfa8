"""Adapts the advice of a finding to the user's script.

`judge.py` calls `fitted_to_script` for each finding. It replaces words such as
`optimizer` by the names of the script, and adds the numbers of the script's own lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from determined_amp.check.finding import CheckFinding, code_of

# The largest distance, in lines, of a line that is near that of the finding.
_NEAR = 8
# How far around that line we look for names, and for lines that the script already has.
FAR = 24
# A call, up to its arguments.
_CALL = re.compile(r"[\w.]+\(")

# The words of a `write` line that a script's own names replace. `_WORD` matches no
# attribute, no key and no name of an argument.
_WORDS = "scaler|optimizer|scheduler|loss|parameters|max_norm|limit"
_WORD = re.compile(rf'(?<![.\w"])({_WORDS})\b(?!=)')
_NAME = r"[\w.]+(?:\[\w+\]|\(\))?"
# The calls that show what the script calls its scaler and its optimizer.
_AROUND = {
    "scaler": re.compile(rf"({_NAME})\.(?:scale|unscale_)\("),
    "optimizer": re.compile(rf"\.(?:unscale_|step)\(({_NAME})[,)]"),
}

Code = dict[int, str]  # lines of a script by number, the nearest first


def fitted_to_script(finding: CheckFinding) -> CheckFinding:
    """Return the finding with the script's names and line numbers in its advice.

    If the script already has all these lines near the finding, in this order, the
    finding only advises to look at them. They may belong to another object, or be in
    the wrong place.
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
    """A line to write, with a comment: the script's own line, or whose optimizer it is.

    Args:
        line: The line, with the names of the script.
        number: The number of the script's own line; 0 if it has none.
        is_below: Whether the script has this line below one that must follow it.
        is_known: Whether the name of the optimizer is known.

    Returns:
        The line itself if it already has a comment, or if there is nothing to add.
    """
    if "#" in line:
        return line
    if number:
        return f"{line}  # your line {number}" + (": move it here" if is_below else "")
    is_unknown = "optimizer" in _WORD.findall(line) and not is_known
    return f"{line}  # your optimizer" if is_unknown else line


# Lines that a script has already.


def _calls(line: str) -> str:
    """The first call of a line to write; empty if the line is a sentence."""
    found = _CALL.search(_code_of(line))
    return found[0] if found and not line.startswith("leave ") else ""


def _code_of(line: str) -> str:
    """A line to write without its comment and without `torch.nn.utils.`."""
    return code_of(line).replace("torch.nn.utils.", "")


def _number_of(line: str, around: Code) -> int:
    """The number of the nearest line of the script with the same code or the same call.

    A line to write that has a comment needs the same code. 0 if there is no such line.
    """
    for wanted in (_code_of(line), "" if "#" in line else _calls(line)):
        its_own = wanted.removeprefix("self.")  # the name differs outside a class
        for number, its in around.items():
            if wanted and its_own in its:
                return number
    return 0


# The names of a script.


def _names_around(around: Code) -> dict[str, str]:
    """The script's names of scaler and optimizer, if each has a single name."""
    names: dict[str, str] = {}
    for word, shows in _AROUND.items():
        found = {name for code in around.values() for name in shows.findall(code)}
        if len(found) == 1:
            names[word] = found.pop()
    return names


def _names_in_its_lines(finding: CheckFinding, lines: Iterable[str]) -> dict[str, str]:
    """The script's names in the lines of the finding.

    A line of the finding shows them if it has the form of a line to write, or of the
    line that this one replaces.
    """
    names: dict[str, str] = {}
    its = [code for where in finding.where for code in where.code_around(0).values()]
    for line in filter(_calls, lines):
        code = line.partition("in place of ")[2] or _code_of(line)
        for found in map(_pattern_of(code).search, its):
            names |= found.groupdict() if found else {}
    return names


def _pattern_of(code: str) -> re.Pattern[str]:
    """A pattern for the line to write with any names in place of its words."""
    named = _WORD.sub(lambda word: f"(?P<{word[1]}>{_NAME})", re.escape(code))
    return re.compile(named)

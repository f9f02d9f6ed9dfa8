"""The code blocks of the pages, and the commands in them."""

import re
import shlex


def blocks(page, language=""):
    """The blocks in a language; those without one have commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [block for written_in, block in fenced if written_in == language]


def commands(page):
    """The commands of a page, without comments, in order."""
    lines = "".join(blocks(page)).replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in line.split(" && ")]
    return [shlex.join(shlex.split(part, comments=True)) for part in parts]

"""What `check` says of the text of a script."""

import gc
import linecache
from contextlib import ExitStack, suppress
from functools import cache

from determined_amp.check import watching
from determined_amp.check.judge import judge_record
from determined_amp.check.two_scales import WaitingRuns
from tests.right_scripts import PRELUDE
from tests.wrong_scripts import WRONG


def prepared():
    """The names that scripts begin with."""
    names = {}
    exec(compile(PRELUDE, "prelude.py", "exec"), names)
    return names


@cache
def findings_of(script, file, *, compares=False):
    """What is said of a script, which may raise; several tests read the same.

    Two loss scales are compared only where the answer needs it, which takes longer.
    """
    names = prepared()
    linecache.cache[file] = (len(script), None, script.splitlines(True), file)
    program = compile(script, file, "exec")
    with ExitStack() as stack:
        if compares:
            again = WaitingRuns(lambda: exec(program, prepared()))
            stack.callback(again.close)
        with suppress(Exception, SystemExit), watching() as findings:
            exec(program, names)
        if compares and not findings.record.error:
            findings.record.at_two_scales = again.compare(24, 60.0)
            findings = judge_record(findings.record)
    # A hook of a graph holds them in a circle that Python does not see.
    names.clear()
    gc.collect()
    gc.freeze()  # the doctor looks at all other objects when it begins
    return findings


def findings_of_mistake(name):
    """What is said of one of the scripts with a mistake."""
    mistake = WRONG[name]
    compares = mistake.findings.startswith("depends_on_scale")
    return findings_of(mistake.script, f"{name}.py", compares=compares)

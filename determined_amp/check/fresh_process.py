"""Runs a probe in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack

from determined_amp.amp.errors import UserError
from determined_amp.check import probe as probes
from determined_amp.check.confinement import confine
from determined_amp.check.probe import Probe
from determined_amp.check.record import Record
from determined_amp.check.scratch import Scratch, changing_only
from determined_amp.trial.determined_private import leave_the_cluster

# Seconds that one run may take, with its start.
PATIENCE = 300
# Seconds in which its process sends what it has seen, and ends.
_PARTING = 30

_ENTERED = ExitStack()  # what its process is in until it ends


def run_afresh(probe: Probe) -> Record:
    """Run a probe in a process of its own, which prints nothing.

    What its trial changes, changes in the folder of the probe.

    Raises:
        UserError: if the trial cannot be run.
    """
    processes = multiprocessing.get_context("forkserver")
    entered = os.getcwd(), str(probe.folder)
    with ProcessPoolExecutor(1, processes, _enter, entered) as pool:
        try:
            return pool.submit(_run, probe).result()
        except BrokenProcessPool:
            raise UserError(
                f"a run of the trial died, or took more than {PATIENCE} s; give it "
                "less data"
            ) from None


def _enter(directory: str, folder: str) -> None:
    signal.alarm(PATIENCE)  # it ends the process
    os.chdir(directory)
    sys.path.insert(0, directory)
    leave_the_cluster()  # the doctor may be a task of one, but its runs are not
    # for data loaders, as in a training
    multiprocessing.set_start_method("fork", force=True)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nothing, stream.fileno())
    scratch = Scratch(folder)
    confine(scratch.writable)
    _ENTERED.enter_context(changing_only(scratch))


def _run(probe: Probe) -> Record:
    try:
        return probes.run(probe)
    except UserError as error:
        raise UserError(str(error)) from None
    except BaseException:  # a trial may raise anything, and not all of it can be sent
        said = traceback.format_exc().strip().splitlines()[-1]
        raise UserError(f"a run of the trial failed: {said}") from None
    finally:
        signal.alarm(_PARTING)  # a thread that the trial has left may never end

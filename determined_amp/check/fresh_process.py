"""Runs a probe in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from determined_amp.amp.errors import UserError
from determined_amp.check import probe as probes
from determined_amp.check.probe import Probe
from determined_amp.check.record import Record
from determined_amp.trial.determined_private import leave_the_cluster

# Seconds that one run may take, with its start.
PATIENCE = 300.0


def run_afresh(probe: Probe) -> Record:
    """Run a probe in a process of its own, which prints nothing.

    Raises:
        UserError: if the trial cannot be run.
    """
    processes = multiprocessing.get_context("forkserver")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_serve, args=(theirs, probe, os.getcwd()))
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            raise UserError(
                f"a run of the trial took more than {PATIENCE:.0f} s; give it less data"
            )
        answer = ours.recv()
    except EOFError:
        process.join()
        raise UserError(f"a run of the trial died with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, UserError):
        raise answer
    if isinstance(answer, str):
        raise UserError(f"a run of the trial failed: {answer}")
    assert isinstance(answer, Record)
    return answer


def _serve(connection: Connection, probe: Probe, directory: str) -> None:
    os.chdir(directory)
    leave_the_cluster()  # the doctor may be a task of one, but its runs are not
    multiprocessing.set_start_method("fork", force=True)  # for data loaders, as in a training
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nothing, stream.fileno())
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    answer: Any
    try:
        answer = probes.run(probe)
    except UserError as error:
        answer = UserError(str(error))
    except BaseException:  # a trial may raise anything, and the doctor must hear of it
        answer = traceback.format_exc().strip().splitlines()[-1]
    connection.send(answer)

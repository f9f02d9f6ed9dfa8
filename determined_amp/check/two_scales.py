"""Trains again in float32 with two loss scales, which must make no difference.

A multiplication by a power of two changes no digit of a float32 number. So with equal
seeds, the weights of a correct training are equal at any two loss scales, whatever its
code does with gradients, losses, averages and rates. They are equal to the bit unless
it adds a small number to a scaled one, as a clip does to its norm. `any_loop.py` asks
for the comparison after it has watched the script, and a rule of `invariants.py` reads
it.

The trainings are forks of a process that waits from before the script begins, because
no fork works after torch has computed with several threads.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from determined_amp.amp.errors import one_line
from determined_amp.amp.patched import patched
from determined_amp.amp.rehearse.regions import float16_as
from determined_amp.amp.tensors import SIXTEEN_BITS, parameters_of, tensors_of
from determined_amp.check.finding import Where
from determined_amp.check.record import users_line
from determined_amp.check.stand_in import StandIn

# The loss scales of the trainings, as states of a `GradScaler`. Two are constant, and
# two grow after each update, up to `_MOST`, beyond which squares of gradients may
# overflow. The smallest is small, because a limit may cut off scaled numbers alike at
# every larger scale, and not 1, because torch adds 1e-6 to the norm of a clip. `_HIGH`
# and `_FASTER` prove a difference. A scale shrinks only for batches that are not finite
# in float32; below `_LEAST` small gradients lose digits, so a training ends there.
_NEVER = 2**31 - 1
_FIXED = {"scale": 2.0**4, "growth_interval": _NEVER}
_HIGH = {"scale": 2.0**24, "growth_interval": _NEVER}
_GROWING = {"scale": 2.0**11, "growth_interval": 1}
_FASTER = {"scale": 2.0**11, "growth_interval": 1, "growth_factor": 4.0}
_MOST, _LEAST = 2.0**32, 2.0**-26

# What is compared, and the largest relative difference that rounding explains. A small
# loss is a difference of larger numbers, so its digits are fewer.
LOSSES, WEIGHTS = "the losses", "the weights"
_ROUNDING = {LOSSES: 1e-3, WEIGHTS: 1e-5}
# A training that is repeated may differ by this share of it.
_REPEATED = 0.1
# How many numbers of each tensor are compared, besides its norm and its sum.
_SAMPLED = 16

# The most trainings of a comparison: two, a repetition of each, and two that prove a
# difference.
MOST_TRAININGS = 6

# A training that is told to end gets this many seconds more.
_GRACE = 5.0

State = dict[str, float]
# The readings of a training, and why they do not count; empty if they do.
Trace = tuple[Sequence["Reading"], str]

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Reading:
    """Numbers that a training came to; two trainings are compared by them."""

    what: str  # the losses, before they are scaled, or the weights after a step
    where: Where | None  # the user's line
    step: int  # number of optimizer steps before it
    values: tuple[tuple[float, ...], ...]  # for each tensor, beginning with its norm

    def is_near(self, other: Reading, share: float) -> bool:
        """Whether that of another training differs by no more than rounding.

        Args:
            other: The reading of the other training.
            share: The share of the allowed difference that counts as rounding.
        """
        same_place = replace(self, values=()) == replace(other, values=())
        if not same_place or len(self.values) != len(other.values):
            return False
        for mine, others in zip(self.values, other.values, strict=True):
            allowed = share * _ROUNDING[self.what] * mine[0]
            differences = [abs(a - b) for a, b in zip(mine, others, strict=True)]
            is_equal = repr(mine) == repr(others)  # NaN included
            if not (is_equal or max(differences) <= allowed):
                return False
        return True


@dataclass(frozen=True)
class ScaleComparison:
    """What two trainings in float32 showed that differ only in their loss scale."""

    steps: int  # optimizer steps that both have made
    first: Reading | None  # the first reading that differs; None if all are equal
    # Whether they also differ if both scales are constant, or both grow. Otherwise a
    # script may only take a growth of the scale for a skipped step.
    proven: bool = False
    reason: str = ""  # why they were not compared; empty if they were


class WaitingRuns:
    """A process that waits, and then compares two trainings of a script.

    Args:
        run: Runs the script.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._here, theirs = _fork.Pipe()
        process = _fork.Process(target=_serve, args=(theirs, self._here, run))
        process.start()
        theirs.close()
        self._process = process

    def compare(self, steps: int, seconds: float) -> ScaleComparison:
        """Train with both scales; what the script prints is not shown.

        Args:
            steps: After this many optimizer steps a training ends.
            seconds: How long a training may take.
        """
        try:
            self._here.send((steps, seconds))
            answer: ScaleComparison = self._here.recv()
        except (EOFError, OSError):
            return ScaleComparison(
                0, None, reason="the process that compares them died"
            )
        return answer

    def close(self) -> None:
        """End the process. Loaders of the script may still hold this connection."""
        self._process.terminate()
        self._process.join()
        with suppress(OSError):  # the script may have closed it
            self._here.close()


def _serve(connection: Connection, theirs: Connection, run: Callable[[], None]) -> None:
    """Wait for a question, and answer it; end when the asking process has ended."""
    theirs.close()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with suppress(EOFError):
        steps, seconds = connection.recv()
        trace = partial(_traced, connection, run, steps, seconds)
        connection.send(_compared(trace))


def _compared(trace: Callable[[State], Trace]) -> ScaleComparison:
    """Compare trainings by their traces."""
    grown, reason = trace(_GROWING)
    fixed, other_reason = trace(_FIXED)
    if reason or other_reason:
        return ScaleComparison(0, None, reason=reason or other_reason)
    other = _first_difference(grown, fixed)
    if other is None:
        steps = min((each[-1].step for each in (grown, fixed) if each), default=0)
        return ScaleComparison(steps, None, reason="" if steps else "it made no step")
    # Otherwise the script is random, or another program has a part in it. Some kernels
    # of a GPU add numbers in another order each time.
    for scale, before in ((_FIXED, fixed), (_GROWING, grown)):
        again, _ = trace(scale)
        same, reached = before[: other + 1], len(again) > other
        if not reached or _first_difference(again, same, _REPEATED) is not None:
            return ScaleComparison(0, None, reason="equal seeds gave other numbers")
    proven = any(
        _first_difference(trace(scale)[0], before) is not None
        for scale, before in ((_HIGH, fixed), (_FASTER, grown))
    )
    return ScaleComparison(grown[other].step, grown[other], proven)


def _first_difference(
    one: Sequence[Reading], other: Sequence[Reading], share: float = 1.0
) -> int | None:
    """The index of the first readings that are not near; None if all are."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if not a.is_near(b, share)), None)


def _traced(
    owner: Connection,
    run: Callable[[], None],
    steps: int,
    seconds: float,
    scale: State,
) -> Trace:
    """Train in a fork, and return its trace.

    Raises:
        EOFError: if the asking process has ended.
    """
    connection, theirs = _fork.Pipe()
    tracer = _Tracer(theirs, scale, steps)
    process = _fork.Process(target=_train, args=(tracer, run, seconds))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        ready = wait([connection, owner], seconds + _GRACE)
        if owner in ready:
            raise EOFError
        with suppress(EOFError):
            if ready:
                trace: Trace = connection.recv()
                return trace
        return (), "a training died, or did not end in time"
    finally:
        process.kill()
        with suppress(ProcessLookupError):  # its group has its loaders
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _train(tracer: _Tracer, run: Callable[[], None], seconds: float) -> None:
    """Run the script with its output hidden, and send the trace."""
    os.setpgrp()
    tracer.pid = os.getpid()
    hidden = os.open(os.devnull, os.O_RDWR)
    for shown in range(3):
        os.dup2(hidden, shown)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, tracer.end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    random.seed(0)
    np.random.seed(0)  # the generator that scripts use
    torch.manual_seed(0)
    if torch.cuda.is_available():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with tracer.watching():
            run()
    except SystemExit as left:
        if left.code not in (None, 0):
            tracer.reason = f"it exits with {left.code} in float32"
    except BaseException as error:
        tracer.reason = (
            f"it raises {type(error).__name__} in float32: {one_line(error)}"
        )
    tracer.end()


class _Tracer:
    """Follows a training in float32, with a loss scale of its own.

    Args:
        connection: Where it sends its trace.
        scale: The loss scale, as a part of a scaler's state.
        steps: The number of steps after which the training ends.

    Attributes:
        reason: Why the trace does not count; empty if it does.
        pid: The id of the process that trains.
    """

    def __init__(self, connection: Connection, scale: State, steps: int) -> None:
        self.reason = ""
        self.pid = 0  # of the training
        self._connection = connection
        self._scale = scale
        self._most_steps = steps
        self._steps = 0
        self._readings: list[Reading] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the training in this block."""
        kind = torch.amp.GradScaler
        with ExitStack() as stack:
            stack.enter_context(StandIn(self._see).standing_in())
            stack.enter_context(float16_as(torch.float32))
            for name, replacing in (
                ("__init__", self._making),
                ("load_state_dict", self._loading),
                ("scale", self._scaling),
            ):
                own = getattr(kind, name)
                stack.enter_context(patched(kind, name, wraps(own)(replacing(own))))
            handle = register_optimizer_step_post_hook(self._after_step)
            stack.callback(handle.remove)
            yield

    def end(self, *_: object) -> None:
        """Send the trace, and end the process at once, whatever the script does."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() == self.pid:  # not in a fork of the script
            self._connection.send((self._readings, self.reason))
        os._exit(0)

    def _see(self, name: str, arguments: Any, result: Any) -> None:
        """Look for numbers that float32 does not hold exactly at every scale."""
        if any(tensor.dtype in SIXTEEN_BITS for tensor in tensors_of(result)):
            self.reason = "it has 16-bit tensors that autocast did not make"

    def _making(self, own: Callable[..., None]) -> Callable[..., None]:
        def make(scaler: Any, *args: Any, **kwargs: Any) -> None:
            own(scaler, *args, **kwargs)
            kind = torch.amp.GradScaler  # a subclass may not be ready for a state
            kind.load_state_dict(scaler, kind.state_dict(scaler))

        return make

    def _loading(self, own: Callable[..., None]) -> Callable[..., None]:
        def load(scaler: Any, state: dict[str, Any]) -> None:
            exact = {"growth_factor": 2.0, "backoff_factor": 0.5}
            own(scaler, {**state, **exact, **self._scale} if state else state)

        return load

    def _scaling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            if isinstance(outputs, torch.Tensor):
                self._note(LOSSES, [outputs])
            loss_scale = scaler.get_scale()
            if 0.0 < loss_scale < _LEAST:
                self.end()
            if loss_scale >= _MOST:
                if self._scale is _FASTER:  # the other one still grows
                    self.end()
                scaler.set_growth_interval(_NEVER)
            if math.frexp(loss_scale)[0] not in (0.0, 0.5):
                self.reason = "its loss scale is no power of two"
            return own(scaler, outputs)

        return scale

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._steps += 1
        self._note(WEIGHTS, parameters_of(optimizer))
        if self._steps == self._most_steps:
            self.end()

    def _note(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), torch.DisableTorchFunction():
            values = [_values_of(each.detach().double()) for each in tensors]
        reading = Reading(what, users_line(), self._steps, tuple(values))
        self._readings.append(reading)


def _values_of(tensor: torch.Tensor) -> tuple[float, ...]:
    """The norm of a tensor, and its sum and some of its numbers at the size of it."""
    size = max(1, tensor.numel())
    few = tensor.flatten()[:: math.ceil(size / _SAMPLED)] * size**0.5
    return float(tensor.norm()), float(tensor.sum()) / size**0.5, *few.tolist()

"""Measures `torch.compile` with ResNet-50, in a bare loop and through `amp.compile`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu import loops
from benchmarks.gpu.box import Box, problem_of, stretch
from benchmarks.gpu.resnet import Bare, batch_on
from benchmarks.loops import train_in_turns
from determined_amp.amp.settings import Precision

ROUNDS = 3
# A rehearsal only traces, because compiling needs a C++ compiler and a minute.
MODES: dict[str, dict[str, str]] = {
    "default": {"mode": "default"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
TINY_MODES: dict[str, dict[str, str]] = {"default": {"backend": "eager"}}
# The seconds in which a mode compiles; a mode is left out if fewer are left.
SECONDS = 60


def measure(box: Box) -> Iterator[dict[str, Any]]:
    """Yield rows of `mode`, `precision`, `batch`, `round` and `images_per_second`.

    The mode `off` does not compile.
    """
    precision = box.amp[0]
    batch = batch_on(box, loops.batch_size(box))
    steps = {"off": partial(Bare(box).step, batch, precision)}
    yield from _rounds(box, precision, steps)
    for mode, options in (TINY_MODES if box.tiny else MODES).items():
        if box.left() < SECONDS and not box.tiny:
            yield {"mode": mode, "note": f"not begun: {box.left():.0f} s are left"}
            continue
        compiled, started = Bare(box), time.monotonic()
        compiled.model.compile(**options)  # in place, so that parameter names stay
        step = partial(compiled.step, batch, precision)
        try:
            step()
        except Exception as error:
            # A compiler raises errors of many types, and the next mode may work.
            yield {"mode": mode, "note": problem_of(error)}
            continue
        yield {"mode": mode, "compile_seconds": time.monotonic() - started}
        yield from _rounds(box, precision, {"off": steps["off"], mode: step})
    if box.tiny:
        yield {"mode": "amp.compile", "note": "not rehearsed: it compiles for a minute"}
    elif box.left() < SECONDS:
        yield {"mode": "amp.compile", "note": f"not begun: {box.left():.0f} s are left"}
    else:
        yield from through_the_library(box, precision)


def _rounds(
    box: Box, precision: Precision, steps: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    size = loops.batch_size(box)
    for number in range(2 if box.tiny else ROUNDS):
        for mode, step in steps.items():
            for _ in range(1 if box.tiny else 3):
                step()
            seconds, peak = stretch(step, box)
            where = {
                "mode": mode,
                "precision": precision.value,
                "batch": size,
                "round": number,
            }
            yield {**where, "images_per_second": size / seconds, "peak_bytes": peak}


def through_the_library(box: Box, precision: Precision) -> Iterator[dict[str, Any]]:
    """Yield rows of Determined's loop, with `amp.compile` off and on by turns."""
    data = loops.noise_of(box)
    compared = {
        f"amp.compile: {value}": partial(
            train_in_turns,
            loops.experiment_of(
                box, precision, data, [f"hyperparameters.amp.compile={value}"]
            ),
        )
        for value in ("false", "default")
    }
    for row in loops.in_turns(box, precision, compared):
        yield {"mode": row.pop("loop"), **row}

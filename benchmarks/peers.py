"""Measures the CPU time of a batch in our loops and in those of other libraries.

    pip install '.[all]' --group peers
    python -m benchmarks.peers [--rounds 12] [--calls]

All loops train the same model on the same batches, with the same clip and rate. They
run by turns in one process, so that other load on the machine affects all of them
alike. A round is 100 batches of each loop, with one report. The step is tiny on
purpose: most of its time is work of the host around the kernels.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import determined_amp
from benchmarks import loops
from benchmarks.measured import DEVICE, machine, markdown_table, parser_of, write
from benchmarks.turns import BATCHES_PER_ROUND, BATCHES_PER_TURN, Turns, by_turns
from determined_amp.amp.settings import Precision
from determined_amp.trial.controller import SafeController
from determined_amp.trial.determined_private import controlled_by
from trials.schedule import LRSchedule

TURNS_PER_ROUND = BATCHES_PER_ROUND // BATCHES_PER_TURN
PRECISIONS = (Precision.AMP_BF16.value, Precision.AMP_FP16.value)
PACKAGES = ("accelerate", "lightning", "transformers")
OUR_FILES = str(Path(determined_amp.__file__).parent)

REFERENCE = "bare PyTorch loop"
DETERMINED = "Determined, no metrics"
AMP_LOOP = "`AmpLoop`"
TEN_LINES = "the ten lines"
LOOPS: dict[str, Callable[[loops.Case, Turns], nn.Module]] = {
    REFERENCE: loops.bare,
    DETERMINED: loops.silent,
    "Determined, loss as a metric": loops.stock,
    AMP_LOOP: loops.amp_loop,
    TEN_LINES: loops.ours,
}

# How the tables of the README and of docs/evidence.md begin.
LINE_BEGINS = "| CPU time of a tiny batch | "
TABLE_BEGINS = "| loop | "


def measure(precision: str, rounds: int) -> dict[str, list[float]]:
    """Measure CPU microseconds per batch of each loop, in each round but the first."""
    measured: dict[str, Callable[[loops.Case, Turns], object]] = dict(LOOPS)
    if DEVICE.type == "cuda" or precision != Precision.AMP_FP16.value:
        from benchmarks.peer_loops import PEERS  # noqa: PLC0415  # optional packages

        measured |= PEERS
    turns_each = (rounds + 1) * TURNS_PER_ROUND
    case = loops.Case(
        precision, LRSchedule.CONSTANT.value, turns_each * BATCHES_PER_TURN + 1
    )
    with controlled_by(SafeController):
        turns = by_turns(
            {name: partial(loop, case) for name, loop in measured.items()}, turns_each
        )
    return {name: _rounds(each)[1:] for name, each in turns.items()}


def _rounds(turns: Turns) -> list[float]:
    cpu = [1e6 * seconds / BATCHES_PER_ROUND for _, seconds in turns.times]
    starts = range(0, len(cpu), TURNS_PER_ROUND)
    return [sum(cpu[start : start + TURNS_PER_ROUND]) for start in starts]


def summary(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """The median CPU time of each loop, and quartiles of its ratio to the bare loop.

    A ratio compares the times of one round.
    """
    bare = found[REFERENCE]
    rows = {}
    for name, times in found.items():
        ratios = [time / reference for time, reference in zip(times, bare, strict=True)]
        few = len(ratios) == 1
        low, middle, high = (
            ratios * 3 if few else statistics.quantiles(ratios, method="inclusive")
        )
        rows[name] = {
            "cpu_us": statistics.median(times),
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
        }
    return rows


class CallsOfABatch(Turns):
    """Counts the Python calls in our files during 100 batches of a single loop.

    Attributes:
        calls: The number of calls of each function, by file and name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def batch_begins(self) -> None:
        """Start to count after one round, and end the loop after a second one."""
        if self._batch == BATCHES_PER_ROUND:
            sys.setprofile(self._count)
        if self._batch == 2 * BATCHES_PER_ROUND:
            sys.setprofile(None)
            self.over = True
        self._batch += 1

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OUR_FILES):
            self.calls[f"{Path(code.co_filename).name} {code.co_name}"] += 1


def calls_of(precision: str, name: str) -> Counter[str]:
    """Count the Python calls in our files in 100 batches of a loop, with one report."""
    case = loops.Case(precision, LRSchedule.CONSTANT.value, 2 * BATCHES_PER_ROUND + 1)
    turns = CallsOfABatch()
    with controlled_by(SafeController):
        LOOPS[name](case, turns)
    return turns.calls


def markdown(result: Mapping[str, Any]) -> str:
    """The table that `docs/evidence.md` quotes."""
    precisions = result["precisions"]
    heads = [
        "loop",
        *(f"`{name}`: CPU us, times a bare loop (quartiles)" for name in precisions),
    ]
    names = next(iter(precisions.values()))
    rows = [
        [name, *(_cell(rows.get(name)) for rows in precisions.values())]
        for name in names
    ]
    return markdown_table(heads, rows)


def _cell(row: Mapping[str, float] | None) -> str:
    if row is None:
        return "not on a CPU"
    low, middle, high = row["ratio_low"], row["ratio"], row["ratio_high"]
    return f"{row['cpu_us']:.0f}, {middle:.2f} ({low:.2f} to {high:.2f})"


def line(result: Mapping[str, Any]) -> str:
    """The README's table: one line of ratios to the bare loop, in bfloat16."""
    rows = next(iter(result["precisions"].values()))
    ratios = [f"{row['ratio']:.2f}" for row in rows.values()]
    marks = "|---" * (len(rows) + 1) + "|"
    heads, values = " | ".join(rows), " | ".join(ratios)
    return f"{LINE_BEGINS}{heads} |\n{marks}\n| in bfloat16 | {values} |\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "peers", "Measure what a batch costs beside other libraries.", rounds=12
    )
    parser.add_argument(
        "--calls",
        action="store_true",
        help="count the calls of our functions in 100 batches",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.calls:
        print_calls()
        return
    result = {
        **machine(),
        **{package: version(package) for package in PACKAGES},
        "rounds": options.rounds,
        "batches_per_round": BATCHES_PER_ROUND,
        "precisions": {
            each: summary(measure(each, options.rounds)) for each in PRECISIONS
        },
    }
    write(options.folder / f"peers_{DEVICE.type}", result, markdown(result))
    print(markdown(result))


def print_calls() -> None:
    """Print how often our loops call each of our functions in 100 batches."""
    for precision in PRECISIONS:
        for name in (AMP_LOOP, TEN_LINES):
            calls = calls_of(precision, name)
            print(
                f"{name}, {precision}: {calls.total() / BATCHES_PER_ROUND:.1f} calls a "
                "batch"
            )
            for function, count in calls.most_common():
                print(f"  {count:5} {function}")


if __name__ == "__main__":
    main()

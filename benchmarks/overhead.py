"""Measures what Determined's loop and our recipe add to a bare PyTorch AMP loop.

    python -m benchmarks.overhead [--precision amp_fp16] [--rounds 40]

All loops train the same model on the same batches of the same loader, in one process and in turn,
so that other load on the machine affects all of them alike. A round is 100 batches of each, with
one report. The step is tiny on purpose: it shows what the host does around the kernels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import loops
from benchmarks.measured import DEVICE, machine, markdown_table, parser_of, write
from benchmarks.turns import BATCHES_PER_TURN, Turns, by_turns
from determined_amp.amp.settings import Precision
from determined_amp.trial.determined_private import SafeController, controlled_by
from trials.schedule import LRSchedule

BATCHES_PER_ROUND = 100  # one report of the default period
TURNS_PER_ROUND = BATCHES_PER_ROUND // BATCHES_PER_TURN

LOOPS: dict[str, Callable[[loops.Case, Turns], nn.Module]] = {
    "bare PyTorch loop": loops.bare,
    "the same, batches in memory": loops.bare_in_memory,
    "Determined, no metrics": loops.silent,
    "Determined, loss as a metric": loops.stock,
    "determined_amp": loops.ours,
}
REFERENCE = "bare PyTorch loop"


def measure(precision: str, schedule: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU time per batch, in microseconds, of every loop and round."""
    turns_each = (rounds + 1) * TURNS_PER_ROUND
    case = loops.Case(precision, schedule, turns_each * BATCHES_PER_TURN + 1)
    with controlled_by(SafeController):
        turns = by_turns({name: partial(loop, case) for name, loop in LOOPS.items()}, turns_each)
    return {name: _rounds(each.times)[1:] for name, each in turns.items()}


def _rounds(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    starts = range(0, len(times), TURNS_PER_ROUND)
    groups = [times[start : start + TURNS_PER_ROUND] for start in starts]
    scale = 1e6 / BATCHES_PER_ROUND
    return [
        (sum(w for w, _ in group) * scale, sum(c for _, c in group) * scale) for group in groups
    ]


def summary(found: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the quarter of the rounds in which all loops together took the least CPU time.

    In the other rounds the machine was busy with something else. Rounds are not selected by
    the time of a single loop, because that loop would look better than the others. The time that a
    loop adds is a difference within each round.
    """
    bare = [cpu for _, cpu in found[REFERENCE]]
    together = [sum(cpu for _, cpu in each) for each in zip(*found.values(), strict=True)]
    quiet = sorted(range(len(bare)), key=together.__getitem__)[: math.ceil(len(bare) / 4)]
    rows = {}
    for name, times in found.items():
        added = [times[turn][1] - bare[turn] for turn in quiet]
        low, middle, high = _quartiles(added)
        rows[name] = {
            "wall_us": statistics.median(times[turn][0] for turn in quiet),
            "cpu_us": statistics.median(times[turn][1] for turn in quiet),
            "added_cpu_us": middle,
            "added_cpu_us_low": low,
            "added_cpu_us_high": high,
            "cpu_ratio": statistics.median(times[turn][1] / bare[turn] for turn in quiet),
        }
    return rows


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3


def markdown(result: dict[str, Any]) -> str:
    """The table that `docs/amp.md` quotes."""
    schedules = result["schedules"]
    heads = ["loop", *(f"{name} rate: CPU us, over bare (quartiles), ratio" for name in schedules)]
    names = next(iter(schedules.values()))
    rows = [[name, *(_cell(rows[name]) for rows in schedules.values())] for name in names]
    return markdown_table(heads, rows)


def _cell(row: dict[str, float]) -> str:
    low, high = row["added_cpu_us_low"], row["added_cpu_us_high"]
    added = f"{row['added_cpu_us']:+.0f} ({low:+.0f} to {high:+.0f})"
    return f"{row['cpu_us']:.0f}, {added}, {row['cpu_ratio']:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("overhead", "Measure what the loops cost.", rounds=40)
    parser.add_argument(
        "--precision", choices=[p.value for p in Precision], default=Precision.AMP_FP16.value
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = {
        **machine(),
        "precision": options.precision,
        "rounds": options.rounds,
        "batches_per_round": BATCHES_PER_ROUND,
        "schedules": {
            schedule.value: summary(measure(options.precision, schedule.value, options.rounds))
            for schedule in LRSchedule
        },
    }
    write(options.folder / f"overhead_{DEVICE.type}", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()

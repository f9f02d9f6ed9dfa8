"""Measures how much faster `amp.compile` is in Determined's loop, on this machine.

    python -m benchmarks.compiling [--rounds 8]

One process trains each trial with `compile: false` and `compile: default` by turns, so
that other load on the machine affects both alike. The first turns do not count, because
they compile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.progress import track

from benchmarks.loops import ENDLESS, train_in_turns
from benchmarks.measured import (
    DEVICE,
    ROOT,
    machine,
    markdown_table,
    parser_of,
    spread,
    write,
)
from benchmarks.turns import Turns, by_turns
from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.trial.controller import SafeController
from determined_amp.trial.determined_private import controlled_by

BATCHES_PER_TURN = 10
SETTINGS = ("false", "default")

_WIDE = (
    "hyperparameters.hidden_features=4096",
    "hyperparameters.global_batch_size=512",
)
_BATCH_OF_16 = ("hyperparameters.global_batch_size=16",)
# Each name's YAML, and the overrides of its settings.
TRIALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wide MLP, fp32": ("mlp/fp32.yaml", _WIDE),
    "wide MLP, amp_bf16": ("mlp/bf16.yaml", _WIDE),
    "Latte, fp32": ("latte/fp32.yaml", _BATCH_OF_16),
    "Latte, amp_bf16": ("latte/bf16.yaml", _BATCH_OF_16),
    "ResNet-50, fp32": ("resnet50/fp32.yaml", _BATCH_OF_16),
    "ResNet-50, amp_bf16": ("resnet50/bf16.yaml", _BATCH_OF_16),
}


def loop(config: str, overrides: Sequence[str], setting: str, turns: Turns) -> None:
    """Train an experiment with this `amp.compile` until its turns are over."""
    changes = [*ENDLESS, *overrides, f"hyperparameters.amp.compile={setting}"]
    path = str(ROOT / "experiment_configs" / config)
    train_in_turns(parse(with_overrides(read_yaml(path), changes), path), turns)


def measure(config: str, overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure seconds per batch of both settings, and their ratios, in each round.

    The first round is left out.
    """
    loops: dict[str, Callable[[Turns], object]] = {
        setting: partial(loop, config, overrides, setting) for setting in SETTINGS
    }
    with controlled_by(SafeController):
        turns = by_turns(loops, rounds + 1, BATCHES_PER_TURN)
    seconds = {
        setting: [wall / BATCHES_PER_TURN for wall, _ in each.times[1:]]
        for setting, each in turns.items()
    }
    ratios = [off / on for off, on in zip(*seconds.values(), strict=True)]
    return {"seconds_per_batch": seconds, "speed": ratios}


def table(result: dict[str, Any]) -> str:
    """The table of a result, in Markdown."""
    rows = []
    for name, found in result["trials"].items():
        off, on = (
            1000 * statistics.median(found["seconds_per_batch"][s]) for s in SETTINGS
        )
        rows.append(
            [name, f"{off:.1f}", f"{on:.1f}", spread(found["speed"], ".2f", "x")]
        )
    return markdown_table(
        ["trial", "ms per batch, without", "with", "speed, median (range)"], rows
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("compiling", "Measure what torch.compile gains.", rounds=8)
    parser.add_argument(
        "--trials", nargs="+", choices=list(TRIALS), default=list(TRIALS)
    )
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {**machine(), "trials": {}}
    for name in track(options.trials, "measuring"):
        config, overrides = TRIALS[name]
        result["trials"][name] = measure(config, overrides, options.rounds)
        write(options.folder / f"compiling_{DEVICE.type}", result, table(result))
    print(table(result))


if __name__ == "__main__":
    main()

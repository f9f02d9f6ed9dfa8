"""Measures what `amp.compile` gains in Determined's loop, on this machine.

    python -m benchmarks.compiling [--rounds 8]

Each trial is trained with `compile: false` and with `compile: default`, in one process and by
turns, so that other load on the machine affects both alike. The first turns, in which code is
compiled, are left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import determined
import torch
from rich.progress import track

from benchmarks.loops import NoReports, take_turns
from benchmarks.measured import ROOT, add_folder, cpu_name
from benchmarks.turns import Turns, by_turns
from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.open_trial import throwaway_core_context, trial_context
from determined_amp.trial.determined_0_38 import SafeController, controlled_by
from determined_amp.trial.fitting import fit
from determined_amp.trial.unmodified import trial_of

BATCHES_PER_TURN = 10
SETTINGS = ("false", "default")

_WIDE = ("hyperparameters.hidden_features=4096", "hyperparameters.global_batch_size=512")
_BATCH_OF_16 = ("hyperparameters.global_batch_size=16",)
# By name: the experiment, and the settings changed in it.
TRIALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wide MLP, fp32": ("mlp/fp32.yaml", _WIDE),
    "wide MLP, amp_bf16": ("mlp/bf16.yaml", _WIDE),
    "Latte, fp32": ("latte/fp32.yaml", _BATCH_OF_16),
    "Latte, amp_bf16": ("latte/bf16.yaml", _BATCH_OF_16),
    "ResNet-50, fp32": ("resnet50/fp32.yaml", _BATCH_OF_16),
    "ResNet-50, amp_bf16": ("resnet50/bf16.yaml", _BATCH_OF_16),
}


def loop(config: str, overrides: Sequence[str], setting: str, turns: Turns) -> None:
    """Train an experiment with this `amp.compile`, until its turns are over."""
    lengths = ("max_length", "validation_period", "checkpoint_period")
    changes = [f"hyperparameters.training.{name}={{batches: 1000000}}" for name in lengths]
    changes += [*overrides, f"hyperparameters.amp.compile={setting}"]
    path = str(ROOT / "experiment_configs" / config)
    experiment = parse(with_overrides(read_yaml(path), changes), path)
    with throwaway_core_context(reports=NoReports) as core_context:
        context = trial_context(core_context, experiment)
        trial = trial_of(experiment, context)
        take_turns(trial, turns)
        fit(trial, context, checkpoint_policy="none")


def measure(config: str, overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    """Seconds per batch of both settings in every round but the first, and their ratios."""
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
    """The rows in Markdown."""
    lines = [
        "| trial | ms per batch, without | with | speed, median (range) |",
        "|---|---|---|---|",
    ]
    for name, found in result["trials"].items():
        off, on = (1000 * statistics.median(found["seconds_per_batch"][s]) for s in SETTINGS)
        speed = found["speed"]
        spread = f"{statistics.median(speed):.2f}x ({min(speed):.2f} to {max(speed):.2f})"
        lines.append(f"| {name} | {off:.1f} | {on:.1f} | {spread} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiling", description="Measure what torch.compile gains."
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--trials", nargs="+", choices=list(TRIALS), default=list(TRIALS))
    add_folder(parser)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "determined": determined.__version__,
        "trials": {},
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    stem = options.folder / f"compiling_{device}"
    for name in track(options.trials, "measuring"):
        config, overrides = TRIALS[name]
        result["trials"][name] = measure(config, overrides, options.rounds)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()

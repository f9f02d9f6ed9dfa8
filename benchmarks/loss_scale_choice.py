"""Compares the finder's scale with the best scale of a grid of short trainings.

    python -m benchmarks.loss_scale_choice            # some minutes on one core; no GPU needed
    python -m benchmarks.loss_scale_choice --redraw   # table and picture of the last results

At PyTorch's default of 2^16, the gradients of the first model fit float16, those of the second
overflow, and those of the third are flushed to 0. Each model trains with the same five seeds from
12 initial loss scales and from the finder's scale. Seeds differ far more than scales do. So the
comparison is paired, and a difference within the standard deviation over seeds is a tie.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
import torch
from determined import pytorch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress

from benchmarks import small_trials
from determined_amp.amp.precision import DeviceSupport
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.advice import FoundScale
from determined_amp.finder.frozen import wrapped_scaler
from determined_amp.finder.trial import find_in_trial
from determined_amp.finder.verdict import DEFAULT_LOG2, Window
from determined_amp.local.open_trial import open_trial
from determined_amp.report import loss_scale_panels as panels
from determined_amp.report.loss_scale_panels import Point
from determined_amp.report.page import STYLE, save_png
from determined_amp.runs.run import Machine
from determined_amp.trial.determined_0_38 import SafeController, controlled_by

COMMAND = ["python", "-m", "benchmarks.loss_scale_choice"]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "loss_scale_choice_cpu.json"
PICTURE = ROOT / "docs" / "pictures" / "loss_scale_choice.png"

STEPS = 250
SEEDS = (1, 2, 3, 4, 5)
GRID_LOG2 = tuple(range(0, 48, 4))  # 12 points
BATCHES_OF_FINDER = 4

# Student's t for a two-sided 95 % interval of the mean of five differences.
T_95 = 2.776


@dataclass(frozen=True)
class Model:
    """One training to repeat.

    Args:
        name: Name in the table.
        what: Description in the table.
        config: The experiment, without seed and scale.
        scale_key: The hyperparameter with the initial loss scale.
    """

    name: str
    what: str
    config: Mapping[str, Any]
    scale_key: str

    def at(self, seed: int, scale_log2: int) -> dict[str, Any]:
        """The experiment of one training."""
        changes = (
            f"reproducibility.experiment_seed={seed}",
            f"hyperparameters.{self.scale_key}={2.0**scale_log2:.1f}",
        )
        return with_overrides(self.config, changes)


@dataclass(frozen=True)
class Training:
    """The result of one training."""

    scale_log2: int
    seed: int
    validation_loss: float
    skipped_steps: int


@dataclass(frozen=True)
class Comparison:
    """The finder's scale compared with the grid's best, by validation loss.

    Args:
        choice_log2: log2 of the finder's scale.
        best_log2: log2 of the grid's best scale; chosen on the same data, which favours it.
        choice_loss: Mean loss over seeds at the finder's scale.
        default_loss: Mean loss over seeds at PyTorch's default of 2^16.
        best_loss: Mean loss over seeds at the grid's best.
        seed_sd: Standard deviation over seeds at the grid's best.
        difference: Mean of the paired differences, choice minus best.
        half_width: Half width of their 95 % interval.
        verdict: `tie` within `seed_sd`, otherwise `better` or `worse`.
        ratio: Samples of the grid with one seed, divided by those of the finder.
    """

    choice_log2: int
    best_log2: int
    choice_loss: float
    default_loss: float
    best_loss: float
    seed_sd: float
    difference: float
    half_width: float
    verdict: str
    ratio: float


def models() -> list[Model]:
    """The MLP, small enough for float16 on a CPU, and two models that 2^16 does not fit."""
    mlp = with_overrides(
        read_yaml(str(ROOT / "experiment_configs" / "mlp" / "amp.yaml")),
        ["data.image_size=8", "hyperparameters.hidden_features=128"],
    )
    summed, tiny = (
        small_trials.config(trial) for trial in (small_trials.SummedLoss, small_trials.TinyLoss)
    )
    return [
        Model("MLP", "trials.mlp, 64-128-10, cross-entropy, Adam", mlp, "amp.init_scale"),
        Model("SummedLoss", "autoencoder, loss summed, AdamW", summed, "init_scale"),
        Model("TinyLoss", "regression, loss near 1e-8, Adam", tiny, "init_scale"),
    ]


class _NoCheckpoints(SafeController):
    def _checkpoint(self, already_exiting: bool) -> None:
        pass


class _LastValidation(pytorch.PyTorchCallback):
    loss = math.nan

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.loss = float(metrics["validation_loss"])


def train(model: Model, seed: int, scale_log2: int, steps: int) -> Training:
    """Train in Determined's loop, in this process, and validate once at the end."""
    last = _LastValidation()
    with open_trial(model.at(seed, scale_log2), model.name) as found:
        callbacks = {**found.trial.build_callbacks(), "last_validation": last}
        found.trial.build_callbacks = lambda: callbacks  # type: ignore[method-assign]
        whole = pytorch.Batch(steps)
        with controlled_by(_NoCheckpoints):
            pytorch.Trainer(found.trial, found.context).fit(
                max_length=whole,
                validation_period=whole,
                reporting_period=whole,
                checkpoint_policy="none",
            )
        scaler = wrapped_scaler(found.context)
        # Before the scale first grows, only skipped steps change it: each one halves it.
        assert steps < scaler.get_growth_interval()
        skipped = scale_log2 - round(math.log2(scaler.get_scale()))
    return Training(scale_log2, seed, last.loss, skipped)


def predict(model: Model) -> FoundScale:
    """Run the finder with the first seed."""
    config = model.at(SEEDS[0], 16)
    with open_trial(config, model.name) as found:
        return find_in_trial(model.name, found.trial, found.context, BATCHES_OF_FINDER)


def compare(trainings: Sequence[Training], found: FoundScale, steps: int) -> Comparison:
    """Compare by paired differences: the same seeds train from both scales."""
    assert found.finding.choice_log2 is not None
    losses: dict[int, list[float]] = {}
    for training in sorted(trainings, key=lambda training: training.seed):
        losses.setdefault(training.scale_log2, []).append(training.validation_loss)
    best = min(GRID_LOG2, key=lambda scale: mean(losses[scale]))
    differences = [
        ours - theirs
        for ours, theirs in zip(losses[found.finding.choice_log2], losses[best], strict=True)
    ]
    noise, difference = stdev(losses[best]), mean(differences)
    samples_per_batch = found.run.samples / found.run.batches
    return Comparison(
        choice_log2=found.finding.choice_log2,
        best_log2=best,
        choice_loss=mean(losses[found.finding.choice_log2]),
        default_loss=mean(losses[DEFAULT_LOG2]),
        best_loss=mean(losses[best]),
        seed_sd=noise,
        difference=difference,
        half_width=T_95 * stdev(differences) / math.sqrt(len(differences)),
        verdict="tie" if abs(difference) <= noise else "better" if difference < 0 else "worse",
        ratio=len(GRID_LOG2) * steps * samples_per_batch / found.passed_samples,
    )


def measure(chosen: Sequence[Model]) -> Iterator[dict[str, Any]]:
    """All trainings of each model, and their comparison."""
    with Progress() as progress:
        most = len(chosen) * (len(GRID_LOG2) + 1) * len(SEEDS)
        task = progress.add_task("trainings", total=most)
        for model in chosen:
            progress.update(task, description=model.name)
            found = predict(model)
            assert found.finding.choice_log2 is not None
            trainings = []
            for scale in dict.fromkeys([*GRID_LOG2, found.finding.choice_log2]):
                for seed in SEEDS:
                    trainings.append(train(model, seed, scale, STEPS))
                    progress.advance(task)
            yield {
                "name": model.name,
                "what": model.what,
                "window_log2": [found.finding.low_log2, found.finding.top_log2],
                "comparison": dataclasses.asdict(compare(trainings, found, STEPS)),
                "trainings": [dataclasses.asdict(training) for training in trainings],
            }


def markdown(results: Mapping[str, Any]) -> str:
    """The table, with the notes to read it."""
    lines = [
        f"{len(GRID_LOG2)} initial loss scales from 2^{GRID_LOG2[0]} to 2^{GRID_LOG2[-1]}, "
        f"{results['steps']} steps each, {len(results['seeds'])} seeds; validation loss, mean over "
        "the seeds. `python -m benchmarks.loss_scale_choice`",
        "",
        "| model | window | finder | loss | grid's best | loss | paired difference, 95 % | seed sd "
        "| verdict | loss at 2^16 | samples, grid / finder |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in results["models"]:
        c = Comparison(**model["comparison"])
        low, top = model["window_log2"]
        lines.append(
            f"| {model['name']}: {model['what']} | 2^{low} to 2^{top} | 2^{c.choice_log2} "
            f"| {c.choice_loss:.4g} | 2^{c.best_log2} | {c.best_loss:.4g} "
            f"| {c.difference:+.2g} ± {c.half_width:.1g} | {c.seed_sd:.2g} "
            f"| {c.verdict} | {c.default_loss:.4g} | {c.ratio:.0f} |"
        )
    where = results["environment"]
    lines += [
        "",
        f"{where['device']['name']}, {where['processors']} cores, torch {where['torch']}, "
        f"{where['date'][:10]}, commit {where['commit']}. float16 on a CPU is torch's own. A tie "
        "is a paired difference within the standard deviation over seeds. The grid's best is "
        "chosen on the same trainings, which favours it; its samples are counted with one seed.",
    ]
    return "\n".join(lines) + "\n"


def draw_models(models: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw validation loss and skipped steps by scale, with a thin line per seed.

    Args:
        models: Each with `name`, `window_log2`, `comparison` and `trainings`.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.0 * len(models), 4.4), layout="constrained")
        axes = figure.subplots(2, len(models), squeeze=False, sharex="col", height_ratios=[2, 1])
        for column, model in enumerate(models):
            _draw_model(axes[0, column], axes[1, column], model)
        return figure


def _draw_model(loss: Axes, skips: Axes, model: Mapping[str, Any]) -> None:
    comparison, trainings = model["comparison"], model["trainings"]
    low, top = model["window_log2"]
    window = Window(low, top, comparison["choice_log2"])
    losses = [Point(t["scale_log2"], t["validation_loss"], t["seed"]) for t in trainings]
    panels.metric(loss, losses, "validation_loss", window)
    skipped = [Point(t["scale_log2"], t["skipped_steps"]) for t in trainings]
    panels.skips(skips, skipped, window)
    for axes in (loss, skips):
        panels.mark_scales(axes, window, label=axes is loss)
        axes.set_xlim(min(p.scale_log2 for p in losses) - 1, max(p.scale_log2 for p in losses) + 1)
    loss.set_title(f"{model['name']}: {comparison['verdict']}", pad=18)
    skips.set_xlabel("log₂ of the initial loss scale")


def environment() -> dict[str, Any]:
    """What the benchmark ran on, and when."""
    machine = Machine.of_this_process()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": COMMAND,
        "commit": machine.versions["commit"],
        "torch": machine.torch,
        "device": {"name": DeviceSupport.of(torch.device("cpu")).name},
        "processors": os.cpu_count(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 if the finder's scale is worse for a model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_scale_choice")
    parser.add_argument("--redraw", action="store_true", help="train nothing: the last results")
    if parser.parse_args(arguments).redraw:
        results = json.loads(RESULTS.read_text())
    else:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")  # determined and torch warn once per training
        torch.set_num_threads(1)
        results = {
            "environment": environment(),
            "steps": STEPS,
            "seeds": SEEDS,
            "models": list(measure(models())),
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    table = markdown(results)
    RESULTS.with_suffix(".md").write_text(table)
    PICTURE.parent.mkdir(exist_ok=True)
    save_png(draw_models(results["models"]), PICTURE)
    print(table)
    return int(any(model["comparison"]["verdict"] == "worse" for model in results["models"]))


if __name__ == "__main__":
    sys.exit(main())

"""Compares Latte's losses in FP32 and BF16 with each other and with simple baselines.

    python -m benchmarks.latte_learning [--batches 500] [--seeds 3] [--runs FOLDER]

It trains with several seeds, but does not repeat runs that are in FOLDER already. It
prints a table, and writes the numbers to `latte_learning.json` in `--folder`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DDPMScheduler
from rich.progress import track

from benchmarks.measured import ROOT, machine, markdown_table, parser_of, write
from determined_amp.cli.options import at_least
from determined_amp.experiment import experiment
from determined_amp.runs.folder import read_metrics
from trials.data import clips
from trials.data.loading import Sample
from trials.latte import LatteHparams

CONFIGS = ROOT / "experiment_configs" / "latte"
# The baselines are fitted on this many epochs of the training set; each has new motion.
PASSES = 6


def baselines(config: experiment.Experiment) -> dict[str, float]:
    """Compute the losses of noise predictors without a network, over all timesteps.

    Let x_t = sqrt(a) x + sqrt(1 - a) e. Along a direction in which the clips have
    variance v, the best linear prediction of e leaves a v / (a v + 1 - a) of its
    variance (Wiener). The directions are single pixels, or the principal components of
    clips, which give the best linear predictor.

    Returns:
        The losses `zero` (predicts 0), `linear_per_pixel` and `linear`.
    """
    train, _ = clips.load(config.data, seed=0)
    everything = [
        train.__getitems__([Sample(epoch, index) for index in range(len(train))])[0]
        for epoch in range(PASSES)
    ]
    pixels = torch.cat(everything).flatten(1).double()
    covariance = pixels.T.cov()
    scheduler = DDPMScheduler(**config.hparams.diffusion.scheduler_config())
    kept = scheduler.alphas_cumprod.double()[:, None]

    def loss(variances: torch.Tensor) -> float:
        signal = kept * variances.clamp(min=0.0)
        return float((signal / (signal + 1.0 - kept)).mean())

    return {
        "zero": 1.0,
        "linear_per_pixel": loss(covariance.diagonal()),
        "linear": loss(torch.linalg.eigvalsh(covariance)),
    }


def trained(config: str, seed: int, batches: int, runs: Path) -> float:
    """The final validation loss of a run, with EMA weights; train it if necessary."""
    folder = runs / f"{config}-{batches}-{seed}"
    if (loss := _final_loss(folder, batches)) is None:
        changes = {
            "reproducibility.experiment_seed": seed,
            "hyperparameters.training.max_length": f"{{batches: {batches}}}",
            "hyperparameters.training.validation_period": f"{{batches: {batches}}}",
            "hyperparameters.training.checkpoint_period": f"{{batches: {batches}}}",
        }
        subprocess.run(
            [
                sys.executable,
                "-m",
                "determined_amp",
                "train",
                str(CONFIGS / f"{config}.yaml"),
            ]
            + ["--run-folder", str(folder)]
            + [
                word
                for key, value in changes.items()
                for word in ("--config", f"{key}={value}")
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        loss = _final_loss(folder, batches)
    assert loss is not None
    return loss


def _final_loss(folder: Path, batches: int) -> float | None:
    reports = read_metrics(folder / "metrics.jsonl")
    last = [r for r in reports if r["batches"] == batches and "validation_loss" in r]
    return float(last[-1]["validation_loss"]) if last else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status, 0."""
    parser = parser_of("latte_learning", "Compare what Latte learns in two precisions.")
    parser.add_argument("--batches", type=at_least(1), default=500)
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "latte-learning")
    options = parser.parse_args(arguments)
    path = str(CONFIGS / "fp32.yaml")
    config = experiment.parse(experiment.read_yaml(path), path)
    assert isinstance(config.hparams, LatteHparams)
    without_network = baselines(config)
    jobs = [
        (name, seed)
        for name in ("fp32", "bf16")
        for seed in range(1, options.seeds + 1)
    ]
    losses: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for name, seed in track(jobs, "training"):
        losses[name].append(trained(name, seed, options.batches, options.runs))
    result = {
        "batches": options.batches,
        "baselines": without_network,
        "losses": losses,
    }
    write(options.folder / "latte_learning", {**machine(), **result})
    rows = [
        [name.replace("_", " "), f"{loss:.4f}"]
        for name, loss in without_network.items()
    ]
    for name, found in losses.items():
        seeds = f"{name}, seeds 1 to {options.seeds}"
        rows.append([seeds, ", ".join(f"{loss:.4f}" for loss in found)])
    print(markdown_table(["what", "validation loss"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures ResNet-50 in Determined's loop with determined_amp and in the bare loop.

The loops run by turns. It also counts how often a batch makes the host wait for the
device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from determined import pytorch

from benchmarks.gpu.box import Box
from benchmarks.gpu.resnet import BATCHES, TINY_BATCHES, Bare, batch_on
from benchmarks.loops import ENDLESS, context_of, train_in_turns
from benchmarks.turns import BATCHES_PER_TURN, Turns, by_turns
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment, parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.trial.controller import SafeController
from determined_amp.trial.determined_private import controlled_by
from determined_amp.trial.fitting import fit
from determined_amp.trial.make import trial_of

CONFIGS = Path(__file__).parents[2] / "experiment_configs" / "resnet50"
YAMLS = {
    Precision.FP32: "imagenet_fp32.yaml",
    Precision.TF32: "imagenet_tf32.yaml",
    Precision.AMP_FP16: "imagenet_amp.yaml",
    Precision.AMP_BF16: "imagenet_bf16.yaml",
}
ROUNDS = 6
# After this batch, the audit is over and cuDNN has chosen its algorithms.
WARM = 20
COUNTED = 40


def measure(box: Box) -> Iterator[dict[str, Any]]:
    """Yield rows of `loop`, `precision`, `batch`, `round` and `images_per_second`.

    On a GPU, the first row has the count of synchronisations.
    """
    if box.device.type == "cuda":
        yield count_synchronisations(box, box.amp[0])
    for precision in box.amp:
        compared = {
            "bare": partial(bare, box, precision),
            "determined_amp": partial(
                train_in_turns, experiment_of(box, precision, noise_of(box))
            ),
        }
        yield from in_turns(box, precision, compared)


def in_turns(
    box: Box, precision: Precision, loops: dict[str, Any], rounds: int = ROUNDS
) -> Iterator[dict[str, Any]]:
    """Run loops by turns, and yield rows; the first round is a warm-up without rows."""
    size, batches = batch_size(box), 2 if box.tiny else BATCHES_PER_TURN
    with controlled_by(SafeController):
        found = by_turns(loops, 1 + (2 if box.tiny else rounds), batches)
    for name, turns in found.items():
        for number, (wall, _) in enumerate(turns.times[1:]):
            speed = size * batches / wall
            where = {"loop": name, "precision": precision.value, "batch": size}
            yield {**where, "round": number, "images_per_second": speed}


def batch_size(box: Box) -> int:
    return (TINY_BATCHES if box.tiny else BATCHES)[0]


def noise_of(box: Box) -> dict[str, Any]:
    """The `data` section for one batch of noise on the device."""
    return {
        "dataset": "device_synthetic",
        "workers": 0,
        "samples": 100 * batch_size(box),
    }


def experiment_of(
    box: Box, precision: Precision, data: dict[str, Any], changes: Sequence[str] = ()
) -> Experiment:
    """imagenet_*.yaml as an endless experiment on `data`, with a report per turn."""
    path = str(CONFIGS / YAMLS[precision])
    raw = dict(read_yaml(path))
    side, classes = (32, 10) if box.tiny else (224, 1000)
    raw["data"] = {"image_size": side, "channels": 3, "classes": classes, **data}
    overrides = [
        *ENDLESS,
        f"hyperparameters.training.reporting_period={{batches: {BATCHES_PER_TURN}}}",
        f"hyperparameters.global_batch_size={batch_size(box)}",
        *changes,
    ]
    return parse(with_overrides(raw, overrides), path)


def bare(box: Box, precision: Precision, turns: Turns) -> None:
    """Train in the bare loop until the turns are over."""
    loop, batch = Bare(box), batch_on(box, batch_size(box))
    while True:
        turns.batch_begins()
        if turns.over:
            return
        loop.step(batch, precision)


class Counting(SafeController):
    """Determined's loop, which records synchronisations from batch `WARM` on.

    Args:
        caught: List that gets a warning for each synchronisation.
        fitted: The arguments that `Trainer.fit` passes to the controller.
    """

    def __init__(self, caught: list[warnings.WarningMessage], **fitted: Any) -> None:
        super().__init__(**fitted)
        self._caught = caught

    def _train_with_boundaries(self, *arguments: Any) -> Any:
        assert self.state is not None
        trained = self.state.batches_trained
        if trained >= WARM + COUNTED:
            raise pytorch._ShouldExit(skip_exit_checkpoint=True)
        if trained < WARM:
            return super()._train_with_boundaries(*arguments)
        with waits() as caught:
            found = super()._train_with_boundaries(*arguments)
        self._caught.extend(caught)
        return found


@contextmanager
def waits() -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings of operations that make the host wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")
    caught[:] = [
        each for each in caught if "synchronizing CUDA operation" in str(each.message)
    ]


def count_synchronisations(box: Box, precision: Precision) -> dict[str, Any]:
    """Count synchronisations in `COUNTED` batches, and in one `item()` as a control."""
    experiment = experiment_of(box, precision, noise_of(box))
    caught: list[warnings.WarningMessage] = []
    with context_of(experiment) as context, controlled_by(partial(Counting, caught)):
        fit(trial_of(experiment, context), context, checkpoint_policy="none")
    planted = torch.ones((), device=box.device)
    with waits() as control:
        planted.item()
    return {
        "synchronisations": len(caught),
        "batches": COUNTED,
        "of_a_planted_one": len(control),
        "precision": precision.value,
    }

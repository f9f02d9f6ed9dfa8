"""Small trials looked at as the finder does, and gradients made by hand."""

import math
from collections import Counter
from typing import TypeVar

from determined import pytorch

from benchmarks import small_trials
from benchmarks.small_trials import SmallTrial
from determined_amp.amp.patched import patched
from determined_amp.experiment.experiment import experiment_in
from determined_amp.finder.gradient_recorder import Source
from determined_amp.finder.histogram import Histogram
from determined_amp.finder.prediction import Prediction
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.loss_scale import in_training

T = TypeVar("T")

ALL = list(small_trials.LEARNING_RATES)


def config(trial, **hyperparameters):
    made = small_trials.config(trial)
    made["hyperparameters"].update({"global_batch_size": 16, **hyperparameters})
    return made


def looked_at(
    trial,
    work,
    *,
    batches=2,
    steps=0,
    **hyperparameters,
):
    """`work` on the first batches of a trial, after some real steps on them."""
    with open_trial(
        experiment_in(config(trial, **hyperparameters), trial.__name__)
    ) as found:
        small, context = found.trial, found.context
        assert isinstance(small, SmallTrial)

        def after_steps(rehearsals):
            for step in range(steps):
                trial.train_batch(small, rehearsals[step % batches].batch, 0, step)
            return work(small, context, rehearsals)

        return in_training(small, context, batches, after_steps)


def first_failing(works, fails, is_fine):
    """The smallest power of two that is not fine, by halving an interval."""
    while fails - works > 1:
        middle = (works + fails) // 2
        works, fails = (middle, fails) if is_fine(middle) else (works, middle)
    return fails


def skipped_steps(trial, steps, init_scale):
    """Of a real training from the first batch on."""
    with open_trial(
        experiment_in(config(trial, init_scale=init_scale), trial.__name__)
    ) as found:
        assert isinstance(found.trial, SmallTrial)
        train(found.trial, steps)
        return found.trial.skipped_steps


def train(trial, steps):
    """Determined's loop, without the checkpoint at its end."""
    train_batch = trial.train_batch

    def train_until(batch, epoch_idx, batch_idx):
        metrics = train_batch(batch, epoch_idx, batch_idx)
        if batch_idx + 1 == steps:
            raise pytorch._ShouldExit(skip_exit_checkpoint=True)
        return metrics

    with patched(trial, "train_batch", train_until):
        pytorch.Trainer(trial, trial.context).fit(max_length=pytorch.Batch(2**20))


def prediction_of(modules):
    """Of one tensor in each module."""
    tensors = {
        Source(name, "mm", 0, (1,)): histogram(at) for name, at in modules.items()
    }
    return Prediction(tensors)


def histogram(values_by_log2, zeros=0):
    """So many values of each power of two."""
    counts = Counter({2.0**power: n for power, n in values_by_log2.items()})
    if zeros:
        counts[0.0] = zeros
    return Histogram(counts)


def powers_in(counted):
    """How many values there are in [2^q, 2^(q+1)), by q."""
    powers = Counter()
    for magnitude, count in counted.counts.items():
        if magnitude:
            powers[math.floor(math.log2(magnitude))] += count
    return dict(powers)

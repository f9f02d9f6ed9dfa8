"""`trial.batches`: one exchange of gradients for a window of batches, and the seconds
that each has taken to come.
"""

from __future__ import annotations

import math

import pytest

from determined_amp.amp.errors import GuardError
from determined_amp.trial.batches import timed_loader
from tests.harness import fit
from tests.test_metrics import Clock
from tests.trials import Weights


class SpoilsABatch(Weights):
    """Writes into its third batch, and no number of its validation is finite."""

    rows = ((1.0, 1.0),) * 8
    spoiled = 2

    def train_batch(self, batch, epoch_idx, batch_idx):
        reported = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx == self.spoiled:
            batch[0].fill_(math.inf)
        return reported

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": math.nan}


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (2, "The newest batch alone is finite"),
        (3, "train_batch has changed the newest batch in place"),
        (4, "The newest batch alone is finite"),
    ],
)
def test_guard_does_not_look_at_a_batch_that_the_trial_has_changed(batches, said):
    with pytest.raises(GuardError, match=said):
        fit(SpoilsABatch, {"precision": "fp32"}, batches=batches)


class SpoilsTheFirst(SpoilsABatch):
    spoiled = 0


def test_first_batch_is_kept_as_it_came():
    with pytest.raises(GuardError, match="The newest batch alone is finite"):
        fit(SpoilsTheFirst, {"precision": "fp32"}, batches=1)


class TestTimedLoader:
    def test_timed_loader_tells_the_seconds_that_a_batch_took_to_come(
        self, monkeypatch
    ):
        clock = Clock()
        monkeypatch.setattr("determined_amp.trial.batches.time", clock)

        class Slow:
            batch_size = 7

            def __len__(self):
                return 2

            def __iter__(self):
                clock.now += 100.0  # the workers start
                return self.batches()

            def batches(self):
                for seconds in (1.0, 2.0):
                    clock.now += seconds
                    yield seconds

        waits: list[float] = []
        slow = timed_loader(lambda **options: Slow(), waits.append, repeat=True)
        batches, trained = iter(slow), []
        # the workers load while Determined restores a checkpoint
        assert clock.now == 100
        for batch in batches:
            trained.append(batch)
            clock.now += 50.0
        assert waits == trained == [1, 2]
        assert (len(slow), slow.batch_size) == (2, 7)

    def test_loader_of_a_validation_is_not_timed(self):
        waits: list[float] = []
        made = timed_loader(lambda repeat: [0, 1, 2], waits.append, repeat=False)
        assert (list(made), waits) == ([0, 1, 2], [])

"""The finder on trials as strangers write them: what they do otherwise is said, not
crashed on.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.small_trials import SmallTrial, SummedLoss
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.tensors import own_copy
from determined_amp.experiment.experiment import experiment_in, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.scale_finding import find_range
from determined_amp.finder.scoring import score_batches
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.loss_scale import in_training
from tests.loss_scale import Context, looked_at
from tests.training import ROOT, SMALL

Loss = Callable[..., torch.Tensor]


def popped(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch.pop()
    return batch.pop(), labels


def normalised(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].sub_(0.5).div_(0.25), batch[1]


class TestOwnBatch:
    """A trial may do with its batch what it likes: every pass gets its own."""

    @staticmethod
    def prepares(monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., Any]) -> None:
        plain = SmallTrial.train_batch

        def train_batch(
            trial: SummedLoss, batch: Any, epoch_idx: int, batch_idx: int
        ) -> Any:
            return plain(trial, prepare(batch), epoch_idx, batch_idx)

        monkeypatch.setattr(SummedLoss, "train_batch", train_batch)

    @pytest.mark.parametrize("prepare", [popped, normalised])
    def test_trial_that_changes_its_batch_in_place_has_the_same_finding_and_score(
        self, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def work(
            small: SmallTrial, context: Context, batches: Sequence[Rehearsal]
        ) -> Any:
            slots = context.distributed
            return find_range(batches, slots), score_batches(batches, slots, 2)

        self.prepares(
            monkeypatch, lambda batch: prepare([part.clone() for part in batch])
        )
        expected = looked_at(SummedLoss, work)
        self.prepares(monkeypatch, prepare)
        assert looked_at(SummedLoss, work) == expected

    def test_copy_holds_the_same_values_in_memory_of_its_own(self) -> None:
        @dataclasses.dataclass
        class Batch:
            rows: torch.Tensor

        class Fields(UserDict[str, Any]):
            """As the tokenizers of Hugging Face return."""

        whole = torch.arange(6.0)
        batch: Any = (
            {"ids": whole[:2], "more": [whole[2:4]]},
            Fields(mask=whole[4:]),
            Batch(whole[:1]),
        )
        copied = own_copy(batch)
        assert copied[0]["ids"].tolist() == [0.0, 1.0]
        for tensor in (copied[0]["ids"], copied[1]["mask"]):
            # not all that it is a view of
            assert tensor.untyped_storage().nbytes() == 8
        for tensor in (
            copied[0].pop("ids"),
            copied[0]["more"].pop(),
            copied[1].pop("mask"),
        ):
            tensor.zero_()
        copied[2].rows.add_(1.0)
        assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert (len(batch[0]["more"]), list(batch[1]), batch[2].rows.item()) == (
            1,
            ["mask"],
            0.0,
        )

    def test_copy_of_containers_shares_tensors_and_what_cannot_be_copied(self) -> None:
        batch: Any = {"ids": torch.ones(2), "more": [[torch.zeros(1)]]}
        for kind in (dict, UserDict):
            mine = kind(batch)
            shared = own_copy(mine, shared=True)
            assert type(shared) is kind
            assert shared.pop("ids") is mine["ids"]
        assert own_copy(batch, shared=True)["more"][0].pop() is batch["more"][0][0]
        generator = (number for number in (1, 2))
        assert own_copy(generator) is generator


def test_audit_and_guard_are_off_before_the_loop_starts() -> None:
    raw = read_yaml(str(ROOT / "experiment_configs/mlp/amp.yaml"))
    with open_trial(experiment_in(with_overrides(raw, SMALL), "test")) as found:
        trial: Any = found.trial
        guard = trial.amp.guard
        assert guard.enabled
        assert not in_training(trial, found.context, 1, lambda batches: guard.enabled)

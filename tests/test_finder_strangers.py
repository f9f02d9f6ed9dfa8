"""The finder on trials as strangers write them: what they do otherwise is said, not crashed on."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.small_trials import SmallTrial, SummedLoss, TinyLoss
from determined_amp.amp.replay import own_copy
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.advice import FinderRun, FoundScale, sentences
from determined_amp.finder.frozen import FrozenBatch
from determined_amp.finder.score import score_batches
from determined_amp.finder.verdict import Finding, Verdict, find
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.frozen import in_training
from tests.loss_scale import Context, Trial, looked_at
from tests.training import ROOT, SMALL

Loss = Callable[..., torch.Tensor]

RUN = FinderRun("", "", "", "", 1, 1, 65536.0, 2000, is_ours=False)


def finding(trial: Trial) -> Finding:
    return looked_at(trial, lambda _, context, batches: find(context, batches))


@pytest.fixture
def counts_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial takes its outputs to numpy in the middle of a batch, which has no bfloat16."""

    def loss(trial: SmallTrial, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = trial.model(images)
        assert logits.detach().cpu().numpy().ndim == 2
        return functional.binary_cross_entropy_with_logits(
            logits.float(), images.flatten(1), reduction="sum"
        )

    monkeypatch.setattr(SummedLoss, "loss", loss)


class TestWithoutBfloat16:
    """The paths to float16 are in `test_passes.py`; these are whole trials."""

    def test_finding_is_the_one_that_bfloat16_gives_with_the_reason(
        self, request: pytest.FixtureRequest
    ) -> None:
        plain = finding(SummedLoss)
        request.getfixturevalue("counts_in_numpy")
        found = finding(SummedLoss)
        assert plain.recorded_log2 is None
        assert (found.top_log2, found.choice_log2, found.verdict) == (
            plain.top_log2,
            plain.choice_log2,
            plain.verdict,
        )
        assert abs(found.low_log2 - plain.low_log2) <= 1
        told = FoundScale(found, RUN)
        assert next(sentences(told)) == (
            f"recorded in float16 at 2^{found.recorded_log2}: this trial cannot run in bfloat16: "
            "TypeError: Got unsupported ScalarType BFloat16"
        )
        assert told.as_json()["recorded_log2"] == found.recorded_log2

    @pytest.mark.usefixtures("counts_in_numpy")
    def test_score_is_measured_too(self) -> None:
        def work(small: SmallTrial, context: Context, batches: Sequence[FrozenBatch]) -> float:
            return score_batches(context, batches, 6).gradient_error

        assert looked_at(SummedLoss, work) < 0.01

    def test_recorded_where_little_is_flushed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At the default all of these gradients would be 0."""
        plain = finding(TinyLoss)
        loss: Loss = TinyLoss.loss

        def in_numpy(trial: TinyLoss, *batch: torch.Tensor) -> torch.Tensor:
            trial.model(batch[0]).detach().numpy()
            return loss(trial, *batch)

        monkeypatch.setattr(TinyLoss, "loss", in_numpy)
        found = finding(TinyLoss)
        assert found.recorded_log2 == plain.top_log2 - 1
        assert (found.top_log2, found.low_log2) == (plain.top_log2, plain.low_log2)

    def test_error_of_float16_too_is_the_trials_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(trial: SummedLoss, *batch: torch.Tensor) -> torch.Tensor:
            raise KeyError("its own")

        monkeypatch.setattr(SummedLoss, "loss", broken)
        with pytest.raises(KeyError, match="its own"):
            finding(SummedLoss)


def popped(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch.pop()
    return batch.pop(), labels


def normalised(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].sub_(0.5).div_(0.25), batch[1]


def mixed(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    flipped = batch[0].flip(0).mul_(0.25)
    return batch[0].mul_(0.75).add_(flipped), batch[1]


class TestOwnBatch:
    """A trial may do with its batch what it likes: every pass gets its own."""

    @staticmethod
    def prepares(monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., Any]) -> None:
        plain = SmallTrial.train_batch

        def train_batch(trial: SummedLoss, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return plain(trial, prepare(batch), epoch_idx, batch_idx)

        monkeypatch.setattr(SummedLoss, "train_batch", train_batch)

    @pytest.mark.parametrize("prepare", [popped, normalised, mixed])
    def test_finding_and_score_are_those_of_a_trial_that_leaves_its_batch_alone(
        self, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def work(small: SmallTrial, context: Context, batches: Sequence[FrozenBatch]) -> Any:
            return find(context, batches), score_batches(context, batches, 2)

        self.prepares(monkeypatch, lambda batch: prepare([part.clone() for part in batch]))
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
            assert tensor.untyped_storage().nbytes() == 8  # not all that it is a view of
        for tensor in (copied[0].pop("ids"), copied[0]["more"].pop(), copied[1].pop("mask")):
            tensor.zero_()
        copied[2].rows.add_(1.0)
        assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert (len(batch[0]["more"]), list(batch[1]), batch[2].rows.item()) == (1, ["mask"], 0.0)

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


def test_frozen_half_of_a_model_is_no_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model = SummedLoss.make_model

    def with_frozen_part(trial: SummedLoss) -> torch.nn.Module:
        model = make_model(trial)
        model.add_module("unused", torch.nn.Identity())
        unused = torch.nn.Linear(2, 2).half().requires_grad_(False)
        model.get_submodule("unused").add_module("encoder", unused)
        return model

    monkeypatch.setattr(SummedLoss, "make_model", with_frozen_part)
    assert finding(SummedLoss).verdict is Verdict.SCALE


def test_audit_and_guard_are_off_before_the_loop_starts() -> None:
    raw = read_yaml(str(ROOT / "experiment_configs/mlp/amp.yaml"))
    with open_trial(with_overrides(raw, SMALL), "test") as found:
        trial: Any = found.trial
        guard = trial.amp.guard
        assert guard.enabled
        assert not in_training(trial, found.context, 1, lambda batches: guard.enabled)

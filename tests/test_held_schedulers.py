"""Schedulers that hold schedulers are resumed; other objects in a state are a
warning.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import determined as det
import pytest
import torch
from determined import pytorch
from torch.optim import lr_scheduler

from tests.harness import Fitted, fit, fit_as_it_is
from tests.trials import Converted, Plain


class Warmup(lr_scheduler.LRScheduler):
    """Warms up for two steps; then another scheduler moves the rate."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.after, self.all = after, [after]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * min(1, (self.last_epoch + 1) / 3) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < 2:
            super().step()
        else:
            self.after.step()


class Note:
    """No plain value."""


class Notes(pytorch.PyTorchCallback):
    def state_dict(self) -> dict[str, Any]:
        return {"note": Note()}


class Warms(Plain):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.rates: list[float] = []
        context.lr_schedulers.clear()
        self.optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[0][
            "initial_lr"
        ] = 0.01
        after = lr_scheduler.CosineAnnealingLR(self.optimizer, 8)
        scheduler: Any = Warmup(self.optimizer, after)
        self.scheduler = scheduler
        modes = pytorch.LRScheduler.StepMode
        context.wrap_lr_scheduler(self.scheduler, modes.STEP_EVERY_OPTIMIZER_STEP)

    def loss(self, batch: Any) -> torch.Tensor:
        if self.model.training:
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        return super().loss(batch)


class WarmsConverted(Converted, Warms):
    pass


class Remembers(Warms):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.scheduler.note = Note()


DETERMINEDS = pytorch._PyTorchTrialController


@pytest.mark.parametrize(
    ("trial", "loop"),
    [(Warms, None), (WarmsConverted, None), (WarmsConverted, DETERMINEDS)],
)
def test_scheduler_that_holds_another_is_resumed(
    trial: Any,
    loop: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Off a cluster Determined's own loop does not resume, so it is told of one."""
    monkeypatch.setattr(
        det, "get_cluster_info", lambda: loop and SimpleNamespace(task_type="")
    )

    def run(batches: int, resume: Fitted | None = None) -> Fitted:
        amp = {"precision": "amp_bf16"}
        return fit_as_it_is(trial, amp, batches=batches, resume=resume, loop=loop)

    undisturbed = run(8)
    resumed = run(8, run(5))
    assert resumed.trial.rates[:3] == undisturbed.trial.rates[5:]
    assert len(set(undisturbed.trial.rates)) > 5
    assert resumed.trial.scheduler.all == [resumed.trial.scheduler.after]
    assert "can be resumed" not in caplog.text


class RemembersConverted(WarmsConverted, Remembers):
    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {**super().build_callbacks(), "mine": Notes()}


@pytest.mark.parametrize(
    ("trial", "amp", "loop", "said"),
    [
        (Remembers, None, None, ["Warmup"]),
        (
            RemembersConverted,
            {"precision": "amp_bf16"},
            None,
            ["Warmup", "callback mine"],
        ),
        (
            RemembersConverted,
            {"precision": "amp_bf16"},
            DETERMINEDS,
            ["Warmup", "callback mine"],
        ),
    ],
)
def test_state_that_cannot_be_restored_is_said_once_in_every_loop(
    trial: Any, amp: Any, loop: Any, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fit(trial, amp, batches=2, checkpoint_period=1, loop=loop)
    lines = [
        line
        for line in caplog.messages
        if "no checkpoint of this run can be resumed" in line
    ]
    assert len(lines) == len(said)
    for line, owner in zip(lines, said, strict=True):
        assert f"the state of {owner} is more than plain values" in line

"""A resumed training ends as one that nothing disturbed, to the bit, whoever moves its
rates and whatever it is written as; and what cannot be restored is said.

`test_any_loop.py` asks this of a loop, `test_contract.py` of each trial of `trials/`.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import determined as det
import pytest
import torch
from determined import pytorch
from torch.optim import lr_scheduler

from determined_amp.trial.resumed import _settle
from tests import habits
from tests.harness import fit, fit_as_it_is, needs_fused, same_bits
from tests.trials import Converted, Modes, Plain, run_of

pytestmark = [
    # A scheduler that Determined moves is moved by a skipped first step, too.
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
    pytest.mark.filterwarnings(
        "ignore:Validating sparse tensor invariants:UserWarning"
    ),
]
BATCHES = 8


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def one_cycle(optimizer):
    """Moves the momentum, or betas, too."""
    return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=BATCHES)


def impatient(optimizer):
    """The metric never improves: the second validation halves the rate, and the fourth
    does.
    """
    plateau = lr_scheduler.ReduceLROnPlateau
    return plateau(optimizer, factor=0.5, patience=0, cooldown=1)


class Warmup(lr_scheduler.LRScheduler):
    """Warms up for two steps; then another scheduler moves the rate."""

    def __init__(self, optimizer, after):
        self.after, self.all = after, [after]
        super().__init__(optimizer)

    def get_lr(self):
        return [base * min(1, (self.last_epoch + 1) / 3) for base in self.base_lrs]

    def step(self, epoch=None):
        if self.last_epoch < 2:
            super().step()
        else:
            self.after.step()


class NotesRates(Plain):
    """Has another scheduler, and notes the rate of each batch."""

    def __init__(self, context):
        super().__init__(context)
        self.seen = []
        context.lr_schedulers.clear()

    def loss(self, inputs, classes):
        if self.model.training:
            self.seen.append(float(self.optimizer.param_groups[0]["lr"]))
        return super().loss(inputs, classes)


class Warms(NotesRates):
    """Has a scheduler that holds another one."""

    def __init__(self, context):
        super().__init__(context)
        (group,) = self.optimizer.param_groups
        group["lr"] = group["initial_lr"] = 0.01
        after = lr_scheduler.CosineAnnealingLR(self.optimizer, BATCHES)
        scheduler: Any = Warmup(self.optimizer, after)
        self.scheduler = scheduler
        every_step = Modes.STEP_EVERY_OPTIMIZER_STEP
        context.wrap_lr_scheduler(self.scheduler, every_step)


class WarmsConverted(Converted, Warms):
    pass


def run_as_it_is(trial, precision, loop=None):
    """Trains a trial, an unmodified one with AMP from outside."""
    amp = {"precision": precision, "init_scale": 1024.0}

    def run(batches, resume=None):
        return fit_as_it_is(trial, amp, batches=batches, resume=resume, loop=loop)

    return run


class Validates(pytorch.PyTorchCallback):
    """Moves a scheduler with each validation, and counts them."""

    def __init__(self, trial):
        self.trial, self.count = trial, 0

    def on_validation_end(self, metrics):
        self.count += 1
        self.trial.scheduler.step(metrics["validation_loss"])

    def state_dict(self):
        return {"count": torch.tensor(self.count)}

    def load_state_dict(self, state_dict):
        self.count = int(state_dict["count"])


class MovesByValidations(NotesRates):
    """Steps a scheduler of Determined itself, and has a rate that is a tensor."""

    def __init__(self, context):
        super().__init__(context)
        (group,) = self.optimizer.param_groups
        group["lr"] = torch.tensor(0.01)
        self.scheduler: Any = impatient(self.optimizer)
        context.wrap_lr_scheduler(self.scheduler, Modes.MANUAL_STEP)

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": torch.rand(1).ceil()}  # draws a number, returns 1

    def build_callbacks(self):
        return {"mine": Validates(self)}


DETERMINEDS = pytorch._PyTorchTrialController
BY_VALIDATIONS = {
    "rates by validations": run_of(impatient, validation_period=2),
    "rates by a callback": partial(fit, MovesByValidations, validation_period=2),
    "rates by a callback, unmodified": partial(
        fit_as_it_is, MovesByValidations, {"precision": "amp_fp16"}, validation_period=2
    ),
}
FORMS = {
    "rates of the library": run_of(one_cycle, None, adamw),
    **{f"rates by {mode.name}": run_of(one_cycle, mode) for mode in Modes},
    "scheduler in a scheduler, unmodified": run_as_it_is(Warms, "amp_bf16"),
    "scheduler in a scheduler": run_as_it_is(WarmsConverted, "amp_bf16"),
    "in Determined's own loop": run_as_it_is(WarmsConverted, "amp_bf16", DETERMINEDS),
    **{
        f"{habit.__name__}, unmodified": run_as_it_is(habit, "amp_fp16")
        for habit in habits.USE_GRADIENTS
    },
    "GradientsHook, unmodified": run_as_it_is(habits.GradientsHook, "amp_bf16"),
    "Penalty, unmodified": run_as_it_is(habits.Penalty, "amp_bf16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_resumed_training_ends_as_one_that_nothing_disturbed(name, caplog, monkeypatch):
    """Weights, optimizers, schedulers, scale, counts and random state."""
    # Off a cluster Determined's own loop does not resume, so it is told of one.
    cluster = SimpleNamespace(task_type="") if "Determined" in name else None
    monkeypatch.setattr(det, "get_cluster_info", lambda: cluster)
    run = FORMS[name]
    undisturbed = run(BATCHES)
    rates = getattr(undisturbed.trial, "seen", [])
    assert len({*rates}) != 1  # they move
    first = run(4)
    resumed = run(BATCHES, first)
    assert getattr(resumed.trial, "seen", []) == rates[4:]
    ends = [restored(made, name) for made in (undisturbed, resumed)]
    assert same_bits(*ends)
    assert ends[0] is None or not same_bits(ends[0], restored(first, name))
    assert "can be resumed" not in caplog.text


@pytest.mark.parametrize("name", BY_VALIDATIONS)
@pytest.mark.parametrize("stop", [4, 5])
def test_validation_that_a_longer_run_does_not_make_moves_nothing(name, stop):
    """Every second batch is followed by one, and the last one always."""
    run = BY_VALIDATIONS[name]
    undisturbed = run(batches=BATCHES)
    resumed = run(batches=BATCHES, resume=run(batches=stop))
    assert resumed.trial.seen == undisturbed.trial.seen[stop:]
    assert same_bits(undisturbed.checkpoint, resumed.checkpoint)


def restored(made, name):
    """What a resumed run ends with as an undisturbed one does."""
    if "Determined" in name:
        return None  # its dropout draws other numbers; rates are the same
    if "ByHand" in name:  # such a step is seen in the next batch
        return made.checkpoint["models_state_dict"]
    return made.checkpoint


class Note:
    """No plain value."""


class Notes(pytorch.PyTorchCallback):
    def state_dict(self):
        return {"note": Note()}


class Remembers(Warms):
    def __init__(self, context):
        super().__init__(context)
        self.scheduler.note = Note()


class RemembersConverted(WarmsConverted, Remembers):
    def build_callbacks(self):
        return {**super().build_callbacks(), "mine": Notes()}


@pytest.mark.parametrize(
    ("trial", "amp", "loop", "said"),
    [
        (Remembers, None, None, ["Warmup"]),
        (RemembersConverted, "amp_bf16", None, ["Warmup", "callback mine"]),
        (RemembersConverted, "amp_bf16", DETERMINEDS, ["Warmup", "callback mine"]),
    ],
)
def test_state_that_cannot_be_restored_is_said_once_in_every_loop(
    trial, amp, loop, said, caplog
):
    section = amp and {"precision": amp}
    fit(trial, section, batches=2, checkpoint_period=1, loop=loop)
    words = "no checkpoint of this run can be resumed"
    lines = [line for line in caplog.messages if words in line]
    for line, owner in zip(lines, said, strict=True):
        assert f"the state of {owner} is more than plain values" in line


class ReadsAFileOfItsOwn(pytorch.PyTorchCallback):
    """Restores an average that it keeps beside the checkpoint."""

    def __init__(self, file, **how):
        self.file, self.how, self.read = file, how, None

    def state_dict(self):
        torch.save(torch.ones(1), self.file)
        return {"saved": True}

    def load_state_dict(self, state_dict):
        self.read = torch.load(self.file, **self.how)


@pytest.mark.parametrize("how", [{}, {"weights_only": False}, {"weights_only": True}])
def test_callback_that_restores_a_file_of_its_own_reads_it_as_it_asks(how, tmp_path):
    callback = ReadsAFileOfItsOwn(tmp_path / "average.pth", **how)

    class Averages(Converted):
        def build_callbacks(self):
            return {**super().build_callbacks(), "mine": callback}

    section = {"precision": "amp_bf16"}
    first = fit(Averages, section, batches=2)
    fit(Averages, section, batches=4, resume=first)
    assert callback.read is not None


def test_setting_that_a_saved_optimizer_lacks_is_that_of_this_trial():
    """A newer torch has more settings than the one that saved."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5)
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(lr=0.25)
    del saved["param_groups"][0]["nesterov"]
    assert _settle(saved, optimizer, ("weight_decay",), ()) == []
    (group,) = saved["param_groups"]
    assert (group["lr"], group["nesterov"]) == (0.25, False)


def halving_later(optimizer):
    return lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


def sgd_of(rate, fused):
    return partial(torch.optim.SGD, lr=rate, fused=fused)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_fused)])
def test_resume_takes_a_scheduled_rate_from_the_new_yaml_at_once(fused, caplog):
    first, second = (
        run_of(halving_later, None, sgd_of(rate, fused)) for rate in (0.5, 0.25)
    )
    resumed = second(8, first(4))
    assert [rate for rate, *_ in resumed.trial.seen] == [0.25, 0.25, 0.125, 0.125]
    assert "of the checkpoint (YAML" not in caplog.text


@needs_fused
@pytest.mark.parametrize("now", [True, False])
def test_resume_steps_by_the_kernels_of_its_own_optimizer(*, now):
    """Otherwise torch's scaler leaves an overflow to a fused kernel that is not
    called.
    """
    first, second = (run_of(None, None, sgd_of(0.5, fused)) for fused in (not now, now))
    resumed = second(4, first(1))  # the second batch overflows
    assert resumed.trial.optimizer.param_groups[0]["fused"] is now
    assert all(bool(p.isfinite().all()) for p in resumed.trial.model.parameters())
    assert resumed.report["skipped_steps"] == 1

"""`check`: each fault of hand-written AMP is planted in a trial, and found with its
line.
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
from functools import cache, partial
from graphlib import TopologicalSorter
from typing import Any

import pytest
import torch
import yaml
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_ as clip_norm
from torch.optim import lr_scheduler
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.data import TensorDataset

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.check import doctor, invariants, rules, watching
from determined_amp.check.finding import ROWS
from determined_amp.check.stand_in import ONLY_ON_A_GPU
from determined_amp.experiment.experiment import experiment_in
from tests import habits, test_amp_examples
from tests.harness import same_bits
from tests.loops import by_hand
from tests.wrong_scripts import WRONG

pytestmark = pytest.mark.usefixtures("_libraries_are_collected_once")

BATCH = pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
step_lr: Any = lr_scheduler.StepLR
MANUAL = pytorch.LRScheduler.StepMode.MANUAL_STEP


def experiment(**changes):
    searcher = {"name": "single", "metric": "validation_loss"}
    return {
        "name": "planted",
        "hyperparameters": {"global_batch_size": 4},
        "searcher": {**searcher, "max_length": {"batches": 24}},
        **changes,
    }


def doctors_answer(trial, **changes):
    """What the doctor says of a trial, with all of its runs in this process."""
    name = f"{trial.__module__}:{trial.__qualname__}"
    made = experiment_in(experiment(**changes), "planted.yaml", trial=name)
    return doctor.examine(made, lambda text: None, doctor.run_here)


@cache
def examined(trial, aggregation=1):
    return doctors_answer(trial, optimizations={"aggregation_frequency": aggregation})


class Right(pytorch.PyTorchTrial):
    """AMP by hand as it should be; every other trial here differs from it in one
    thing.
    """

    def __init__(self, context):
        self.context = context
        self.wrap_scaler()
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.model = context.wrap_model(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        self.optimizer = context.wrap_optimizer(optimizer)
        self.schedule()

    def wrap_scaler(self):
        self.scaler = self.context.wrap_scaler(torch.cuda.amp.GradScaler())

    def schedule(self):
        """None."""

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.float16)

    def forward(self, batch):
        inputs, labels = batch
        return functional.cross_entropy(self.model(inputs), labels)

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.batch_idx = batch_idx
        with self.autocast():
            loss = self.forward(batch)
        self.backward(loss)
        self.step()
        self.update()
        return {"loss": loss.detach()}

    def backward(self, loss):
        self.context.backward(self.scaler.scale(loss))

    def clip(self, parameters):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def step(self):
        self.context.step_optimizer(
            self.optimizer, clip_grads=self.clip, scaler=self.scaler
        )

    def update(self):
        if (self.batch_idx + 1) % self.context._aggregation_frequency == 0:
            self.scaler.update()

    def evaluate_batch(self, batch, batch_idx):
        with self.autocast():
            return {"validation_loss": self.forward(batch)}

    def build_training_data_loader(self):
        points = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
        return pytorch.DataLoader(
            TensorDataset(points, points[:, :3].argmax(1)), batch_size=4
        )

    build_validation_data_loader = build_training_data_loader


class UnscaledLoss(Right):
    def backward(self, loss):
        self.context.backward(loss)  # HERE
        self.scaler.scale(loss)


class StepsWithoutScaler(Right):
    def step(self):
        self.context.step_optimizer(self.optimizer)  # HERE

    def update(self):
        """There is nothing to update by."""


class UpdatesEachMicroBatch(Right):
    def update(self):
        self.scaler.update()  # HERE


class ClipsScaled(Right):
    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 1.0)  # HERE


class Scheduled(Right):
    """Moves on applied steps only: the control of those below."""

    measured: Any = ()

    def schedule(self):
        self.scheduler = step_lr(self.optimizer, 4)
        self.context.wrap_lr_scheduler(self.scheduler, MANUAL)

    def update(self):
        before = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step(*self.measured)


class MovesOnSkipped(Scheduled):
    def update(self):
        self.scaler.update()
        self.scheduler.step()  # HERE


class PlateauNotWrapped(Scheduled):
    """A scheduler that does not make itself as most of torch's do."""

    measured = (1.0,)

    def schedule(self):
        plateau: Any = lr_scheduler.ReduceLROnPlateau
        self.scheduler = plateau(self.optimizer)  # HERE


class DeterminedMovesSequenceOnSkipped(Right):
    def schedule(self):
        parts = [step_lr(self.optimizer, 2), step_lr(self.optimizer, 3)]
        sequence: Any = lr_scheduler.SequentialLR
        self.scheduler = sequence(self.optimizer, parts, [4])  # HERE
        self.context.wrap_lr_scheduler(self.scheduler, BATCH)


class ScalerNotWrapped(Right):
    def wrap_scaler(self):
        self.scaler = torch.cuda.amp.GradScaler()  # HERE


class MakesScalerInFirstBatch(Right):
    scaler: Any = None

    def wrap_scaler(self):
        """Later."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        if self.scaler is None:
            self.scaler = torch.cuda.amp.GradScaler()  # HERE
        return super().train_batch(batch, epoch_idx, batch_idx)


class CannotLoad(Right):
    def build_callbacks(self):
        class Counts(pytorch.PyTorchCallback):
            def state_dict(self):
                return {"count": 1}

            def load_state_dict(self, state_dict):
                raise KeyError("count_1")  # HERE

        return {"counts": Counts()}


class ZeroesInTheWindow(Right):
    def backward(self, loss):
        self.optimizer.zero_grad()  # HERE
        super().backward(loss)


class EvaluatesInFloat16(Right):
    """Its validation loss is beyond float16. In training, too, it computes without
    gradients.
    """

    def forward(self, batch):
        with torch.no_grad(), self.autocast():
            batch[0].square() @ batch[0].T
        return super().forward(batch)

    def evaluate_batch(self, batch, batch_idx):
        with self.autocast():  # HERE
            return {"validation_loss": (self.model(batch[0]) * 1e5).square().mean()}


PLANTED = {
    UnscaledLoss: "unscaled_loss",
    StepsWithoutScaler: "step_without_scaler",
    UpdatesEachMicroBatch: "update_in_window",
    ClipsScaled: "clip_scaled",
    MovesOnSkipped: "schedule_on_skipped",
    DeterminedMovesSequenceOnSkipped: "schedule_on_skipped",
    PlateauNotWrapped: "schedule_not_saved",
    ScalerNotWrapped: "scaler_not_saved",
    MakesScalerInFirstBatch: "scaler_not_saved",
    ZeroesInTheWindow: "zero_grad_in_window",
    EvaluatesInFloat16: "eval_16_bits",
    CannotLoad: "resume_fails",  # a suspicion
}
WINDOWS = {UpdatesEachMicroBatch: 2, ZeroesInTheWindow: 4}


def planted_place(trial):
    """The file and the line that ends in HERE."""
    lines, first = inspect.getsourcelines(trial)
    (here,) = (at for at, line in enumerate(lines) if line.endswith("# HERE\n"))
    return "test_check.py", first + here


@pytest.mark.parametrize("trial", PLANTED)
def test_planted_fault_is_found_with_its_line(trial):
    """Lines that do the same rightly are not named."""
    findings = examined(trial, WINDOWS.get(trial, 1))
    assert bool(findings.faults) is (trial is not CannotLoad)
    (finding,) = findings.faults or findings
    assert finding.key == PLANTED[trial]
    places = {(where.file.rpartition("/")[2], where.line) for where in finding.where}
    assert places == {planted_place(trial)}
    assert any(digit.isdecimal() for digit in finding.effect)
    assert finding.write


def test_right_trial_that_steps_every_second_batch_has_no_finding():
    findings = examined(Right, 2)
    assert [finding.text() for finding in findings] == []


class Automatic(Right):
    """Determined's own AMP, which does all of it."""

    def wrap_scaler(self):
        self.context.experimental.use_amp()

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.forward(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
        return {"loss": loss}

    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.forward(batch)}


class SavedByCallback(ScalerNotWrapped):
    def build_callbacks(self):
        scaler = self.scaler

        class Keep(pytorch.PyTorchCallback):
            def state_dict(self):
                return dict(scaler.state_dict())

            def load_state_dict(self, state):
                scaler.load_state_dict(state)

        return {"scaler": Keep()}


class ExitsOnOverflow(Right):
    def clip(self, parameters):
        self.scaler.unscale_(self.optimizer)
        if not nn.utils.clip_grad_norm_(parameters, max_norm=1.0).isfinite():
            sys.exit("the gradients are not finite")


CONTROLS = [Right, Scheduled, Automatic, SavedByCallback, ExitsOnOverflow]
WITHOUT_AMP = [
    habits.Habit,
    habits.ClipsOutside,
    habits.OwnAccumulation,
    habits.Sam,
    habits.Wgan,
    habits.LineSearch,
    habits.Penalty,
    habits.HalfWeights,
    habits.Adversarial,
    habits.SharedParameters,
    habits.AlternatingHeads,
]


@pytest.mark.parametrize("trial", [*CONTROLS, *WITHOUT_AMP])
def test_right_trial_has_no_finding(trial):
    findings = examined(trial)
    assert [finding.text() for finding in findings] == []


class ClipsTrueGradients(habits.Habit):
    """Gets true gradients to clip in float16, too, although its loss is scaled."""

    def step(self):
        clip: Any = partial(clip_norm, max_norm=1e-3)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)


@pytest.mark.parametrize("trial", [habits.Habit, ClipsTrueGradients])
def test_unmodified_trial_in_float16_has_no_fault(trial):
    values = {"global_batch_size": 8, "amp": {"precision": "amp_fp16"}}
    said = doctors_answer(trial, hyperparameters=values)
    assert said.faults == []
    assert "a GradScaler" in str(said)


def test_watching_leaves_torch_as_it_was_and_a_training_undisturbed():
    owners = [
        torch.amp.GradScaler,
        torch.Tensor,
        torch.optim.Optimizer,
        nn.Module,
    ]
    before = [dict(vars(owner)) for owner in owners]
    plain = by_hand(test_amp_examples.CLIPPED)
    with watching(overflows=()):
        watched = by_hand(test_amp_examples.CLIPPED)
    assert [dict(vars(owner)) for owner in owners] == before
    assert not function_modes()
    assert same_bits(plain, watched)


def test_each_rule_stands_in_the_row_of_one_finding():
    rows = [{**row.get("seen", {}), **row.get("resumed", {})} for row in ROWS.values()]
    here = [
        name
        for module in (invariants, rules)
        for name, thing in inspect.getmembers(module, inspect.isfunction)
        if inspect.signature(thing).return_annotation == "Found"
    ]
    public = [name for name in here if not name.startswith("_")]
    assert sorted(name for row in rows for name in row) == sorted(public)


def test_each_finding_but_that_of_an_error_is_told_of_a_script_or_a_trial():
    scripts = {key for each in WRONG.values() for key in each.findings.split("|")}
    assert scripts <= ROWS.keys()
    assert ROWS.keys() - scripts - {*PLANTED.values()} == {"raised"}


def test_finding_explains_findings_that_do_not_explain_it():
    of = {key: row.get("explains", []) for key, row in ROWS.items()}
    TopologicalSorter(of).prepare()
    assert set().union(*of.values()) <= ROWS.keys()


def test_error_of_a_run_in_its_own_process_is_told_by_its_last_line(monkeypatch):
    def fail(probe):
        raise KeyError("weights")

    monkeypatch.setattr(doctor, "run_here", fail)
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    probe: Any = None
    with pytest.raises(
        UserError, match="a run of the trial failed: KeyError: 'weights'"
    ):
        doctor._run(probe)


class TestCommand:
    @pytest.fixture
    def config(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "planted.yaml").write_text(yaml.safe_dump(experiment()))
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "of the user").touch()
        return tmp_path / "planted.yaml"

    @pytest.fixture
    def _in_this_process(self, monkeypatch):
        def here(job, probe, *others):
            return doctor.run_here(probe) if job is doctor._run else None

        monkeypatch.setattr(doctor, "_afresh", here)

    @pytest.mark.usefixtures("_workers_are_forks")
    def test_fault_is_counted_in_the_first_line_and_ends_with_status_1(
        self, config, capsys
    ):
        given = ["--trial", "tests.test_check:MovesOnSkipped"]
        assert door.main(["check", config.name, *given]) == 1
        shown = capsys.readouterr()
        assert shown.out.startswith("1 fault: 20 batches, ")
        assert "2 of 2 skipped steps moved the schedule" in shown.out
        assert "twice in float32, at two loss scales" in shown.err
        assert "not compared" not in shown.out
        assert shown.err.startswith("at most ")
        assert {path.name for path in config.parent.iterdir()} == {"data", config.name}

    @pytest.mark.usefixtures("_in_this_process")
    def test_trial_without_amp_is_told_how_to_ask_for_it_and_is_examined_with_it(
        self, config, capsys
    ):
        given = ["check", config.name, "--trial", "tests.habits:Habit"]
        assert door.main(given) == 0
        plain = capsys.readouterr().out
        assert plain.startswith("no AMP was used: ")
        assert f"\nnote: {doctor.ASK_FOR_AMP}\n" in plain
        assert door.main([*given, "--precision", "amp_fp16"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("0 faults: 20 batches, 18 steps, 2 skipped, autocast")
        assert doctor.ASK_FOR_AMP not in shown
        assert f"\nnote: {ONLY_ON_A_GPU}\n" in plain
        assert f"\nnote: {ONLY_ON_A_GPU}\n" in shown
        assert door.main([*given, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["faults"] == 0

    def test_finding_is_explained_by_its_row_and_all_are_listed(self, capsys):
        assert door.main(["check", "--explain", "clip_scaled"]) == 0
        shown = capsys.readouterr().out
        row = ROWS["clip_scaled"]
        assert shown.startswith(f"clip_scaled (fault): {row['sentence']}\n")
        said = " ".join(shown.split())
        told = [row["evidence"], row["means"], *row["in_a_loop_write"]]
        assert [each for each in told if each not in said] == []
        assert door.main(["check", "--explain"]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in listed] == [*ROWS]

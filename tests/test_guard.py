"""A run that no longer trains ends with the cause, and leaves its last good state."""

import dataclasses
import math
from typing import Any

import determined as det
import pytest
import torch
from torch import nn

from determined_amp.amp.errors import GuardError
from determined_amp.amp.metrics import StepReport
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import AmpSettings, OnOverflow, Precision
from determined_amp.trial.mixed_precision import MixedPrecision
from determined_amp.trial.notes import TrialGuard
from tests.harness import Context, fit
from tests.trials import Weights

FP16 = AmpSettings(
    Precision.AMP_FP16, min_scale=2.0, max_consecutive_skips=3, max_skip_ratio=0.5
)


def guard(settings=FP16, *, newest=lambda: None, models=(), **searcher):
    context: Any = Context()
    context.distributed.allgather = lambda value: [value]
    context._exp_conf = {"searcher": {"metric": "validation_loss", **searcher}}
    amp = MixedPrecision(context, settings)
    context.models.extend(models)
    return TrialGuard(context, amp.guard, settings, newest=newest)


def counted(applied, skipped, consecutive_skips=0, name="", *, began=(0, 0)):
    return StepReport(name, applied, skipped, consecutive_skips, 0, 0, began=began)


SOUND = counted(100, 0)


def judge(watched, steps=SOUND, loss=1.0, loss_scale=2.0**16):
    """Let the guard look at a report."""
    metrics = watched._guard._metrics
    metrics.latest, metrics.loss = [steps], loss
    metrics.scale_of_newest_step = loss_scale
    watched.on_training_workload_end({"loss": loss}, {})


# Reports that a guard judges one after the other, and what it says of the last one;
# None passes.
IN_A_ROW = "4 optimizer steps in a row were skipped, more than"
TROUBLE = {
    "sound": ([SOUND], None),
    "four in a row": ([counted(10, 0), counted(100, 0, 4)], IN_A_ROW),
    "of one of two optimizers": (
        [counted(10, 0, 4, "_1")],
        f"^optimizer 1: {IN_A_ROW}",
    ),
    "three in a row": ([counted(100, 3, 3)], None),
    "more than half": (
        [counted(10, 0), counted(59, 51, 1)],
        "51% of the optimizer steps",
    ),
    "half": ([counted(50, 50)], None),
    "too few to judge": ([counted(0, 9, 3)], None),
    "scale has found its level": ([counted(4, 6)], None),
    "skips after that": (
        [counted(10, 6), counted(14, 12)],
        "60% of the optimizer steps",
    ),
    "more than half of those": (
        [counted(100, 0), counted(150, 50), counted(199, 101)],
        "51% of the optimizer steps",
    ),
    "skips after steps without any": (
        [counted(100, 0), counted(104, 6)],
        "60% of the optimizer steps",
    ),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_guard_ends_a_run_that_skips_beyond_the_limits(name):
    (*before, last), words = TROUBLE[name]
    watched = guard()
    for steps in before:
        judge(watched, steps)
    if words is None:
        judge(watched, last)
        return
    with pytest.raises(GuardError, match=words) as ended:
        judge(watched, last)
    assert ended.value.state_is_good
    assert "optimizer : " not in str(ended.value)


def test_guard_ends_a_run_that_still_skips_at_the_floor():
    watched = guard()
    judge(watched, loss=math.nan)  # of a skipped step
    judge(watched, loss_scale=2.0)  # no step was skipped
    with pytest.raises(GuardError, match="at its floor 2") as ended:
        judge(watched, counted(110, 0, 1), loss_scale=2.0)
    assert ended.value.state_is_good


@pytest.mark.parametrize(
    ("began", "passing", "ending"),
    [
        # its skips are no start, and are not counted again
        ((4, 60), [(14, 60)], (18, 66)),
        # It has settled before, and settles again: what comes after five steps is
        # judged.
        ((25, 0), [(30, 0), (34, 6), (40, 6)], (44, 12)),
        ((0, 3), [(4, 9)], None),  # it had not settled yet
    ],
)
def test_share_of_skips_counts_from_the_resumed_checkpoint_on(began, passing, ending):
    watched = guard()
    for steps in passing:
        judge(watched, counted(*steps, began=began))
    if ending is not None:
        with pytest.raises(GuardError, match="60% of the optimizer steps"):
            judge(watched, counted(*ending, began=began))


class TestTrouble:
    @pytest.mark.parametrize(
        "start", ["s" * 12, "s" * 7 + "aas", "sa" * 9, "s" * 40 + "asas"]
    )
    def test_guard_never_ends_a_run_whose_loss_scale_still_settles(self, start):
        """Whichever steps a report ends after: s is a skipped step, a an applied
        one.
        """
        steps = start + "a" * 60
        for period in range(1, 60):
            watched = guard(dataclasses.replace(FP16, max_consecutive_skips=50))
            for end in range(period, len(steps), period):
                done = steps[:end]
                in_a_row = len(done) - len(done.rstrip("s"))
                judge(watched, counted(done.count("a"), done.count("s"), in_a_row))

    def test_loss_that_is_not_finite_ends_a_run_that_can_skip_no_step(self):
        """Nothing was skipped, so the weights are not worth a checkpoint."""
        with pytest.raises(GuardError, match="the training loss is nan") as ended:
            judge(guard(AmpSettings(Precision.FP32)), loss=math.nan)
        assert not ended.value.state_is_good

    def test_loss_that_the_trial_reports_itself_is_judged_where_update_is_given_none(
        self,
    ):
        watched = guard(AmpSettings(Precision.FP32))
        watched._guard._metrics.latest = [SOUND]
        watched.on_training_workload_end({"loss": 1.0}, {})
        with pytest.raises(GuardError, match="the training loss is inf"):
            watched.on_training_workload_end({"loss": math.inf}, {})
        watched._guard._metrics.loss = 1.0
        watched.on_training_workload_end({"loss": math.inf}, {})

    def test_disabled_guard_ends_nothing(self):
        watched = guard()
        watched._guard.enabled = False
        judge(watched, counted(0, 100, 100), loss=math.nan)
        watched.on_validation_end({"validation_loss": math.nan})

    def test_cause_of_a_warning_is_looked_for_once(self, caplog):
        """A rehearsal changes what the trial keeps, such as a queue."""
        rehearsed = []
        warns = dataclasses.replace(FP16, on_overflow=OnOverflow.WARN)
        watched = guard(warns, newest=lambda: Rehearsal(rehearsed.append, []))
        for _ in range(2):
            judge(watched, counted(100, 9, 9))
        first, second = caplog.messages
        assert rehearsed == [2.0**16]
        assert first.endswith(
            "max_consecutive_skips 3. The newest batch alone is finite"
        )
        assert second.endswith(
            "max_consecutive_skips 3. Its cause is not looked for again"
        )

    def test_parameter_that_is_not_finite_ends_a_run_that_reports_no_loss(self):
        model = nn.Linear(1, 2)
        for models in ([], [nn.Linear(1, 1), model]):
            watched = guard(AmpSettings(Precision.AMP_BF16), models=models)
            watched._guard._metrics.latest = [SOUND]
            watched.on_training_workload_end({}, {})
        torch.nn.init.constant_(model.bias, math.inf)
        with pytest.raises(GuardError, match="a parameter is not finite in amp_bf16"):
            watched.on_training_workload_end({}, {})

    def test_guard_judges_nothing_before_the_first_report(self):
        guard().on_training_workload_end({"loss": math.nan}, {})


class TestCause:
    @pytest.mark.parametrize(
        ("newest", "words"),
        [
            (None, "Its cause was not looked for: there is no batch"),
            (Rehearsal(lambda scale: None, []), "The newest batch alone is fin"),
        ],
        ids=["no batch", "a finite batch"],
    )
    def test_cause_that_is_not_found_is_said(self, newest, words):
        watched = guard(newest=lambda: newest)
        with pytest.raises(GuardError, match=rf"in a row .*\. {words}"):
            judge(watched, counted(100, 9, 9))

    @pytest.mark.parametrize(
        ("start", "now", "words"),
        [
            (
                0.5,
                6.0,
                "the weights are 12 times as large as at the start: lower "
                "learning_rate",
            ),
            (0.0, 6.0, "look at the inputs"),
        ],
    )
    def test_cause_names_the_growth_of_the_weights_since_the_start(
        self, start, now, words
    ):
        model = nn.Linear(1, 1, bias=False)
        weight = nn.init.constant_(model.weight, start)

        def train(scale):
            (model(torch.ones(1)) * math.inf).sum().backward()

        watched = guard(models=[model], newest=lambda: Rehearsal(train, [model]))
        watched.on_training_start()
        nn.init.constant_(weight, now)
        with pytest.raises(
            GuardError, match=f"in a row .* not even in float32; {words}"
        ):
            judge(watched, counted(100, 9, 9))


@pytest.mark.parametrize(
    ("on_overflow", "searcher", "error"),
    [
        (OnOverflow.ABORT, "single", GuardError),
        (OnOverflow.ABORT, "adaptive_asha", det.InvalidHP),
        # Determined 0.38.1's master ends the whole search on it.
        (OnOverflow.WARN, "adaptive_asha", det.InvalidHP),
        (OnOverflow.WARN, "async_halving", det.InvalidHP),
        (OnOverflow.WARN, "random", None),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf, 1.0, "a histogram"])
def test_metric_that_is_not_finite_ends_the_run_and_never_reaches_asha(
    on_overflow, searcher, error, value, caplog
):
    settings = dataclasses.replace(FP16, on_overflow=on_overflow)
    watched = guard(settings, name=searcher)
    is_bad = isinstance(value, float) and not math.isfinite(value)
    if is_bad and error is not None:
        with pytest.raises(error, match=f"validation_loss is {value}"):
            watched.on_validation_end({"validation_loss": value})
    else:
        watched.on_validation_end({"validation_loss": value})
    is_only_said = is_bad and error is None
    assert (
        f"validation_loss is {value}. Its cause was not" in caplog.text
    ) is is_only_said


class TestRunningStatistics:
    @pytest.mark.parametrize("when", ["report", "validation"])
    def test_poisoned_statistics_are_put_back_at_every_report_and_validation(
        self, when
    ):
        model = nn.BatchNorm1d(2)
        watched = guard(models=[model])
        mean = model.get_buffer("running_mean").fill_(3.0)
        watched.on_training_start()
        mean[1] = math.nan
        if when == "report":
            watched.on_training_workload_end({}, {})
        else:
            watched.on_validation_start()
        assert mean.tolist() == [3.0, 3.0]


class NeverSteps(Weights):
    def step(self, which=0):
        pass


class AlwaysOverflows(Weights):
    rows = ((math.inf,),) * 4


@pytest.mark.parametrize(
    ("trial", "precision", "words"),
    [
        (
            AlwaysOverflows,
            "amp_fp16",
            "all of its 4 optimizer steps overflowed and were skipped",
        ),
        (NeverSteps, "fp32", "no optimizer was stepped"),
        (Weights, "amp_fp16", None),
    ],
)
def test_run_that_ends_without_an_applied_step_says_so(trial, precision, words, caplog):
    section = {"precision": precision, "init_scale": 64.0, "audit": False}
    fit(trial, section, batches=len(trial.rows))
    assert caplog.text.count("this run has trained nothing: ") == (words is not None)
    assert words is None or words in caplog.text

"""Two models, two optimizers, one scaler: the shape of a GAN, with numbers derived by
hand.

Each model is y = w x with its own input, so its gradient is the mean of that input
whatever w is, and SGD with rate 0.5 moves w by -0.5 * mean(x). A row is a batch of one
sample (x_d, x_g).
"""

import math

import pytest
import torch

from tests.harness import needs_fused
from tests.trials import TwoWeights, weigh_two

INF = math.inf
AMP = {"precision": "amp_fp16", "init_scale": 4.0, "growth_interval": 1000}
GOOD = (1.0, 1.0)
fused_or_not = pytest.mark.parametrize(
    "fused", [False, pytest.param(True, marks=needs_fused)]
)


def counts(report, name="watch_applied_steps"):
    """Of both optimizers."""
    return report[f"{name}_0"], report[f"{name}_1"]


class UpdatesAfterEachStep(TwoWeights):
    """Steps its discriminator three times a batch, as a Wasserstein GAN does.

    Attributes:
        counted: Batches counted after each batch.
    """

    def __init__(self, context, rows):
        super().__init__(context, rows)
        self.counted = []

    def train_batch(self, batch, epoch_idx, batch_idx):
        for which in (0, 0, 0, 1):
            loss = self.backward(batch, which)
            self.step(which)
            reported = self.amp.update(loss)
        self.counted.append(self.amp.metrics._batches_of_process)
        return reported


@pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
def test_update_after_each_of_several_steps_counts_the_batch_once(precision):
    """Losses 1, 0.5, 0 and 1: w_d falls by 0.5 a step. The second batch overflows
    nowhere.
    """
    amp = AMP if precision == "amp_fp16" else {"precision": precision}
    made = weigh_two([GOOD] * 2, amp, UpdatesAfterEachStep, reporting_period=2)
    assert made.trial.weights() == [1.0 - 6 * 0.5, 1.0 - 2 * 0.5]
    assert made.trial.counted == [1, 2]
    (report,) = made.reports.training
    assert report["loss"] == (1.0 + 0.5 + 0.0 + 1.0 - 0.5 - 1.0 - 1.5 + 0.5) / 8
    assert counts(report) == (6, 2)


@fused_or_not
def test_overflow_of_the_second_optimizer_leaves_the_first_its_counts_and_rate(
    *, fused
):
    """The `update` of torch adds what all optimizers found into the tensor of the
    first.
    """

    class Scheduled(TwoWeights):
        def __init__(self, context, rows):
            super().__init__(context, rows)
            for optimizer in self.optimizers:
                halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
                self.amp.wrap_lr_scheduler(halving)

    Scheduled.fused = fused
    made = weigh_two([GOOD, (1.0, INF), GOOD], AMP, Scheduled)
    assert counts(made.report) == (3, 2)
    assert counts(made.report, "skipped_steps") == (0, 1)
    rates = [float(it.param_groups[0]["lr"]) for it in made.trial.optimizers]
    assert rates == [0.5**4, 0.5**3]


def test_gradient_norms_are_reported_of_each_optimizer():
    report = weigh_two([(1.0, 3.0)], AMP).report
    assert counts(report, "watch_grad_norm") == (1.0, 3.0)
    headroom = counts(report, "watch_headroom_bits")
    assert headroom[0] - headroom[1] == pytest.approx(math.log2(3), abs=1e-6)


class StepsTheSecondThen(TwoWeights):
    """Steps the second optimizer when a test says so, and clips nothing."""

    def step(self, which=0):
        self.context.step_optimizer(self.optimizers[which], scaler=self.amp.scaler)


@pytest.mark.parametrize(("period", "steps"), [(2, 2), (9, 0)])
def test_optimizer_that_steps_seldom_or_never_has_counts_of_its_own(period, steps):
    class Seldom(StepsTheSecondThen):
        def steps_generator(self, batch_idx):
            return batch_idx % period == period - 1

    report = weigh_two([GOOD] * 4, AMP, Seldom).report
    assert counts(report) == (4, steps)
    assert "watch_grad_norm_0" not in report  # nobody clips, so nothing was measured


class WithRates(TwoWeights):
    """Plain SGD with the first rate, and Adam with the second."""

    rates = (0.5, 0.01)

    def optimizer_of(self, parameters):
        if not self.context.optimizers:
            return torch.optim.SGD(parameters, lr=self.rates[0])
        rate = self.rates[1]
        return torch.optim.Adam(parameters, lr=rate, weight_decay=rate)


class WithOtherRates(WithRates):
    rates = (0.5, 0.1)


def test_resume_keeps_the_settings_of_the_checkpoint_and_says_which(caplog):
    first = weigh_two([GOOD] * 2, AMP, WithRates)
    weigh_two([GOOD] * 4, AMP, WithRates, resume=first)
    assert "YAML" not in caplog.text
    resumed = weigh_two([GOOD] * 4, AMP, WithOtherRates, resume=first)
    assert resumed.trial.optimizers[1].param_groups[0]["lr"] == 0.01
    (line,) = (line for line in caplog.messages if "YAML" in line)
    assert line.startswith(
        "optimizer 0 (SGD) follows the YAML; optimizer 1 (Adam) keeps lr 0.01 of the "
        "checkpoint (YAML: 0.1), weight_decay 0.01 of the checkpoint (YAML: 0.1). A ne"
    )

"""`amp.init_scale: find`: the scale is found on the first batch, and nothing else
changes.
"""

import dataclasses
import logging
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from determined_amp import AmpLoop, AmpSettings, ConfigError, Precision
from determined_amp.amp.rehearse import restored
from determined_amp.amp.settings import FindScale
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_finding import Verdict, find_range
from determined_amp.trial import loss_scale
from tests.habits import CLASSES, FEATURES
from tests.harness import fit_as_it_is, same_bits
from tests.trials import Converted, Plain

# A scheduler that Determined moves is moved by a skipped first step, too.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

FIND = {"precision": "amp_fp16", "init_scale": "find"}
BATCHES = 6


class Draws(Plain):
    """Draws from every global generator, beside its dropout."""

    def net(self):
        random.seed(1)
        np.random.seed(1)
        return super().net()

    def loss(self, inputs, classes):
        noise = random.random() + float(np.random.rand()) + torch.randn(FEATURES)
        return super().loss(inputs + noise, classes)


class DrawsConverted(Converted, Draws):
    """The same with a `MixedPrecision` of its own."""


def found(log):
    """The scale that the one line in the log says."""
    (line,) = re.findall(r"init_scale: find found (\S+) in .* s: safe range", log.text)
    return 2.0 ** int(line.removeprefix("2^"))


def run(trial, **amp):
    return fit_as_it_is(trial, {**FIND, **amp}, batches=BATCHES)


def left(fitted):
    """The checkpoint, and what was reported."""
    return [fitted.checkpoint, [report["loss"] for report in fitted.reports.training]]


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.INFO)


def test_min_scale_that_overflows_is_refused():
    words = (
        r"^the trial: .* gradients overflow at min_scale 2\^24; allowed:"
        r" min_scale: "
    )
    with pytest.raises(ConfigError, match=words):
        run(Converted, min_scale=2.0**24)


@pytest.mark.parametrize("trial", [Draws, DrawsConverted])
def test_run_that_finds_its_scale_equals_one_with_that_init_scale_to_the_bit(
    trial, caplog, monkeypatch
):
    noted = []
    monkeypatch.setattr(
        loss_scale, "note_on_master", lambda context, **values: noted.append(values)
    )
    searched = run(trial)
    scale = found(caplog)
    assert scale != 65536.0
    written = run(trial, init_scale=scale)
    assert same_bits(left(searched), left(written))
    assert found(caplog) == scale  # the second run found nothing
    assert noted == [{"init_scale": scale}]
    # The control: what is drawn is not put back.
    monkeypatch.setattr(restored, "_keep_random_state", lambda *_: None)
    assert not same_bits(left(run(trial)), left(written))


def test_resume_keeps_the_saved_scale(caplog):
    first = fit_as_it_is(Converted, {**FIND, "init_scale": 8.0}, batches=2)
    second = fit_as_it_is(Converted, FIND, batches=4, resume=first)
    amp = second.trial.amp
    assert amp.scaler.get_scale() == amp.settings.init_scale == 8.0
    raised = fit_as_it_is(Converted, {**FIND, "min_scale": 16.0}, resume=first)
    assert raised.trial.amp.scaler.get_scale() == 16.0
    assert "find found" not in caplog.text


@pytest.mark.parametrize("init_scale", [65536.0, "find"])
def test_resume_without_a_saved_scale_warns_or_finds_one(init_scale, caplog):
    first = fit_as_it_is(Converted, {"precision": "fp32"}, batches=2)
    second = fit_as_it_is(
        Converted, {**FIND, "init_scale": init_scale}, batches=4, resume=first
    )
    words = "the checkpoint has no loss scale; starting with 2^16, which may cost"
    assert (words in caplog.text) == (init_scale != "find")
    if init_scale == "find":
        amp = second.trial.amp
        assert amp.scaler.get_scale() == amp.settings.init_scale == found(caplog)


def test_saved_scale_that_a_resume_does_not_need_is_named(caplog):
    first = fit_as_it_is(Converted, {**FIND, "init_scale": 8.0}, batches=1)
    fit_as_it_is(Converted, {"precision": "amp_bf16"}, batches=2, resume=first)
    assert "the checkpoint has a loss scale; amp_bf16 needs none" in caplog.messages


def test_forward_that_overflows_ends_the_run_at_once():
    class Overflows(Converted):
        def net(self):
            model = nn.Sequential(
                nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
            )
            nn.init.constant_(model[0].get_parameter("weight"), 60000.0)
            return model

    with pytest.raises(
        ConfigError, match=r"init_scale: got find, and no scale helps: .*amp_bf16"
    ):
        run(Overflows)
    run(Overflows, on_overflow="warn", audit=False)


def test_found_scale_is_raised_to_min_scale_where_that_is_safe(caplog):
    kept = run(Converted, min_scale=2.0**13).trial.amp.scaler.get_scale()
    assert kept == 2.0**13
    assert found(caplog) < 2.0**13
    assert "and the training starts with min_scale, 2^13" in caplog.text


def test_finding_that_advises_bfloat16_is_a_warning(caplog, monkeypatch):
    def advising_bfloat16(*given):
        return dataclasses.replace(find_range(*given), verdict=Verdict.BF16)

    monkeypatch.setattr(loss_scale, "find_range", advising_bfloat16)
    run(Converted)
    (record,) = [r for r in caplog.records if "find found" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert "verdict: use amp_bf16" in record.getMessage()


def test_finder_without_an_answer_starts_with_the_default_scale_and_says_so(
    caplog, monkeypatch
):
    def refuse(*given, **named):
        raise LossScaleError("all 16-bit gradients are exactly 0")

    noted = {}
    monkeypatch.setattr(loss_scale, "find_range", refuse)
    monkeypatch.setattr(
        loss_scale, "note_on_master", lambda context, **values: noted.update(values)
    )
    run(Converted)
    assert noted == {"init_scale": 2.0**16}
    said = (
        "init_scale: find found none: all 16-bit gradients are exactly 0; starting with"
        " 2^16"
    )
    assert said in caplog.text


def test_amp_loop_refuses_init_scale_find_and_says_what_to_call():
    settings = AmpSettings(Precision.AMP_FP16, init_scale=FindScale.FIND)
    words = (
        r"^the loop: init_scale: got find, .* allowed: a number, such as"
        r" determined_amp\.find_loss"
    )
    with pytest.raises(ConfigError, match=words):
        AmpLoop(settings, "cpu")
    AmpLoop(
        AmpSettings(Precision.AMP_BF16, init_scale=FindScale.FIND, set_backends=False),
        "cpu",
    )

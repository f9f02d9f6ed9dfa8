"""`finder.scoring`: the optimizer steps that a loss scale loses, measured, and
finite.
"""

import math
from types import SimpleNamespace
from typing import Any

import determined as det
import pytest

from benchmarks.small_trials import SmallTrial, SummedLoss, TinyLoss
from determined_amp.experiment.experiment import experiment_in, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder import scoring
from determined_amp.finder.prediction import Prediction
from determined_amp.finder.scale_score import (
    FLUSHED_LIMIT,
    Score,
    advice_of,
)
from determined_amp.finder.scoring import NoScaleError, score_batches
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.loss_scale import score
from tests.loss_scale import config, prediction_of
from tests.run_here import ROOT, SMALL


class TestTerms:
    """The gradient of 2^9 is predicted to overflow from 2^7 on."""

    @pytest.fixture
    def float16(self, monkeypatch):
        """Measurements made by hand: nothing overflows up to 2^top, `share` is flushed
        at any scale, and `measured` has log2 of the scales that were tried so far.
        """
        made = SimpleNamespace(top=6.0, share=0.0, measured=[])

        def overflows(rehearsals, slots, scale_log2):
            made.measured.append(scale_log2)
            return scale_log2 > made.top

        prediction = prediction_of({"a": {9: 1}})
        monkeypatch.setattr(Prediction, "flushed_share", lambda *given: made.share)
        monkeypatch.setattr(scoring, "predict_float16", lambda *given: prediction)
        monkeypatch.setattr(scoring, "any_overflow_at", overflows)
        monkeypatch.setattr(
            scoring, "cause_of", lambda *given: f"the cause at 2^{given[-1]:g}"
        )
        return made

    @staticmethod
    def of(scale_log2, **scaler):
        nothing: Any = None
        return score_batches(nothing, nothing, scale_log2, **scaler)

    def test_score_has_every_term(self, float16):
        headroom = math.log2(65520 / 2**9)
        assert self.of(4) == Score(4, 0.0, 0.0, headroom - 4, 0.0, 0.0)
        assert self.of(9) == Score(9, 2.0, 3.0, headroom - 9, 0.0, 1.0)

    @pytest.mark.parametrize("start", [127, 30.25, 16, 0.5, -2, -20, -99.75])
    def test_skipped_steps_are_counted_wherever_overflow_ends(self, float16, start):
        """With few rehearsals, also where the prediction is wrong."""
        for float16.top in (
            127,
            100.25,
            41,
            40,
            17,
            6.5,
            6,
            0,
            -1,
            -25,
            -60.5,
            -100,
            -126,
        ):
            float16.measured.clear()
            assert self.of(start).steps_lost == max(0, math.ceil(start - float16.top))
            assert len({*float16.measured}) == len(float16.measured)
            assert len(float16.measured) <= (2 if float16.top == 6 else 15)

    @pytest.mark.parametrize(
        ("start", "share", "interval", "steps"),
        [
            (5, FLUSHED_LIMIT, 2000, 0.0),
            (5, 0.0011, 2000, 2.2),
            (5, 1.0, 2000, 2000.0),
            (5, 0.5, 40, 20.0),
            (10, 0.25, 2000, 504.0),  # of the scale that the training then starts with
            (10, FLUSHED_LIMIT, 2000, 4.0),
        ],
    )
    def test_flushed_share_costs_steps_above_its_limit(
        self, float16, start, share, interval, steps
    ):
        float16.share = share
        found = self.of(start, growth_interval=interval)
        assert found.steps_lost == pytest.approx(steps)
        assert found.loss_scale_score == pytest.approx(math.log2(1 + steps))
        assert found.flushed_share == share

    @pytest.mark.parametrize(
        ("top", "floor"), [(-math.inf, {}), (-0.5, {"min_scale": 1.0})]
    )
    def test_overflow_at_every_scale_is_refused_with_its_cause(
        self, float16, top, floor
    ):
        float16.top = top
        with pytest.raises(
            NoScaleError,
            match=r"^every loss scale down to \S+ overflows: the cause at 2\^0$",
        ):
            self.of(8.5, **floor)

    @pytest.mark.parametrize(("top", "steps"), [(0, 9), (0.5, 8), (1.5, 7)])
    def test_scale_stays_above_its_floor(self, float16, top, steps):
        float16.top = top
        assert self.of(8.5, min_scale=1.0).steps_lost == steps
        assert min(float16.measured) >= 0


def test_score_uses_backoff_factor_and_growth_interval_of_the_trials_scaler():
    def scored(trial, scale):
        with open_trial(
            experiment_in(config(trial, init_scale=2.0**scale), trial.__name__)
        ) as found:
            assert isinstance(found.trial, SmallTrial)
            found.trial.scaler.set_backoff_factor(0.25)
            found.trial.scaler.set_growth_interval(10)
            metrics = score(found.trial, found.context, 1)
            return metrics["steps_lost"], metrics["flushed_share"]

    assert scored(SummedLoss, 21) == (5, 0)
    assert scored(TinyLoss, -20) == (10, 1)


@pytest.mark.parametrize(("floor", "invalid"), [(2.0**18, False), (2.0**21, True)])
def test_score_of_a_scale_that_overflows_at_min_scale_is_an_invalid_trial(
    floor, invalid
):
    """The gradients of the MLP overflow above 2^18 or 2^19."""
    scales = [
        f"hyperparameters.amp.{key}={floor}" for key in ("init_scale", "min_scale")
    ]
    mlp = with_overrides(
        read_yaml(str(ROOT / "experiment_configs/mlp/amp.yaml")), [*SMALL, *scales]
    )
    with open_trial(experiment_in(mlp, "mlp")) as found:
        if invalid:
            with pytest.raises(
                det.InvalidHP,
                match=r"a loss scale of 2.09715e\+06; .* lower init_scale",
            ):
                score(found.trial, found.context, 1)
        else:
            assert score(found.trial, found.context, 1)["steps_lost"] == 0


def trials(*steps):
    """Trials at 2^14, 2^15 and so on that lose so many steps."""
    return [(14.0 + i, lost) for i, lost in enumerate(steps)]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            trials(3, 0, 0, 0, 2),
            "no step is lost in 3 of 5 trials, at 2^15 to 2^17: default is fine: 2^16 "
            "is among them; a search can find nothing better",
        ),
        # As the finder chooses in this range: half of it is left to the top.
        (
            [(7.0, 0.5), (8.0, 0.0), (9.0, 0.0), (15.0, 0.0), (16.0, 1.0)],
            "no step is lost in 3 of 5 trials, at 2^8 to 2^15: use 2^11",
        ),
        (
            [(14.25, 0.0), (14.5, 0.0)],
            "no step is lost in 2 of 2 trials, at 2^14.25 to 2^14.5: use 2^14.25; "
            "no lower scale was tried",
        ),
        (
            trials(3, 0.5, 4),
            "every scale of this search loses steps, and the best one 0.5",
        ),
        ([], None),
        (trials(0), None),
        (trials(0, None), None),
        ([*trials(0), (math.nan, 0.0)], None),
    ],
    ids=[
        "some lose none",
        "the default loses some",
        "no power of two",
        "all lose some",
        "no trial",
        "one trial",
        "no score",
        "no scale",
    ],
)
def test_search_says_what_its_best_score_is_worth(found, sentence):
    advice = advice_of("loss_scale_score", found)
    assert (advice and advice.text) == sentence
    assert advice_of("validation_loss", found) is None

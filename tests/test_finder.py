"""`trial.loss_scale`: what it finds is what float16 does, and it says what to do about
it.
"""

import json
import re
from functools import cache

import pytest

from benchmarks.small_trials import (
    BatchNormCNN,
    DeepPlain,
    Float16Loss,
    PreNormTransformer,
    SummedLoss,
)
from determined_amp import __main__ as door
from determined_amp.finder.scale_finding import (
    Verdict,
    find_range,
)
from determined_amp.finder.scale_score import choice_of
from tests.loss_scale import ALL, first_failing, looked_at, skipped_steps
from tests.run_here import arguments, run_small


def measured_first_overflow(batches):
    """Not found from the prediction; overflow is monotone."""
    return first_failing(
        -30, 100, lambda power: all(batch.run(2.0**power).is_sound for batch in batches)
    )


class TestRange:
    @pytest.mark.parametrize("trial", ALL)
    def test_first_overflowing_power_of_two_is_exact(self, trial):
        """After a few steps; `test_first_overflow` begins with new weights."""

        def work(small, context, batches):
            found = find_range(batches, context.distributed)
            return found.top_log2 + 1, measured_first_overflow(batches)

        found, measured = looked_at(trial, work, steps=3)
        assert found == measured

    @pytest.mark.parametrize("trial", ALL)
    def test_two_rehearsals_in_float16_confirm_the_predicted_top(self, trial):
        """One at the top, and one a bit above it."""
        scales = found_in_four(trial).scales
        assert len([one for one in scales if one.overflow is not None]) == 2


class TestChoice:
    @pytest.mark.parametrize("trial", ALL)
    def test_choice_trains_twenty_steps_without_a_skip(self, trial):
        found = found_in_four(trial)
        assert found.choice_log2 is not None
        assert skipped_steps(trial, 20, init_scale=2.0**found.choice_log2) == 0


@cache
def found_in_four(trial):
    """In the first four batches of a trial as it is."""

    def work(small, context, batches):
        return find_range(batches, context.distributed)

    return looked_at(trial, work, batches=4)


@pytest.mark.parametrize(
    ("trial", "verdict"),
    [
        (BatchNormCNN, Verdict.DEFAULT),
        (PreNormTransformer, Verdict.DEFAULT),
        (SummedLoss, Verdict.SCALE),
        (Float16Loss, Verdict.SCALE),
        (DeepPlain, Verdict.BF16),
    ],
)
def test_verdict_of_the_small_trials(trial, verdict):
    """Each of the forty layers of `DeepPlain` shrinks the gradient: no range is safe.

    The first ones train on what the last ones overflow at.
    """
    found = found_in_four(trial)
    assert found.verdict is verdict
    assert (found.range_bits < 0) == (verdict is Verdict.BF16)
    default = verdict is Verdict.DEFAULT
    assert found.choice_log2 == choice_of(found.low_log2, found.top_log2)
    assert (found.low_log2 <= 16 <= found.top_log2) == default


class TestCommand:
    def test_find_prints_range_verdict_and_lines_and_writes_json(
        self, tmp_path, capsys
    ):
        data = tmp_path / "finding.json"
        assert door.run(["find", *arguments("mlp/amp.yaml"), "--json", str(data)]) == 0
        printed = capsys.readouterr().out
        assert "verdict: default is fine" in printed
        assert "hyperparameters:" not in printed
        top = int(re.findall(r"safe range: 2\^-?\d+ to 2\^(\d+)", printed)[0])
        written = json.loads(data.read_text())
        assert written["verdict"] == "default is fine"
        assert written["top_log2"] == top

    def test_find_starts_from_a_checkpoint(self, tmp_path):
        run = run_small("mlp/amp.yaml", tmp_path / "run")
        findings = []
        for options in ([], ["--checkpoint", str(run)]):
            target = tmp_path / f"{len(options)}.json"
            assert (
                door.run(
                    [
                        "find",
                        *arguments("mlp/amp.yaml"),
                        "--json",
                        str(target),
                        *options,
                    ]
                )
                == 0
            )
            findings.append(json.loads(target.read_text())["scales"])
        assert findings[0] != findings[1]

"""Verdicts of `report precision` on numbers whose answer is known, and which runs get one."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import variance
from typing import Any

import pytest
from scipy import stats  # type: ignore[import-untyped]

from determined_amp.amp.settings import SCALER_KEYS, Precision
from determined_amp.report import ReportError
from determined_amp.report.precision_comparison import (
    Comparison,
    Equivalence,
    Interval,
    Judgement,
    Ratio,
    judge,
    paired,
    welch,
)
from determined_amp.report.precision_findings import Findings, advise, find
from determined_amp.report.precision_report import answer, sentences, table
from determined_amp.report.sources import read_source
from determined_amp.runs.folder import RunFolder, read_run
from determined_amp.runs.run import SEED, Report, Reports, Run, RunState
from determined_amp.search.search_folder import read_search
from tests.precisions import CPU, LOST, findings_of, run, seeds, write_run
from tests.reporting import write_study

BASE = (0.90, 0.91, 0.92)


def shifted(*by: float) -> list[float]:
    return [base + shift for base, shift in zip(BASE, by, strict=True)]


ALIKE = shifted(-0.0001, 0.0, 0.0001)


def of_differences(differences: Sequence[float]) -> Interval:
    return paired(differences, [0.0] * len(differences))


def findings(amp: Sequence[float] = BASE, **options: Any) -> Findings:
    """Three seeds in fp32, and others in amp_fp16."""
    return findings_of(*seeds("fp32", BASE), *seeds("amp_fp16", amp), **options)


def compared(*runs: Run, **options: Any) -> Comparison:
    """The only comparison of some runs."""
    (comparison,) = findings_of(*runs, **options).comparisons
    return comparison


class TestInterval:
    def test_interval_of_pairs_is_students(self) -> None:
        """By hand: mean 2, deviation 1, t of 2 degrees of freedom 4.303."""
        interval = of_differences([1.0, 2.0, 3.0])
        assert (interval.mean, interval.std, interval.seeds) == (2.0, 1.0, 3)
        quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # of Student's t with 2, in closed form
        assert interval.half_width == pytest.approx(quantile / math.sqrt(3), rel=1e-9)

    def test_interval_of_other_seeds_is_welchs(self) -> None:
        """By hand: both variances, and Welch's degrees of freedom."""
        first, second = [1.0, 2.0, 4.0, 3.5], [0.1, 0.2, 0.15]
        parts = [variance(first) / 4, variance(second) / 3]
        dof = sum(parts) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 2)
        half_width = float(stats.t.ppf(0.975, dof)) * math.sqrt(sum(parts))
        interval = welch(first, second)
        assert interval.half_width == pytest.approx(half_width, rel=1e-9)
        assert interval.std == pytest.approx(math.sqrt(variance(first) + variance(second)))
        assert interval.mean == pytest.approx(2.625 - 0.15)
        assert (interval.seeds, interval.paired) == (3, False)

    def test_seeds_that_hardly_differ_cause_no_warning(self) -> None:
        interval = paired([0.7, 0.8, 0.9], [0.6, 0.7, 0.8])
        assert interval.std is not None
        assert 0 < interval.std < 1e-15
        assert interval.half_width == pytest.approx(interval.std * 4.30265 / 3**0.5, rel=0.2)

    @pytest.mark.parametrize("difference", [0.0, 1.0])
    def test_seeds_without_a_spread_give_no_verdict(self, difference: float) -> None:
        for interval in (
            of_differences([difference] * 3),
            welch([1.0 + difference, 1.0 + difference], [1.0, 1.0]),
        ):
            assert interval.verdict(0.001) is Equivalence.UNKNOWN
            assert interval.seeds_needed(0.001) is None

    def test_one_seed_gives_no_verdict(self) -> None:
        for interval in (of_differences([5.0]), welch([5.0], [0.0, 0.0])):
            assert interval.verdict(0.001) is Equivalence.UNKNOWN
            assert interval.verdict(1000.0) is Equivalence.UNKNOWN
            assert interval.seeds_needed(0.001) is None

    @pytest.mark.parametrize(
        ("differences", "verdict"),
        [
            ((-0.001, 0.0, 0.001), Equivalence.EQUAL),  # half width 0.0025
            ((0.001, 0.0011, 0.0012), Equivalence.EQUAL),  # real, and too small to matter
            ((0.01, 0.011, 0.012), Equivalence.DIFFERENT),
            ((0.0, 0.0, 0.01), Equivalence.UNKNOWN),
            ((-0.002, 0.0, 0.002), Equivalence.UNKNOWN),  # not significant, which is not equal
        ],
    )
    def test_verdict_depends_on_the_margin(
        self, differences: Sequence[float], verdict: Equivalence
    ) -> None:
        assert of_differences(differences).verdict(0.003) is verdict

    def test_number_of_seeds_needed_is_the_first_that_would(self) -> None:
        interval = of_differences([-0.002, 0.0, 0.002])
        needed = interval.seeds_needed(0.003)
        assert needed is not None

        def half_width(seeds: int) -> float:
            return float(stats.t.ppf(0.975, seeds - 1)) * 0.002 / math.sqrt(seeds)

        assert half_width(needed) <= 0.003 < half_width(needed - 1)
        assert of_differences([-1.0, 0.0, 1.0]).seeds_needed(0.003) is None  # more than a thousand

    def test_number_of_seeds_needed_does_not_depend_on_the_sign(self) -> None:
        better, worse = (
            of_differences([sign * x for x in (0.01, 0.02, 0.05)]).seeds_needed(0.02)
            for sign in (1, -1)
        )
        assert better is not None
        assert better == worse

    def test_number_of_other_seeds_needed_is_that_of_each_group(self) -> None:
        """Groups of that number, with these variances, are just told apart."""
        needed = welch([0.0, 2.0], [2.0, 4.0]).seeds_needed(0.1)
        assert needed is not None

        def low(seeds: int) -> float:
            error = math.sqrt((2.0 + 2.0) / seeds)
            return float(2.0 - stats.t.ppf(0.975, 2 * seeds - 2) * error)

        assert low(needed) >= 0 > low(needed - 1)


class TestMetric:
    @pytest.mark.parametrize(
        ("shifts", "words"),
        [
            ((0.001, 0.0, -0.001), "equal within the margin of 0.003"),
            ((-0.05, -0.051, -0.049), "different, worse"),
            ((0.05, 0.051, 0.049), "different, better"),
            ((-0.01, 0.0, 0.01), "inconclusive with 3 seeds; about "),
            (
                (0.0, 0.0, 0.0),
                "inconclusive with 3 seeds; the difference is the same for all, which leaves",
            ),
        ],
    )
    def test_verdict_is_reported(self, shifts: Sequence[float], words: str) -> None:
        assert words in "\n".join(sentences(findings(shifted(*shifts))))

    def test_report_on_one_seed_asks_for_two(self) -> None:
        lines = sentences(findings_of(run("fp32"), run("amp_bf16")))
        assert "inconclusive with 1 seed; at least 2 are needed" in "\n".join(lines)

    def test_pairs_by_seed_see_what_groups_do_not(self) -> None:
        """Seeds differ by 0.01, the precisions by 0.004 in each of them."""
        values = shifted(0.0039, 0.004, 0.0041)
        (by_seed,) = findings(values).comparisons
        assert by_seed.difference.paired
        assert by_seed.verdict is Equivalence.DIFFERENT
        others = (run("amp_fp16", seed, accuracy=value) for seed, value in enumerate(values, 11))
        groups = compared(*seeds("fp32", BASE), *others)
        assert not groups.difference.paired
        assert groups.verdict is Equivalence.UNKNOWN

    def test_margin_is_the_users(self) -> None:
        values = shifted(-0.01, 0.0, 0.01)
        assert findings(values).comparisons[0].verdict is Equivalence.UNKNOWN
        assert findings(values, margin=0.1).comparisons[0].verdict is Equivalence.EQUAL

    def test_margin_of_a_loss_is_one_percent_and_less_is_better(self) -> None:
        worse = (run("amp_fp16", s, loss=loss) for s, loss in enumerate((2.5, 2.51, 2.52), 1))
        by_loss = findings_of(*seeds("fp32", BASE, loss=2.0), *worse, metric="validation_loss")
        assert by_loss.margin == pytest.approx(0.02)
        assert "different, worse" in "\n".join(sentences(by_loss))

    def test_unknown_direction_of_a_metric_has_to_be_given(self) -> None:
        reports = Reports([("validation", Report(100, {"f1": 0.5}))])
        runs = [dataclasses.replace(run(p), reports=reports) for p in ("fp32", "amp_fp16")]
        with pytest.raises(ReportError, match="larger or a smaller f1 is better is unknown"):
            findings_of(*runs, metric="f1")
        assert not findings_of(*runs, metric="f1", smaller_is_better=False).smaller_is_better

    def test_accuracy_in_percent_has_a_margin_in_percent(self) -> None:
        percent = [100 * value for value in BASE]
        nearly = [value + 0.01 for value in percent]
        in_percent = findings_of(
            *seeds("fp32", percent, loss=1.0), *seeds("amp_fp16", nearly, loss=1.0)
        )
        assert in_percent.margin == pytest.approx(0.3)
        (comparison,) = in_percent.comparisons
        assert comparison.claims[2].judgement is Judgement.UNMEASURED

    def test_accuracy_of_exactly_one_is_not_in_percent(self) -> None:
        of_one = findings((1.0, 1.0, 0.99))
        assert of_one.margin == pytest.approx(0.003)
        assert of_one.comparisons[0].claims[2].judgement is not Judgement.UNMEASURED

    def test_margin_of_a_negative_metric_is_positive(self) -> None:
        runs = (run(p, seed, loss=-2.0) for p in ("fp32", "amp_fp16") for seed in (1, 2))
        assert findings_of(*runs, metric="validation_loss").margin == pytest.approx(0.02)

    def test_unknown_seeds_are_not_paired(self) -> None:
        unknown = {"settings": {SEED: None}}
        comparison = compared(*seeds("fp32", BASE, **unknown), *seeds("amp_fp16", BASE, **unknown))
        assert not comparison.difference.paired
        assert comparison.speed is not None
        assert (comparison.speed.pairs, comparison.speed.by_seed) == (9, False)

    @pytest.mark.parametrize(("shift", "is_not_worse"), [(-0.002, True), (-0.02, False)])
    def test_inconclusive_metric_may_be_worse_by_the_margin_only(
        self, shift: float, is_not_worse: bool
    ) -> None:
        comparison = compared(run("fp32"), run("amp_fp16", accuracy=0.9 + shift))
        assert comparison.verdict is Equivalence.UNKNOWN
        assert not comparison.is_better
        assert comparison.is_not_worse is is_not_worse

    def test_searcher_knows_the_direction_of_its_metric(self) -> None:
        upwards = {"searcher.smaller_is_better": False}
        runs = (run(p, settings=upwards) for p in ("fp32", "amp_fp16"))
        assert not findings_of(*runs, metric="validation_loss").smaller_is_better


def ratio(fp32: Sequence[float], fp16: Sequence[float], *, first_seed: int = 1) -> Ratio:
    """The ratio of the speeds of some runs; those in amp_fp16 begin with `first_seed`."""
    base = (run("fp32", seed, speed=speed) for seed, speed in enumerate(fp32, 1))
    amp = (run("amp_fp16", seed, speed=speed) for seed, speed in enumerate(fp16, first_seed))
    speed = compared(*base, *amp).speed
    assert speed is not None
    return speed


class TestSpeed:
    def test_speed_is_the_median_of_steady_reports(self) -> None:
        """The first report says 1, and a zero counts for nothing."""
        steady = findings_of(
            run("fp32", speed=[100.0, 0.0, 300.0, 110.0]), run("amp_fp16", speed=220.0)
        )
        assert [s.speed.median for s in steady.summaries if s.speed] == [110.0, 220.0]
        speed = steady.comparisons[0].speed
        assert speed is not None
        # Of one pair, the range is what its reports make of it.
        assert (speed.median, speed.low, speed.high) == pytest.approx((2.0, 220 / 300, 2.2))

    def test_first_report_of_a_resumed_process_is_left_out(self) -> None:
        resumed = {"watch_audit_share": 1.0, "samples_per_second": 9999.0}
        speed = run("fp32", speed=[100.0, 7.0], trained=resumed).speed
        assert speed is not None
        assert speed.median == 100.0

    def test_ratio_is_over_pairs_of_equal_seed(self) -> None:
        """The machine slows down from seed to seed; in each, AMP is twice as fast."""
        pairs = ratio((1000.0, 500.0, 250.0), (2000.0, 1000.0, 500.0))
        assert (pairs.low, pairs.median, pairs.high, pairs.pairs) == (2.0, 2.0, 2.0, 3)

    def test_speed_of_several_runs_is_their_median(self) -> None:
        """One machine was busy, and one run waited for its data."""
        waits = [{"watch_data_wait_share": wait} for wait in (0.0, 0.1, 0.9)]
        base, amp = (
            [
                run(precision, seed, speed=[1000.0 * times], trained=trained)
                for seed, (times, trained) in enumerate(zip(ratios, waits, strict=True), 1)
            ]
            for precision, ratios in (("fp32", (1.0, 1.0, 1.0)), ("amp_fp16", (2.0, 2.2, 9.0)))
        )
        measured = findings_of(*base, *amp)
        summary, speed = measured.summaries[1], measured.comparisons[0].speed
        assert speed is not None
        assert summary.speed is not None
        assert speed.median == pytest.approx(2.2)
        assert summary.speed.median == pytest.approx(2200.0)
        assert summary.data_wait_share == pytest.approx(0.1)

    def test_ratio_of_two_pairs_inverts_if_they_are_swapped(self) -> None:
        slow, fast = (1000.0, 1000.0), (2000.0, 8000.0)
        there, back = ratio(slow, fast), ratio(fast, slow)
        assert there.median == pytest.approx(4.0)
        assert there.median * back.median == pytest.approx(1.0)

    def test_without_equal_seeds_all_are_paired_with_all(self) -> None:
        crossed = ratio((1000.0, 500.0), (1000.0, 500.0), first_seed=3)
        assert (crossed.low, crossed.high, crossed.pairs) == (0.5, 2.0, 4)
        assert not crossed.by_seed


class TestClaims:
    @pytest.mark.parametrize(
        ("speeds", "memory", "accuracies", "judged"),
        [
            ((2100, 2200, 2300), 490, (0.0, 0.0, 0.001), "hhh"),
            ((1700, 1800, 1900), 600, (-0.02, -0.021, -0.022), "fff"),
            ((1900, 2000, 2100), 500, (-0.01, 0.0, 0.01), "uhu"),
        ],
    )
    def test_each_claim_is_judged(
        self, speeds: Sequence[float], memory: float, accuracies: Sequence[float], judged: str
    ) -> None:
        amp = (
            run("amp_fp16", seed, accuracy=value, speed=speed, memory=memory)
            for seed, (value, speed) in enumerate(zip(shifted(*accuracies), speeds, strict=True), 1)
        )
        comparison = compared(*seeds("fp32", BASE), *amp)
        words = {"h": Judgement.HOLDS, "f": Judgement.FAILS, "u": Judgement.UNKNOWN}
        assert [c.judgement for c in comparison.claims] == [words[letter] for letter in judged]

    def test_memory_of_a_cpu_is_not_judged(self) -> None:
        amp = seeds("amp_fp16", BASE, device=CPU, memory=100)
        comparison = compared(*seeds("fp32", BASE, device=CPU), *amp)
        assert comparison.claims[1].judgement is Judgement.UNMEASURED

    def test_claims_are_judged_on_this_repositorys_trials_or_on_request(self) -> None:
        other = {"hyperparameters.trial": "model_def:MyTrial"}
        runs = [run(p, settings=other) for p in ("fp32", "amp_fp16")]
        assert not compared(*runs).claims
        assert len(compared(*runs, judge_claims=True).claims) == 3

    def test_range_across_a_limit_cannot_be_told(self) -> None:
        assert judge((1.9, 2.1), 2.0, math.inf) is Judgement.UNKNOWN
        assert judge((-math.inf, math.inf), -0.003, 0.003) is Judgement.UNKNOWN
        assert judge(None, 2.0, math.inf) is Judgement.UNMEASURED

    def test_accuracy_is_judged_whatever_metric_is_compared(self) -> None:
        (comparison,) = findings(ALIKE, metric="validation_loss").comparisons
        assert comparison.claims[2].judgement is Judgement.HOLDS


class TestAdvice:
    def advised(self, **amp: dict[str, Any]) -> tuple[Precision, str]:
        """The advice on three seeds in fp32 at 1000 samples/s, and on other precisions."""
        others = (r for p, options in amp.items() for r in seeds(p, **{"values": ALIKE, **options}))
        advice = advise(findings_of(*seeds("fp32", BASE), *others))
        return advice.precision, advice.why

    def test_fastest_of_those_that_are_not_worse(self) -> None:
        advised, why = self.advised(
            tf32={"speed": 1500.0},
            amp_fp16={"speed": 2500.0, "values": shifted(-0.05, -0.051, -0.049)},
            amp_bf16={"speed": 2000.0},
        )
        assert advised is Precision.AMP_BF16
        assert why == "it is 2.00 times as fast as fp32 with equal validation_accuracy"

    def test_baseline_where_amp_is_slower(self) -> None:
        advised, why = self.advised(amp_fp16={"speed": 300.0})
        assert advised is Precision.FP32
        assert why == "amp_fp16 is slower (0.30 times the speed)"

    def test_reason_is_what_is_certain_before_what_may_be_chance(self) -> None:
        values = shifted(-0.01, -0.0, -0.03)
        _, why = self.advised(amp_bf16={"speed": 500.0, "values": values})
        assert why == "amp_bf16 is slower (0.50 times the speed)"
        _, why = self.advised(amp_bf16={"speed": 2000.0, "values": values})
        assert "cannot tell whether that is chance" in why

    def test_baseline_where_nothing_is_faster_by_more_than_the_spread(self) -> None:
        speeds = {"fp32": (900, 1100), "amp_bf16": (1000, 1090)}
        advice = advise(
            findings_of(
                *(run(p, i, speed=x) for p, both in speeds.items() for i, x in enumerate(both))
            )
        )
        assert advice.precision is Precision.FP32
        assert advice.why == "amp_bf16 is not faster by more than the spread"

    def test_precision_that_lost_a_run_is_not_advised(self) -> None:
        runs = [*seeds("fp32", BASE), *seeds("amp_fp16", BASE, speed=3000.0)]
        assert advise(findings_of(*runs)).precision is Precision.AMP_FP16
        advice = advise(findings_of(*runs, run("amp_fp16", 4, last_batch=60, end=LOST)))
        assert advice.precision is Precision.FP32
        assert "amp_fp16 lost a run" in advice.why

    def test_inconclusive_metric_is_part_of_the_advice(self) -> None:
        advice = advise(findings_of(run("fp32"), run("amp_bf16", speed=2000.0)))
        assert advice.precision is Precision.AMP_BF16
        assert "cannot be told with 1 seed: train more before you rely on it" in advice.why
        worse = run("amp_bf16", speed=2000.0, accuracy=0.1)
        assert advise(findings_of(run("fp32"), worse)).precision is Precision.FP32


def test_small_effect_is_none_however_certain() -> None:
    assert Ratio(1.06, 1.05, 1.07, 3, by_seed=True).is_larger
    assert not Ratio(1.02, 1.01, 1.03, 3, by_seed=True).is_larger
    assert Ratio(0.9, 0.89, 0.91, 3, by_seed=True).is_smaller
    assert not Ratio(0.98, 0.97, 0.99, 3, by_seed=True).is_smaller


FP32, FP16 = run("fp32"), run("amp_fp16")


def text_of(findings: Findings) -> str:
    return "\n".join([answer(advise(findings)), *sentences(findings)])


def pairs(findings: Findings) -> list[tuple[str, str]]:
    """Each precision, and what it is compared with."""
    return [(c.precision.value, c.against.value) for c in findings.comparisons]


@pytest.mark.parametrize("accuracy", [math.nan, math.inf, -math.inf])
def test_run_whose_compared_metric_is_not_finite_has_failed(accuracy: float) -> None:
    """The searcher's metric, the loss, is finite."""
    broken = run("amp_fp16", 3, accuracy=accuracy, loss=1.0)
    others = (run(p, s) for p in ("fp32", "amp_fp16") for s in (1, 2))
    findings = findings_of(*others, broken)
    (failed,) = [each for each in findings.runs if each.state is RunState.FAILED]
    assert failed.name == broken.name
    assert failed.reason == f"validation_accuracy is {accuracy} at the end"


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e308, 10**400, -1])
def test_odd_speed_or_memory_counts_for_nothing(number: float) -> None:
    odd = {"samples_per_second": number, "watch_peak_memory_mib": number}
    (compared,) = findings_of(FP32, run("amp_fp16", trained=odd)).comparisons
    assert compared.memory is None


class TestDifferences:
    @pytest.mark.parametrize(
        ("changes", "key"),
        [
            *(
                ({"settings": {key: value}}, f"{key}: ")
                for key, value in {
                    "hyperparameters.learning_rate": 0.01,
                    "hyperparameters.global_batch_size": 32,
                    "hyperparameters.amp.fp32_modules": ["^head$"],
                    "hyperparameters.trial": "trials.resnet50:ResNet50Trial",
                    "hyperparameters.training.max_length.batches": 90,
                    "data.classes": 100,
                    "resources.slots_per_trial": 2,
                    "searcher.metric": "x",
                }.items()
            ),
            ({"machine": {"torch": "2.7.0"}}, "torch: 2.6.0 in"),
            ({"device": "NVIDIA A100"}, "device: NVIDIA H100 in"),
            ({"machine": {"slots": 2}}, "slots: 1 in"),
        ],
    )
    def test_runs_that_differ_in_more_than_precision_are_not_compared(
        self, changes: dict[str, Any], key: str
    ) -> None:
        with pytest.raises(ReportError, match="cannot be compared: 1 problem\n") as caught:
            findings_of(FP32, run("amp_fp16", 2, **changes))
        message = str(caught.value)
        assert f"  - {key}" in message
        assert "fp32, seed 1 (fp32-1)" in message
        assert "amp_fp16, seed 2 (amp_fp16-2)" in message

    @pytest.mark.parametrize(
        "settings",
        [
            {"name": "another"},
            {"searcher.name": "grid"},
            *({f"hyperparameters.amp.{key}": 8.0} for key in SCALER_KEYS),
        ],
    )
    def test_runs_may_differ_in_names_and_scaler_settings(
        self, settings: Mapping[str, Any]
    ) -> None:
        assert findings_of(FP32, run("amp_fp16", 2, settings=settings)).comparisons

    def test_differences_within_a_precision_are_reported(self) -> None:
        low = run("amp_fp16", 2, settings={"hyperparameters.amp.init_scale": 8.0})
        newer = run("amp_fp16", 3, versions={"python": "3.12.1"})
        shown = text_of(findings_of(FP32, FP16, low, newer))
        assert "the runs in amp_fp16 differ in init_scale: 65536.0, 8.0" in shown
        assert "the runs differ in python: 3.11.7, 3.12.1" in shown
        assert "differ in" not in text_of(findings_of(FP32, FP16))

    def test_all_differences_are_named_at_once_with_the_runs_of_each_value(self) -> None:
        changes = {"hyperparameters.learning_rate": 0.01, "data.classes": 1}
        with pytest.raises(ReportError, match="2 problems") as caught:
            findings_of(
                *(run("fp32", seed) for seed in (1, 2, 3)), run("amp_fp16", settings=changes)
            )
        assert "and 1 more; 0.01 in amp_fp16, seed 1" in str(caught.value)


def test_duplicate_seed_is_an_error_that_names_both_runs() -> None:
    with pytest.raises(ReportError, match="fp32 has finished 2 times with seed 1: one, other"):
        findings_of(run("fp32", name="one"), run("fp32", name="other"), FP16)


@pytest.mark.parametrize("end", [None, LOST])
def test_duplicate_seed_is_allowed_if_one_run_was_killed_or_failed(
    end: dict[str, str] | None,
) -> None:
    assert findings_of(FP32, run("fp32", last_batch=50, end=end), FP16).comparisons


class TestMissing:
    def test_one_precision_is_an_error(self) -> None:
        with pytest.raises(ReportError, match="all runs are fp32 and there is nothing to compare"):
            findings_of(FP32, run("fp32", 2))

    def test_no_baseline_is_an_error(self) -> None:
        amp = FP16, run("amp_bf16")
        with pytest.raises(ReportError, match=r"no baseline.*of fp32 or tf32 a finished run"):
            findings_of(*amp)
        assert pairs(findings_of(*amp, run("tf32"))) == [("amp_fp16", "tf32"), ("amp_bf16", "tf32")]

    def test_nothing_finished_is_an_error_that_says_what_there_is(self) -> None:
        with pytest.raises(ReportError, match="no run has finished; left out: fp32, seed 1"):
            findings_of(run("fp32", last_batch=50))
        failed = (run(p, last_batch=50, end=LOST) for p in ("fp32", "amp_fp16"))
        with pytest.raises(ReportError, match=r"no run has finished: 100% of the optimizer"):
            findings_of(*failed)

    def test_metric_that_not_all_report_is_an_error(self) -> None:
        with pytest.raises(
            ReportError, match=r"--metric: fvd is not .*: validation_accuracy, validation_loss"
        ):
            findings_of(FP32, FP16, metric="fvd")
        assert findings_of(FP32, FP16).metric == "validation_accuracy"
        assert findings_of(FP32, FP16, metric="validation_loss").metric == "validation_loss"


class TestDevice:
    def test_tf32_of_a_cpu_is_shown_and_not_compared(self) -> None:
        speeds = {"fp32": 1000.0, "tf32": 700.0, "amp_bf16": 300.0}
        runs = [run(p, device=CPU, speed=speed) for p, speed in speeds.items()]
        findings = findings_of(*runs)
        assert pairs(findings) == [("amp_bf16", "fp32")]
        shown = text_of(findings)
        for words in (
            "tf32 is fp32 on this device",
            "that its speed is 0.70x",
            "on a CPU speed drifts",
            "speed 0.30x",
            "slower (3.3 times the time)",
        ):
            assert words in shown
        with pytest.raises(ReportError, match="all runs are fp32 and tf32, which is fp32 on this"):
            findings_of(*runs[:2])

    def test_tf32_of_a_gpu_is_compared_with_both_sides(self) -> None:
        """Negative control."""
        findings = findings_of(FP32, run("tf32"), FP16, run("amp_bf16"))
        with_fp32 = [(p, "fp32") for p in ("tf32", "amp_fp16", "amp_bf16")]
        assert pairs(findings) == [*with_fp32, ("amp_fp16", "tf32"), ("amp_bf16", "tf32")]
        assert "tf32 is fp32" not in text_of(findings)
        assert "on a CPU" not in text_of(findings)

    def test_loop_that_waits_for_data_is_reported(self) -> None:
        waits = run("amp_fp16", speed=[1000.0], trained={"watch_data_wait_share": 0.6})
        words = "waits for data more than 20% of the time"
        assert f"{words} (amp_fp16 60%)" in text_of(findings_of(FP32, waits))
        assert words not in text_of(findings_of(FP32, run("amp_fp16", speed=[1000.0])))


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ([0.973], "audit: amp_fp16, seed 1 (amp_fp16-1) computed 97.3% of the FLOPs"),
        ([0.926, 0.926], "audit: amp_fp16 (seed 1, seed 2) computed 92.6% of the FLOPs"),
        ([None], "whether the precision was on is unknown: amp_fp16, seed 1 (amp_fp16-1)"),
        ([1.0], "audit: every finished run computed all products"),
    ],
)
def test_audit_is_one_sentence(shares: list[float | None], sentence: str) -> None:
    amp = (run("amp_fp16", seed, audit_share=share) for seed, share in enumerate(shares, 1))
    shown = text_of(findings_of(FP32, run("fp32", 2), *amp))
    assert sentence in shown
    assert shown.count("audit: ") == ("audit: " in sentence)


class TestEnd:
    def test_healthy_run_that_was_stopped_after_a_skipped_step_is_no_failure(self) -> None:
        """The newest batch overflowed at the floor of the scale; then somebody stopped the run."""
        skipped = {"loss": math.nan, "watch_consecutive_skips": 1, "loss_scale_log2": 0.0}
        end = {"state": "stopped", "reason": "stopped by SIGTERM"}
        stopped = run("amp_fp16", 2, last_batch=60, trained=skipped, end=end)
        assert stopped.state is RunState.STOPPED
        assert stopped.reason == "60 of 100 batches: stopped by SIGTERM"
        amp = (run("amp_fp16", seed, speed=2000.0) for seed in (1, 3))
        findings = findings_of(FP32, run("fp32", 3), *amp, stopped)
        assert findings.left_out == [f"{stopped.short_name}: {stopped.reason}"]
        assert advise(findings).precision.value == "amp_fp16"

    @pytest.mark.parametrize(
        ("options", "state", "reason"),
        [
            (
                {"last_batch": 60, "end": LOST},
                RunState.FAILED,
                f"{LOST['reason']}; it ended after 60 of 100 batches",
            ),
            *(
                (
                    {"last_batch": 60, "trained": trained},
                    RunState.RUNNING,
                    "60 of 100 batches: it is running, or was killed",
                )
                for trained in ({}, {"loss": math.nan, "watch_consecutive_skips": 51})
            ),
            ({"end": {"state": "stopped", "reason": "stopped"}}, RunState.COMPLETED, ""),
            ({"end": {"state": "failed", "reason": "disk full"}}, RunState.FAILED, "disk full"),
            ({"loss": math.nan}, RunState.FAILED, "validation_loss is nan at the end"),
        ],
        ids=["lost", "killed", "killed in NaN", "stopped at its end", "failed", "not finite"],
    )
    def test_end_is_judged_by_record_and_reports(
        self, options: dict[str, Any], state: RunState, reason: str
    ) -> None:
        ended = run("amp_fp16", **options)
        assert (ended.state, ended.reason) == (state, reason)

    def test_length_in_epochs_is_counted_in_epochs(self, tmp_path: Path) -> None:
        length = {"hyperparameters.training.max_length": {"batches": None, "epochs": 5}}
        folder = write_run(tmp_path / "a", "fp32", 1, settings=length)
        assert read_run(folder).state is RunState.RUNNING
        lines = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(lines.replace("{", '{"epochs": 5, '))
        assert read_run(folder).state is RunState.COMPLETED
        (folder / "metrics.jsonl").write_text(lines)
        RunFolder(folder).end(RunState.COMPLETED)
        assert read_run(folder).state is RunState.COMPLETED

    def test_other_metric_that_is_not_finite_is_no_failure(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "a", "fp32", 1)
        lines = (folder / "metrics.jsonl").read_text()
        assert '"validation_loss"' in lines
        metrics = lines.replace('"validation_loss"', '"perplexity": Infinity, "validation_loss"')
        (folder / "metrics.jsonl").write_text(metrics)
        assert read_run(folder).state is RunState.COMPLETED

    def test_precision_whose_runs_all_failed_is_a_finding(self) -> None:
        seeds = (1, 2, 3)
        lost = (run("amp_fp16", seed, last_batch=60, end=LOST) for seed in seeds)
        findings = findings_of(*(run("fp32", seed) for seed in seeds), *lost)
        shown = text_of(findings)
        assert "amp_fp16: 3 of 3 runs failed: seed 1 (amp_fp16-1): 100% of the optimizer" in shown
        assert "use fp32 here: amp_fp16 has no finished run" in shown
        rows = [row[:2] for row in table(findings)[1]]
        assert rows == [["fp32", "3"], ["amp_fp16", "0, 3 failed"]]

    def test_unfinished_run_is_left_out_and_named_and_its_settings_count_for_nothing(self) -> None:
        changes = {"hyperparameters.learning_rate": 1.0}
        findings = findings_of(FP32, FP16, run("amp_bf16", last_batch=60, settings=changes))
        assert [summary.name for summary in findings.summaries] == ["fp32", "amp_fp16"]
        assert "left out: amp_bf16, seed 1 (amp_bf16-1): 60 of 100 batches" in text_of(findings)


class TestSearch:
    def write(self, root: Path, *precisions: str) -> Path:
        """A search with a trial in each precision, each with a seed of its own."""
        metrics = {"loss_scale_score": 0.0, "validation_loss": 0.1}
        folder = write_study(root / "search", [(1.0, metrics)] * len(precisions))
        shutil.rmtree(folder / "trials")
        for number, precision in enumerate(precisions):
            write_run(folder / "trials" / f"{number:04d}", precision, number)
        return folder

    def test_trials_of_a_search_are_runs(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path, "fp32", "amp_fp16", "fp32", "amp_fp16")
        for path in (folder, folder / "study.db"):
            findings = find([read_source(str(path))])
            assert sorted(run.seed or 0 for run in findings.runs) == [0, 1, 2, 3]
            assert [len(summary.runs) for summary in findings.summaries] == [2, 2]

    def test_search_knows_how_its_trials_ended(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path, "fp32", "amp_fp16")
        for number, end in enumerate((RunState.FAILED, RunState.PRUNED), 2):
            path = write_run(folder / "trials" / f"{number:04d}", "amp_bf16", number, last_batch=60)
            RunFolder(path).end(end, "no memory\nleft")
        assert [(run.state, run.reason) for run in read_search(folder).runs[2:]] == [
            (RunState.FAILED, "no memory left; it ended after 60 of 100 batches"),
            (RunState.PRUNED, "60 of 100 batches: no memory left"),
        ]

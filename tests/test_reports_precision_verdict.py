"""Verdicts of `determined_amp.report.precision_report` on numbers whose answer is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import variance
from typing import Any

import pytest
from scipy import stats  # type: ignore[import-untyped]

from determined_amp.amp.settings import Precision
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
from determined_amp.report.precision_findings import Findings, advise
from determined_amp.report.precision_report import sentences
from determined_amp.runs.run import SEED, Report, Reports, Run
from tests.precisions import CPU, LOST, findings_of, run, seeds

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

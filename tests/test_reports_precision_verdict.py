"""Verdicts of `determined_amp.report.precision_report` on numbers whose answer is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import variance

import pytest
from scipy import stats  # type: ignore[import-untyped]

from determined_amp.amp.settings import Precision
from determined_amp.report import ReportError
from determined_amp.report.precision_comparison import (
    Equivalence,
    Interval,
    Judgement,
    Ratio,
    judge,
    paired,
    speed_ratio,
    welch,
)
from determined_amp.report.precision_findings import Findings, advise, find
from determined_amp.report.precision_report import sentences
from determined_amp.runs.folder import read_run
from determined_amp.runs.run import SEED, Run
from determined_amp.search.search_folder import Search
from tests.precisions import CPU, LOST, found, write_run, write_seeds

BASE = (0.90, 0.91, 0.92)


def shifted(*by: float) -> list[float]:
    return [base + shift for base, shift in zip(BASE, by, strict=True)]


ALIKE = shifted(-0.0001, 0.0, 0.0001)


def of_differences(differences: Sequence[float]) -> Interval:
    return paired(differences, [0.0] * len(differences))


def without_seed(run: Run) -> Run:
    (part,) = run.parts
    settings = {**part.settings, SEED: None}
    return dataclasses.replace(run, parts=(dataclasses.replace(part, settings=settings),))


class TestInterval:
    def test_interval_of_pairs_is_students(self) -> None:
        """By hand: mean 2, deviation 1, t of 2 degrees of freedom 4.303."""
        interval = of_differences([1.0, 2.0, 3.0])
        assert (interval.mean, interval.std, interval.seeds) == (2.0, 1.0, 3)
        quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # of Student's t with 2, in closed form
        assert interval.half_width == pytest.approx(quantile / math.sqrt(3), rel=1e-9)

    def test_interval_of_other_seeds_is_welchs(self) -> None:
        """By hand: both variances, and Welch's degrees of freedom."""
        ours, theirs = [1.0, 2.0, 4.0, 3.5], [0.1, 0.2, 0.15]
        parts = [variance(ours) / 4, variance(theirs) / 3]
        dof = sum(parts) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 2)
        half_width = float(stats.t.ppf(0.975, dof)) * math.sqrt(sum(parts))
        interval = welch(ours, theirs)
        assert interval.half_width == pytest.approx(half_width, rel=1e-9)
        assert interval.std == pytest.approx(math.sqrt(variance(ours) + variance(theirs)))
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
    def findings(self, root: Path, amp: Sequence[float]) -> Findings:
        return found(*write_seeds(root, "fp32", BASE), *write_seeds(root, "amp_fp16", amp))

    @pytest.mark.parametrize(
        ("shifts", "said"),
        [
            ((0.001, 0.0, -0.001), "equal within the margin of 0.003"),
            ((-0.05, -0.051, -0.049), "different, worse"),
            ((0.05, 0.051, 0.049), "different, better"),
            ((-0.01, 0.0, 0.01), "inconclusive with 3 seeds; about "),
        ],
    )
    def test_verdict_is_reported(self, tmp_path: Path, shifts: Sequence[float], said: str) -> None:
        findings = self.findings(tmp_path, shifted(*shifts))
        assert said in "\n".join(sentences(findings))

    def test_pairs_by_seed_see_what_groups_do_not(self, tmp_path: Path) -> None:
        """Seeds differ by 0.01, the precisions by 0.004 in each of them."""
        (comparison,) = self.findings(tmp_path / "a", shifted(0.0039, 0.004, 0.0041)).comparisons
        assert comparison.difference.paired
        assert comparison.verdict is Equivalence.DIFFERENT
        base = write_seeds(tmp_path / "b", "fp32", BASE)
        others = [
            write_run(tmp_path / f"b/{seed}", "amp_fp16", seed, accuracy=value)
            for seed, value in enumerate(shifted(0.0039, 0.004, 0.0041), 11)
        ]
        (comparison,) = found(*base, *others).comparisons
        assert not comparison.difference.paired
        assert comparison.verdict is Equivalence.UNKNOWN

    def test_report_on_one_seed_asks_for_two(self, tmp_path: Path) -> None:
        findings = found(
            write_run(tmp_path / "a", "fp32", 1), write_run(tmp_path / "b", "amp_bf16", 1)
        )
        assert "inconclusive with 1 seed; 2 at least are needed" in "\n".join(sentences(findings))

    def test_report_on_a_difference_without_spread_is_inconclusive(self, tmp_path: Path) -> None:
        findings = self.findings(tmp_path, BASE)
        said = "\n".join(sentences(findings))
        assert "inconclusive with 3 seeds; the difference is the same for all, which leaves" in said

    def test_margin_is_the_users(self, tmp_path: Path) -> None:
        folders = [
            *write_seeds(tmp_path, "fp32", BASE),
            *write_seeds(tmp_path, "amp_fp16", shifted(-0.01, 0.0, 0.01)),
        ]
        assert found(*folders).comparisons[0].verdict is Equivalence.UNKNOWN
        assert found(*folders, margin=0.1).comparisons[0].verdict is Equivalence.EQUAL

    def test_margin_of_a_loss_is_one_percent_and_less_is_better(self, tmp_path: Path) -> None:
        base = write_seeds(tmp_path, "fp32", BASE, loss=2.0)
        worse = [
            write_run(tmp_path / f"{seed}", "amp_fp16", seed, loss=loss)
            for seed, loss in enumerate((2.5, 2.51, 2.52), 1)
        ]
        findings = found(*base, *worse, metric="validation_loss")
        assert findings.margin == pytest.approx(0.02)
        assert "different, worse" in "\n".join(sentences(findings))

    def test_unknown_direction_of_a_metric_has_to_be_given(self, tmp_path: Path) -> None:
        folders = [write_run(tmp_path / p, p, 1) for p in ("fp32", "amp_fp16")]
        for folder in folders:
            lines = (folder / "metrics.jsonl").read_text()
            (folder / "metrics.jsonl").write_text(lines.replace("validation_loss", "f1"))
        with pytest.raises(ReportError, match="larger or a smaller f1 is better is unknown"):
            found(*folders, metric="f1")
        assert not found(*folders, metric="f1", smaller_is_better=False).smaller_is_better

    def test_accuracy_in_percent_has_a_margin_in_percent(self, tmp_path: Path) -> None:
        percent = [100 * value for value in BASE]
        findings = found(
            *write_seeds(tmp_path, "fp32", percent, loss=1.0),
            *write_seeds(tmp_path, "amp_fp16", [value + 0.01 for value in percent], loss=1.0),
        )
        assert findings.margin == pytest.approx(0.3)
        (comparison,) = findings.comparisons
        assert comparison.claims[2].judgement is Judgement.UNMEASURED

    def test_accuracy_of_exactly_one_is_not_in_percent(self, tmp_path: Path) -> None:
        findings = self.findings(tmp_path, (1.0, 1.0, 0.99))
        assert findings.margin == pytest.approx(0.003)
        assert findings.comparisons[0].claims[2].judgement is not Judgement.UNMEASURED

    def test_margin_of_a_negative_metric_is_positive(self, tmp_path: Path) -> None:
        folders = [
            write_run(tmp_path / f"{p}{seed}", p, seed, loss=-2.0)
            for p in ("fp32", "amp_fp16")
            for seed in (1, 2)
        ]
        assert found(*folders, metric="validation_loss").margin == pytest.approx(0.02)

    def test_unknown_seeds_are_not_paired(self, tmp_path: Path) -> None:
        runs = [
            without_seed(read_run(folder))
            for precision in ("fp32", "amp_fp16")
            for folder in write_seeds(tmp_path, precision, BASE)
        ]
        (comparison,) = find([Search("", tuple(runs))]).comparisons
        assert not comparison.difference.paired
        assert comparison.speed is not None
        assert (comparison.speed.pairs, comparison.speed.by_seed) == (9, False)

    @pytest.mark.parametrize(("shift", "is_not_worse"), [(-0.002, True), (-0.02, False)])
    def test_inconclusive_metric_may_be_worse_by_the_margin_only(
        self, tmp_path: Path, shift: float, is_not_worse: bool
    ) -> None:
        folders = [
            write_run(tmp_path / "a", "fp32", 1, accuracy=0.9),
            write_run(tmp_path / "b", "amp_fp16", 1, accuracy=0.9 + shift),
        ]
        (comparison,) = found(*folders).comparisons
        assert comparison.verdict is Equivalence.UNKNOWN
        assert not comparison.is_better
        assert comparison.is_not_worse is is_not_worse

    def test_searcher_knows_the_direction_of_its_metric(self, tmp_path: Path) -> None:
        upwards = {"searcher.smaller_is_better": False}
        folders = [write_run(tmp_path / p, p, 1, settings=upwards) for p in ("fp32", "amp_fp16")]
        assert not found(*folders, metric="validation_loss").smaller_is_better


class TestSpeed:
    def test_speed_is_the_median_of_steady_reports(self, tmp_path: Path) -> None:
        """The first report says 1, and a zero counts for nothing."""
        findings = found(
            write_run(tmp_path / "a", "fp32", 1, speed=[100.0, 0.0, 300.0, 110.0]),
            write_run(tmp_path / "b", "amp_fp16", 1, speed=220.0),
        )
        speeds = [s.speed.median for s in findings.summaries if s.speed]
        assert speeds == [110.0, 220.0]
        ratio = findings.comparisons[0].speed
        assert ratio is not None
        # Of one pair, the range is what its reports make of it.
        assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 220 / 300, 2.2))

    def test_first_report_of_a_resumed_process_is_left_out(self, tmp_path: Path) -> None:
        resumed = {"watch_audit_share": 1.0, "samples_per_second": 9999.0}
        run = write_run(tmp_path / "a", "fp32", 1, speed=[100.0, 7.0], trained=resumed)
        findings = found(run, write_run(tmp_path / "b", "amp_fp16", 1))
        speed = findings.summaries[0].speed
        assert speed is not None
        assert speed.median == 100.0

    def test_ratio_is_over_pairs_of_equal_seed(self, tmp_path: Path) -> None:
        """The machine slows down from seed to seed; in each, AMP is twice as fast."""
        folders = [
            write_run(tmp_path / f"{precision}{seed}", precision, seed, speed=speed * times)
            for precision, times in (("fp32", 1.0), ("amp_fp16", 2.0))
            for seed, speed in ((1, 1000.0), (2, 500.0), (3, 250.0))
        ]
        ratio = found(*folders).comparisons[0].speed
        assert ratio is not None
        assert (ratio.low, ratio.median, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 3)

    def test_speed_of_several_runs_is_their_median(self, tmp_path: Path) -> None:
        """One machine was busy, and one run waited for its data."""
        folders = [
            write_run(
                tmp_path / f"{precision}{seed}",
                precision,
                seed,
                speed=[1000.0 * times],
                trained={"watch_data_wait_share": wait},
            )
            for precision, ratios in (("fp32", (1.0, 1.0, 1.0)), ("amp_fp16", (2.0, 2.2, 9.0)))
            for seed, times, wait in zip((1, 2, 3), ratios, (0.0, 0.1, 0.9), strict=True)
        ]
        findings = found(*folders)
        summary, ratio = findings.summaries[1], findings.comparisons[0].speed
        assert ratio is not None
        assert summary.speed is not None
        assert ratio.median == pytest.approx(2.2)
        assert summary.speed.median == pytest.approx(2200.0)
        assert summary.data_wait_share == pytest.approx(0.1)

    def test_ratio_of_two_pairs_inverts_if_they_are_swapped(self, tmp_path: Path) -> None:
        folders = [
            write_run(tmp_path / f"{precision}{seed}", precision, seed, speed=speed)
            for precision, speeds in (("fp32", (1000.0, 1000.0)), ("amp_fp16", (2000.0, 8000.0)))
            for seed, speed in enumerate(speeds)
        ]
        fp32, fp16 = found(*folders).summaries
        there, back = speed_ratio(fp16, fp32), speed_ratio(fp32, fp16)
        assert there is not None
        assert back is not None
        assert there.median == pytest.approx(4.0)
        assert there.median * back.median == pytest.approx(1.0)

    def test_without_equal_seeds_all_are_paired_with_all(self, tmp_path: Path) -> None:
        folders = [
            write_run(tmp_path / f"{precision}{seed}", precision, seed, speed=speed)
            for precision, seed, speed in (
                *(("fp32", 1, 1000.0), ("fp32", 2, 500.0)),
                *(("amp_fp16", 3, 1000.0), ("amp_fp16", 4, 500.0)),
            )
        ]
        ratio = found(*folders).comparisons[0].speed
        assert ratio is not None
        assert (ratio.low, ratio.high, ratio.pairs, ratio.by_seed) == (0.5, 2.0, 4, False)


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
        self,
        tmp_path: Path,
        speeds: Sequence[float],
        memory: float,
        accuracies: Sequence[float],
        judged: str,
    ) -> None:
        base = write_seeds(tmp_path, "fp32", BASE, speed=1000, memory=1000)
        amp = [
            write_run(tmp_path / str(i), "amp_fp16", i, accuracy=value, speed=speed, memory=memory)
            for i, (value, speed) in enumerate(zip(shifted(*accuracies), speeds, strict=True), 1)
        ]
        (comparison,) = found(*base, *amp).comparisons
        words = {"h": Judgement.HOLDS, "f": Judgement.FAILS, "u": Judgement.UNKNOWN}
        assert [c.judgement for c in comparison.claims] == [words[letter] for letter in judged]

    def test_memory_of_a_cpu_is_not_judged(self, tmp_path: Path) -> None:
        base = write_seeds(tmp_path, "fp32", BASE, device=CPU, memory=1000)
        amp = write_seeds(tmp_path, "amp_fp16", BASE, device=CPU, memory=100)
        (comparison,) = found(*base, *amp).comparisons
        assert comparison.claims[1].judgement is Judgement.UNMEASURED

    def test_claims_are_judged_on_this_repositorys_trials_or_on_request(
        self, tmp_path: Path
    ) -> None:
        other = {"settings": {"hyperparameters.trial": "model_def:MyTrial"}}
        folders = [write_run(tmp_path / p, p, 1, **other) for p in ("fp32", "amp_fp16")]  # type: ignore[arg-type]
        assert not found(*folders).comparisons[0].claims
        assert len(found(*folders, judge_claims=True).comparisons[0].claims) == 3

    def test_range_across_a_limit_cannot_be_told(self) -> None:
        assert judge((1.9, 2.1), 2.0, math.inf) is Judgement.UNKNOWN
        assert judge((-math.inf, math.inf), -0.003, 0.003) is Judgement.UNKNOWN
        assert judge(None, 2.0, math.inf) is Judgement.UNMEASURED

    def test_accuracy_is_judged_whatever_metric_is_compared(self, tmp_path: Path) -> None:
        base = write_seeds(tmp_path, "fp32", BASE)
        amp = write_seeds(tmp_path, "amp_fp16", ALIKE)
        (comparison,) = found(*base, *amp, metric="validation_loss").comparisons
        assert comparison.claims[2].judgement is Judgement.HOLDS


class TestAdvice:
    def advised(self, root: Path, **amp: dict[str, object]) -> tuple[Precision, str]:
        """The advice on three seeds in fp32 at 1000 samples/s, and on other precisions."""
        folders = write_seeds(root, "fp32", BASE)
        for precision, options in amp.items():
            given = {"values": ALIKE, **options}
            folders += write_seeds(root, precision, **given)  # type: ignore[arg-type]  # as given
        advice = advise(found(*folders))
        return advice.precision, advice.why

    def test_fastest_of_those_that_are_not_worse(self, tmp_path: Path) -> None:
        advised, why = self.advised(
            tmp_path,
            tf32={"speed": 1500.0},
            amp_fp16={"speed": 2500.0, "values": shifted(-0.05, -0.051, -0.049)},
            amp_bf16={"speed": 2000.0},
        )
        assert advised is Precision.AMP_BF16
        assert why == "it is 2.00 times as fast as fp32 with equal validation_accuracy"

    def test_baseline_where_amp_is_slower(self, tmp_path: Path) -> None:
        advised, why = self.advised(tmp_path, amp_fp16={"speed": 300.0})
        assert advised is Precision.FP32
        assert why == "amp_fp16 is slower (0.30 times the speed)"

    def test_names_what_is_certain_before_what_may_be_chance(self, tmp_path: Path) -> None:
        values = shifted(-0.01, -0.0, -0.03)
        _, why = self.advised(tmp_path, amp_bf16={"speed": 500.0, "values": values})
        assert why == "amp_bf16 is slower (0.50 times the speed)"
        _, why = self.advised(tmp_path / "faster", amp_bf16={"speed": 2000.0, "values": values})
        assert "cannot tell whether that is chance" in why

    def test_baseline_where_nothing_is_faster_by_more_than_the_spread(self, tmp_path: Path) -> None:
        folders = [
            write_run(tmp_path / f"{precision}{seed}", precision, seed, speed=speed)
            for precision, speeds in (("fp32", (900, 1100)), ("amp_bf16", (1000, 1090)))
            for seed, speed in enumerate(speeds)
        ]
        advice = advise(found(*folders))
        assert advice.precision is Precision.FP32
        assert advice.why == "amp_bf16 is not faster by more than the spread"

    def test_precision_that_lost_a_run_is_not_advised(self, tmp_path: Path) -> None:
        folders = [
            *write_seeds(tmp_path, "fp32", BASE),
            *write_seeds(tmp_path, "amp_fp16", BASE, speed=3000.0),
        ]
        assert advise(found(*folders)).precision is Precision.AMP_FP16
        lost = write_run(tmp_path / "lost", "amp_fp16", 4, last_batch=60, end=LOST)
        advice = advise(found(*folders, lost))
        assert advice.precision is Precision.FP32
        assert "amp_fp16 lost a run" in advice.why

    def test_says_so_if_the_metric_cannot_be_told(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "amp_bf16", 1, speed=2000.0)
        advice = advise(found(one, other))
        assert advice.precision is Precision.AMP_BF16
        assert "cannot be told with 1 seed: train more before you rely on it" in advice.why
        worse = write_run(tmp_path / "c", "amp_bf16", 1, speed=2000.0, accuracy=0.1)
        assert advise(found(one, worse)).precision is Precision.FP32


def test_small_effect_is_none_however_certain() -> None:
    assert Ratio(1.06, 1.05, 1.07, 3, by_seed=True).is_larger
    assert not Ratio(1.02, 1.01, 1.03, 3, by_seed=True).is_larger
    assert Ratio(0.9, 0.89, 0.91, 3, by_seed=True).is_smaller
    assert not Ratio(0.98, 0.97, 0.99, 3, by_seed=True).is_smaller

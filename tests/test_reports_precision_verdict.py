"""Verdicts of `report precision` on numbers whose answer is known, and which runs get one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from determined_amp.amp.settings import SCALER_KEYS, Precision
from determined_amp.report import ReportError
from determined_amp.report.compared_runs import ComparedRuns, compare_runs
from determined_amp.report.precision_comparison import (
    Comparison,
    Effect,
    Equivalence,
    Interval,
    Ratio,
    interval_of,
)
from determined_amp.report.precision_report import precision_sentences, precision_table
from determined_amp.report.recommendation import recommend
from determined_amp.report.sources import read_source
from determined_amp.runs.run import SEED, Report, Reports, Run, RunState
from tests.precisions import CPU, LOST, comparison_of, run, seeds, write_run
from tests.reporting import write_study

BASE = (0.90, 0.91, 0.92)


def shifted(*by: float) -> list[float]:
    return [base + shift for base, shift in zip(BASE, by, strict=True)]


ALIKE = shifted(-0.0001, 0.0, 0.0001)
DOUBTFUL = shifted(-0.01, 0.0, -0.03)
UNSTEADY = [(1, ALIKE[0], 1200.0), (2, ALIKE[1], 990.0), (3, ALIKE[2], 1300.0)]


def findings(amp: Sequence[float] = BASE, **options: Any) -> ComparedRuns:
    """Three seeds in fp32, and others in amp_fp16."""
    return comparison_of(*seeds("fp32", BASE), *seeds("amp_fp16", amp), **options)


def compared(*runs: Run, **options: Any) -> Comparison:
    """The only comparison of some runs."""
    (comparison,) = comparison_of(*runs, **options).comparisons
    return comparison


class TestInterval:
    def test_interval_of_pairs_is_students(self) -> None:
        """By hand: mean 2, deviation 1, t of 2 degrees of freedom 4.303."""
        interval = interval_of([1.0, 2.0, 3.0])
        assert (interval.mean, interval.std, interval.pairs) == (2.0, 1.0, 3)
        quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # of Student's t with 2, in closed form
        half = quantile / math.sqrt(3)
        assert (interval.low, interval.high) == pytest.approx((2.0 - half, 2.0 + half), rel=1e-9)

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
        assert interval_of(differences).verdict(0.003) is verdict

    @pytest.mark.parametrize(
        "interval",
        [interval_of([0.0] * 3), interval_of([1.0] * 3), interval_of([5.0])],
        ids=str,
    )
    def test_interval_of_one_seed_or_without_a_spread_gives_no_verdict(
        self, interval: Interval
    ) -> None:
        assert {interval.verdict(margin) for margin in (0.001, 1000.0)} == {Equivalence.UNKNOWN}


class TestMetric:
    @pytest.mark.parametrize(
        ("amp", "words"),
        [
            (shifted(0.001, 0.0, -0.001), "equal within the margin of 0.003"),
            (shifted(-0.05, -0.051, -0.049), "different, worse"),
            (shifted(0.05, 0.051, 0.049), "different, better"),
            (shifted(-0.01, 0.0, 0.01), "cannot tell yet with 3 seeds (margin 0.003)"),
            (BASE, "cannot tell yet with 3 seeds, between which the difference has no spread"),
            (BASE[:1], "cannot tell yet with 1 seed, which does not show"),
        ],
    )
    def test_verdict_is_reported(self, amp: Sequence[float], words: str) -> None:
        assert words in "\n".join(precision_sentences(findings(amp)))

    @pytest.mark.parametrize(
        ("amp", "more"), [(shifted(-0.01, 0.0, 0.01), 5), (BASE[:1], 5), (ALIKE, None)]
    )
    def test_what_cannot_be_told_yet_says_what_to_type(
        self, amp: Sequence[float], more: int | None
    ) -> None:
        said = "\n".join(precision_sentences(findings(amp)))
        assert (f"compare YAML --seeds {more}`" in said) is (more is not None)

    def test_seeds_that_differ_by_more_than_the_precisions_hide_nothing(self) -> None:
        """Seeds differ by 0.01, the precisions by 0.004 in each of them."""
        (comparison,) = findings(shifted(0.0039, 0.004, 0.0041)).comparisons
        assert comparison.verdict is Equivalence.DIFFERENT

    @pytest.mark.parametrize("seed", [11, None])
    def test_runs_without_a_seed_in_common_are_refused(self, seed: int | None) -> None:
        with pytest.raises(ReportError, match=r"amp_fp16 and fp32 have no seed in common; allowed"):
            comparison_of(run("fp32"), run("amp_fp16", settings={SEED: seed}))

    def test_runs_without_a_partner_of_equal_seed_are_not_compared(self) -> None:
        amp = (run("amp_fp16", seed, speed=speed) for seed, speed in ((2, 2000.0), (7, 9000.0)))
        comparison = compared(*seeds("fp32", BASE), *amp)
        assert comparison.difference.pairs == 1
        assert comparison.speed is not None
        assert (comparison.speed.median, comparison.speed.pairs) == (2.0, 1)

    def test_margin_is_the_users(self) -> None:
        values = shifted(-0.01, 0.0, 0.01)
        assert findings(values).comparisons[0].verdict is Equivalence.UNKNOWN
        assert findings(values, margin=0.1).comparisons[0].verdict is Equivalence.EQUAL

    @pytest.mark.parametrize(
        ("metric", "values", "margin"),
        [
            ("validation_accuracy", {"accuracy": 0.9}, 0.003),
            ("validation_accuracy", {"accuracy": 1.0}, 0.003),
            ("validation_accuracy", {"accuracy": 91.0, "loss": 1.0}, 0.3),  # percent
            ("validation_loss", {"loss": 2.0}, 0.02),
            ("validation_loss", {"loss": -2.0}, 0.02),
        ],
    )
    def test_margin_by_default_is_that_of_the_metric(
        self, metric: str, values: dict[str, Any], margin: float
    ) -> None:
        runs = (run(p, seed, **values) for p in ("fp32", "amp_fp16") for seed in (1, 2))
        found = comparison_of(*runs, metric=metric)
        assert found.margin == pytest.approx(margin)

    @pytest.mark.parametrize(
        ("metric", "settings", "is_better"),
        [
            ("validation_accuracy", {}, True),
            ("validation_loss", {}, False),
            ("validation_loss", {"searcher.smaller_is_better": False}, True),
        ],
    )
    def test_direction_is_that_of_the_searcher_or_of_the_name(
        self, metric: str, settings: dict[str, Any], is_better: bool
    ) -> None:
        values = {"fp32": (0.9, 0.1), "amp_fp16": (0.95, 0.2)}
        runs = (run(p, accuracy=a, loss=b, settings=settings) for p, (a, b) in values.items())
        assert compared(*runs, metric=metric).is_better is is_better

    def test_metric_whose_direction_neither_searcher_nor_name_tell_is_refused(self) -> None:
        reports = Reports([("validation", Report(100, {"f1": 0.5, "validation_loss": 0.1}))])
        runs = [dataclasses.replace(run(p), reports=reports) for p in ("fp32", "amp_fp16")]
        # The searcher's, without an accuracy.
        assert comparison_of(*runs).metric == "validation_loss"
        with pytest.raises(ReportError, match="larger or a smaller f1 is better is unknown"):
            comparison_of(*runs, metric="f1")

    @pytest.mark.parametrize(("shift", "may_be_worse"), [(-0.002, False), (-0.02, True)])
    def test_inconclusive_metric_may_be_worse_by_the_margin_only(
        self, shift: float, may_be_worse: bool
    ) -> None:
        comparison = compared(run("fp32"), run("amp_fp16", accuracy=0.9 + shift))
        assert comparison.verdict is Equivalence.UNKNOWN
        assert not comparison.is_better
        assert comparison.may_be_worse is may_be_worse


class TestSpeed:
    @pytest.mark.parametrize(
        ("fp32", "fp16", "ratio", "effect"),
        [
            # The machine slows down from seed to seed; in each, AMP is twice as fast.
            ((1000.0, 500.0, 250.0), (2000.0, 1000.0, 500.0), (2.0, 2.0, 2.0, 3), Effect.LARGER),
            # The ratio inverts if both are swapped.
            ((1000.0, 1000.0), (2000.0, 8000.0), (4.0, 2.0, 8.0, 2), Effect.UNKNOWN),
            ((2000.0, 8000.0), (1000.0, 1000.0), (0.25, 0.125, 0.5, 2), Effect.UNKNOWN),
            # Of one pair, the range is what its reports make of it; a zero counts for nothing.
            (([100.0, 0.0, 300.0, 110.0],), (220.0,), (2.0, 220 / 300, 2.2, 1), Effect.UNKNOWN),
        ],
    )
    def test_ratio_is_over_pairs_of_runs(
        self, fp32: Sequence[Any], fp16: Sequence[Any], ratio: tuple[float, ...], effect: Effect
    ) -> None:
        base = (run("fp32", seed, speed=speed) for seed, speed in enumerate(fp32, 1))
        amp = (run("amp_fp16", seed, speed=speed) for seed, speed in enumerate(fp16, 1))
        speed = compared(*base, *amp).speed
        assert speed is not None
        assert (speed.median, speed.low, speed.high, speed.pairs) == pytest.approx(ratio)
        assert speed.effect is effect

    def test_speed_of_several_runs_is_their_median(self) -> None:
        """One machine was busy, and one run waited for its data."""
        waits = [{"watch_data_wait_share": wait} for wait in (0.0, 0.1, 0.9)]
        amp = (
            run("amp_fp16", seed, speed=[speed], trained=trained)
            for seed, (speed, trained) in enumerate(
                zip((2000.0, 2200.0, 9000.0), waits, strict=True), 1
            )
        )
        measured = comparison_of(*seeds("fp32", BASE), *amp)
        summary, speed = measured.precisions[1], measured.comparisons[0].speed
        assert speed is not None
        assert summary.speed is not None
        assert (speed.median, summary.speed.median) == (2.2, 2200.0)
        assert summary.data_wait_share == pytest.approx(0.1)

    @pytest.mark.parametrize("number", [math.inf, math.nan, -1, 10**400])
    def test_odd_speed_or_memory_counts_for_nothing(self, number: float) -> None:
        odd = {"samples_per_second": number, "watch_peak_memory_mib": number}
        comparison = compared(FP32, run("amp_fp16", speed=[1000.0, 1.0], trained=odd))
        assert comparison.memory is None
        assert comparison.speed is not None
        assert comparison.speed.median == 1.0

    @pytest.mark.parametrize(
        ("speeds", "of", "memory", "size"),
        [
            ([200.0, 220.0], "2.00 to 2.20 over the reports of one pair", 500.0, "less"),
            ([210.0], "in one pair", 1000.0, "not more"),
        ],
    )
    def test_range_of_one_pair_is_only_given_if_there_is_one(
        self, speeds: list[float], of: str, memory: float, size: str
    ) -> None:
        amp = run("amp_fp16", speed=speeds, memory=memory)
        lines = "\n".join(precision_sentences(comparison_of(run("fp32", speed=[100.0]), amp)))
        assert f"speed 2.10x ({of} of runs): faster" in lines
        assert f"memory {memory / 1000:.2f}x (in one pair of runs): {size}; " in lines

    @pytest.mark.parametrize(
        ("speeds", "word"),
        [
            ((690.0, 630.0, 870.0), "cannot tell yet"),  # of a busy machine
            ((1190.0, 1610.0), "cannot tell yet"),
            ((1090.0, 1270.0, 1600.0), "cannot tell yet"),
            ((690.0, 670.0, 700.0), "slower (1.4 times the time)"),
            ((1190.0, 1200.0), "faster"),
            ((960.0, 990.0, 1000.0), "not faster"),
            ((1020.0, 1021.0, 1022.0), "not faster"),  # by an effect that matters
        ],
    )
    def test_verdict_on_the_speed_is_what_its_pairs_can_tell(
        self, speeds: Sequence[float], word: str
    ) -> None:
        amp = [run("amp_fp16", seed, speed=speed) for seed, speed in enumerate(speeds, 1)]
        base = (run("fp32", seed, speed=1000.0) for seed in range(1, 4))
        said = "\n".join(precision_sentences(comparison_of(*base, *amp)))
        assert f"{len(speeds)} pairs of equal seed): {word};" in said

    def test_small_effect_is_none_however_certain(self) -> None:
        ratios = [
            Ratio(x, x - 0.01, x + 0.01, 3, x - 0.01, x + 0.01) for x in (1.06, 1.02, 0.9, 0.98)
        ]
        effects = [Effect.LARGER, Effect.NOT_LARGER, Effect.SMALLER, Effect.NOT_LARGER]
        assert [ratio.effect for ratio in ratios] == effects


@pytest.mark.parametrize(
    ("amp", "advised", "why"),
    [
        (
            [
                *seeds("tf32", ALIKE, speed=1500.0),
                *seeds("amp_fp16", shifted(-0.05, -0.051, -0.049), speed=2500.0),
                *seeds("amp_bf16", ALIKE, speed=2000.0),
            ],
            Precision.AMP_BF16,
            "it is 2.00 times as fast as fp32 with equal validation_accuracy",
        ),
        (seeds("amp_fp16", ALIKE, speed=300.0), Precision.FP32, "slower (0.30 times the speed)"),
        # What is certain comes before what may be chance.
        (seeds("amp_bf16", DOUBTFUL, speed=500.0), Precision.FP32, "slower (0.50 times the speed)"),
        (seeds("amp_bf16", ALIKE, speed=1010.0), Precision.FP32, "amp_bf16 is not faster by 5%"),
        (
            [*seeds("amp_fp16", ALIKE, speed=3000.0), run("amp_fp16", 4, last_batch=60, end=LOST)],
            Precision.FP32,
            "amp_fp16 lost a run",
        ),
        ([run("amp_fp16", last_batch=60, end=LOST)], Precision.FP32, "has no finished run"),
        (
            [run("amp_bf16", speed=2000.0)],
            Precision.AMP_BF16,
            "cannot be told with 1 seed: train more before you rely on it",
        ),
        ([run("amp_bf16", speed=0.0)], Precision.FP32, "amp_bf16 has no measured speed"),
        (
            seeds("amp_bf16", shifted(0.05, 0.051, 0.049), speed=2000.0),
            Precision.AMP_BF16,
            "it is 2.00 times as fast as fp32 with better validation_accuracy",
        ),
    ],
)
def test_fastest_precision_that_is_not_worse_is_advised(
    amp: Sequence[Run], advised: Precision, why: str
) -> None:
    """On three seeds in fp32 at 1000 samples/s, and others."""
    recommended = recommend(comparison_of(*seeds("fp32", BASE), *amp))
    assert recommended.precision is advised
    assert recommended.answer == f"use {advised.value} here: {recommended.why}"
    assert why in recommended.why


@pytest.mark.parametrize(
    ("amp", "why"),
    [
        (
            [run("amp_bf16", i, accuracy=x, speed=s) for i, x, s in UNSTEADY],
            "whether amp_bf16 is faster, at 1.20x (0.99 to 1.30 over 3 pairs of equal seed); more",
        ),
        (
            seeds("amp_bf16", DOUBTFUL, speed=2000.0),
            "amp_bf16 is 2.00 times as fast, but whether its worse mean validation_accuracy is "
            "chance cannot be told with 3 seeds; more seeds tell: ",
        ),
        ([run("amp_bf16", speed=2000.0, accuracy=0.1)], "chance cannot be told with 1 seed; more"),
    ],
)
def test_what_the_runs_cannot_tell_is_no_answer_but_says_what_to_type(
    amp: Sequence[Run], why: str
) -> None:
    recommended = recommend(comparison_of(*seeds("fp32", BASE), *amp))
    assert recommended.precision is Precision.FP32
    assert recommended.answer == f"cannot tell yet: {recommended.why}; use fp32 until then"
    assert recommended.why.startswith(why) or why in recommended.why
    assert "compare YAML --seeds 5`" in recommended.why


FP32, FP16 = run("fp32"), run("amp_fp16")


def text_of(findings: ComparedRuns) -> str:
    return "\n".join([recommend(findings).answer, *precision_sentences(findings)])


def pairs(findings: ComparedRuns) -> list[tuple[str, str]]:
    """Each precision, and what it is compared with."""
    return [(c.precision.value, c.against.value) for c in findings.comparisons]


class TestDifferences:
    @pytest.mark.parametrize(
        ("changes", "key"),
        [
            *(
                ({"settings": {key: value}}, f"{key}: ")
                for key, value in {
                    "hyperparameters.learning_rate": 0.01,
                    "hyperparameters.amp.fp32_modules": ["^head$"],
                    "hyperparameters.training.max_length.batches": 90,
                    "data.classes": 100,
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
            comparison_of(FP32, run("amp_fp16", 2, **changes))
        message = str(caught.value)
        assert f"  - {key}" in message
        assert "fp32, seed 1 (fp32-1)" in message
        assert "amp_fp16, seed 2 (amp_fp16-2)" in message

    @pytest.mark.parametrize(
        "settings",
        [
            {"name": "another", "searcher.name": "grid"},
            {f"hyperparameters.amp.{key}": 8.0 for key in SCALER_KEYS},
        ],
    )
    def test_runs_may_differ_in_names_and_scaler_settings(
        self, settings: Mapping[str, Any]
    ) -> None:
        assert comparison_of(FP32, run("amp_fp16", settings=settings)).comparisons

    def test_differences_within_a_precision_are_reported(self) -> None:
        low = run("amp_fp16", 2, settings={"hyperparameters.amp.init_scale": 8.0})
        newer = run("amp_fp16", 3, versions={"python": "3.12.1"})
        shown = text_of(comparison_of(FP32, FP16, low, newer))
        assert "differ in init_scale: 65536.0 in amp_fp16, seed 1 (amp_fp16-1); 8.0 in amp" in shown
        assert "differ in python: 3.11.7 in fp32, seed 1 (fp32-1); 3.12.1 in amp_fp16, s" in shown
        assert "differ in" not in text_of(comparison_of(FP32, FP16))

    def test_all_differences_are_named_at_once_with_a_run_of_each_value(self) -> None:
        changes = {"hyperparameters.learning_rate": 0.01, "data.classes": 1}
        with pytest.raises(ReportError, match="2 problems") as caught:
            comparison_of(run("fp32"), run("fp32", 2), run("amp_fp16", settings=changes))
        assert "0.001 in fp32, seed 1 (fp32-1); 0.01 in amp_fp16, seed 1" in str(caught.value)


LOST_RUNS = [run(p, last_batch=50, end=LOST) for p in ("fp32", "amp_fp16")]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (
            [run("fp32", name="one"), run("fp32", name="other"), FP16],
            "twice with seed 1: one, other; give",
        ),
        ([FP32, run("fp32", 2)], "all runs are fp32 and there is nothing to compare"),
        ([FP16, run("amp_bf16")], r"no baseline.*of fp32 or tf32 a finished run"),
        ([run("fp32", last_batch=50)], "no run has finished; left out: fp32, seed 1"),
        ([], "no run has finished; allowed: finished runs"),
        (LOST_RUNS, "no run has finished: 100% of the optimizer"),
        ([run(p, device=CPU) for p in ("fp32", "tf32")], "fp32 and tf32, which is fp32 on this"),
    ],
)
def test_runs_without_anything_to_compare_are_an_error_that_says_why(
    runs: Sequence[Run], words: str
) -> None:
    with pytest.raises(ReportError, match=words):
        comparison_of(*runs)


@pytest.mark.parametrize("end", [None, LOST])
def test_duplicate_seed_is_allowed_if_one_run_was_killed_or_failed(
    end: dict[str, str] | None,
) -> None:
    assert comparison_of(FP32, run("fp32", last_batch=50, end=end), FP16).comparisons


def test_metric_is_the_accuracy_where_all_report_it_or_the_users() -> None:
    assert comparison_of(FP32, FP16).metric == "validation_accuracy"
    assert comparison_of(FP32, FP16, metric="validation_loss").metric == "validation_loss"
    with pytest.raises(ReportError, match=r"--metric: fvd is not .*: validation_accuracy, val"):
        comparison_of(FP32, FP16, metric="fvd")


class TestDevice:
    def test_tf32_of_a_cpu_is_shown_and_not_compared(self) -> None:
        speeds = {"fp32": 1000.0, "tf32": 700.0, "amp_bf16": 300.0}
        findings = comparison_of(*(run(p, device=CPU, speed=s) for p, s in speeds.items()))
        assert pairs(findings) == [("amp_bf16", "fp32")]
        assert "tf32 is fp32 on this device" in text_of(findings)

    def test_tf32_of_a_gpu_is_compared_with_both_sides(self) -> None:
        """Negative control."""
        findings = comparison_of(FP32, run("tf32"), FP16, run("amp_bf16"))
        with_fp32 = [(p, "fp32") for p in ("tf32", "amp_fp16", "amp_bf16")]
        assert pairs(findings) == [*with_fp32, ("amp_fp16", "tf32"), ("amp_bf16", "tf32")]
        assert "tf32 is fp32" not in text_of(findings)
        without = comparison_of(run("tf32"), FP16, run("amp_bf16"))
        assert pairs(without) == [("amp_fp16", "tf32"), ("amp_bf16", "tf32")]

    def test_loop_that_waits_for_data_is_reported(self) -> None:
        waits = run("amp_fp16", speed=[1000.0], trained={"watch_data_wait_share": 0.6})
        words = "waits for data more than 20% of the time"
        assert f"{words} (amp_fp16 60%)" in text_of(comparison_of(FP32, waits))
        assert words not in text_of(comparison_of(FP32, run("amp_fp16", speed=[1000.0])))


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ([0.973, 0.926], "audit: amp_fp16 computed at least 92.6% of the FLOPs"),
        ([0.9999], "audit: amp_fp16 computed at least 99.9% of the FLOPs"),
        ([None], "whether the precision was on is unknown: amp_fp16, seed 1 (amp_fp16-1)"),
        ([1.0], "audit: every finished run computed all products"),
    ],
)
def test_audit_is_one_sentence(shares: list[float | None], sentence: str) -> None:
    amp = (run("amp_fp16", seed, audit_share=share) for seed, share in enumerate(shares, 1))
    found = comparison_of(FP32, run("fp32", 2), *amp)
    shown = text_of(found)
    assert sentence in shown
    assert shown.count("audit: ") == ("audit: " in sentence)


def test_steps_of_several_optimizers_are_added_up() -> None:
    """As in a GAN, whose metrics have the number of the optimizer in their name."""
    own = {"watch_applied_steps_0": 98, "watch_applied_steps_1": 90, "skipped_steps_1": 10}
    runs = (run(p, trained=own) for p in ("fp32", "amp_fp16"))
    made = [dataclasses.replace(one, reports=without_single_counts(one)) for one in runs]
    heads, rows = precision_table(comparison_of(*made))
    shown = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [(row["applied steps"], row["skipped"]) for row in shown] == [("188", "10")] * 2


def test_metric_that_is_named_like_another_column_has_its_own() -> None:
    """A classifier may report its precision."""
    made = []
    for one in (FP32, FP16):
        reports = Reports([("validation", Report(100, {"precision": 0.75}))])
        settings = {**one.settings, "searcher.metric": "precision"}
        parts = (dataclasses.replace(one.parts[0], settings=settings),)
        made.append(dataclasses.replace(one, reports=reports, parts=parts))
    heads, rows = precision_table(comparison_of(*made, metric="precision"))
    assert heads[:3] == ["precision", "runs", "precision"]
    assert [row[:3] for row in rows] == [["fp32", "1", "0.75"], ["amp_fp16", "1", "0.75"]]


def without_single_counts(run: Run) -> Reports:
    """The reports of a run as if it had no single optimizer."""
    assert run.reports.training is not None
    single = ("watch_applied_steps", "skipped_steps")
    metrics = {n: v for n, v in run.reports.training.metrics.items() if n not in single}
    validations = [("validation", report) for report in run.reports.validations]
    return Reports([*validations, ("training", Report(100, metrics))])


@pytest.mark.parametrize("accuracy", [math.nan, -math.inf])
def test_run_whose_compared_metric_is_not_finite_has_failed(accuracy: float) -> None:
    """The searcher's metric, the loss, is finite."""
    broken = run("amp_fp16", 3, accuracy=accuracy, loss=1.0)
    others = (run(p, s) for p in ("fp32", "amp_fp16") for s in (1, 2))
    findings = comparison_of(*others, broken)
    (failed,) = [each for each in findings.runs if each.state is RunState.FAILED]
    assert failed.name == broken.name
    assert failed.reason == f"validation_accuracy is {accuracy} at the end"


def test_healthy_run_that_was_stopped_after_a_skipped_step_is_left_out_and_no_failure() -> None:
    """The newest batch overflowed at the floor of the scale; then somebody stopped the run."""
    skipped = {"loss": math.nan, "watch_consecutive_skips": 1, "loss_scale_log2": 0.0}
    end = {"state": "stopped", "reason": "stopped by SIGTERM"}
    stopped = run("amp_fp16", 2, last_batch=60, trained=skipped, end=end)
    amp = (run("amp_fp16", seed, speed=2000.0) for seed in (1, 3))
    findings = comparison_of(FP32, run("fp32", 3), *amp, stopped)
    assert findings.left_out == [f"{stopped.short_name}: 60 of 100 batches: stopped by SIGTERM"]
    assert recommend(findings).precision.value == "amp_fp16"


def test_precision_whose_runs_all_failed_is_a_finding() -> None:
    lost = (run("amp_fp16", seed, last_batch=60, end=LOST) for seed in (1, 2, 3))
    findings = comparison_of(*seeds("fp32", BASE), *lost)
    shown = text_of(findings)
    assert "amp_fp16: 3 of 3 runs failed: seed 1 (amp_fp16-1): 100% of the optimizer" in shown
    heads, rows = precision_table(findings)
    assert [row[:2] for row in rows] == [["fp32", "3"], ["amp_fp16", "0, 3 failed"]]
    assert [row[heads.index("audit")] for row in rows] == ["100.0%", ""]


def test_unfinished_run_is_left_out_and_named_and_its_settings_count_for_nothing() -> None:
    changes = {"hyperparameters.learning_rate": 1.0}
    findings = comparison_of(FP32, FP16, run("amp_bf16", last_batch=60, settings=changes))
    assert [same.name for same in findings.precisions] == ["fp32", "amp_fp16"]
    assert "left out: amp_bf16, seed 1 (amp_bf16-1): 60 of 100 batches" in text_of(findings)


def test_run_that_changed_its_precision_at_a_resume_counts_for_neither() -> None:
    mixed = run("fp32", 2)
    (part,) = mixed.parts
    name = "hyperparameters.amp.precision"
    later = dataclasses.replace(part, first_batch=80, settings={**part.settings, name: "amp_bf16"})
    findings = comparison_of(FP32, FP16, dataclasses.replace(mixed, parts=(part, later)))
    assert findings.runs == [FP32, FP16]
    (left_out,) = findings.left_out
    assert f"{name} changed at a resume: fp32 from batch 0, amp_bf16 from batch 80" in left_out


def test_trials_of_a_search_are_runs(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "search", [])
    for number, precision in enumerate(("fp32", "amp_fp16", "fp32", "amp_fp16")):
        write_run(folder / "trials" / f"{number:04d}", precision, seed=number // 2)
    for path in (folder, folder / "study.db"):
        findings = compare_runs([read_source(str(path))])
        assert sorted(run.seed or 0 for run in findings.runs) == [0, 0, 1, 1]
        assert [len(same.runs) for same in findings.precisions] == [2, 2]

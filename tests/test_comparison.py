"""Verdicts of `report` on numbers whose answer is known, and which runs get
one.
"""

import dataclasses
import math

import pytest

from determined_amp.amp.errors import UserError
from determined_amp.amp.settings import SCALER_KEYS
from determined_amp.report.answer import answer_of
from determined_amp.report.change import Judgement, change_of
from determined_amp.report.comparison import compare_runs
from determined_amp.report.precision_report import precision_sentences, precision_table
from determined_amp.runs.run import SEED, Report
from determined_amp.search.search_folder import Search
from tests.precisions import CPU, GPU, LOST, comparison_of, run, seeds

ACCURACIES = (0.90, 0.91, 0.92)
FP32, FP16 = run("fp32"), run("amp_fp16")
BASE = seeds("fp32", ACCURACIES)


def shifted(*by):
    return [base + shift for base, shift in zip(ACCURACIES, by, strict=True)]


ALIKE, WORSE = shifted(-0.0001, 0.0, 0.0001), shifted(-0.05, -0.051, -0.049)
BETTER, DOUBTFUL = shifted(0.05, 0.051, 0.049), shifted(-0.01, 0.0, -0.03)


def at_speeds(*speeds, accuracies=ACCURACIES):
    """Runs in amp_fp16 of seeds 1, 2 and so on; those in fp32 train 1000 samples/s."""
    pairs = zip(speeds, accuracies, strict=False)
    return [
        run("amp_fp16", i, speed=s, accuracy=a) for i, (s, a) in enumerate(pairs, 1)
    ]


def text_of(found):
    return "\n".join([answer_of(found).text, *precision_sentences(found)])


def compared(*runs, **options):
    """The only pair of some runs."""
    (pair,) = comparison_of(*runs, **options).pairs
    return pair


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((-0.001, 0.0, 0.001), Judgement.EQUAL),  # half width 0.0025
        ((0.001, 0.0011, 0.0012), Judgement.EQUAL),  # real, and too small to matter
        ((0.01, 0.011, 0.012), Judgement.BETTER),
        ((-0.01, -0.011, -0.012), Judgement.WORSE),
        # Real, but by how much is not known: the interval is 0.0006 to 0.0038.
        ((0.0015, 0.0022, 0.0029), Judgement.UNKNOWN),
        ((-0.002, 0.0, 0.002), Judgement.UNKNOWN),  # no change is not shown either
        ((1.0, 1.0, 1.0), Judgement.BETTER),  # as memory on a GPU
        ((0.1 + 0.2, 0.3, 0.3), Judgement.BETTER),  # but for rounding
        ((0.5,), Judgement.UNKNOWN),
        ((math.inf, 0.0), Judgement.UNKNOWN),  # beyond float64
    ],
)
def test_verdict_is_that_of_an_interval_and_a_margin(differences, verdict):
    """The same change is for the worse where less is better."""
    change = change_of(differences, 0.003, more_is_better=True)
    assert change.judgement is verdict
    opposite = {Judgement.BETTER: Judgement.WORSE, Judgement.WORSE: Judgement.BETTER}
    mirrored = change_of(differences, 0.003, more_is_better=False)
    assert mirrored.judgement is opposite.get(verdict, verdict)


@pytest.mark.parametrize(
    ("amp", "words"),
    [
        (seeds("amp_fp16", ALIKE), "+0.00025): equal (margin 0.003)"),
        (seeds("amp_fp16", DOUBTFUL), "+0.025): cannot tell yet (margin 0.003)"),
        # With a metric of few samples.
        (seeds("amp_fp16", ACCURACIES), "+0 (no interval yet) (margin 0.003)"),
        ([FP16], "amp_fp16 against fp32, 1 pair of equal seed: speed 1.00x (no in"),
        ([FP16], "more seeds tell what is open: `det-amp compare "),
        (at_speeds(1190, 1610), "9.45): cannot tell yet;"),
        (at_speeds(1190, 1200), "1.19x (95 % interval 1.13 to 1.26): better;"),
        (
            seeds("amp_fp16", ALIKE, memory=500.0),
            "memory 0.50x (95 % interval 0.50 to 0.50): better;",
        ),
        (
            [run("amp_fp16", speed=[1000.0], trained={"watch_data_wait_share": 0.6})],
            "waits for data more than 20% of the time (amp_fp16 60%)",
        ),
        (
            [
                FP16,
                run("amp_fp16", 2, settings={"hyperparameters.amp.init_scale": 8.0}),
            ],
            (
                "differ in init_scale: 2^16 in amp_fp16, seed 1 (amp_fp16-1); 2^3 in "
                "amp_fp16, s"
            ),
        ),
        (
            [FP16, run("amp_fp16", 3, versions={"python": "3.12.1"})],
            (
                "differ in python: 3.11.7 in fp32, seed 1 (fp32-1); 3.12.1 in amp_fp16,"
                " seed 3"
            ),
        ),
        (
            [
                run("amp_fp16", seed, audit_share=share)
                for seed, share in ((1, 0.973), (2, 0.926))
            ],
            "audit: amp_fp16 computed at least 92.6% of the FLOPs",
        ),
        (
            [run("amp_fp16", audit_share=None)],
            "whether the precision was on is unknown: amp_fp16, seed 1 (amp_fp16-1)",
        ),
        ([FP16], "audit: every finished run computed all products"),
        (
            [run("amp_fp16", seed, last_batch=60, end=LOST) for seed in (1, 2)],
            "amp_fp16: 2 of 2 runs failed: seed 1 (amp_fp16-1): 100% of the optimizer",
        ),
        # Its settings count for nothing.
        (
            [FP16, run("amp_bf16", last_batch=60, settings={"data.classes": 5})],
            "left out: amp_bf16, seed 1 (amp_bf16-1): 60 of 100 batches",
        ),
        (
            [dataclasses.replace(FP16, shares_device=True)],
            "their speeds are left out; compare speeds with one worker",
        ),
    ],
)
def test_report_says_what_the_runs_show(amp, words):
    """The report is on three seeds in fp32 at 1000 samples/s, and on these runs."""
    assert words in text_of(comparison_of(*BASE, *amp))


def test_report_on_equal_runs_mentions_no_fault():
    said = text_of(comparison_of(*BASE, *seeds("amp_fp16", ALIKE)))
    for words in (
        "--seeds",
        "waits for data",
        "differ in",
        "failed",
        "left out",
        "tf32",
        "unknown",
    ):
        assert words not in said
    assert said.count("audit: ") == 1


@pytest.mark.parametrize("size", [{}, {"global_batch_size": None}])
def test_report_on_runs_without_a_batch_size_says_that_it_is_unknown(size):
    own = {**size, "training": {"max_length": {"batches": 100}}}
    runs = (
        run(name, settings={"hyperparameters": {**own, "amp": {"precision": name}}})
        for name in ("fp32", "amp_fp16")
    )
    assert "100 batches of unknown size, 2026-" in text_of(comparison_of(*runs))


def test_margin_of_the_user_decides_the_verdict():
    pair = compared(*BASE, *seeds("amp_fp16", DOUBTFUL), margin=0.1)
    assert pair.metric.judgement is Judgement.EQUAL


@pytest.mark.parametrize(
    ("metric", "values", "margin"),
    [
        ("validation_accuracy", {"accuracy": 1.0}, 0.003),
        ("validation_accuracy", {"accuracy": 91.0, "loss": 1.0}, 0.3),  # percent
        ("validation_loss", {"loss": 2.0}, 0.02),
        ("validation_loss", {"loss": -2.0}, 0.02),
    ],
)
def test_margin_by_default_is_that_of_the_metric(metric, values, margin):
    runs = (run(p, seed, **values) for p in ("fp32", "amp_fp16") for seed in (1, 2))
    assert comparison_of(*runs, metric=metric).margin == pytest.approx(margin)


@pytest.mark.parametrize(
    ("metric", "settings", "is_better"),
    [
        (None, {}, True),  # the accuracy, which all report
        ("validation_loss", {}, False),
        ("validation_loss", {"searcher.smaller_is_better": False}, True),
    ],
)
def test_direction_is_that_of_the_searcher_or_of_the_name(metric, settings, is_better):
    values = {"fp32": (0.9, 0.1), "amp_fp16": (0.95, 0.2)}
    runs = (
        run(p, accuracy=a, loss=b, settings=settings) for p, (a, b) in values.items()
    )
    assert (compared(*runs, metric=metric).metric.gain > 0) is is_better


@pytest.mark.parametrize(
    ("fp32", "fp16", "ratio"),
    [
        # The machine slows down from seed to seed; in each, AMP is twice as fast.
        ((1000.0, 500.0, 250.0), (2000.0, 1000.0, 500.0), (2.0, 3)),
        # The geometric mean, so that the ratio inverts if both are swapped.
        ((1000.0, 1000.0), (2000.0, 8000.0), (4.0, 2)),
        # Of a run the median of its reports; a zero counts for nothing.
        (([100.0, 0.0, 300.0, 110.0],), (220.0,), (2.0, 1)),
    ],
)
def test_ratio_is_over_pairs_of_runs(fp32, fp16, ratio):
    base = (run("fp32", seed, speed=speed) for seed, speed in enumerate(fp32, 1))
    pair = compared(*base, *at_speeds(*fp16))
    assert pair.speed is not None
    assert (pair.times_as_fast, pair.speed.pairs) == pytest.approx(ratio)


def test_one_seed_tells_nothing_and_the_report_says_what_to_type():
    found = comparison_of(FP32, run("amp_bf16", accuracy=0.5, speed=9000.0, memory=9.0))
    (pair,) = found.pairs
    for change in (pair.speed, pair.memory, pair.metric):
        assert change is not None
        assert change.judgement is Judgement.UNKNOWN
    said = text_of(found)
    assert said.startswith("cannot tell yet: whether amp_bf16 is faster, at 9.")
    assert said.count("cannot tell yet") == 1
    typed = (
        "more seeds tell what is open: `det-amp compare YAML --seeds 5`, or 5 values"
    )
    assert said.count(typed) == 1
    for word in ("not faster", "slower", "worse", "equal", "better"):
        assert word not in said.replace("of equal seed", "")


def test_share_of_waiting_is_the_median_of_the_runs():
    amp = [
        run("amp_fp16", seed, speed=[1.0], trained={"watch_data_wait_share": share})
        for seed, share in ((1, 0.0), (2, 0.1), (3, 0.9))
    ]
    _, same = comparison_of(*BASE, *amp).precisions
    assert same.data_wait_share == pytest.approx(0.1)


def test_run_whose_compared_metric_is_not_finite_has_failed():
    """The searcher's metric, the loss, is finite."""
    found = comparison_of(FP32, FP16, run("amp_fp16", 3, accuracy=math.nan, loss=1.0))
    (failed,) = found.precisions[1].failed
    assert failed.reason == "validation_accuracy is nan at the end"


@pytest.mark.parametrize(("device", "is_judged"), [(GPU, True), (CPU, False)])
def test_memory_is_judged_on_a_gpu_alone(device, *, is_judged):
    """On a CPU it is that of the whole process, libraries included."""
    base = seeds("fp32", ACCURACIES, device=device, memory=1000.0)
    amp = seeds("amp_bf16", ACCURACIES, device=device, memory=500.0)
    found = comparison_of(*base, *amp)
    (pair,) = found.pairs
    assert (pair.memory is not None) is is_judged
    assert ("; memory 0.50x" in text_of(found)) is is_judged


@pytest.mark.parametrize(
    ("amp", "advised", "why"),
    [
        (
            [
                *seeds("tf32", ALIKE, speed=1500.0),
                *seeds("amp_fp16", WORSE, speed=2500.0),
                *seeds("amp_bf16", ALIKE, speed=2000.0),
            ],
            "amp_bf16",
            "it is 2.00 times as fast as fp32 with equal validation_accuracy",
        ),
        (
            seeds("amp_fp16", ALIKE, speed=300.0),
            "fp32",
            "amp_fp16 is slower: 0.30x (95 % interval 0.30 to 0.30)",
        ),
        (
            seeds("amp_fp16", WORSE, speed=2000.0),
            "fp32",
            "amp_fp16 has a worse validation_accurac",
        ),
        # What is certain comes before what may be chance.
        (
            seeds("amp_bf16", DOUBTFUL, speed=500.0),
            "fp32",
            "amp_bf16 is slower: 0.50x (",
        ),
        (
            seeds("amp_bf16", ALIKE, speed=1010.0),
            "fp32",
            "amp_bf16 is not faster by 5% or more",
        ),
        (
            [
                *seeds("amp_fp16", ALIKE, speed=3000.0),
                run("amp_fp16", 4, last_batch=60, end=LOST),
            ],
            "fp32",
            "amp_fp16 lost a run",
        ),
        (
            [run("amp_fp16", last_batch=60, end=LOST)],
            "fp32",
            "amp_fp16 has no finished run",
        ),
        (
            [run("amp_fp16", last_batch=60)],
            None,
            (
                "all finished runs are in fp32, and one in another precision is"
                " missing: ask again when there is one, or type `det-amp compare YAML`"
            ),
        ),
        (
            [run("amp_bf16", speed=0.0)],
            None,
            "the speed of amp_bf16 was not measured",
        ),
        (
            at_speeds(2000.0, 2010.0, accuracies=[0.898, 0.91]),
            "amp_fp16",
            "2.00 times as fast as fp32, but whether its validation_accuracy is the "
            "same cannot be told with 2 seeds",
        ),
        (
            seeds("amp_bf16", BETTER, speed=2000.0),
            "amp_bf16",
            "with better validation_accuracy",
        ),
        # It is not faster, though whether it is slower cannot be told.
        (
            at_speeds(690.0, 630.0, 840.0, accuracies=ALIKE),
            "fp32",
            "amp_fp16 is not faster by 5% or more: 0.71x (95 % interval 0.50 to 1.03)",
        ),
        (
            at_speeds(1190.0, 1610.0, accuracies=ALIKE),
            None,
            "whether amp_fp16 is faster, at 1.38x (95 % interval 0.20 to 9.45)",
        ),
        (
            seeds("amp_bf16", DOUBTFUL, speed=2000.0),
            None,
            (
                "amp_bf16 is 2.00 times as fast, but whether its worse mean "
                "validation_accuracy is chance cannot be told with 3 seeds"
            ),
        ),
    ],
)
def test_fastest_precision_that_is_not_worse_is_advised(amp, advised, why):
    """The report is on three seeds in fp32 at 1000 samples/s, and these; None: no
    advice yet.
    """
    answer = answer_of(comparison_of(*BASE, *amp))
    certain = f"use {advised} here: {answer.why}"
    unknown = f"cannot tell yet: {answer.why}; use fp32 until then"
    assert answer.text == (certain if advised else unknown)
    assert answer.precision.value == (advised or "fp32")
    assert why in answer.why


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("det-amp compare a.yaml --batches 40", "det-amp compare a.yaml --batches 40"),
        ("det-amp compare --seeds 1 a.yaml", "det-amp compare a.yaml"),
        ("det-amp compare a.yaml --seeds=4", "det-amp compare a.yaml"),
    ],
)
def test_more_seeds_are_asked_for_once_with_the_command_of_the_user(command, more):
    runs = (FP32, run("amp_bf16", speed=2000.0), run("amp_fp16", speed=2000.0))
    said = text_of(compare_runs([Search("", runs, command=command)]))
    assert said.count("--seeds") == 1
    assert f"more seeds tell what is open: `{more} --seeds 5`\n" in said


LOST_RUNS = [run(p, last_batch=50, end=LOST) for p in ("fp32", "amp_fp16")]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (
            [FP32, run("amp_fp16", device="NVIDIA A100")],
            "be compared: 1 problem\n  - device: ",
        ),
        (
            [FP32, run("amp_fp16", 2, machine={"slots": 2})],
            "be compared: 1 problem\n  - slots: ",
        ),
        (
            [FP32, run("fp32", 2), run("amp_fp16", machine={"torch": "2.7.0"})],
            (
                "  - torch: 2.6.0 in fp32, seed 1 (fp32-1); 2.7.0 in amp_fp16, seed 1"
                " (amp_fp16-1)\nallowed: runs that differ in precision, scaler"
                " settings, seed and name only"
            ),
        ),
        (
            [FP32, run("amp_fp16", settings={"data.classes": 1, "data.dataset": "x"})],
            (
                "2 problems\n  - data.classes: 10 in fp32, seed 1 (fp32-1); 1 in"
                " amp_fp16, seed 1"
            ),
        ),
        (
            [run("fp32", name="one"), run("fp32", name="other"), FP16],
            "twice with seed 1: one, oth",
        ),
        (
            [FP16, run("amp_bf16")],
            "there is no baseline; allowed: a finished run in fp32 or tf32:",
        ),
        (
            [run("fp32", last_batch=50)],
            "no finished run can be compared; fp32, seed 1 (fp32-1): 50 of 10",
        ),
        ([], "no finished run can be compared; allowed: a finished run in fp32"),
        (LOST_RUNS, "no finished run can be compared; 100% of the optimizer"),
        (
            [FP32, run("amp_fp16", 11)],
            "amp_fp16 and fp32 have no seed in common; allowed: runs",
        ),
        ([FP32, run("amp_fp16", settings={SEED: None})], "have no seed in common"),
    ],
)
def test_runs_that_cannot_be_compared_are_an_error_that_says_why(runs, words):
    with pytest.raises(UserError) as refused:
        comparison_of(*runs)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "runs",
    [
        [run("amp_fp16", settings={"name": "another", "searcher.name": "grid"})],
        [
            run(
                "amp_fp16",
                settings={f"hyperparameters.amp.{key}": 8.0 for key in SCALER_KEYS},
            )
        ],
        # One of two runs with one seed was killed, or failed.
        [run("fp32", last_batch=50), FP16],
        [run("fp32", last_batch=50, end=LOST), FP16],
    ],
    ids=[
        "names",
        "scaler settings",
        "killed and trained again",
        "failed and trained again",
    ],
)
def test_runs_may_differ_in_names_and_scaler_settings_and_be_trained_again(runs):
    assert comparison_of(FP32, *runs).pairs


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (
            "fvd",
            (
                "--metric: fvd is not in the last validation of every finished run; "
                "allowed: f1, v"
            ),
        ),
        (
            "f1",
            (
                "--metric: whether a larger or a smaller f1 is better is unknown;"
                " allowed: the sear"
            ),
        ),
    ],
)
def test_metric_that_no_comparison_can_use_is_refused(metric, words):
    validations = [Report(100, {"f1": 0.5, "validation_loss": 0.1})]
    runs = [dataclasses.replace(one, validations=validations) for one in (FP32, FP16)]
    # The searcher's, without an accuracy.
    assert comparison_of(*runs).metric == "validation_loss"
    with pytest.raises(UserError) as refused:
        comparison_of(*runs, metric=metric)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    ("runs", "pairs", "is_fp32"),
    [
        (
            [run(p, device=CPU) for p in ("fp32", "tf32", "amp_bf16")],
            [("amp_bf16", "fp32")],
            True,
        ),
        (
            [FP32, run("tf32"), FP16],
            [("tf32", "fp32"), ("amp_fp16", "fp32"), ("amp_fp16", "tf32")],
            False,
        ),
        (
            [run(p, device=CPU) for p in ("tf32", "amp_bf16")],
            [("amp_bf16", "tf32")],
            True,
        ),
    ],
)
def test_tf32_is_compared_where_the_device_has_it(runs, pairs, is_fp32):
    found = comparison_of(*runs)
    assert [(c.precision.value, c.against.value) for c in found.pairs] == pairs
    assert ("tf32 is fp32 on this device" in text_of(found)) is is_fp32


def test_table_shows_the_last_loss_scales_of_float16_alone():
    ends = [
        run("amp_fp16", seed, trained={"loss_scale_log2": log2})
        for seed, log2 in [(1, 15), (2, 16)]
    ]
    plain = [run("fp32", seed, trained={"loss_scale_log2": 0}) for seed in (1, 2)]
    rows = precision_table(comparison_of(*plain, *ends))
    assert [dict(row)["loss scale"] for row in rows] == ["none", "2^15 to 2^16"]

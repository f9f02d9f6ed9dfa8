"""Only runs that can be compared are compared; every guard has its negative control."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from determined_amp.amp.settings import SCALER_KEYS
from determined_amp.report import ReportError
from determined_amp.report.precision_findings import Findings, advise, find
from determined_amp.report.precision_report import answer, sentences, table
from determined_amp.report.sources import read_source
from determined_amp.runs.folder import RunFolder, read_run
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import read_search
from tests.precisions import CPU, LOST, findings_of, run, write_run
from tests.reporting import write_study

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

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
from determined_amp.runs.folder import RunError, RunFolder, read_run
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import read_search
from tests.precisions import CPU, GPU, LOST, found, write_run
from tests.reporting import write_study


def told(findings: Findings) -> str:
    return "\n".join([answer(advise(findings)), *sentences(findings)])


@pytest.mark.parametrize("accuracy", [math.nan, math.inf, -math.inf])
def test_run_whose_compared_metric_is_not_finite_has_failed(
    tmp_path: Path, accuracy: float
) -> None:
    """The searcher's metric, the loss, is finite."""
    runs = [write_run(tmp_path / f"{p}-{s}", p, s) for p in ("fp32", "amp_fp16") for s in (1, 2)]
    broken = write_run(tmp_path / "broken", "amp_fp16", 3, accuracy=accuracy, loss=1.0)
    findings = found(*runs, broken)
    (failed,) = [run for run in findings.runs if run.state is RunState.FAILED]
    assert (failed.name, failed.reason) == (
        str(broken),
        f"validation_accuracy is {accuracy} at the end",
    )


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e308, 10**400, -1])
def test_odd_speed_or_memory_counts_for_nothing(tmp_path: Path, number: float) -> None:
    odd = {"samples_per_second": number, "watch_peak_memory_mib": number}
    findings = found(
        write_run(tmp_path / "a", "fp32", 1), write_run(tmp_path / "b", "amp_fp16", 1, trained=odd)
    )
    (compared,) = findings.comparisons
    assert compared.memory is None


class TestDifferences:
    @pytest.mark.parametrize(
        ("name", "value", "shown"),
        [
            ("hyperparameters.learning_rate", 0.01, "hyperparameters.learning_rate: 0.001 in"),
            ("hyperparameters.global_batch_size", 32, "hyperparameters.global_batch_size: 64 in"),
            (
                "hyperparameters.amp.fp32_modules",
                ["^head$"],
                r"hyperparameters.amp.fp32_modules: not set",
            ),
            (
                "hyperparameters.trial",
                "trials.resnet50:ResNet50Trial",
                "hyperparameters.trial: trials.mlp",
            ),
            ("data.classes", 100, "data.classes: 10 in"),
            ("resources.slots_per_trial", 2, "resources.slots_per_trial: 1 in"),
            ("searcher.metric", "x", "searcher.metric: validation_loss in"),
        ],
    )
    def test_runs_with_another_setting_are_not_compared(
        self, tmp_path: Path, name: str, value: object, shown: str
    ) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "amp_fp16", 2, settings={name: value})
        with pytest.raises(ReportError, match="cannot be compared: 1 problem\n") as caught:
            found(one, other)
        message = str(caught.value)
        assert shown in message
        assert f"fp32, seed 1 ({one})" in message
        assert f"amp_fp16, seed 2 ({other})" in message

    @pytest.mark.parametrize(
        "settings",
        [
            {"name": "another"},
            {"searcher.name": "grid"},
            *({f"hyperparameters.amp.{key}": 8.0} for key in SCALER_KEYS),
        ],
    )
    def test_runs_may_differ_in_names_and_scaler_settings(
        self, tmp_path: Path, settings: Mapping[str, Any]
    ) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "amp_fp16", 2, settings=settings)
        assert found(one, other).comparisons

    def test_differences_within_a_precision_are_reported(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        low = {"hyperparameters.amp.init_scale": 8.0}
        folders = [
            write_run(tmp_path / "b", "amp_fp16", 1),
            write_run(tmp_path / "c", "amp_fp16", 2, settings=low),
            write_run(tmp_path / "d", "amp_fp16", 3, versions={"python": "3.12.1"}),
        ]
        said = told(found(one, *folders))
        assert "the runs in amp_fp16 differ in init_scale: 65536.0, 8.0" in said
        assert "the runs differ in python: 3.11.7, 3.12.1" in said
        assert "differ in" not in told(found(one, folders[0]))

    def test_runs_of_another_length_are_not_compared(self, tmp_path: Path) -> None:
        shorter = {"hyperparameters.training.max_length.batches": 90}
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "amp_fp16", 1, settings=shorter)
        with pytest.raises(ReportError, match=r"max_length.batches: 100 in .*; 90 in "):
            found(one, other)

    @pytest.mark.parametrize(
        ("device", "machine", "shown"),
        [
            (GPU, {"torch": "2.7.0"}, "torch: 2.6.0 in"),
            ("NVIDIA A100", {}, "device: NVIDIA H100 in"),
            (GPU, {"slots": 2}, "slots: 1 in"),
        ],
    )
    def test_runs_on_another_device_or_torch_are_not_compared(
        self, tmp_path: Path, device: str, machine: dict[str, Any], shown: str
    ) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "amp_fp16", 1, device=device, machine=machine)
        with pytest.raises(ReportError, match=shown):
            found(one, other)

    def test_all_differences_are_named_at_once_with_the_runs_of_each_value(
        self, tmp_path: Path
    ) -> None:
        changes = {"hyperparameters.learning_rate": 0.01, "data.classes": 1}
        folders = [write_run(tmp_path / str(seed), "fp32", seed) for seed in (1, 2, 3)]
        other = write_run(tmp_path / "b", "amp_fp16", 1, settings=changes)
        with pytest.raises(ReportError, match="2 problems") as caught:
            found(*folders, other)
        assert "and 1 more; 0.01 in amp_fp16, seed 1" in str(caught.value)


class TestDuplicates:
    def test_duplicate_seed_is_an_error_that_names_both_runs(self, tmp_path: Path) -> None:
        one, other = (write_run(tmp_path / name, "fp32", 1) for name in "ab")
        amp = write_run(tmp_path / "c", "amp_fp16", 1)
        with pytest.raises(ReportError, match="fp32 has finished 2 times with seed 1") as caught:
            found(one, other, amp)
        assert str(one) in str(caught.value)
        assert str(other) in str(caught.value)

    @pytest.mark.parametrize("end", [None, LOST])
    def test_duplicate_seed_is_allowed_if_one_run_is_unfinished(
        self, tmp_path: Path, end: dict[str, str] | None
    ) -> None:
        """It was killed, or it failed."""
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "fp32", 1, last_batch=50, end=end)
        assert found(one, other, write_run(tmp_path / "c", "amp_fp16", 1)).comparisons


class TestMissing:
    def test_one_precision_is_an_error(self, tmp_path: Path) -> None:
        folders = [write_run(tmp_path / str(seed), "fp32", seed) for seed in (1, 2)]
        with pytest.raises(ReportError, match="all runs are fp32 and there is nothing to compare"):
            found(*folders)

    def test_no_baseline_is_an_error(self, tmp_path: Path) -> None:
        folders = [write_run(tmp_path / p, p, 1) for p in ("amp_fp16", "amp_bf16")]
        with pytest.raises(ReportError, match=r"no baseline.*of fp32 or tf32 a finished run"):
            found(*folders)
        baseline = write_run(tmp_path / "tf32", "tf32", 1)
        pairs = found(*folders, baseline).comparisons
        assert [(c.precision.value, c.against.value) for c in pairs] == [
            ("amp_fp16", "tf32"),
            ("amp_bf16", "tf32"),
        ]

    def test_nothing_finished_is_an_error_that_says_what_there_is(self, tmp_path: Path) -> None:
        running = write_run(tmp_path / "a", "fp32", 1, last_batch=50)
        with pytest.raises(ReportError, match="no run has finished; left out: fp32, seed 1"):
            found(running)
        failed = [
            write_run(tmp_path / p, p, 1, last_batch=50, end=LOST) for p in ("fp32", "amp_fp16")
        ]
        with pytest.raises(ReportError, match=r"no run has finished: 100% of the optimizer"):
            found(*failed)

    def test_metric_that_not_all_report_is_an_error(self, tmp_path: Path) -> None:
        folders = [write_run(tmp_path / p, p, 1) for p in ("fp32", "amp_fp16")]
        with pytest.raises(
            ReportError, match=r"--metric: fvd is not .*: validation_accuracy, validation_loss"
        ):
            found(*folders, metric="fvd")
        assert found(*folders).metric == "validation_accuracy"
        assert found(*folders, metric="validation_loss").metric == "validation_loss"


class TestDevice:
    def test_tf32_of_a_cpu_is_shown_and_not_compared(self, tmp_path: Path) -> None:
        folders = [
            write_run(tmp_path / precision, precision, 1, device=CPU, speed=speed)
            for precision, speed in (("fp32", 1000.0), ("tf32", 700.0), ("amp_bf16", 300.0))
        ]
        findings = found(*folders)
        assert [(c.precision.value, c.against.value) for c in findings.comparisons] == [
            ("amp_bf16", "fp32")
        ]
        said = told(findings)
        assert "tf32 is fp32 on this device" in said
        assert "that its speed is 0.70x" in said
        assert "on a CPU speed drifts" in said
        assert "speed 0.30x" in said
        assert "slower (3.3 times the time)" in said
        with pytest.raises(ReportError, match="all runs are fp32 and tf32, which is fp32 on this"):
            found(*folders[:2])

    def test_tf32_of_a_gpu_is_compared_with_both_sides(self, tmp_path: Path) -> None:
        """Negative control."""
        precisions = ("fp32", "tf32", "amp_fp16", "amp_bf16")
        findings = found(*(write_run(tmp_path / p, p, 1) for p in precisions))
        assert [(c.precision.value, c.against.value) for c in findings.comparisons] == [
            ("tf32", "fp32"),
            ("amp_fp16", "fp32"),
            ("amp_bf16", "fp32"),
            ("amp_fp16", "tf32"),
            ("amp_bf16", "tf32"),
        ]
        assert "tf32 is fp32" not in told(findings)
        assert "on a CPU" not in told(findings)

    def test_loop_that_waits_for_data_is_told(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        waits = {"watch_data_wait_share": 0.6}
        other = write_run(tmp_path / "b", "amp_fp16", 1, speed=[1000.0], trained=waits)
        assert "waits for data more than 20% of the time (amp_fp16 60%)" in told(found(one, other))
        assert "waits for data" not in told(
            found(one, write_run(tmp_path / "c", "amp_fp16", 1, speed=[1000.0]))
        )


class TestAudit:
    def test_audit_below_one_is_reported(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "amp_fp16", 1, audit_share=0.973)
        assert f"amp_fp16, seed 1 ({other}) computed 97.3% of the FLOPs" in told(found(one, other))

    def test_audit_below_one_in_several_runs_is_one_sentence(self, tmp_path: Path) -> None:
        runs = [write_run(tmp_path / f"{i}", "fp32", i) for i in (1, 2)]
        runs += [write_run(tmp_path / f"b{i}", "amp_bf16", i, audit_share=0.926) for i in (1, 2)]
        said = told(found(*runs))
        assert "amp_bf16 (seed 1, seed 2) computed 92.6% of the FLOPs" in said
        assert said.count("audit: ") == 1

    def test_missing_audit_is_reported(self, tmp_path: Path) -> None:
        one = write_run(tmp_path / "a", "fp32", 1)
        other = write_run(tmp_path / "b", "amp_fp16", 1, audit_share=None)
        said = told(found(one, other))
        assert f"whether the precision was on is unknown: amp_fp16, seed 1 ({other})" in said
        assert "audit: every" not in said

    def test_audits_that_all_passed_are_one_sentence(self, tmp_path: Path) -> None:
        one, other = (write_run(tmp_path / p, p, 1) for p in ("fp32", "amp_fp16"))
        assert "audit: every finished run computed all products" in told(found(one, other))


class TestEnd:
    def test_end_of_a_run_is_the_recorded_one(self, tmp_path: Path) -> None:
        run = read_run(write_run(tmp_path / "a", "amp_fp16", 1, last_batch=60, end=LOST))
        assert run.state is RunState.FAILED
        assert run.reason == f"{LOST['reason']}; it ended after 60 of 100 batches"

    def test_healthy_run_that_was_stopped_after_a_skipped_step_is_no_failure(
        self, tmp_path: Path
    ) -> None:
        """The newest batch overflowed at the floor of the scale; then somebody stopped the run."""
        skipped = {"loss": math.nan, "watch_consecutive_skips": 1, "loss_scale_log2": 0.0}
        end = {"state": "stopped", "reason": "stopped by SIGTERM"}
        settings = {"last_batch": 60, "trained": skipped, "end": end}
        stopped = write_run(tmp_path / "b", "amp_fp16", 2, **settings)  # type: ignore[arg-type]
        run = read_run(stopped)
        assert run.state is RunState.STOPPED
        assert run.reason == "60 of 100 batches: stopped by SIGTERM"
        base, amp = (
            [write_run(tmp_path / f"{p}{s}", p, s, speed=speed, accuracy=0.9) for s in (1, 3)]
            for p, speed in (("fp32", 1000.0), ("amp_fp16", 2000.0))
        )
        findings = found(*base, *amp, stopped)
        assert findings.left_out == [f"{run.short_name}: {run.reason}"]
        assert advise(findings).precision.value == "amp_fp16"

    @pytest.mark.parametrize("trained", [{}, {"loss": math.nan, "watch_consecutive_skips": 51}])
    def test_run_without_a_recorded_end_is_running_or_was_killed(
        self, tmp_path: Path, trained: dict[str, float]
    ) -> None:
        folder = write_run(tmp_path / "a", "amp_fp16", 1, last_batch=60, trained=trained)
        run = read_run(folder)
        assert run.state is RunState.RUNNING
        assert run.reason == "60 of 100 batches: it is running, or was killed"

    def test_run_that_was_stopped_after_its_last_validation_has_completed(
        self, tmp_path: Path
    ) -> None:
        end = {"state": "stopped", "reason": "stopped by SIGTERM"}
        assert read_run(write_run(tmp_path / "a", "fp32", 1, end=end)).state is RunState.COMPLETED

    def test_error_after_the_last_validation_is_a_failure(self, tmp_path: Path) -> None:
        end = {"state": "failed", "reason": "disk full"}
        run = read_run(write_run(tmp_path / "a", "fp32", 1, end=end))
        assert (run.state, run.reason) == (RunState.FAILED, "disk full")

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

    def test_searchers_metric_that_is_not_finite_at_the_end_is_a_failure(
        self, tmp_path: Path
    ) -> None:
        run = read_run(write_run(tmp_path / "a", "fp32", 1, loss=math.nan))
        assert (run.state, run.reason) == (RunState.FAILED, "validation_loss is nan at the end")

    def test_other_metric_that_is_not_finite_is_no_failure(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "a", "fp32", 1)
        lines = (folder / "metrics.jsonl").read_text()
        assert '"validation_loss"' in lines
        metrics = lines.replace('"validation_loss"', '"perplexity": Infinity, "validation_loss"')
        (folder / "metrics.jsonl").write_text(metrics)
        assert read_run(folder).state is RunState.COMPLETED

    def test_precision_whose_runs_all_failed_is_a_finding(self, tmp_path: Path) -> None:
        base = [write_run(tmp_path / f"a{seed}", "fp32", seed) for seed in (1, 2, 3)]
        lost = [
            write_run(tmp_path / f"b{seed}", "amp_fp16", seed, last_batch=60, end=LOST)
            for seed in (1, 2, 3)
        ]
        findings = found(*base, *lost)
        said = told(findings)
        assert f"amp_fp16: 3 of 3 runs failed: seed 1 ({lost[0]}): 100% of the optimizer" in said
        assert "use fp32 here: amp_fp16 has no finished run" in said
        assert [row[:2] for row in table(findings)[1]] == [
            ["fp32", "3"],
            ["amp_fp16", "0, 3 failed"],
        ]

    def test_unfinished_run_is_left_out_and_named(self, tmp_path: Path) -> None:
        """Its settings count for nothing."""
        one, other = (write_run(tmp_path / p, p, 1) for p in ("fp32", "amp_fp16"))
        changes = {"hyperparameters.learning_rate": 1.0}
        half = write_run(tmp_path / "half", "amp_bf16", 1, last_batch=60, settings=changes)
        findings = found(one, other, half)
        assert [summary.name for summary in findings.summaries] == ["fp32", "amp_fp16"]
        assert f"left out: amp_bf16, seed 1 ({half}): 60 of 100 batches" in told(findings)


class TestSearch:
    def write(self, root: Path, *states: str) -> Path:
        """A search of trials in fp32, amp_fp16 and so on, each with a seed of its own."""
        metrics = {"loss_scale_score": 0.0, "validation_loss": 0.1}
        folder = write_study(root / "search", [(1.0, metrics)] * len(states))
        shutil.rmtree(folder / "trials")
        for number, precision in enumerate(states):
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
            run = write_run(folder / "trials" / f"{number:04d}", "amp_bf16", number, last_batch=60)
            RunFolder(run).end(end, "no memory\nleft")
        ended = [(run.state, run.reason) for run in read_search(folder).runs[2:]]
        assert ended == [
            (RunState.FAILED, "no memory left; it ended after 60 of 100 batches"),
            (RunState.PRUNED, "60 of 100 batches: no memory left"),
        ]


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "{}", '{"state": "finished"}'])
def test_folder_that_is_no_run_is_a_sentence(tmp_path: Path, content: str | None) -> None:
    folder = write_run(tmp_path / "a", "fp32", 1)
    assert read_run(folder).state is RunState.COMPLETED
    if content is None:
        (folder / "run.json").unlink()
    else:
        (folder / "run.json").write_text(content)
    with pytest.raises(
        RunError, match=r"is not a run folder .*allowed: what .*determined_amp train"
    ):
        read_run(folder)


@pytest.mark.parametrize("line", ["[]", "{}", '{"group": "training"}', "3"])
def test_line_that_is_no_report_is_left_out_with_a_warning(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "a", "fp32", 1)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(f"{line}\n{metrics.read_text()}")
    assert read_run(folder).state is RunState.COMPLETED
    assert "left out what is no report, in line 1" in caplog.text


def test_line_cut_off_by_a_kill_ends_the_reports(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fp32", 1)
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines[:-20])
    run = read_run(folder)
    assert (run.state, run.trained_batches) == (RunState.RUNNING, 100)

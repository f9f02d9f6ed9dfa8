"""`determined_amp.report.precision_report` on the trials of a master, here a small HTTP server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from determined_amp.cli import report as precision
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.machine import Machine
from determined_amp.experiment.overrides import with_overrides
from determined_amp.report import ReportError
from determined_amp.report.master_runs import read_experiment
from determined_amp.report.precision_findings import find
from determined_amp.runs.folder import read_run
from determined_amp.runs.run import RunState
from tests.precisions import TRAINED, made_on
from tests.report_master import TRIAL, Master, report, serving
from tests.training import ROOT, run_small

CONFIG = with_overrides(
    read_yaml(str(ROOT / "experiment_configs/mlp/fp32.yaml")),
    ("hyperparameters.training.max_length.batches=100", "searcher.name=grid"),
)
NOTED = {"date": "2026-01-01T00:00:00+00:00", "machine": made_on("NVIDIA H100")}


def trial(number: int, precision: str, **others: Any) -> dict[str, Any]:
    hparams = with_overrides(CONFIG, (f"hyperparameters.amp.precision={precision}",))
    return {**TRIAL, "id": number, "hparams": hparams["hyperparameters"], **others}


def reports_of(number: int, accuracy: float, speed: float) -> list[dict[str, Any]]:
    memory = {"watch_peak_memory_mib": speed, "watch_peak_reserved_memory_mib": speed}
    numbers = {**TRAINED, **memory, "samples_per_second": speed}
    return [
        report(number, 100, "training", numbers),
        report(number, 50, "training", {**numbers, "samples_per_second": 1.0, "epochs": 2}),
        report(number, 100, "validation", {"validation_accuracy": accuracy, "validation_loss": 1}),
    ]


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Master]:
    """Two trials in fp32, two in amp_bf16, 11 to 14."""
    trials = [trial(n, p) for n, p in enumerate(("fp32", "fp32", "amp_bf16", "amp_bf16"), 11)]
    made = Master(CONFIG, trials)
    for number, accuracy, speed in (
        (11, 0.90, 1000.0),
        (12, 0.901, 1010.0),
        (13, 0.90, 2000.0),
        (14, 0.9005, 2020.0),
    ):
        for sent in reports_of(number, accuracy, speed):
            made.reports[sent["group"]].append(sent)
        made.metadata[number] = dict(NOTED)
    with serving(made, monkeypatch, tmp_path):
        yield made


def test_all_trials_are_runs(master: Master) -> None:
    runs = read_experiment(7).runs
    assert [run.precision.value for run in runs] == ["fp32", "fp32", "amp_bf16", "amp_bf16"]
    assert {run.state for run in runs} == {RunState.COMPLETED}
    assert {run.machine.device for run in runs} == {"NVIDIA H100"}
    assert {run.machine.torch for run in runs} == {"2.6.0"}
    assert all(run.machine.on_gpu and run.machine.has_tf32 for run in runs)
    assert [run.metrics["validation_accuracy"] for run in runs] == [0.9, 0.901, 0.9, 0.9005]
    speeds = [run.speed.median for run in runs if run.speed]
    assert speeds == [1000.0, 1010.0, 2000.0, 2020.0]  # whatever the order they came in
    assert runs[0].date == "2026-01-01T00:00:00+00:00"


def test_trial_that_failed_before_its_training_hinders_nothing(master: Master) -> None:
    """An image could not be pulled, so the trial has noted nothing."""
    early = trial(10, "amp_fp16", state="STATE_ERROR")
    master.trials = [early, *master.trials]
    findings = find([read_experiment(7)])
    assert [run.name[-2:] for run in findings.runs if run.state is RunState.FAILED] == ["10"]
    assert findings.machine.on_gpu
    assert findings.machine.device == "NVIDIA H100"


def test_metric_that_is_no_number_is_left_out(master: Master) -> None:
    for sent in master.reports["validation"]:
        sent["metrics"]["validation_metrics"] |= {"per_class": [0.5, 0.5], "note": "text"}
    (run, *_) = read_experiment(7).runs
    assert "per_class" not in run.metrics


def test_seeds_are_those_that_the_trials_noted(master: Master) -> None:
    for number, seed in zip((11, 12, 13, 14), (5, 6, 5, 6), strict=True):
        master.metadata[number]["seed"] = seed
    findings = find([read_experiment(7)])
    assert [run.seed for run in findings.runs] == [5, 6, 5, 6]
    assert findings.comparisons[0].difference.paired


def test_trials_of_different_seeds_are_compared(master: Master) -> None:
    findings = find([read_experiment(7)])
    (comparison,) = findings.comparisons
    assert {run.seed for run in findings.runs} == {None}
    assert not comparison.difference.paired
    assert comparison.speed is not None
    assert comparison.speed.pairs == 4


@pytest.mark.parametrize(
    ("noted", "reason"),
    [
        ({"failure": "60% of the steps were skipped"}, "60% of the steps were skipped"),
        ({}, "its log has the reason"),
    ],
)
def test_trial_that_failed_has_the_reason_that_it_noted(
    master: Master, noted: dict[str, str], reason: str
) -> None:
    master.trials[2] = trial(13, "amp_bf16", state="STATE_ERROR")
    master.metadata[13] |= noted
    run = read_experiment(7).runs[2]
    assert (run.state, run.reason) == (RunState.FAILED, reason)


def ended_early(master: Master, **groups: Mapping[str, Any]) -> None:
    """Let trial 13 have one report of each of these groups, after 60 of 100 batches."""
    for group, reports in master.reports.items():
        own = [report(13, 60, group, groups[group])] if group in groups else []
        master.reports[group] = [*(r for r in reports if r["trialId"] != 13), *own]


def test_trial_that_ended_early_is_no_finished_one(master: Master) -> None:
    """A search's trial that the guard gave up is completed to the platform."""
    ended_early(master, training={**TRAINED, "loss": "NaN"})
    run = read_experiment(7).runs[2]
    assert run.state is RunState.PRUNED
    assert run.reason == "60 of 100 batches: ended early by its search"
    master.metadata[13]["failure"] = "the training loss is nan in amp_bf16"
    run = read_experiment(7).runs[2]
    assert run.state is RunState.INVALID
    assert run.reason == "the training loss is nan in amp_bf16; it ended after 60 of 100 batches"


@pytest.mark.parametrize(
    ("status", "state"),
    [("CANCELED", RunState.STOPPED), ("ACTIVE", RunState.RUNNING), ("ERROR", RunState.FAILED)],
)
def test_state_of_a_trial_that_came_half_way_is_the_masters(
    master: Master, status: str, state: RunState
) -> None:
    master.trials[2] = trial(13, "amp_bf16", state=f"STATE_{status}")
    metrics = {"validation_accuracy": 0.5}
    ended_early(master, training=metrics, validation=metrics)
    assert read_experiment(7).runs[2].state is state


def test_machine_that_no_trial_noted_is_unknown(master: Master) -> None:
    master.metadata = {}
    assert read_experiment(7).runs[0].machine == Machine()


def test_settings_of_a_trial_are_what_was_sampled(master: Master) -> None:
    """A drawn scale is rounded to a power of two, as in the trial itself."""
    space = "hyperparameters.amp.init_scale={type: log, base: 2.0, minval: 0, maxval: 24}"
    precisions = "hyperparameters.amp.precision={type: categorical, vals: [fp32, amp_fp16]}"
    master.config = with_overrides(CONFIG, (space, precisions))
    master.trials[2] = trial(13, "amp_fp16")
    master.trials[2]["hparams"]["amp"]["init_scale"] = 3000.7
    run = read_experiment(7).runs[2]
    assert run.precision.value == "amp_fp16"
    assert run.settings["hyperparameters.amp.init_scale"] == 4096.0


def test_experiment_of_another_entrypoint_is_a_sentence(master: Master) -> None:
    master.trials = [{**TRIAL, "id": 11, "hparams": {"learning_rate": 0.1}}]
    master.reports = {"training": [], "validation": []}
    with pytest.raises(
        ReportError, match=r"hyperparameters.trial: missing(.|\n)*of determined_amp train"
    ):
        read_experiment(7)


def test_run_folder_has_the_same_names_as_a_master(master: Master, tmp_path: Path) -> None:
    """Otherwise runs of both could not be compared."""
    folder = read_run(run_small("mlp/fp32.yaml", tmp_path / "run"))
    assert read_experiment(7).runs[0].settings.keys() == folder.settings.keys()


def test_report_of_a_master_goes_into_runs(
    master: Master,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert precision.main(["precision", "7"]) == 0
    assert "use amp_bf16 here: it is 2.00 times as fast" in capsys.readouterr().out
    assert (tmp_path / "runs/experiment-7/precision.html").exists()

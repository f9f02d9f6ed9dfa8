"""`determined_amp.report.precision_report` on the trials of a master, here a small HTTP server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from determined_amp.cli import report as precision
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.report.master_runs import read_experiment
from determined_amp.report.precision_findings import find
from determined_amp.report.run_folders import read_folder
from determined_amp.report.runs import ReportError, Source, State
from tests.precisions import TRAINED
from tests.report_master import TRIAL, Master, report, serving
from tests.training import ROOT, run_small

CONFIG = with_overrides(
    read_yaml(str(ROOT / "experiment_configs/mlp/fp32.yaml")),
    ("hyperparameters.training.max_length.batches=100", "searcher.name=grid"),
)
NATIVELY = "1 x NVIDIA H100, natively: fp32 yes, tf32 yes, amp_fp16 yes, amp_bf16 yes"
MACHINE = (f"[rank=0] || INFO: determined_amp: {NATIVELY}; torch 2.3.1, Python 3.10.12",)
# What the startup hook printed before the training itself did.
OLD_HOOK = (
    f"[rank=0] || {NATIVELY}",
    "[rank=0] || startup-hook: Python 3.10.12 torch==2.3.1 torchvision==0.18.1 numpy==1.26.4",
)


def read(number: int = 7) -> Source:
    return read_experiment(number, with_settings=True)


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
        made.logs[number] = list(MACHINE)
    with serving(made, monkeypatch, tmp_path):
        yield made


def test_all_trials_are_runs(master: Master) -> None:
    runs = read().runs
    assert [run.precision.value for run in runs] == ["fp32", "fp32", "amp_bf16", "amp_bf16"]
    assert {run.state for run in runs} == {State.FINISHED}
    assert {run.machine.device for run in runs} == {"NVIDIA H100"}
    assert {run.machine.torch for run in runs} == {"2.3.1"}
    assert all(run.machine.on_gpu and run.machine.has_tf32 for run in runs)
    assert [run.metrics["validation_accuracy"] for run in runs] == [0.9, 0.901, 0.9, 0.9005]
    speeds = [run.speed.median for run in runs if run.speed]
    assert speeds == [1000.0, 1010.0, 2000.0, 2020.0]  # whatever the order they came in
    assert runs[0].machine.date == "2026-01-01T00:00:00+00:00"


def test_trial_that_failed_before_its_log_began_hinders_nothing(master: Master) -> None:
    """As on a GPU that refuses amp_bf16, or where an image could not be pulled."""
    early = trial(10, "amp_fp16", state="STATE_ERROR")
    master.trials = [early, *master.trials]
    master.logs[10] = []
    findings = find([read()])
    assert findings.runs[0].state is State.FAILED
    assert findings.machine.on_gpu
    assert findings.machine.device == "NVIDIA H100"


def test_metric_that_is_no_number_is_left_out(master: Master) -> None:
    for sent in master.reports["validation"]:
        sent["metrics"]["validation_metrics"] |= {"per_class": [0.5, 0.5], "note": "text"}
    (run, *_) = read().runs
    assert "per_class" not in run.validation[-1].metrics


def test_seeds_that_a_search_gives_are_known(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    # The length of CONFIG, by which the trials of `master` have finished.
    training = "hyperparameters.training={max_length: {batches: 100}}"
    master.config = with_overrides(read_yaml("hp_search/compare_precisions.yaml"), (training,))
    hparams = master.config["hyperparameters"]
    master.trials = [
        {
            **sent,
            "hparams": {
                **hparams,
                "trial_seed": seed,
                "amp": {**hparams["amp"], "precision": precision},
            },
        }
        for sent, (precision, seed) in zip(
            master.trials, itertools.product(("fp32", "amp_bf16"), (5, 6)), strict=True
        )
    ]
    findings = find([read()])
    assert [run.seed for run in findings.runs] == [5, 6, 5, 6]
    assert findings.comparisons[0].difference.paired


def test_seeds_of_a_search_are_unknown_and_its_trials_are_compared(master: Master) -> None:
    findings = find([read()])
    (comparison,) = findings.comparisons
    assert {run.seed for run in findings.runs} == {None}
    assert not comparison.difference.paired
    assert comparison.speed is not None
    assert comparison.speed.pairs == 4


def test_seed_of_a_single_experiment_is_its_own(master: Master) -> None:
    master.config = with_overrides(CONFIG, ("searcher.name=single",))
    assert {run.seed for run in read().runs} == {20261121}


def test_trial_that_failed_says_why(master: Master) -> None:
    why = "no retry can help: 60% of the optimizer steps were skipped"
    master.trials[2] = trial(13, "amp_bf16", state="STATE_ERROR")
    master.logs[13].append(f"[rank=0] || {why}")
    run = read().runs[2]
    assert (run.state, run.reason) == (State.FAILED, "60% of the optimizer steps were skipped")


def test_trial_without_a_reason_failed_all_the_same(master: Master) -> None:
    master.trials[2] = trial(13, "amp_bf16", state="STATE_ERROR")
    run = read().runs[2]
    assert (run.state, run.reason) == (State.FAILED, "its log has the reason")


@pytest.mark.parametrize(
    "line", ["ERROR: [12] determined_amp.amp.guard: {}", "invalid trial: {}"], ids=["guard", "last"]
)
def test_trial_that_ended_early_is_no_finished_one(line: str, master: Master) -> None:
    """A search's trial that the guard gave up is completed to the platform."""
    master.reports["validation"] = [r for r in master.reports["validation"] if r["trialId"] != 13]
    broken: Mapping[str, Any] = {**TRAINED, "loss": "NaN"}
    training = [r for r in master.reports["training"] if r["trialId"] != 13]
    master.reports["training"] = [*training, report(13, 60, "training", broken)]
    run = read().runs[2]
    assert run.state is State.STOPPED
    assert run.reason == "60 of 100 batches: ended early by its search"
    master.logs[13].append(f"[rank=0] || {line.format('the training loss is nan in amp_bf16')}")
    run = read().runs[2]
    assert run.state is State.FAILED
    assert run.reason == "the training loss is nan in amp_bf16; it ended after 60 of 100 batches"


@pytest.mark.parametrize(
    ("status", "state"),
    [("CANCELED", State.STOPPED), ("ACTIVE", State.UNFINISHED), ("ERROR", State.FAILED)],
)
def test_state_of_a_trial_that_came_half_way_is_the_masters(
    master: Master, status: str, state: State
) -> None:
    master.trials[2] = trial(13, "amp_bf16", state=f"STATE_{status}")
    for group in ("training", "validation"):
        kept = [r for r in master.reports[group] if r["trialId"] != 13]
        master.reports[group] = [*kept, report(13, 60, group, {"validation_accuracy": 0.5})]
    assert read().runs[2].state is state
    assert read_experiment(7).runs[2].state is state


def test_machine_is_read_from_an_older_log_too(master: Master) -> None:
    master.logs[11] = list(OLD_HOOK)
    old, new = read().runs[:2]
    assert old.machine == new.machine
    assert new.machine.versions == {"python": "3.10.12"}


def test_device_that_no_log_names_is_unknown(master: Master) -> None:
    master.logs = {}
    machine = read().runs[0].machine
    assert (machine.device, machine.torch) == ("unknown", "unknown")
    assert machine.on_gpu  # only there, memory is reserved


def test_search_is_the_experiment_with_what_was_sampled(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sampled = with_overrides(
        {"hyperparameters": master.trials[2]["hparams"]},
        (
            "hyperparameters.amp={precision: amp_fp16, init_scale: 64.0}",
            "hyperparameters.training.max_length.batches=100",
        ),
    )
    master.trials[2] = {**TRIAL, "id": 13, "hparams": sampled["hyperparameters"]}
    run = read().runs[2]
    assert run.precision.value == "amp_fp16"
    assert run.settings["hyperparameters.training.max_length.batches"] == 100


def test_experiment_of_another_entrypoint_is_a_sentence(master: Master) -> None:
    master.trials = [{**TRIAL, "id": 11, "hparams": {"learning_rate": 0.1}}]
    master.reports = {"training": [], "validation": []}
    with pytest.raises(
        ReportError, match=r"hyperparameters.trial: missing(.|\n)*of determined_amp train"
    ):
        read()


def test_unknown_experiment_is_a_sentence(master: Master) -> None:
    with pytest.raises(ReportError, match="has no experiment 8"):
        read(8)


def test_run_folder_has_the_same_names_as_a_master(master: Master, tmp_path: Path) -> None:
    """Or runs of both could not be compared."""
    folder = read_folder(run_small("mlp/fp32.yaml", tmp_path / "run"))
    assert read().runs[0].settings.keys() == folder.settings.keys()


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

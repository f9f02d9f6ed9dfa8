"""`report` on runs that were really trained, in folders and on a master."""

import json

import numpy as np
import pytest

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.machine import Machine
from determined_amp.experiment.overrides import with_overrides
from determined_amp.report.comparison import compare_runs
from determined_amp.report.master_runs import read_experiment
from determined_amp.runs.folder import read_run
from determined_amp.runs.run import RunState
from determined_amp.trial.notes import in_parts
from tests.precisions import CPU, RESOLVED, TRAINED, made_on, write_run
from tests.report_master import TRIAL, Master, report, serving
from tests.run_here import ROOT, metrics, run_small


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with small runs in two precisions, 24 batches each."""
    root = tmp_path_factory.mktemp("runs")
    longer = (
        "hyperparameters.training.max_length.batches=24",
        "hyperparameters.training.reporting_period.batches=6",
    )
    for name in ("fp32", "amp"):
        run_small(f"mlp/{name}.yaml", root / name, *longer)
    return root


def test_real_runs_are_compared_by_the_numbers_that_they_reported(
    trained, tmp_path, capsys
):
    runs = [str(trained / name) for name in ("fp32", "amp")]
    assert door.run(["report", *runs, "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    record = json.loads((tmp_path / "precision.json").read_text())
    page = (tmp_path / "precision.md").read_text()
    assert page.startswith(f"# {record['answer']}\n")
    assert output.startswith(f"{record['answer']}\n")
    lines = [f"* {sentence}\n" for sentence in record["sentences"]]
    assert len(lines) >= 6
    assert all(line in page and line in output for line in lines)
    _, row = record["table"]
    reports = metrics(trained / "amp")
    _, *later = [line for line in reports if line["group"] == "training"]
    speeds = [x["samples_per_second"] for x in later if "samples_per_second" in x]
    assert row["samples/s"]["median"] == pytest.approx(np.median(speeds))
    assert row["validation_accuracy"] == f"{reports[-1]['validation_accuracy']:.4g}"
    assert row["applied steps"]["median"] == later[-1]["watch_applied_steps"]


def test_report_on_fp32_alone_is_an_answer_beside_the_first_source(tmp_path, capsys):
    folders = [
        write_run(tmp_path / f"{p}-{s}", p, s, device=CPU)
        for p in ("fp32", "tf32")
        for s in (1, 2)
    ]
    unfinished = write_run(tmp_path / "amp", "amp_bf16", 1, device=CPU, last_batch=60)
    assert door.main(["report", *map(str, (*folders, unfinished))]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("cannot tell yet: all finished runs are in fp32 and tf32,")
    assert "* left out: amp_bf16, seed 1 (" in shown
    pages = sorted(tmp_path.glob("*/precision.*"))
    made = [folders[0] / "precision.json", folders[0] / "precision.md"]
    assert pages == made  # nothing to draw


def test_json_of_failed_runs_has_no_nan(tmp_path):
    base = write_run(tmp_path / "a", "fp32", 1)
    failed = write_run(tmp_path / "c", "amp_bf16", 2, loss=float("nan"))
    assert door.run(["report", str(base), str(failed)]) == 0
    text = (base / "precision.json").read_text()
    fp32, amp_bf16 = json.loads(text)["table"]
    assert (fp32["runs"], fp32["audit"]) == ("1", "100.0%")
    assert (amp_bf16["runs"], amp_bf16["audit"]) == ("0, 1 failed", None)
    assert "NaN" not in text


CONFIG = with_overrides(
    read_yaml(str(ROOT / "experiment_configs/mlp/fp32.yaml")),
    ("hyperparameters.training.max_length.batches=100", "searcher.name=grid"),
)
NOTED = {"date": "2026-01-01T00:00:00+00:00", "machine": made_on("NVIDIA H100")}


def trial(number, precision, **others):
    hparams = with_overrides(CONFIG, (f"hyperparameters.amp.precision={precision}",))
    return {**TRIAL, "id": number, "hparams": hparams["hyperparameters"], **others}


def noted_by(trial):
    """What a trial notes: its settings, as a run folder has them."""
    made = parse(CONFIG, "x", hyperparameters=trial["hparams"])
    seed = 5 + (trial["id"] + 1) % 2
    return {**NOTED, "seed": seed, "settings": json.dumps(made.resolved())}


def reports_of(number, accuracy, speed):
    """The last report comes first."""
    memory = {"watch_peak_memory_mib": speed, "watch_peak_reserved_memory_mib": speed}
    numbers = {**TRAINED, **memory, "samples_per_second": speed}
    first = {**numbers, "samples_per_second": 1.0, "epochs": 2}
    validated = {"validation_accuracy": accuracy, "validation_loss": 1}
    return [
        report(number, 100, "training", numbers),
        report(number, 50, "training", first),
        report(number, 100, "validation", validated),
    ]


@pytest.fixture
def master(monkeypatch, tmp_path):
    """Two trials in fp32, two in amp_bf16, 11 to 14."""
    trials = [
        trial(n, p) for n, p in enumerate(("fp32", "fp32", "amp_bf16", "amp_bf16"), 11)
    ]
    searched = (
        "hyperparameters.amp.precision={type: categorical, vals: [fp32, amp_bf16]}"
    )
    made = Master(with_overrides(CONFIG, [searched]), trials)
    for number, accuracy, speed in (
        (11, 0.90, 1000.0),
        (12, 0.901, 1010.0),
        (13, 0.90, 2000.0),
        (14, 0.9005, 2020.0),
    ):
        for sent in reports_of(number, accuracy, speed):
            made.reports[sent["group"]].append(sent)
        made.metadata[number] = noted_by(trials[number - 11])
    with serving(made, monkeypatch, tmp_path):
        yield made


def test_trial_that_failed_before_its_training_hinders_nothing(master):
    """An image could not be pulled, so the trial has noted nothing."""
    early = trial(10, "amp_fp16", state="STATE_ERROR")
    master.trials = [early, *master.trials]
    compared = compare_runs([read_experiment(7)])
    assert [run.name[-2:] for run in compared.runs if run.state is RunState.FAILED] == [
        "10"
    ]
    assert compared.machine == Machine(**NOTED["machine"])


def test_seeds_are_those_that_the_trials_noted(master):
    compared = compare_runs([read_experiment(7)])
    assert [run.seed for run in compared.runs] == [5, 6, 5, 6]
    for number in (11, 12, 13, 14):
        del master.metadata[number]["seed"]
    with pytest.raises(UserError, match="have no seed in common"):
        compare_runs([read_experiment(7)])


SKIPPED, NAN = "60% of the steps were skipped", "the training loss is nan in amp_bf16"


@pytest.mark.parametrize(
    ("status", "failure", "batches", "end"),
    [
        ("ERROR", SKIPPED, 100, (RunState.FAILED, SKIPPED)),
        ("ERROR", None, 100, (RunState.FAILED, "its log has the reason")),
        (
            "ERROR",
            None,
            60,
            (RunState.FAILED, "its log has the reason; it ended after 60 of 100 "),
        ),
        (
            "CANCELED",
            None,
            60,
            (RunState.STOPPED, "60 of 100 batches: it was canceled"),
        ),
        ("ACTIVE", None, 60, (RunState.RUNNING, "60 of 100 batches: it is running")),
        (
            "COMPLETED",
            None,
            60,
            (RunState.PRUNED, "60 of 100 batches: ended early by its search"),
        ),
        # One that the guard gave up is completed to the platform.
        (
            "COMPLETED",
            NAN,
            60,
            (RunState.INVALID, f"{NAN}; it ended after 60 of 100 batches"),
        ),
    ],
)
def test_end_of_a_trial_is_told_by_the_master_its_notes_and_its_reports(
    master, status, failure, batches, end
):
    master.trials[2] = trial(13, "amp_bf16", state=f"STATE_{status}")
    master.metadata[13] = {} if failure is None else {"failure": failure}
    if batches < 100:
        for group, reports in master.reports.items():
            master.reports[group] = [r for r in reports if r["trialId"] != 13]
        numbers = {**TRAINED, "loss": "NaN"}
        master.reports["training"].append(report(13, batches, "training", numbers))
    run = read_experiment(7).runs[2]
    assert (run.state, run.reason[: len(end[1])]) == end
    assert run.machine == Machine()  # it noted none


def test_settings_of_a_trial_are_what_was_sampled(master):
    """A drawn scale is rounded to a power of two, as in the trial itself; this one has
    noted nothing.
    """
    space = (
        "hyperparameters.amp.init_scale={type: log, base: 2.0, minval: 0, maxval: 24}"
    )
    precisions = (
        "hyperparameters.amp.precision={type: categorical, vals: [fp32, amp_fp16]}"
    )
    master.config = with_overrides(CONFIG, (space, precisions))
    master.trials[2] = trial(13, "amp_fp16")
    master.trials[2]["hparams"]["amp"]["init_scale"] = 3000.7
    master.metadata[13] = {}
    run = read_experiment(7).runs[2]
    assert run.precision.value == "amp_fp16"
    assert run.settings["hyperparameters.amp.init_scale"] == 4096.0
    assert run.scale_log2 == 12.0


def test_long_settings_of_a_trial_are_noted_and_read_whole(master):
    """A master takes no text of more than 5000 characters."""
    classes = ["a name of a class"] * 500
    text = json.dumps({**parse(CONFIG, "x").resolved(), "data": {"classes": classes}})
    parts = in_parts(text)
    assert isinstance(parts, list)
    assert max(map(len, parts)) == 5000
    master.metadata[11]["settings"] = parts
    assert read_experiment(7).runs[0].settings["data.classes"] == classes
    assert in_parts("short") == "short"


def test_settings_of_a_run_folder_have_the_names_of_those_on_a_master(master, trained):
    """Otherwise runs of both could not be compared. Runs made by hand have some."""
    names = read_run(trained / "fp32").settings.keys()
    assert read_experiment(7).runs[0].settings.keys() == names >= flat(RESOLVED).keys()


def test_report_on_an_experiment_of_a_master_is_written_into_runs(
    master, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert door.run(["report", "7"]) == 0
    assert "use amp_bf16 here: it is 2.00 times as fast" in capsys.readouterr().out
    assert (tmp_path / "runs/experiment-7/precision.md").exists()

"""The command `compare`: unmodified trials of many shapes, and the answer for two of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from determined_amp import ConfigError, comparison, pilots
from determined_amp import __main__ as door
from determined_amp.amp.settings import Precision
from determined_amp.comparison import CompareError, PilotResults
from determined_amp.experiment.overrides import in_precision
from determined_amp.experiment.training import Length
from determined_amp.pilots import BATCHES, REPORTING_PERIOD, Pilot
from determined_amp.report.precision_report import write_report
from determined_amp.runs.run import RunState
from determined_amp.search import engine
from determined_amp.search.search_folder import Search, read_search
from tests import searching, shapes
from tests.cluster_task import TaskMaster, start_task

pytestmark = pytest.mark.usefixtures("_workers_import_once")


def experiment(trial: str) -> dict[str, Any]:
    """A YAML of Determined's own form, which says nothing of AMP."""
    return {
        "name": "shape",
        "entrypoint": f"shapes:{trial}",
        "hyperparameters": {"global_batch_size": 16},
        "searcher": {
            **{"name": "single", "metric": "validation_loss", "smaller_is_better": True},
            "max_length": {"batches": 24},
        },
    }


def compare(trial: str, tmp: Path, *options: str, changed: Any = None) -> Path:
    """Run the command in a folder that has the trial and a YAML; the folder of the comparison."""
    shutil.copy(shapes.__file__, tmp / "shapes.py")
    (tmp / "plain.yaml").write_text(yaml.safe_dump({**experiment(trial), **(changed or {})}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_TOO_SLOW", math.inf)
        patch.chdir(tmp)
        patch.syspath_prepend(str(tmp))
        assert door.main(["compare", "plain.yaml", *options]) == 0
    (made,) = (tmp / "runs" / "compare-shape").iterdir()
    return made


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison of a trial that nothing is wrong with; what it printed is in `printed`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        made = compare(
            "Images", tmp_path_factory.mktemp("images"), "--seeds", "2", "--batches", "24"
        )
    (made / "printed").write_text(printed.getvalue())
    return made


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison of a trial that float16 cannot hold."""
    return compare("Loud", tmp_path_factory.mktemp("loud"), "--seeds", "1", "--batches", "20")


class TestAnswer:
    def test_answer_is_on_the_page(self, images: Path) -> None:
        result = json.loads((images / "precision.json").read_text())
        trained = {run["precision"] for run in result["runs"]}
        # On a CPU tf32 is fp32. A slow precision is left out, and said to be.
        message = {reason.partition(":")[0] for reason in result["left_out"]}
        assert trained | message == {"fp32", "amp_fp16", "amp_bf16"}
        assert result["use"] in trained
        assert {run["seed"] for run in result["runs"]} == {0, 1}
        assert all(run["state"] == "completed" for run in result["runs"])
        assert {run["audit_share"] for run in result["runs"]} == {1.0}
        assert (images / "precision.html").is_file()
        assert not list(images.glob("pilots/*/checkpoints/batch-*"))

    def test_answer_ends_what_is_printed(self, images: Path) -> None:
        """In this order, without the tables of the page."""
        result = json.loads((images / "precision.json").read_text())
        printed = (images / "printed").read_text()
        _, answer, rest = printed.partition(f"\n\nuse {result['use']} here: {result['why']}\n\n")
        assert answer
        assert rest.startswith(f"hyperparameters:\n  amp:\n    precision: {result['use']}\n")
        assert "- float16 loss scale: verdict: " in rest
        assert "|" not in rest

    def test_runs_are_equal_but_for_their_precision(self, images: Path) -> None:
        runs = read_search(images).runs
        lengths = {run.trained_batches for run in runs}
        assert lengths == {24}
        half = len(runs) // 2  # seed by seed
        assert [run.seed for run in runs] in ([0] * half + [1] * half, [1] * half + [0] * half)

    def test_answer_names_the_module_that_float16_cannot_hold(self, loud: Path) -> None:
        result = json.loads((loud / "precision.json").read_text())
        (left_out,) = (why for why in result["left_out"] if why.startswith("amp_fp16: "))
        assert "forward overflow in module loud" in left_out
        assert {run["precision"] for run in result["runs"]} == {"fp32", "amp_bf16"}
        assert math.isfinite(result["precisions"][1]["mean"])


def test_answer_counts_the_missing_runs_without_a_list(images: Path) -> None:
    source = read_search(images)
    first, second, *_ = source.runs
    stopped = dataclasses.replace(second, state=RunState.STOPPED, reason="stopped by SIGTERM")
    runs = dataclasses.replace(source, runs=(first, stopped), left_out=())
    answer = comparison._of_answer(runs, 6, "within 3 min")
    assert [run.name for run in answer.runs] == [f"run {first.number}"]
    assert answer.left_out == ("5 of 6 runs were not finished within 3 min",)


def test_time_that_is_up_ends_it_with_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison.Plan, "time_limit", 0.0)
    with pytest.raises(AssertionError):
        compare("Images", tmp_path, "--batches", "4000", "--seeds", "1")
    shown = capsys.readouterr()
    assert "fp32, " in shown.out
    message = (
        "stopped before there was anything to compare: too few runs were finished within 0 s; "
    )
    assert f"{message}python -m determined_amp search" in shown.err
    (made,) = (tmp_path / "runs" / "compare-shape").iterdir()
    assert {run.state for run in read_search(made).runs} <= {RunState.RUNNING, RunState.STOPPED}


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"common_failure": "no memory"}, "because the last 3 failed alike: no memory"),
        ({"time_is_up": True, "stopping": True}, "within 10 min"),
        ({"stopping": True}, "when it was interrupted"),
        ({}, ""),
    ],
)
def test_comparison_says_why_it_ended_early(
    end: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = {"common_failure": None, "time_is_up": False, "stopping": False, **end}
    monkeypatch.setattr(engine, "_run", Mock(return_value=SimpleNamespace(**ended)))
    config = searching.load(tmp_path, "compare_precisions.yaml")
    assert engine.run_comparison(tmp_path, config, 600.0) == why


def test_runs_that_take_longer_than_estimated_have_all_the_minutes_allowed() -> None:
    short = comparison.Plan(batches=200, reporting_period=25, seconds=8.0, allowed=180.0)
    long = comparison.Plan(batches=20, reporting_period=2, seconds=400.0, allowed=180.0)
    assert (short.time_limit, long.time_limit) == (180.0, 520.0)


@pytest.mark.parametrize("trial", [shapes.SlowData, shapes.SlowBatches])
def test_slow_start_is_waited_for_with_a_line_and_does_not_count(
    trial: type[shapes.SlowData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks begin with the first batch: data that takes long to make is no slow training.

    Slow batches are stopped within the first reports, which have no steady speed yet.
    """
    # After the first batch less than the loader sleeps; before it much more.
    monkeypatch.setattr(pilots, "_PATIENCE", 1.0)
    monkeypatch.setattr(pilots, "_GRACE", 60.0)
    monkeypatch.setattr(pilots, "_SLOW_START", (1.0, 60.0))
    shutil.copy(shapes.__file__, tmp_path / "shapes.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = in_precision(experiment(trial.__name__), "fp32")
    config["scheduling_unit"] = REPORTING_PERIOD
    lines: list[str] = []
    pilot = pilots.train_briefly(config, Precision.FP32, tmp_path / "pilot", lines.append)
    assert pilot.failure is None
    assert trial.batch <= pilot.seconds_per_batch < trial.start / 8
    assert pilot.overhead > trial.start
    assert lines[0].startswith("fp32: waiting for the first batch since ")


def test_yaml_without_a_batch_size_is_told_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        compare("Images", tmp_path, changed={"hyperparameters": {"width": 3}})
    assert "hyperparameters.global_batch_size: missing; " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("run_comparison", "stopped before the first run: nothing is compared yet\n"),
        ("write_report", "stopped before the report was written; python -m determined_amp report "),
    ],
)
def test_ctrl_c_between_the_steps_is_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: str,
    words: str,
) -> None:
    def run_pilots(trials: Any, results: PilotResults, folder: Any, console: Any) -> None:
        for precision in (Precision.FP32, Precision.AMP_BF16):
            results.add(Pilot(precision, 0.001, 1.0))

    monkeypatch.setattr(comparison, "run_pilots", run_pilots)
    monkeypatch.setattr(comparison, "run_comparison", lambda *call: False)
    monkeypatch.setattr(comparison, "read_search", lambda folder: Search(str(folder), ()))
    monkeypatch.setattr(comparison, moment, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(AssertionError):
        compare("Images", tmp_path)
    assert capsys.readouterr().err.startswith(words)


@pytest.fixture
def on_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskMaster:
    """The master of a task."""
    hparams = {"learning_rate": {"type": "const", "val": 0.5}}
    return start_task(monkeypatch, tmp_path, {"name": "a"}, hparams)


def test_task_of_a_cluster_that_fails_leaves_its_reason(
    on_cluster: TaskMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = CompareError("the trial cannot be trained in fp32: no batch")
    monkeypatch.setattr(comparison, "compare", Mock(side_effect=fault))
    with pytest.raises(CompareError):
        comparison.compare_on_cluster(Namespace())
    assert on_cluster.metadata["failure"].endswith("in fp32: no batch")
    assert on_cluster.status == "trial cannot be trained in fp32: no batch"


def test_task_of_a_cluster_leaves_the_answer_in_metadata_metrics_and_checkpoint(
    images: Path, on_cluster: TaskMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Namespace(trial=None, seeds=2, minutes=1, batches=None)
    compared = Mock(return_value=(images, write_report([read_search(images)], images)))
    monkeypatch.setattr(comparison, "compare", compared)
    comparison.compare_on_cluster(options)
    config = {"name": "a", "hyperparameters": {"learning_rate": 0.5}}
    compared.assert_called_once_with(config, "experiment", options)
    (saved,) = tmp_path.glob("checkpoints/*")
    assert {"precision.html", "precision.md", "precision.json", "compare.json"} <= {
        path.name for path in saved.iterdir()
    }
    result = json.loads((images / "precision.json").read_text())
    speeds = {c["precision"]: c["speed"]["median"] for c in result["comparisons"]}
    ((batches, metrics),) = on_cluster.reports["validation"]
    assert batches == 24
    assert metrics["speed"] == {**speeds, "fp32": 1.0}[result["use"]]
    assert all(metrics[f"speed_{name}"] == speed for name, speed in speeds.items())
    noted = on_cluster.metadata
    assert noted["answer"] == result["answer"]
    assert noted["precision"] == result["use"]
    assert noted["speed"] == pytest.approx(metrics["speed"], abs=1e-3)
    times = "" if result["use"] == "fp32" else f": {noted['speed']:.1f}x"
    assert on_cluster.status == f"use {result['use']}{times}"


@pytest.mark.parametrize(
    ("window", "length", "batches"),
    [
        (1, Length(batches=40), 40),
        (1, Length(epochs=3), 48),
        (1, None, 2200),
        (1, Length(epochs=900), 2200),
        (32, Length(batches=24), 32),  # one whole window at least
        (1, Length(batches=5), BATCHES),  # long enough to have a speed
    ],
)
def test_plan_is_no_longer_than_the_experiment(
    window: int, length: Length | None, batches: int
) -> None:
    """Three minutes over 1.3, less six starts of 1 s, are 2207 batches of six runs at 10 ms."""
    precisions = (Precision.FP32, Precision.AMP_BF16)
    results = PilotResults({p: Pilot(p, 0.01, 1.0, epoch_batches=16) for p in precisions})
    experiment: Any = SimpleNamespace(
        aggregation_frequency=window, training=SimpleNamespace(max_length=length)
    )
    options: Any = SimpleNamespace(seeds=3, batches=None, minutes=3)
    plan = comparison.make_plan(results, experiment, options)
    assert plan.batches == batches
    assert plan.reporting_period % window == 0
    assert plan.seconds == pytest.approx(6 + 0.06 * plan.batches)


def test_precision_that_is_much_slower_than_fp32_is_left_out() -> None:
    results = PilotResults()
    for precision, seconds in zip(Precision, (0.01, 0.01, 0.2, 0.02), strict=True):
        results.add(Pilot(precision, seconds, 1.0))
    assert results.left_out == {"amp_fp16": "a batch takes 20 times as long as in fp32"}
    assert len(results.pilots) == 3


def test_key_amp_of_the_trial_itself_is_not_overwritten() -> None:
    with pytest.raises(ConfigError, match=r"hyperparameters\.amp: got True, which is the trial"):
        in_precision({"hyperparameters": {"amp": True}}, "amp_bf16")

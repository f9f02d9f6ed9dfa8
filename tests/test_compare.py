"""The command `compare`: unmodified trials of many shapes, and the answer for two of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import determined as det
import pytest
from determined import core

from determined_amp import __main__ as door
from determined_amp import comparison, comparison_task, pilots
from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Metrics, Values
from determined_amp.amp.settings import Precision
from determined_amp.comparison import Compared, PilotResults
from determined_amp.comparison_task import compare_on_cluster
from determined_amp.experiment.experiment import parse
from determined_amp.experiment.overrides import in_precision
from determined_amp.experiment.training import Length
from determined_amp.finder.found_scale import FoundScale
from determined_amp.pilots import BATCHES, FINDER_BATCHES, Pilot
from determined_amp.report.precision_report import write_precision_report
from determined_amp.runs.folder import RunFolder, read_record
from determined_amp.runs.run import RunState
from determined_amp.search import optimize
from determined_amp.search.search_folder import (
    Search,
    read_search,
    write_config,
    write_remarks,
)
from determined_amp.search.task import Task, Verb
from tests import searching, shapes
from tests.cluster_task import TaskMaster, start_task
from tests.precisions import run
from tests.reporting import found_scale
from tests.searching import DEAD, Ended, Staged
from tests.training import write_yaml

DONE = ({"group": "start", "batches": 0, "epoch_batches": 16}, Ended())


def experiment(trial: str) -> Values:
    """A YAML of Determined's own form, which says nothing of AMP."""
    return {
        "name": "shape",
        "entrypoint": f"shapes:{trial}",
        "hyperparameters": {"global_batch_size": 16},
        "searcher": {
            **{
                "name": "single",
                "metric": "validation_loss",
                "smaller_is_better": True,
            },
            "max_length": {"batches": 24},
        },
    }


IMAGES = {**experiment("Images"), "entrypoint": "tests.shapes:Images"}


def compare(trial: str, tmp: Path, *options: str, status: int = 0) -> Path:
    """Run the command in a folder that has the trial and a YAML; the folder of the
    comparison.
    """
    shutil.copy(shapes.__file__, tmp / "shapes.py")
    path = write_yaml(tmp, experiment(trial))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilots, "TOO_SLOW", math.inf)
        patch.chdir(tmp)
        patch.syspath_prepend(str(tmp))
        assert door.main(["compare", path, *options]) == status
    (made,) = (tmp / "runs" / "compare-shape").iterdir()
    return made


@pytest.fixture(scope="module")
def images(
    _workers_import_once: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The comparison of a trial that nothing is wrong with; what it printed is in
    `printed`.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        made = compare(
            "Images",
            tmp_path_factory.mktemp("images"),
            "--seeds",
            "2",
            "--batches",
            "24",
            "--config",
            "hyperparameters.amp={precision: tf32, growth_interval: 7}",
            "--config",
            "hyperparameters.amp.fp32_modules=['1']",
        )
    (made / "printed").write_text(printed.getvalue())
    return made


@pytest.fixture(scope="module")
def loud(_workers_import_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison of a trial that float16 cannot hold."""
    return compare(
        "Loud", tmp_path_factory.mktemp("loud"), "--seeds", "1", "--batches", "20"
    )


class TestAnswer:
    def test_comparison_trains_every_precision_with_both_seeds_and_writes_its_page(
        self, images: Path
    ) -> None:
        result = json.loads((images / "precision.json").read_text())
        trained = {run["precision"] for run in result["runs"]}
        # On a CPU tf32 is fp32. A slow precision is left out, and said to be.
        message = {reason.partition(":")[0] for reason in result["left_out"]}
        assert trained | message == {"fp32", "amp_fp16", "amp_bf16"}
        assert result["use"] in trained
        assert {run["seed"] for run in result["runs"]} == {0, 1}
        assert all(run["state"] == "completed" for run in result["runs"])
        assert {run["audit_share"] for run in result["runs"]} == {1.0}
        assert (images / "precision.md").is_file()
        assert not list(images.glob("pilots/*/checkpoints/batch-*"))

    def test_answer_and_its_yaml_are_printed_last(self, images: Path) -> None:
        """The answer comes first. The tables of the page are not printed."""
        result = json.loads((images / "precision.json").read_text())
        printed = (images / "printed").read_text()
        _, answer, rest = printed.partition(f"\n\n{result['answer']}\n\n")
        assert answer
        assert rest.startswith(
            f"hyperparameters:\n  amp:\n    precision: {result['use']}\n"
        )
        assert "* float16 loss scale: verdict: " in rest
        assert "|" not in rest

    def test_runs_are_equal_but_for_their_precision(self, images: Path) -> None:
        runs = read_search(images).runs
        lengths = {run.trained_batches for run in runs}
        assert lengths == {24}
        half = len(runs) // 2  # seed by seed
        assert [run.seed for run in runs] in (
            [0] * half + [1] * half,
            [1] * half + [0] * half,
        )

    def test_amp_settings_of_the_user_reach_every_run_and_every_pilot(
        self, images: Path
    ) -> None:
        pilots = [read_record(folder) for folder in (images / "pilots").iterdir()]
        runs = [*pilots, *read_search(images).runs]
        assert len(runs) > 6
        for made in runs:
            assert made.settings["hyperparameters.amp.growth_interval"] == 7
            assert made.settings["hyperparameters.amp.fp32_modules"] == ["1"]

    def test_answer_names_the_module_that_float16_cannot_hold(self, loud: Path) -> None:
        result = json.loads((loud / "precision.json").read_text())
        (left_out,) = (
            why for why in result["left_out"] if why.startswith("amp_fp16: ")
        )
        assert "forward overflow in module loud" in left_out
        assert {run["precision"] for run in result["runs"]} == {"fp32", "amp_bf16"}
        assert math.isfinite(result["precisions"][1]["mean"])


def test_answer_counts_missing_runs_and_does_not_list_them() -> None:
    ended, stopped = run("fp32"), run("fp32", 2, last_batch=60)
    source = Search("", (dataclasses.replace(ended, number=3), stopped))
    answer = comparison._of_answer(source, 6, "within 3 min")
    assert [run.name for run in answer.runs] == ["run 3"]
    assert answer.left_out == ("5 of 6 runs were not finished within 3 min",)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"time_is_up": True, "stopping": True}, "within 10 min"),
        ({"stopping": True}, "when it was interrupted"),
        ({}, ""),
    ],
)
def test_comparison_says_why_it_ended_early(
    end: Values, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = {"time_is_up": False, "stopping": False, **end}
    monkeypatch.setattr(
        optimize, "_optimize", Mock(return_value=SimpleNamespace(**ended))
    )
    write_config(tmp_path, searching.load("compare_precisions.yaml"), workers=1)
    assert optimize.run_comparison(tmp_path, 600.0, bool) == why


def test_time_limit_is_what_the_user_allows_or_1_3_times_a_longer_estimate() -> None:
    short = comparison.ComparisonPlan(
        batches=200, reporting_period=25, seconds=8.0, allowed=180.0
    )
    long = comparison.ComparisonPlan(
        batches=20, reporting_period=2, seconds=400.0, allowed=180.0
    )
    assert (short.time_limit, long.time_limit) == (180.0, 520.0)


def pilots_of_two(trials: Any, results: PilotResults, *_: Any) -> None:
    """In place of the pilots."""
    for precision, seconds in ((Precision.FP32, 0.001), (Precision.AMP_BF16, 0.002)):
        results.add(Pilot(precision, seconds, overhead=1.0))


def test_comparison_of_too_few_runs_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "run_pilots", pilots_of_two)
    monkeypatch.setattr(comparison, "run_comparison", lambda *call: "within 3 min")
    monkeypatch.setattr(
        comparison, "read_search", lambda folder: Search(str(folder), ())
    )
    compare("Images", tmp_path, status=2)
    shown = capsys.readouterr()
    assert shown.err.startswith(
        "error: stopped before there was anything to compare: too few runs were "
        "finished within 3 min; python -m determined_amp search --resume "
    )
    assert "  amp_bf16       2.0 ms a batch\n" in shown.out
    assert "plan: fp32, amp_bf16 in turn, 3 runs of " in shown.out


@pytest.fixture
def on_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskMaster:
    """The master of a task."""
    hparams = {
        "learning_rate": {"type": "const", "val": 0.5},
        "global_batch_size": 4,
    }
    return start_task(monkeypatch, tmp_path, {"name": "a"}, hparams)


@pytest.mark.usefixtures("on_cluster")
def test_task_of_several_slots_is_refused() -> None:
    det.get_cluster_info().slot_ids.append(1)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="slots_per_trial: got 2; allowed: 1"):
        compare_on_cluster(Namespace())


@pytest.mark.usefixtures("on_cluster")
def test_task_without_a_batch_size_is_refused_before_its_pilots() -> None:
    info: Any = det.get_cluster_info()
    del info.trial.hparams["global_batch_size"]
    with pytest.raises(UserError, match=r"hyperparameters\.global_batch_size: missing"):
        compare_on_cluster(Namespace())


def test_task_of_a_cluster_leaves_the_answer_in_metadata_metrics_and_checkpoint(
    on_cluster: TaskMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    write_remarks(made, [], [])
    amp = (run("amp_bf16", seed, speed=2000.0) for seed in (1, 2))
    source = Search("", (run("fp32"), run("fp32", 2), *amp))
    report = write_precision_report([source], made)
    compared = Mock(return_value=Compared(made, report))
    monkeypatch.setattr(comparison_task, "compare", compared)
    compare_on_cluster(Namespace(minutes=1))
    hparams = {"learning_rate": 0.5, "global_batch_size": 4}
    config = {"name": "a", "hyperparameters": hparams}
    assert compared.call_args.args[:3] == (config, "experiment", Namespace(minutes=1))
    (saved,) = tmp_path.glob("checkpoints/*")
    assert {"precision.png", "precision.md", "precision.json", "compare.json"} <= {
        path.name for path in saved.iterdir()
    }
    assert json.loads((saved / "metadata.json").read_text())["steps_completed"] == 100
    assert on_cluster.reports["validation"] == [(100, {"speed": 2.0})]
    answer = json.loads((made / "precision.json").read_text())["answer"]
    noted = {
        "answer": answer,
        "precision": "amp_bf16",
        "verdict": "cannot tell yet",
        "speed": 2.0,
    }
    assert on_cluster.metadata.items() >= noted.items()
    assert on_cluster.status == "use amp_bf16: 2.0x"


def test_task_that_can_train_only_fp32_leaves_that_answer_as_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pilots_of_one(trials: Any, results: PilotResults, *_: Any) -> None:
        results.add(Pilot(Precision.FP32, 0.001))
        results.add(Pilot(Precision.AMP_BF16, failure="it is emulated here"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "run_pilots", pilots_of_one)
    master = start_task(monkeypatch, tmp_path, IMAGES, IMAGES["hyperparameters"])
    compare_on_cluster(Namespace(trial=None, seeds=1))
    (page,) = tmp_path.glob("checkpoints/*/precision.md")
    assert (
        page.read_text()
        == f"# {comparison.ONLY_FP32}\n\n* amp_bf16: it is emulated here\n"
    )
    assert master.status == "use fp32"


@pytest.mark.usefixtures("_workers_import_once")
def test_paused_task_stops_at_a_report_and_goes_on_with_its_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused in the second of its two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "run_pilots", pilots_of_two)
    master = start_task(monkeypatch, tmp_path, IMAGES, IMAGES["hyperparameters"])
    paused = Mock(side_effect=lambda *_: any(tmp_path.glob("runs/*/*/trials/0001")))
    monkeypatch.setattr(core.DummyPreemptContext, "should_preempt", paused)
    info: Any = det.get_cluster_info()
    info.trial.experiment_id = 7
    options = Namespace(trial=None, seeds=1, batches=24, minutes=20)
    compare_on_cluster(options)
    (kept,) = tmp_path.glob("checkpoints/*")
    assert not master.reports
    assert master.status.startswith("paused: 1 of ")
    first, second = read_search(kept / "comparison").runs
    assert (first.state, second.state) == (RunState.COMPLETED, RunState.STOPPED)
    assert 0 < second.trained_batches < 24
    assert not list(kept.glob("comparison/trials/0000/checkpoints/*"))

    shutil.rmtree(tmp_path / "runs")  # with its container
    info.latest_checkpoint = kept.name
    paused.side_effect = lambda *_: False
    compare_on_cluster(options)
    (folder,) = tmp_path.glob("runs/*/*")
    runs = read_search(folder).runs
    assert {run.state for run in runs} == {RunState.COMPLETED}
    assert [len(run.parts) for run in runs] == [1, 2]
    assert runs[0].date == first.date
    assert runs[1].parts[1].first_batch == second.trained_batches
    assert master.reports["validation"][0][0] == 24

    # Paused after the answer: activated again, it ends.
    (answer,) = set(tmp_path.glob("checkpoints/*")) - {kept}
    info.latest_checkpoint = answer.name
    monkeypatch.setattr(comparison_task, "compare", Mock(side_effect=AssertionError))
    compare_on_cluster(options)
    assert len(master.reports["validation"]) == 1
    assert len([*tmp_path.glob("checkpoints/*")]) == 2


@pytest.mark.parametrize(
    ("window", "length", "batches"),
    [
        (1, {"batches": 40}, 40),
        (1, {"epochs": 3}, 48),
        (1, None, 2200),
        (32, {"batches": 24}, 32),  # one whole window at least
        (1, {"batches": 5}, BATCHES),  # long enough to have a speed
    ],
)
def test_plan_is_no_longer_than_the_experiment(
    window: int, length: Any, batches: int
) -> None:
    """Three minutes over 1.3, less six starts of 1 s, are 2207 batches of six runs at
    10 ms.
    """
    precisions = (Precision.FP32, Precision.AMP_BF16)
    results = PilotResults(
        {p: Pilot(p, 0.01, overhead=1.0, epoch_batches=16) for p in precisions}
    )
    experiment: Any = SimpleNamespace(
        aggregation_frequency=window,
        training=SimpleNamespace(max_length=length and Length(**length)),
    )
    options: Any = SimpleNamespace(seeds=3, batches=None, minutes=3)
    plan = comparison.make_plan(results, experiment, options)
    assert plan.batches == batches
    assert plan.reporting_period % window == 0
    assert plan.seconds == pytest.approx(6 + 0.06 * plan.batches)


def test_runs_of_a_comparison_differ_in_precision_and_seed_alone() -> None:
    config = {**IMAGES, "reproducibility": {"experiment_seed": 5}}
    config |= {"optimizations": {"aggregation_frequency": 3}}
    trials = comparison._Trials(parse(in_precision(config, "fp32"), "x"), config, 2)
    plan = comparison.ComparisonPlan(
        batches=42, reporting_period=6, seconds=1.0, allowed=1.0
    )
    precisions = {"type": "categorical", "vals": ["amp_bf16", "fp32"]}
    whole, searcher = {"batches": 42}, config["searcher"]
    made = trials.search([Precision.FP32, Precision.AMP_BF16], plan)
    assert {key: made[key] for key in made if made[key] != config.get(key)} == {
        "name": "compare-shape",
        "hyperparameters": {
            "global_batch_size": 16,
            "trial_seed": {"type": "categorical", "vals": [5, 6]},
            "amp": {"precision": precisions},
        },
        "searcher": {**searcher, "name": "grid", "max_length": whole},
        **dict.fromkeys(("min_validation_period", "min_checkpoint_period"), whole),
        "scheduling_unit": 6,
    }
    pilot = trials.pilot(Precision.TF32, BATCHES)
    assert pilot["hyperparameters"]["amp"] == {"precision": "tf32"}
    # whole windows
    assert pilot["searcher"] == {
        **searcher,
        "max_length": {"batches": 21},
    }
    assert pilot["scheduling_unit"] == 3


@pytest.mark.parametrize("has_tf32", [True, False])
def test_pilots_are_of_every_precision_that_the_device_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    has_tf32: bool,
) -> None:
    """The log says which pilot of how many is trained."""
    results = stage_pilots(tmp_path, monkeypatch, {}, has_tf32=has_tf32)
    assert list(results.pilots) == [
        p for p in Precision if has_tf32 or p is not Precision.TF32
    ]
    assert (
        results.scale == FoundScale.read(tmp_path / "loss_scale.json") == found_scale()
    )
    said = (
        "2 of 4, in tf32: up to 20 batches"
        if has_tf32
        else "2 of 4, in tf32: left out, because"
    )
    assert f"pilot {said}" in capsys.readouterr().out


def test_no_loss_scale_is_sought_in_a_precision_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = stage_pilots(tmp_path, monkeypatch, {Precision.AMP_FP16: "for time"})
    assert results.left_out == {"amp_fp16": "for time"}
    assert results.scale is None
    assert Precision.AMP_BF16 in results.pilots


def stage_pilots(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: dict[Precision, str],
    *,
    has_tf32: bool = True,
) -> PilotResults:
    """The results of pilots that end at once."""

    def train(config: Any, precision: Precision, *_: Any) -> Pilot:
        return Pilot(precision, 1.0, failure=failures.get(precision))

    record = SimpleNamespace(machine=SimpleNamespace(has_tf32=has_tf32))
    monkeypatch.setattr(comparison, "read_record", Mock(return_value=record))
    monkeypatch.setattr(comparison, "find_the_scale", Mock(return_value=found_scale()))
    monkeypatch.setattr(comparison, "train_briefly", train)
    results = PilotResults()
    trials: Any = Mock()
    comparison.run_pilots(trials, results, tmp_path / "pilots", bool)
    changes = [call.args for call in trials.change_amp.call_args_list]
    assert changes == ([] if failures else [({"init_scale": 2.0**17},)])
    return results


def reports(*batches: int, **metrics: float) -> list[Metrics]:
    return [{"group": "training", "batches": count, **metrics} for count in batches]


class TestPilot:
    """Process and clock are staged: reports come after 100, 101, 103 and 106 s, and so
    on.
    """

    @pytest.fixture(autouse=True)
    def _staged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        searching.stage(monkeypatch, pilots)

    @pytest.fixture
    def train(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., Pilot]:
        """Runs a pilot in TF32 that sends messages at the seconds 100, 101, 103, 106,
        and so on.
        """

        def pilot(*messages: object, base: float = 1.0) -> Pilot:
            ticks = iter([0.0, *(100.0 + n * (n + 1) / 2 for n in range(20))])
            clock = SimpleNamespace(monotonic=lambda: next(ticks))
            monkeypatch.setattr(pilots, "time", clock)
            monkeypatch.setattr(Staged, "script", messages)
            config = experiment("Images")
            fp32 = Pilot(Precision.FP32, shortest=base)
            made = pilots.train_briefly(
                config, Precision.TF32, tmp_path, fp32, lambda batches: None
            )
            (job,) = Staged.jobs
            assert (job.task, job.config, job.folder.path) == (
                Task(Verb.TRAIN),
                config,
                tmp_path,
            )
            assert not (tmp_path / "checkpoints").exists()
            assert Staged.made[0].connection.closed
            return made

        return pilot

    def test_seconds_per_batch_exclude_the_start_of_the_run(
        self, train: Callable[..., Pilot]
    ) -> None:
        """The command ends at 106 s, of which 6 batches take half a second each."""
        pilot = train(*reports(2, 4, 6), *DONE)
        assert pilot == Pilot(
            Precision.TF32, 0.5, 0.5, overhead=103.0, epoch_batches=16
        )

    def test_reported_speed_gives_the_seconds_per_batch(
        self, train: Callable[..., Pilot]
    ) -> None:
        """64 samples/s are 0.25 s for a batch of 16, also where there is only one
        report.
        """
        spoken = reports(32, samples_per_second=64.0)
        pilot = train(*spoken, *DONE)
        assert (pilot.seconds_per_batch, pilot.shortest) == (0.25, 0.25)

    def test_much_slower_precision_is_stopped_after_two_intervals_between_reports(
        self, train: Callable[..., Pilot]
    ) -> None:
        stopped = Ended(RunState.PRUNED)
        pilot = train(*reports(2, 4, 6), stopped, base=0.09)
        assert str(pilot.failure).startswith(
            "for time: a batch takes 6 times as long as in fp32 (`python -m "
            "determined_amp train YAML --precision tf32` trains"
        )
        assert Staged.made[0].connection.answers == [True, True, False]

    def test_precision_with_one_short_interval_between_reports_is_kept(
        self, train: Callable[..., Pilot]
    ) -> None:
        pilot = train(*reports(2, 4, 6, 8), *DONE, base=0.11)
        assert pilot.failure is None

    @pytest.mark.parametrize(
        ("message", "failure"),
        [
            (Ended(RunState.STOPPED, "disk full"), "disk full"),
            (DEAD, "its process died with status -15"),
            (Ended(), "its reports tell no speed"),
        ],
    )
    def test_pilot_without_an_end_or_a_speed_has_failed(
        self, message: object, failure: str, train: Callable[..., Pilot]
    ) -> None:
        assert train(message) == Pilot(Precision.TF32, failure=failure)

    def test_finder_has_an_answer_or_has_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (RunFolder(tmp_path).path / "loss_scale.json").write_text(
            found_scale().json_text()
        )
        for message, answer in (
            (Ended(), found_scale()),
            (Ended(RunState.FAILED, "why"), "why"),
        ):
            monkeypatch.setattr(Staged, "script", (message,))
            assert pilots.find_the_scale({}, tmp_path) == answer
        assert Staged.jobs[0].task == Task(Verb.FIND, FINDER_BATCHES)

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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import determined as det
import pytest
from determined import core

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Metrics, Values
from determined_amp.amp.settings import Precision
from determined_amp.compare import comparison_task, pilots, plan, runs
from determined_amp.compare.comparison_task import compare_on_cluster
from determined_amp.compare.pilots import BATCHES, FINDER_BATCHES, Pilot, PilotResults
from determined_amp.compare.plan import ComparisonPlan
from determined_amp.compare.runs import ComparisonEnd, RunConfigs
from determined_amp.experiment.experiment import experiment_in, parse
from determined_amp.experiment.overrides import in_precision
from determined_amp.experiment.training import Length
from determined_amp.finder.found_scale import FoundScale
from determined_amp.finder.scale_finding import Verdict
from determined_amp.report.precision_report import write_precision_report
from determined_amp.runs.folder import RunFolder, read_record
from determined_amp.runs.run import Run, RunState
from determined_amp.search.search_folder import (
    Search,
    read_config,
    read_search,
    write_remarks,
)
from determined_amp.search.task import Task, Verb
from determined_amp.search.trial_process import Job
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
    def test_every_precision_is_trained_with_both_seeds_and_has_a_page(
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
        answer = f"\n\n{result['answer']}\n\nhyperparameters:\n  amp:\n    precision: "
        _, _, after = (images / "printed").read_text().partition(answer)
        assert after.startswith(f"{result['use']}\n")
        assert "* float16 loss scale: verdict: " in after
        assert not list(images.glob("pilots/*/checkpoints/batch-*"))

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


def test_time_limit_is_what_the_user_allows_or_1_3_times_a_longer_estimate() -> None:
    short = ComparisonPlan(200, 25, seconds=8.0, allowed=180.0)
    long = ComparisonPlan(20, 2, seconds=400.0, allowed=180.0)
    assert (short.time_limit, long.time_limit) == (180.0, 520.0)


def pilots_of_two(_: Any, precisions: Any, results: PilotResults, *more: Any) -> None:
    """In place of the pilots."""
    results.pilots[Precision.FP32] = Pilot(0.001, overhead=1.0)
    results.pilots[Precision.AMP_BF16] = Pilot(0.002, overhead=1.0)


def test_chosen_precisions_are_trained_with_the_settings_of_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that is only compared needs no precision in its section `amp`, whose
    settings of the scale stay though float16 is left out.
    """

    def pilots_without_float16(*given: Any) -> None:
        pilots_of_two(*given)
        known = found_scale()
        finding = dataclasses.replace(known.finding, verdict=Verdict.BF16)
        given[2].scale = dataclasses.replace(known, finding=finding)

    pilot = Mock(side_effect=pilots_without_float16)
    monkeypatch.setattr(runs, "run_pilots", pilot)
    monkeypatch.setattr(runs, "go_on", Mock(return_value=ComparisonEnd(tmp_path)))
    amp = ("--config", "hyperparameters.amp={growth_interval: 7}")
    folder = compare("Images", tmp_path, *amp, "--precisions", "amp_bf16", "fp32")
    assert pilot.call_args.args[1] == [Precision.FP32, Precision.AMP_BF16]
    section = read_config(folder)["hyperparameters"]["amp"]
    precisions = {"type": "categorical", "vals": ["amp_bf16", "fp32"]}
    assert section == {"growth_interval": 7, "precision": precisions}


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


def test_task_leaves_its_answer_on_the_master(
    on_cluster: TaskMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_remarks(tmp_path, [], [])
    amp = (run("amp_bf16", seed, speed=2000.0) for seed in (1, 2))
    source = Search("", (run("fp32"), run("fp32", 2), *amp))
    report = write_precision_report([source], tmp_path)
    compared = Mock(return_value=ComparisonEnd(tmp_path, report))
    monkeypatch.setattr(comparison_task, "compare", compared)
    compare_on_cluster(Namespace())
    assert on_cluster.reports["validation"] == [(100, {"speed": 2.0})]
    noted = {"precision": "amp_bf16", "verdict": "cannot tell yet", "speed": 2.0}
    assert on_cluster.metadata.items() >= noted.items()
    assert on_cluster.metadata["answer"] == report.answer.text
    assert on_cluster.status == "use amp_bf16: 2.0x"


def test_task_that_can_train_only_fp32_leaves_that_answer_as_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pilots_of_one(_: Any, chosen: Any, results: PilotResults, *more: Any) -> None:
        results.pilots[Precision.FP32] = Pilot(0.001)
        results.leave_out(Precision.AMP_BF16, "it is emulated here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "run_pilots", pilots_of_one)
    master = start_task(monkeypatch, tmp_path, IMAGES, IMAGES["hyperparameters"])
    compare_on_cluster(Namespace(trial=None, seeds=1, precisions=[*Precision]))
    (page,) = tmp_path.glob("checkpoints/*/precision.md")
    assert (
        page.read_text() == f"# {runs.ONLY_FP32}\n\n* amp_bf16: it is emulated here\n"
    )
    assert master.status == "use fp32"


@pytest.mark.usefixtures("_workers_import_once")
def test_paused_task_stops_at_a_report_and_goes_on_with_its_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused in the second of its two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "run_pilots", pilots_of_two)
    master = start_task(monkeypatch, tmp_path, IMAGES, IMAGES["hyperparameters"])
    paused = Mock(side_effect=lambda *_: any(tmp_path.glob("runs/*/*/trials/0001")))
    monkeypatch.setattr(core.DummyPreemptContext, "should_preempt", paused)
    info: Any = det.get_cluster_info()
    info.trial.experiment_id = 7
    options = Namespace(
        trial=None, precisions=[*Precision], seeds=1, batches=24, minutes=20
    )
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
    first_now, second_now = read_search(folder).runs
    assert first_now.state is second_now.state is RunState.COMPLETED
    assert [len(run.parts) for run in (first_now, second_now)] == [1, 2]
    assert first_now.date == first.date
    assert second_now.parts[1].first_batch == second.trained_batches
    (answer,) = set(tmp_path.glob("checkpoints/*")) - {kept}
    files = {path.name for path in answer.iterdir()}
    assert {"precision.png", "precision.md", "precision.json"} <= files
    ((batches, _),) = master.reports["validation"]
    assert batches == 24

    # Paused after the answer: activated again, it ends.
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
        {p: Pilot(0.01, overhead=1.0, epoch_batches=16) for p in precisions}
    )
    experiment: Any = SimpleNamespace(
        aggregation_frequency=window,
        training=SimpleNamespace(max_length=length and Length(**length)),
    )
    options: Any = SimpleNamespace(seeds=3, batches=None, minutes=3)
    made = plan.plan_of(results, experiment, options)
    assert made.batches == batches
    assert made.reporting_period % window == 0
    assert made.seconds == pytest.approx(6 + 0.06 * made.batches)


@pytest.mark.parametrize(
    ("seconds", "shorter"), [(180.0, False), (181.0, True), (2000.0, True)]
)
def test_plan_beyond_the_minutes_says_so_and_what_to_type(
    seconds: float, *, shorter: bool
) -> None:
    results = PilotResults({p: Pilot(0.01) for p in Precision})
    made = ComparisonPlan(40, 5, 3, seconds, allowed=180.0)
    said = "\n".join(plan.plan_lines(results, made))
    assert ("that is more than the 3 min of --minutes; shorter: " in said) is shorter
    for option in ("--precisions fp32 amp_bf16", "--seeds 2", "--batches 20"):
        assert (f"`{option}`" in said) is shorter


def test_runs_of_a_comparison_differ_in_precision_and_seed_alone() -> None:
    config = {**IMAGES, "reproducibility": {"experiment_seed": 5}}
    config |= {"optimizations": {"aggregation_frequency": 3}}
    configs = RunConfigs(parse(in_precision(config, "fp32"), "x"), {}, 2)
    precisions = {"type": "categorical", "vals": ["amp_bf16", "fp32"]}
    whole, searcher = {"batches": 42}, config["searcher"]
    chosen = [Precision.FP32, Precision.AMP_BF16]
    made = configs.search(chosen, ComparisonPlan(42, 6))
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
    pilot = configs.pilot(Precision.TF32, BATCHES)
    assert pilot.config["hyperparameters"]["amp"] == {"precision": "tf32"}
    # whole windows
    assert pilot.config["searcher"] == {
        **searcher,
        "max_length": {"batches": 21},
    }
    assert pilot.config["scheduling_unit"] == 3


@pytest.mark.parametrize("has_tf32", [True, False])
def test_pilots_are_of_every_precision_that_the_device_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_tf32: bool
) -> None:
    results = stage_pilots(tmp_path, monkeypatch, has_tf32=has_tf32)
    lacks = set() if has_tf32 else {Precision.TF32}
    assert {*Precision} - results.pilots.keys() == lacks
    assert results.scale == FoundScale.read(tmp_path / "loss_scale.json")


def test_no_loss_scale_is_sought_in_a_precision_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {Precision.AMP_FP16: "for time"}
    results = stage_pilots(tmp_path, monkeypatch, failures=failures)
    assert (results.left_out, results.scale) == (failures, None)


def stage_pilots(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    failures: Mapping[Precision, str] = MappingProxyType({}),
    has_tf32: bool = True,
) -> PilotResults:
    """The results of pilots that end at once."""

    def train(
        _: Any, precision: Precision, __: Any, made: PilotResults, *more: Any
    ) -> None:
        if why := failures.get(precision):
            made.leave_out(precision, why)
        else:
            made.pilots[precision] = Pilot(1.0)

    def find(job: Job, goes_on: object) -> Run:
        (job.folder.path / "loss_scale.json").write_text(found_scale().json_text())
        return Run("", RunState.COMPLETED)

    record = SimpleNamespace(machine=SimpleNamespace(has_tf32=has_tf32))
    monkeypatch.setattr(pilots, "read_record", Mock(return_value=record))
    monkeypatch.setattr(pilots, "_run", find)
    monkeypatch.setattr(pilots, "train_pilot", train)
    results = PilotResults()
    config_of = Mock(return_value={})
    pilots.run_pilots(config_of, [*Precision], results, tmp_path / "pilots")
    return results


def reports(*batches: int, **metrics: float) -> list[Metrics]:
    return [{"group": "training", "batches": count, **metrics} for count in batches]


class TestPilot:
    """Reports come after 100, 101, 103, 106 s and so on, without a process."""

    @pytest.fixture
    def train(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., PilotResults]:
        """Runs a pilot in TF32 that sends these messages."""
        searching.stage(monkeypatch, pilots)

        def pilot(
            *messages: object, base: float = 1.0, watch: Any = id
        ) -> PilotResults:
            ticks = iter([0.0, *(100.0 + n * (n + 1) / 2 for n in range(20))])
            clock = SimpleNamespace(monotonic=lambda: next(ticks))
            monkeypatch.setattr(pilots, "time", clock)
            monkeypatch.setattr(Staged, "script", messages)
            images = experiment_in(experiment("Images"), "x")
            results = PilotResults({Precision.FP32: Pilot(base)})
            pilots.train_pilot(images, Precision.TF32, tmp_path, results, watch)
            (job,) = Staged.jobs
            assert (job.task, job.folder.path) == (Task(Verb.TRAIN), tmp_path)
            assert job.experiment is images
            assert not (tmp_path / "checkpoints").exists()
            assert Staged.made[0].connection.closed
            return results

        return pilot

    @pytest.mark.parametrize(
        ("told", "seconds"),
        [
            # It ends at 106 s; between reports of 2 batches there are 1 s and 2 s.
            (reports(2, 4, 6), 0.75),
            # 64 samples/s are 0.25 s for a batch of 16, also in the only report.
            (reports(32, samples_per_second=64.0), 0.25),
        ],
    )
    def test_seconds_per_batch_exclude_the_start_of_the_run(
        self, train: Callable[..., PilotResults], told: list[Metrics], seconds: float
    ) -> None:
        made = train(*told, *DONE).pilots[Precision.TF32]
        assert (made.seconds_per_batch, made.epoch_batches) == (seconds, 16)
        assert seconds < 0.5 or made.overhead == 101.5

    @pytest.mark.parametrize("times", [4.9, 5.1, 7.0])
    def test_precision_of_more_than_five_times_the_time_of_fp32_is_left_out(
        self, train: Callable[..., PilotResults], times: float
    ) -> None:
        """It is stopped. The same time of a batch is printed for both, and judged."""
        ends = DONE if times < 5 else (Ended(RunState.PRUNED),)
        why = train(*reports(2, 4, 6), *ends, base=0.75 / times).left_out
        said = f"for time: a batch takes {times:.0f} times as long as in fp32 (`det-amp"
        assert [words.startswith(said) for words in why.values()] == [True] * (
            times > 5
        )
        answers = Staged.made[0].connection.answers
        assert answers[:3] == [True, True, times < 5]

    def test_precision_whose_last_report_tells_that_it_is_slow_is_left_out(
        self, train: Callable[..., PilotResults]
    ) -> None:
        """Its speed is 7 times less than that of fp32, in a pilot that ended."""
        told = reports(2, 4) + reports(12, samples_per_second=16 / 7.0)
        assert Precision.TF32 in train(*told, *DONE).left_out

    def test_pilot_that_was_timed_for_long_is_cut_short(
        self, train: Callable[..., PilotResults]
    ) -> None:
        """After 8 intervals, which take 36 s."""
        made = train(*reports(*range(2, 22, 2)), Ended(RunState.PRUNED))
        assert made.pilots[Precision.TF32].is_cut_short
        assert Staged.made[0].connection.answers == [*[True] * 8, False, False]

    @pytest.mark.parametrize(
        ("message", "failure"),
        [
            (Ended(RunState.STOPPED, "disk full"), "disk full"),
            (DEAD, "its process died with status -15"),
            (Ended(), "its reports tell no speed"),
        ],
    )
    def test_precision_whose_pilot_has_no_end_or_no_speed_is_left_out(
        self, message: object, failure: str, train: Callable[..., PilotResults]
    ) -> None:
        assert train(message).left_out == {Precision.TF32: failure}


@pytest.mark.parametrize(
    ("end", "seconds", "left_out"),
    [
        (Ended(), 0.1, {}),
        (Ended(RunState.FAILED, "why"), 20.0, {Precision.AMP_FP16: "why"}),
    ],
)
def test_finder_has_an_answer_or_float16_is_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Ended,
    seconds: float,
    left_out: dict[Precision, str],
) -> None:
    """It takes fewer batches where they are slow."""
    searching.stage(monkeypatch, pilots)
    monkeypatch.setattr(Staged, "script", (end,))
    place = RunFolder(tmp_path / "pilots" / "loss-scale").path
    (place / "loss_scale.json").write_text(found_scale().json_text())
    results = PilotResults({Precision.AMP_FP16: Pilot(seconds)})
    pilots._find(Mock(return_value={}), results, tmp_path / "pilots")
    assert Staged.jobs[0].task == Task(Verb.FIND, 1 if left_out else FINDER_BATCHES)
    assert results.left_out == left_out
    assert results.scale == (None if left_out else found_scale())

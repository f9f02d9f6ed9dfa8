"""The command `compare`: a stranger's unmodified trials, and the answer for two of
them.
"""

import contextlib
import io
import json
import math
import shutil
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import determined as det
import pytest

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.amp.settings import Precision
from determined_amp.compare import comparison_task, pilots, plan, runs
from determined_amp.compare.comparable import LEAST_BATCHES, ComparisonRequest
from determined_amp.compare.comparison_task import compare_on_cluster
from determined_amp.compare.pilots import (
    FINDER_BATCHES,
    Pilot,
    PilotError,
    PilotResults,
)
from determined_amp.compare.plan import ComparisonPlan
from determined_amp.compare.runs import ComparisonEnd, search_over
from determined_amp.experiment.entrypoint import Task
from determined_amp.experiment.experiment import experiment_in, parse
from determined_amp.experiment.overrides import in_precision, with_overrides
from determined_amp.experiment.training import Length
from determined_amp.finder.scale_finding import Verdict
from determined_amp.report.answer import answer_of
from determined_amp.report.comparison import compare_runs
from determined_amp.runs.folder import RunFolder, read_record
from determined_amp.runs.run import Run, RunState
from determined_amp.search.optimize import BY_A_SIGNAL
from determined_amp.search.search_folder import (
    Search,
    read_config,
    read_search,
    write_remarks,
)
from determined_amp.search.search_plan import SearchPlan
from tests import searching, strangers
from tests.cluster_task import start_task
from tests.precisions import run
from tests.reporting import found_scale
from tests.run_here import write_yaml
from tests.searching import DEAD, Ended, Staged

DONE = ({"group": "start", "batches": 0, "epoch_batches": 16}, Ended())


def experiment(trial):
    """A YAML of Determined's own form, which says nothing of AMP."""
    return {
        "name": "stranger",
        "entrypoint": f"strangers:{trial}",
        "hyperparameters": {"global_batch_size": 16},
        "searcher": {
            "name": "single",
            "metric": "val_loss",
            "smaller_is_better": True,
            "max_length": {"batches": 24},
        },
    }


PLAIN = {**experiment("Stranger"), "entrypoint": "tests.strangers:Stranger"}


def compare(trial, tmp, *options):
    """Run the command in a folder that has the trial and a YAML; the folder of the
    comparison.
    """
    shutil.copy(strangers.__file__, tmp / "strangers.py")
    path = write_yaml(tmp, experiment(trial))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilots, "TOO_SLOW", math.inf)
        patch.chdir(tmp)
        patch.syspath_prepend(str(tmp))
        assert door.main(["compare", path, *options]) == 0
    (made,) = (tmp / "runs" / "compare-stranger").iterdir()
    return made


@pytest.fixture(scope="module")
def whole(_workers_are_forks, tmp_path_factory):
    """The comparison of a trial that nothing is wrong with; what it printed is in
    `printed`.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        made = compare(
            "Stranger",
            tmp_path_factory.mktemp("whole"),
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
def loud(_workers_are_forks, tmp_path_factory):
    """The comparison of a trial that float16 cannot hold."""
    return compare(
        "Loud", tmp_path_factory.mktemp("loud"), "--seeds", "1", "--batches", "20"
    )


class TestAnswer:
    def test_every_precision_is_trained_with_both_seeds_and_has_a_page(self, whole):
        result = json.loads((whole / "precision.json").read_text())
        runs = read_search(whole).runs
        trained = {run.precision.value for run in runs}
        # On a CPU tf32 is fp32. A slow precision is left out, and said to be.
        message = {reason.partition(":")[0] for reason in result["left_out"]}
        assert trained | message == {"fp32", "amp_fp16", "amp_bf16"}
        assert result["use"] in trained
        assert all(run.state is RunState.COMPLETED for run in runs)
        assert {run.audit_share for run in runs} == {1.0}
        assert (whole / "precision.md").is_file()
        answer = f"\n\n{result['answer']}\n\nhyperparameters:\n  amp:\n    precision: "
        _, _, after = (whole / "printed").read_text().partition(answer)
        assert after.startswith(f"{result['use']}\n")
        assert "* float16 loss scale: verdict: " in after
        assert not list(whole.glob("pilots/*/checkpoints/batch-*"))

    def test_runs_are_equal_but_for_their_precision(self, whole):
        runs = read_search(whole).runs
        lengths = {run.training.batches for run in runs}
        assert lengths == {24}
        half = len(runs) // 2  # seed by seed
        assert [run.seed for run in runs] in (
            [0] * half + [1] * half,
            [1] * half + [0] * half,
        )

    def test_amp_settings_of_the_user_reach_every_run_and_every_pilot(self, whole):
        pilots = [read_record(folder) for folder in (whole / "pilots").iterdir()]
        runs = [*pilots, *read_search(whole).runs]
        assert len(runs) > 6
        for made in runs:
            assert made.settings["hyperparameters.amp.growth_interval"] == 7
            assert made.settings["hyperparameters.amp.fp32_modules"] == ["1"]

    def test_answer_names_the_module_that_float16_cannot_hold(self, loud):
        result = json.loads((loud / "precision.json").read_text())
        (left_out,) = (
            why for why in result["left_out"] if why.startswith("amp_fp16: ")
        )
        assert "forward overflow in module 2" in left_out
        rows = {row["precision"]: row for row in result["table"]}
        assert list(rows) == ["fp32", "amp_bf16"]
        assert math.isfinite(float(rows["amp_bf16"]["val_loss"]))


@pytest.mark.parametrize(
    ("ended", "cut_short", "error"),
    [
        ((run("fp32"), run("amp_bf16")), "within 3 min", None),
        ((), "within 3 min", UserError),
        ((), BY_A_SIGNAL, KeyboardInterrupt),
    ],
)
def test_comparison_that_was_cut_short_says_what_is_missing_and_how_to_go_on(
    tmp_path, monkeypatch, ended, cut_short, error
):
    source = Search("", (*ended, run("fp32", 2, last_batch=60)))
    monkeypatch.setattr(runs, "read_search", Mock(return_value=source))
    monkeypatch.setattr(runs, "_page", Mock())
    plan: Any = SimpleNamespace(points=range(6), search={})
    done = f"{len(ended)} of 6 runs were finished {cut_short}; for the others: det-amp"
    said = rf"{done} search --resume {tmp_path}, then det-amp report {tmp_path}"
    if error is None:
        runs._report(tmp_path, plan, cut_short)
        assert said in (tmp_path / "precision.md").read_text()
    else:
        with pytest.raises(error, match=said):
            runs._report(tmp_path, plan, cut_short)


def test_time_limit_is_what_the_user_allows_or_1_3_times_a_longer_estimate():
    short = ComparisonPlan(200, 25, seconds=8.0, allowed=180.0)
    long = ComparisonPlan(20, 2, seconds=400.0, allowed=180.0)
    assert (short.time_limit, long.time_limit) == (180.0, 520.0)


def pilots_of_two(_, precisions, results, *more):
    """In place of the pilots."""
    results.pilots[Precision.FP32] = Pilot(0.001, overhead=1.0)
    results.pilots[Precision.AMP_BF16] = Pilot(0.002, overhead=1.0)


def test_chosen_precisions_are_trained_with_the_settings_of_the_yaml(
    tmp_path, monkeypatch
):
    """A trial that is only compared needs no precision in its section `amp`, whose
    settings of the scale stay though float16 is left out.
    """

    def pilots_without_float16(*given):
        pilots_of_two(*given)
        known = json.loads(found_scale().json_text())
        given[2].scale = {**known, "verdict": Verdict.BF16.value}

    pilot = Mock(side_effect=pilots_without_float16)
    monkeypatch.setattr(runs, "run_pilots", pilot)
    monkeypatch.setattr(runs, "run_comparison", Mock(return_value=""))
    monkeypatch.setattr(runs, "_report", Mock())
    amp = ("--config", "hyperparameters.amp={growth_interval: 7}")
    folder = compare("Stranger", tmp_path, *amp, "--precisions", "amp_bf16", "fp32")
    assert pilot.call_args.args[1] == [Precision.FP32, Precision.AMP_BF16]
    section = read_config(folder)["hyperparameters"]["amp"]
    precisions = {"type": "categorical", "vals": ["amp_bf16", "fp32"]}
    assert section == {"growth_interval": 7, "precision": precisions}
    asked = read_search(folder).command
    assert asked.startswith("det-amp compare ")
    assert asked.endswith(" --precisions amp_bf16 fp32")


@pytest.fixture
def on_cluster(tmp_path, monkeypatch):
    """The master of a task."""
    hparams = {
        "learning_rate": {"type": "const", "val": 0.5},
        "global_batch_size": 4,
    }
    config = {"name": "a", "entrypoint": "tests.strangers:Stranger"}
    return start_task(monkeypatch, tmp_path, config, hparams)


ASKED = ComparisonRequest([*Precision], 1, None, 3, [])


@pytest.mark.usefixtures("on_cluster")
def test_task_without_a_batch_size_or_on_several_slots_is_refused():
    info: Any = det.get_cluster_info()
    del info.trial.hparams["global_batch_size"]
    with pytest.raises(UserError, match=r"hyperparameters\.global_batch_size: missing"):
        compare_on_cluster(None, ASKED)
    info.slot_ids.append(1)
    with pytest.raises(UserError, match="slots_per_trial: got 2; allowed: 1"):
        compare_on_cluster(None, ASKED)


def test_task_leaves_its_answer_on_the_master(on_cluster, tmp_path, monkeypatch):
    write_remarks(tmp_path, [], [], "det-amp compare YAML")
    amp = (run("amp_bf16", seed, speed=2000.0) for seed in (1, 2))
    source = Search("", (run("fp32"), run("fp32", 2), *amp))
    comparison = compare_runs([source])
    compared = Mock(return_value=ComparisonEnd(tmp_path, comparison))
    monkeypatch.setattr(comparison_task, "compare", compared)
    compare_on_cluster(None, ASKED)
    assert on_cluster.reports["validation"] == [(100, {"speed": 2.0})]
    noted = {"precision": "amp_bf16", "verdict": "cannot tell yet", "speed": 2.0}
    assert on_cluster.metadata.items() >= noted.items()
    assert on_cluster.metadata["answer"] == answer_of(comparison).text
    assert on_cluster.status == "use amp_bf16: 2.0x"


def test_task_that_can_train_only_fp32_leaves_that_answer_as_its_page(
    tmp_path, monkeypatch, capsys
):
    def pilots_of_one(_, chosen, results, *more):
        results.pilots[Precision.FP32] = Pilot(0.001)
        results.leave_out(Precision.AMP_BF16, "it is emulated here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "run_pilots", pilots_of_one)
    master = start_task(monkeypatch, tmp_path, PLAIN, PLAIN["hyperparameters"])
    compare_on_cluster(None, ASKED)
    (page,) = tmp_path.glob("checkpoints/*/precision.md")
    assert (
        page.read_text() == f"# {runs.ONLY_FP32}\n\n* amp_bf16: it is emulated here\n"
    )
    assert master.status == "use fp32"
    assert f"{runs.ONLY_FP32} (see above)\n\nthe page: det-amp report 7" in (
        capsys.readouterr().out
    )


@pytest.mark.usefixtures("_workers_are_forks")
def test_task_that_was_paused_after_its_answer_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "run_pilots", pilots_of_two)
    master = start_task(monkeypatch, tmp_path, PLAIN, PLAIN["hyperparameters"])
    info: Any = det.get_cluster_info()
    info.trial.experiment_id = 7
    asked = ComparisonRequest([*Precision], 1, 24, 20, [])
    compare_on_cluster(None, asked)
    (answer,) = tmp_path.glob("checkpoints/*")
    files = {path.name for path in answer.iterdir()}
    assert {"precision.png", "precision.md", "precision.json"} <= files
    ((batches, _),) = master.reports["validation"]
    assert batches == 24

    shutil.rmtree(tmp_path / "runs")  # with its container
    info.latest_checkpoint = answer.name
    monkeypatch.setattr(comparison_task, "compare", Mock(side_effect=AssertionError))
    compare_on_cluster(None, asked)
    assert len(master.reports["validation"]) == 1
    assert len([*tmp_path.glob("checkpoints/*")]) == 1


@pytest.mark.parametrize(
    ("window", "length", "batches"),
    [
        (1, {"batches": 40}, 40),
        (1, {"epochs": 3}, 48),
        (1, None, 2200),
        (32, {"batches": 24}, 32),  # one whole window at least
        (7, {"batches": 20}, 21),
        (1, {"batches": 5}, LEAST_BATCHES),  # long enough to have a speed
    ],
)
def test_plan_is_no_longer_than_the_experiment(window, length, batches):
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
    asked = ComparisonRequest(precisions, 3, None, 3, [])
    made = plan.plan_of(results, experiment, asked)
    assert made.batches == batches
    assert made.reporting_period % window == 0
    assert made.seconds == pytest.approx(6 + 0.06 * made.batches)


@pytest.mark.parametrize(
    ("seconds", "is_cut_short"), [(180.0, False), (181.0, False), (180.0, True)]
)
def test_plan_says_that_it_is_too_long_and_that_it_has_no_validations(
    seconds, *, is_cut_short
):
    pilot = Pilot(0.01, is_cut_short=is_cut_short)
    results = PilotResults(dict.fromkeys(Precision, pilot))
    made = ComparisonPlan(40, 5, 3, seconds, allowed=180.0)
    said = "\n".join(plan.plan_lines(results, made))
    assert ("validation is not in this estimate" in said) is is_cut_short
    too_long = "that is more than the 3 min of --minutes; shorter: "
    for words in (too_long, "--precisions", "--seeds", "--batches 20"):
        assert (words in said) is (seconds > 180.0)


def test_runs_of_a_comparison_differ_in_precision_and_seed_alone():
    config = {**PLAIN, "reproducibility": {"experiment_seed": 5}}
    config |= {"optimizations": {"aggregation_frequency": 3}}
    in_fp32 = parse(in_precision(config, "fp32"), "x")
    precisions = {"type": "categorical", "vals": ["amp_bf16", "fp32"]}
    whole, searcher = {"batches": 42}, config["searcher"]
    chosen = [Precision.FP32, Precision.AMP_BF16]
    made = search_over(in_fp32, chosen, ComparisonPlan(42, 6, 2))
    assert {key: made[key] for key in made if made[key] != config.get(key)} == {
        "name": "compare-stranger",
        "entrypoint": f"python3 -m determined_amp train --trial {in_fp32.trial}",
        "hyperparameters": {
            "global_batch_size": 16,
            "trial_seed": {"type": "categorical", "vals": [5, 6]},
            "amp": {"precision": precisions},
        },
        "searcher": {**searcher, "name": "grid", "max_length": whole},
        **dict.fromkeys(("min_validation_period", "min_checkpoint_period"), whole),
        "scheduling_unit": 6,
    }
    pilot = pilots.pilot_of(in_fp32, Precision.TF32, LEAST_BATCHES)
    assert pilot.config["hyperparameters"]["amp"] == {"precision": "tf32"}
    # whole windows
    assert pilot.config["searcher"] == {**searcher, "max_length": {"batches": 21}}
    assert pilot.config["scheduling_unit"] == 3


THEIRS = {**PLAIN, "scheduling_unit": 20, "min_validation_period": {"epochs": 1}}
LENGTHS = {
    "max_length": {"batches": 24},
    "reporting_period": "20 batches",
    "validation_period": {"epochs": 1},
}
OURS = {
    **{key: PLAIN[key] for key in ("name", "entrypoint")},
    "searcher": {"name": "single", "metric": "val_loss"},
    "hyperparameters": {"global_batch_size": 16, "training": LENGTHS},
}


@pytest.mark.parametrize(
    "config",
    [
        OURS,
        {**OURS, "description": "[test-mode] mine", "scheduling_unit": 1},
        THEIRS,
        with_overrides(THEIRS, ["hyperparameters.trial=3"]),
    ],
    ids=[
        "ours",
        "ours, in a short test of a cluster",
        "Determined's",
        "Determined's, with a hyperparameter named trial",
    ],
)
def test_periods_of_the_user_give_way_to_those_of_the_plan(config):
    in_fp32 = experiment_in(in_precision(config, "fp32"), "x")
    made = search_over(in_fp32, [Precision.FP32], ComparisonPlan(800, 100, 1))
    ((run, _),) = SearchPlan(made).trials
    pilot = pilots.pilot_of(in_fp32, Precision.FP32, LEAST_BATCHES)
    for trains, whole, often in ((run, 800, 100), (pilot, 20, 2)):
        training = trains.training
        assert training.reporting_period == Length(batches=often)
        assert training.max_length == training.validation_period
        assert training.max_length == Length(batches=whole)


FOUND = Run("", RunState.COMPLETED)


@pytest.mark.parametrize("has_tf32", [True, False])
def test_pilots_are_of_every_precision_that_the_device_has(
    tmp_path, monkeypatch, *, has_tf32
):
    results = stage_pilots(tmp_path, monkeypatch, has_tf32=has_tf32)
    lacks = set() if has_tf32 else {Precision.TF32}
    assert {*Precision} - results.pilots.keys() == lacks
    assert results.scale == json.loads((tmp_path / "loss_scale.json").read_text())


def test_no_loss_scale_is_sought_in_a_precision_that_is_left_out(tmp_path, monkeypatch):
    failed = {Precision.AMP_FP16: PilotError("it overflows")}
    results = stage_pilots(tmp_path, monkeypatch, trained=failed)
    assert results.left_out == {Precision.AMP_FP16: "it overflows"}
    assert results.scale is None


def stage_pilots(
    tmp_path,
    monkeypatch,
    *,
    trained=MappingProxyType({}),
    has_tf32=True,
    found=FOUND,
):
    """The results of pilots that end at once, one after the other."""

    def train(made, *more):
        pilot = trained.get(made.amp.precision, Pilot(1.0))
        if isinstance(pilot, PilotError):
            raise pilot
        return pilot

    place = RunFolder(tmp_path / "pilots" / "loss-scale").path
    (place / "loss_scale.json").write_text(found_scale().json_text())
    record = SimpleNamespace(machine=SimpleNamespace(has_tf32=has_tf32))
    monkeypatch.setattr(pilots, "read_record", Mock(return_value=record))
    monkeypatch.setattr(pilots, "_run", Mock(return_value=found))
    monkeypatch.setattr(pilots, "train_pilot", train)
    results = PilotResults()
    in_fp32 = experiment_in(in_precision(experiment("Stranger"), "fp32"), "x")
    pilots.run_pilots(in_fp32, [*Precision], results, tmp_path / "pilots")
    return results


@pytest.mark.parametrize(("seconds", "batches"), [(1.0, FINDER_BATCHES), (20.0, 1)])
def test_finder_that_fails_leaves_float16_out(tmp_path, monkeypatch, seconds, batches):
    """It takes fewer batches where they are slow."""
    trained = dict.fromkeys(Precision, Pilot(seconds))
    found = Run("", RunState.FAILED, "its cause")
    results = stage_pilots(tmp_path, monkeypatch, trained=trained, found=found)
    assert results.left_out == {Precision.AMP_FP16: "its cause"}
    assert results.scale is None
    finder: Any = pilots._run
    (job, _), _ = finder.call_args
    assert job.task == Task("find", batches)


@pytest.mark.parametrize(("seconds", "is_kept"), [(6.0, False), (4.9, True)])
def test_slow_pilot_leaves_its_precision_out(tmp_path, monkeypatch, seconds, is_kept):
    """A batch in fp32 takes 1 s."""
    trained = {Precision.AMP_BF16: Pilot(seconds)}
    results = stage_pilots(tmp_path, monkeypatch, trained=trained)
    assert (Precision.AMP_BF16 in results.pilots) is is_kept
    said = results.left_out.get(Precision.AMP_BF16, "")
    assert said.startswith("for time: a batch takes 6 times") is not is_kept


def reports(*batches, **metrics):
    return [{"group": "training", "batches": count, **metrics} for count in batches]


class TestPilot:
    """Reports come after 100, 101, 103, 106 s and so on, without a process."""

    @pytest.fixture
    def train(self, tmp_path, monkeypatch):
        """Runs a pilot that sends these messages."""
        searching.stage(monkeypatch, pilots)

        def pilot(*messages):
            ticks = iter([0.0, *(100.0 + n * (n + 1) / 2 for n in range(20))])
            clock = SimpleNamespace(monotonic=lambda: next(ticks))
            monkeypatch.setattr(pilots, "time", clock)
            monkeypatch.setattr(Staged, "script", messages)
            given = experiment_in(experiment("Stranger"), "x")
            made = pilots.train_pilot(given, tmp_path, "pilot 2 of 4")
            (job,) = Staged.jobs
            assert (job.task, job.folder.path) == (Task("train"), tmp_path)
            assert job.experiment is given
            assert not (tmp_path / "checkpoints").exists()
            assert Staged.made[0].connection.closed
            return made

        return pilot

    def test_seconds_per_batch_exclude_the_start_of_the_run(self, train):
        """It ends at 106 s; between reports of 2 batches there are 1 s and 2 s."""
        assert train(*reports(2, 4, 6), *DONE) == Pilot(0.75, 101.5, 16)

    def test_seconds_per_batch_are_those_of_the_speed_that_the_run_reports(
        self, tmp_path, train
    ):
        """64 samples/s are 0.25 s for a batch of 16."""
        told = reports(2, 4, samples_per_second=64.0)
        (tmp_path / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(line)}\n" for line in told)
        )
        assert train(*told, *DONE).seconds_per_batch == 0.25

    def test_pilot_that_was_timed_for_long_is_cut_short(self, train):
        """After 8 intervals, which take 36 s."""
        made = train(*reports(*range(2, 22, 2)), Ended(RunState.PRUNED))
        assert made.is_cut_short
        assert Staged.made[0].connection.answers == [*[True] * 8, False, False]

    def test_pilot_shows_its_batches_and_the_rest_of_its_time(self, train, monkeypatch):
        console = MagicMock()
        monkeypatch.setattr(pilots, "Console", console)
        train(*reports(2, 4), *DONE)
        status = console.return_value.status
        status.assert_called_once_with(
            "pilot 2 of 4: 0 of 20 batches, the first is audited"
        )
        shown = status.return_value
        assert [call.args[0] for call in shown.update.call_args_list] == [
            "pilot 2 of 4: 2 of 20 batches, at most 30 s more",
            "pilot 2 of 4: 4 of 20 batches, at most 29 s more",
        ]

    @pytest.mark.parametrize(
        ("message", "failure"),
        [
            (Ended(RunState.STOPPED, "disk full"), "disk full"),
            (DEAD, "its process died with status -15"),
            (Ended(), "its reports tell no speed"),
        ],
    )
    def test_pilot_without_an_end_or_a_speed_has_failed(self, message, failure, train):
        with pytest.raises(PilotError, match=failure):
            train(message)

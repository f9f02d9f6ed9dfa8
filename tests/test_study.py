"""The study of a search, and its trials in processes that only send messages."""

import math
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState

from determined_amp.amp.errors import UserError
from determined_amp.runs.folder import STUDY_FILE, RunFolder, trial_folder
from determined_amp.runs.run import RunState
from determined_amp.search import optimize
from determined_amp.search.optimize import SearchLoop
from determined_amp.search.search_display import closing_lines
from determined_amp.search.search_folder import (
    read_config,
    read_search,
    write_config,
)
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study import next_trial, open_study, storing
from tests import run_here, searching
from tests.reporting import SEARCH, scored, write_study
from tests.searching import COMPLETED, DEAD, Ended, Staged


def three_scales():
    return SearchPlan(searching.load("loss_scale_grid.yaml", *searching.THREE_SCALES))


def study_in(folder):
    return open_study(folder, three_scales())


@pytest.mark.parametrize("stopped", [False, True])
def test_end_of_a_search_names_its_best_values_and_how_to_go_on(tmp_path, *, stopped):
    folder = write_study(tmp_path, [(2.0**scale, scored(scale)) for scale in (24, 16)])
    resume = f"go on: det-amp search --resume {folder}"
    for workers, line in ((1, resume), (3, f"{resume} --workers 3")):
        write_config(folder, SEARCH, workers)
        lines = list(closing_lines(read_search(folder), stopped=stopped))
        assert any("default is fine: 2^16 is among them" in line for line in lines)
        assert (line in lines) is stopped


def test_trials_that_ran_wait_again_and_come_first(tmp_path):
    study, _ = study_in(tmp_path)
    assert study.direction.name == "MINIMIZE"
    plan = three_scales()
    started = [next_trial(study, plan), next_trial(study, plan)]
    assert len(study.trials) == 2  # not the third, which waits
    again, waiting = study_in(tmp_path)
    assert waiting == 3
    asked = [next_trial(again, plan) for _ in range(3)]
    assert [trial.number for trial in asked] == [0, 1, 2]
    assert [trial.params for trial in asked[:2]] == [trial.params for trial in started]
    scales = [trial.params["amp.init_scale"] for trial in asked]
    assert scales == [2.0**24, 2.0**14, 2.0**4]


def test_database_on_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # Optuna tries again
    study, _ = study_in(tmp_path)
    refused = pytest.raises(
        UserError, match=r"its files cannot be read or written: .*disk.*--resume"
    )
    with refused, storing(tmp_path), run_here.no_file_larger_than(1000):
        next_trial(study, three_scales())
    assert next_trial(study_in(tmp_path)[0], three_scales()).number == 0


def test_closed_pipe_is_not_blamed_on_the_files_of_a_search(tmp_path):
    """The door ends the program then, without a word."""
    with pytest.raises(BrokenPipeError), storing(tmp_path):
        raise BrokenPipeError


def test_trial_worse_than_another_stops_where_they_are_first_compared(tmp_path):
    largest = "searcher.smaller_is_better=false"
    config = searching.load("loss_scale_asha.yaml", *searching.SHORT_ASHA, largest)
    plan = SearchPlan(config)
    study, _ = open_study(tmp_path, plan)
    assert study.direction.name == "MAXIMIZE"
    loop = SearchLoop(plan, tmp_path, study, 1)
    trials = [next_trial(study, plan), next_trial(study, plan)]
    continues = []
    for trial, batches, loss in (
        (0, 2, -1.0),
        (1, 2, math.nan),
        (1, 2, "no number"),
        (1, 2, -2.0),
        (1, 8, -2.0),
    ):
        report = {"group": "validation", "validation_loss": loss, "batches": batches}
        assert loop._goes_on(trials[trial], {**report, "group": "training"})
        continues.append(loop._goes_on(trials[trial], report))
    assert continues == [True, True, True, False, True]


AFTER = "; it ended after 2 batches"


class TestTrials:
    """The search has three points, and its processes only send messages."""

    @pytest.fixture(autouse=True)
    def _staged(self, monkeypatch):
        searching.stage(monkeypatch, optimize)

    def run(
        self,
        folder,
        *processes,
        metric="loss_scale_score",
        workers=1,
        time_limit=0.0,
    ):
        """The loop of a search whose processes send these messages, in their
        order.
        """
        config = searching.load("loss_scale_grid.yaml", *searching.THREE_SCALES)
        for number in range(3):
            run_folder = RunFolder(trial_folder(folder, number))
            line = {"group": "validation", "batches": 2, metric: 0.5}
            run_folder.append_metrics(line)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Staged, "scripts", list(processes))
            write_config(folder, config, workers)
            plan = SearchPlan(read_config(folder))
            return optimize._optimize(folder, plan, workers, time_limit)

    def trials(self, folder):
        storage = f"sqlite:///{folder / STUDY_FILE}"
        return optuna.load_study(study_name=None, storage=storage).trials

    def states(self, folder):
        return [trial.state for trial in self.trials(folder)]

    @pytest.mark.parametrize(
        ("end", "metric", "reason", "kept"),
        [
            (Ended(), "loss_scale_score", "", TrialState.COMPLETE),
            (
                Ended(),
                "f1",
                f"loss_scale_score was not reported{AFTER}",
                TrialState.FAIL,
            ),
            (
                Ended(RunState.PRUNED, "why"),
                "loss_scale_score",
                "2 batches: why",
                TrialState.PRUNED,
            ),
            (
                Ended(RunState.INVALID, "why"),
                "loss_scale_score",
                f"why{AFTER}",
                TrialState.FAIL,
            ),
            (DEAD, "", f"its process died with status -15{AFTER}", TrialState.FAIL),
        ],
        ids=["completed", "completed without its metric", "pruned", "invalid", "dead"],
    )
    def test_end_of_a_trial_is_recorded_and_the_next_one_runs(
        self, tmp_path, end, metric, reason, kept
    ):
        self.run(tmp_path, (end,), COMPLETED, COMPLETED, metric=metric)
        run = read_search(tmp_path).runs[0]
        failed = kept is TrialState.FAIL and end.state is not RunState.INVALID
        assert run.state is (RunState.FAILED if failed else end.state)
        assert run.reason == reason
        assert run.hparams == {"amp.init_scale": 2.0**24}
        first = self.trials(tmp_path)[0]
        assert first.state is kept
        assert (first.value == 0.5) is (kept is TrialState.COMPLETE)
        assert len(Staged.made) == 3

    def test_every_trial_has_a_process_and_one_of_the_slots(self, tmp_path):
        self.run(tmp_path, *[COMPLETED] * 3, workers=2)
        assert {trial.slot for trial in Staged.made} <= {0, 1}
        assert all(trial.connection.closed for trial in Staged.made)
        assert not any(trial.process.kill.called for trial in Staged.made)
        assert self.states(tmp_path) == [TrialState.COMPLETE] * 3

    def test_resumed_search_goes_on_with_the_workers_that_it_was_started_with(
        self, tmp_path, monkeypatch
    ):
        self.run(tmp_path, COMPLETED, (DEAD,), COMPLETED, workers=3)
        workers = []

        def note(folder, plan, at_a_time):
            workers.append(at_a_time)
            return SimpleNamespace(stopping=False)

        monkeypatch.setattr(optimize, "_optimize", note)
        for given in (None, 2):
            plan = SearchPlan(read_config(tmp_path))
            optimize.run_search(tmp_path, plan, given)
        assert workers == [3, 2]

    def test_trial_whose_folder_has_its_end_is_not_run_again(self, tmp_path):
        """The search was killed before its study had that end."""
        RunFolder(trial_folder(tmp_path, 1)).end(RunState.COMPLETED)
        self.run(tmp_path, COMPLETED, COMPLETED)
        assert [job.folder.path.name for job in Staged.jobs] == ["0000", "0002"]
        assert self.states(tmp_path) == [TrialState.COMPLETE] * 3

    @pytest.mark.parametrize("ending", ["terminate", "kill"])
    def test_time_limit_stops_what_runs_and_then_kills_it(
        self, ending, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(Staged, "stopped_by", ending)
        monkeypatch.setattr(optimize, "GRACE", 0.2 if ending == "kill" else 60.0)
        made = self.run(tmp_path, (), time_limit=0.5)
        assert made.time_is_up
        (trial,) = Staged.made
        assert trial.process.kill.called is (ending == "kill")
        assert TrialState.FAIL not in self.states(tmp_path)

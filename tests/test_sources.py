"""A report reads a search of a folder and of a master alike, and says what is wrong."""

import math

import pytest

from determined_amp.amp.errors import UserError
from determined_amp.finder.scale_score import bits_from_default
from determined_amp.report.master_runs import read_experiment
from determined_amp.report.sources import read_source
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import read_search
from tests.report_master import TRIAL, Master, report, serving
from tests.reporting import SEARCH, scored, write_study

# What was drawn and what was measured; the scale that was used is a power of two.
TRIALS = [(70000.0, scored(16)), (2.0**20, scored(20)), (2.0**10, {"f1": 0.5})]


@pytest.fixture(params=["folder", "master"])
def search(request, tmp_path, monkeypatch):
    """The same search in a folder and on a master."""
    if request.param == "folder":
        yield read_search(write_study(tmp_path, TRIALS))
        return
    trials, reports = [], []
    for number, (drawn, metrics) in enumerate(TRIALS, 11):
        sampled = {**SEARCH["hyperparameters"], "amp": {"init_scale": drawn}}
        trials.append({**TRIAL, "id": number, "hparams": sampled})
        early = {name: value + 1 for name, value in metrics.items()}
        reports.append(report(number, 2, "validation", early))
        reports.append(report(number, 4, "validation", {**metrics, "note": "text"}))
    master = Master(SEARCH, trials)
    master.reports["validation"] = reports
    with serving(master, monkeypatch, tmp_path):
        yield read_experiment(7)


def test_runs_of_a_folder_and_of_a_master_have_the_same_numbers(search):
    runs = search.runs
    assert search.name == "small"
    assert search.searched == ["amp.init_scale"]
    assert [run.scale_log2 for run in runs] == [16.0, 20.0, 10.0]
    assert [run.metrics.get("overflow") for run in runs] == [0.0, 1.0, None]
    assert [run.skipped_steps for run in runs] == [None] * 3
    assert [run.validated.batches for run in runs] == [4] * 3
    assert {run.state for run in runs} == {RunState.COMPLETED}
    assert "note" not in runs[0].metrics
    assert {one.metrics.get("loss_scale_score") for one in search.ranked()[:2]} == {
        metrics["loss_scale_score"] for _, metrics in TRIALS[:2]
    }


def test_equal_trials_are_ranked_by_their_distance_from_the_default(tmp_path):
    trials = [(2.0**scale, scored(scale)) for scale in (24, 0, 8, 18, 17, 15)]
    folder = write_study(tmp_path, trials)
    assert [run.scale_log2 for run in read_search(folder).ranked()] == [
        17,
        15,
        18,
        8,
        0,
        24,
    ]
    assert bits_from_default(math.nan) > bits_from_default(-100)


def test_trial_with_a_damaged_record_is_named(tmp_path):
    write_study(tmp_path, [(2.0**scale, scored(scale)) for scale in (4, 16, 24)])
    (tmp_path / "trials" / "0001" / "run.json").write_text("{}")
    with pytest.raises(UserError, match="trials/0001: is not a run folder that this"):
        read_search(tmp_path)


def test_source_that_is_not_there_is_a_sentence():
    with pytest.raises(UserError, match="there is no such folder that can be read"):
        read_source("9" * 5000)

"""`report SEARCH`: the best trial, a table and a picture of all, and clear errors."""

import dataclasses
import json
import math
import re
from typing import Any

import pytest

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.scale_finding import Verdict
from determined_amp.finder.scale_score import choice_of
from determined_amp.report import page
from determined_amp.report.search_report import panels_of, write_search_report
from determined_amp.runs.run import Report, Run, RunState
from determined_amp.search.search_display import closing_lines
from determined_amp.search.search_folder import Search, read_search
from tests import run_here
from tests.reporting import (
    SEARCH,
    found_scale,
    scored,
    write_study,
)

TRIALS = [(2.0**scale, scored(scale)) for scale in (8, 16, 17, 18, 19, 24)]


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch):
    """Drawing takes longer than all else; test_figures looks at pictures."""
    monkeypatch.setattr(page, "as_png", lambda figure: b"")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A directory with an experiment that the finder looks at in a second, and its
    search.
    """
    monkeypatch.chdir(tmp_path)
    config = read_yaml(str(run_here.ROOT / "experiment_configs/mlp/amp.yaml"))
    run_here.write_yaml(tmp_path, with_overrides(config, run_here.SMALL))
    write_study(tmp_path / "study", TRIALS)
    return tmp_path


def test_report_on_a_local_search_says_what_its_scores_show(workplace, capsys):
    assert door.run(["report", "study"]) == 0
    output = capsys.readouterr().out
    page = (workplace / "study/report.md").read_text()
    answer = (
        "no step is lost in 4 of 6 trials, at 2^8 to 2^18: default is fine: 2^16 is"
    )
    assert output.startswith(answer)
    assert page.startswith(f"# {answer}")
    assert "(report.png)" in page
    assert "(study); on cpu, torch 2.6.0, 2026-01-02T" in page
    assert "| trial | amp.init_scale | state | batches | loss_scale_score |" in page
    record = json.loads((workplace / "study/report.json").read_text())
    assert record["answer"] == output.splitlines()[0]
    scales = [trial["amp.init_scale"] for trial in record["table"]]
    assert scales == ["2^16", "2^17", "2^18", "2^8", "2^19", "2^24"]  # best first


def test_report_does_not_overwrite_json_of_another_program(workplace, refusal):
    kept = workplace / "study" / "report.json"
    kept.write_text(found_scale().json_text())
    assert "another" in refusal("report", "study")
    assert kept.read_text() == found_scale().json_text()


def test_report_that_cannot_be_written_is_a_sentence_and_leaves_nothing(
    workplace, refusal
):
    (workplace / "out" / "report.md").mkdir(parents=True)
    said = refusal("report", "study", "--output", "out")
    assert said.startswith(
        "error: out: the report cannot be written: [Errno 21] Is a directory: "
    )
    assert [path.name for path in (workplace / "out").iterdir()] == ["report.md"]


def test_answer_that_cannot_be_written_is_a_sentence(workplace, refusal):
    with run_here.no_file_larger_than(1000):
        said = refusal("find", "experiment.yaml", "--batches", "1", "--json", "a.json")
    assert said == "error: a.json cannot be written: File too large\n"
    assert not list(workplace.glob("*a.json*"))


def test_page_shows_tags_and_bars_as_text(tmp_path):
    parts: Any = {
        "table": [[("a", "x | y\nz")]],
        "record": {},
    }
    parts |= {
        "answer": "<script>a</script>, 1 < 2",
        "yaml": "",
        "sentences": [],
        "origin": "",
    }
    page.write_page(tmp_path, "x", **parts)
    text = (tmp_path / "x.md").read_text()
    assert text.startswith("# &lt;script>a&lt;/script>, 1 < 2\n")
    assert "| x \\| y z |" in text


def report_on(search, folder):
    return write_search_report(search, folder).text


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ((21, 20), "every scale of this search overflows: search smaller ones"),
        ((20, -8), "every scale of this search loses steps, and the best one 2"),
    ],
)
def test_search_without_a_scale_that_loses_nothing_says_so(scales, words, tmp_path):
    rows = [(2.0**scale, scored(scale)) for scale in scales]
    search = read_search(write_study(tmp_path / "study", rows))
    assert words in report_on(search, tmp_path)


@pytest.mark.parametrize(
    ("low", "top", "scale"), [(0, 18, None), (0, 14, 8), (2, 5, 3)]
)
def test_search_report_and_finder_recommend_the_same_scale(low, top, scale, tmp_path):
    """A line to paste, or none and that the default is fine."""
    rows = [(2.0**log2, scored(log2, top=top)) for log2 in range(low, 25)]
    search = read_search(write_study(tmp_path / "study", rows))
    known = found_scale(low, top)
    choice = choice_of(low, top)
    verdict = Verdict.DEFAULT if scale is None else Verdict.SCALE
    found = dataclasses.replace(known.finding, choice_log2=choice, verdict=verdict)
    predicted = dataclasses.replace(known, finding=found)
    said = [str(predicted), report_on(search, tmp_path)]
    said.append("\n".join(closing_lines(search, stopped=False)))
    for text in said:
        scales = re.findall(r"^ +init_scale: (.*)$", text, re.MULTILINE)
        assert scales == ([] if scale is None else [str(2.0**scale)])
        assert ("default is fine" in text) is (scale is None)


def searched(*trials, smaller_is_better):
    """A search that trained: scale_log2, state and validation losses of each trial."""
    runs = []
    for number, (scale, state, losses) in enumerate(trials):
        reports = [
            Report(batches, {"validation_loss": loss})
            for batches, loss in enumerate(losses, 1)
        ]
        hparams = {"amp.init_scale": 2.0**scale}
        run = Run("a", state, validations=reports, number=number, hparams=hparams)
        runs.append(run)
    searcher = {"metric": "validation_loss", "smaller_is_better": smaller_is_better}
    return Search(
        "here", tuple(runs), {**SEARCH, "searcher": {**SEARCH["searcher"], **searcher}}
    )


def test_search_that_varies_the_seed_alone_has_no_lines_to_paste(tmp_path):
    two = [(16.0, RunState.COMPLETED, [0.5])] * 2
    search = searched(*two, smaller_is_better=True)
    texts = []
    for width in (8, {"type": "int", "minval": 1, "maxval": 8}):
        config = {**search.config, "hyperparameters": {"width": width}}
        made = dataclasses.replace(search, config=config)
        texts.append(write_search_report(made, tmp_path).text)
    best = "best: trial 0, with validation_loss 0.5"
    assert texts[0] == best
    assert texts[1].startswith(f"{best}\n\nhyperparameters:\n  width:")


@pytest.mark.parametrize(("smaller_is_better", "best"), [(True, 16), (False, 18)])
def test_best_trial_is_the_platforms_which_has_the_best_of_all_validations(
    best, tmp_path, *, smaller_is_better
):
    """A trial that ASHA stopped early may have the best validation and a worse last
    one.
    """
    search = searched(
        (16.0, RunState.PRUNED, [0.5, 0.1, 0.6]),
        (17.0, RunState.COMPLETED, [0.5, 0.4, 0.3]),
        (18.0, RunState.COMPLETED, [0.9, math.nan, 0.2]),
        smaller_is_better=smaller_is_better,
    )
    said = report_on(search, tmp_path)
    assert said.startswith(f"best: trial {best - 16}, with validation_loss 0.")
    assert f"init_scale: {2.0**best}" in said


@pytest.mark.parametrize("end", [RunState.FAILED, RunState.INVALID])
def test_failed_trial_does_not_count_whatever_it_reported(end, tmp_path):
    """The terminal says so, too."""
    failed = (16.0, end, [0.1])
    search = searched(failed, (17.0, RunState.COMPLETED, [0.3]), smaller_is_better=True)
    said = report_on(search, tmp_path)
    assert said.startswith("best: trial 1, with validation_loss 0.3")
    assert "* 1 of 2 trials failed; trial 0: " in said
    assert "(they do not count, although the platform may name one as best)" in said
    local = dataclasses.replace(search, origin=str(tmp_path))
    assert "(they do not count)" in report_on(local, tmp_path)
    closing = "\n".join(closing_lines(search, stopped=False))
    assert "1 of 2 trials failed; trial 0: " in closing


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.KILLED, RunState.STOPPED])
def test_report_on_a_search_whose_trials_have_not_ended_says_so(state, tmp_path):
    one = (17.0, RunState.COMPLETED, [0.3])
    waits = "1 of 2 trials that began have not ended: the answer may change"
    said = report_on(searched((16.0, state, []), one, smaller_is_better=True), tmp_path)
    assert waits in said
    assert "not ended" not in report_on(searched(one, smaller_is_better=True), tmp_path)


def test_search_without_a_result_says_so(tmp_path):
    lost = searched((16.0, RunState.FAILED, []), smaller_is_better=True)
    assert report_on(lost, tmp_path).startswith("no trial reported validation_loss yet")
    with pytest.raises(UserError, match="here: has no trials yet; draw it when"):
        report_on(dataclasses.replace(lost, runs=()), tmp_path)


RATES = "hyperparameters.learning_rate={type: double, minval: 0.1, maxval: 0.4}"


def test_search_over_more_than_the_scale_has_a_best_trial_and_a_panel_for_each(
    tmp_path,
):
    trials = [(float(i), RunState.COMPLETED, [float(i)]) for i in (1, 0, 2)]
    some = searched(*trials, smaller_is_better=True)
    runs = tuple(
        dataclasses.replace(run, hparams={**run.hparams, "learning_rate": rate})
        for run, rate in zip(some.runs, (0.1, 0.2, 0.4), strict=True)
    )
    config = with_overrides(some.config, (RATES,))
    search = dataclasses.replace(some, runs=runs, config=config)
    assert report_on(search, tmp_path).startswith(
        "best: trial 1, with validation_loss 0\n\nhyperparameters:\n"
        "  learning_rate: 0.2\n  amp:\n    init_scale: 1.0"
    )
    panels = {panel.xlabel: list(panel.dots) for panel in panels_of(search)}
    assert panels == {
        "log₂ of amp.init_scale": [(0.0, 0), (1.0, 1), (2.0, 2)],
        "learning_rate": [(0.2, 0), (0.1, 1), (0.4, 2)],
    }

"""`report loss-scale`: a page with a picture, and clear errors."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from determined_amp import __main__ as door
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.scale_finding import Verdict
from determined_amp.finder.scale_score import choice_of
from determined_amp.report import page
from determined_amp.report.loss_scale_report import (
    search_sentences,
    write_loss_scale_report,
)
from determined_amp.runs.run import Report, Reports, Run, RunState
from determined_amp.search.search_display import closing_lines
from determined_amp.search.search_folder import Search, read_search
from tests import training
from tests.reporting import (
    SEARCH,
    Rows,
    finding,
    found_scale,
    observed,
    scored,
    write_study,
)

PNG = b"\x89PNG\r\n"
TRIALS = [(2.0**scale, scored(scale)) for scale in (8, 16, 17, 18, 19, 24)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an experiment that the finder looks at in a second, and its
    search.
    """
    monkeypatch.chdir(tmp_path)
    config = read_yaml(str(training.ROOT / "experiment_configs/mlp/amp.yaml"))
    training.write_yaml(tmp_path, with_overrides(config, training.SMALL))
    write_study(tmp_path / "study", TRIALS)
    return tmp_path


def test_report_on_a_local_search_says_what_its_scores_show(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert door.run(["report", "loss-scale", "study"]) == 0
    output = capsys.readouterr().out
    page = (workplace / "study/loss_scale.md").read_text()
    assert output.startswith(
        "no step is lost in 4 of 6 trials, at 2^8 to 2^18: default is fine: 2^16 is"
    )
    assert "best trial: 2^16 with loss_scale_score 0\n" in output
    # No YAML of this repository: that would find the scale of its own trial.
    assert "`det-amp find CONFIG --json FILE` predicts it" in output
    for line in output.splitlines()[:-1]:
        assert line in page
    assert "(loss_scale.png)" in page
    record = json.loads((workplace / "study/loss_scale.json").read_text())
    assert record["answer"] == output.splitlines()[0]
    assert [trial["init_scale"] for trial in record["trials"]] == [
        scale for scale, _ in TRIALS
    ]
    assert record["finding"] is None


def test_report_shows_a_finding_beside_the_trials(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "finding.json").write_text(json.dumps(finding()))
    arguments = ["study", "--finding", "finding.json", "--output", "elsewhere"]
    assert door.run(["report", "loss-scale", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "verdict: use 2^17" in shown
    # It may be another trial's: a search and a finding rarely have the same name.
    made = "128 samples, on cpu with torch 2.6, 2026-01-01"
    assert (
        f"predicted by finding.json, of small: {made}; nothing tells whether that is"
        in shown
    )
    table = "| trial | init_scale | state | batches | loss_scale_score | steps_lost |"
    text = (workplace / "elsewhere" / "loss_scale.md").read_text()
    assert table in text
    assert "(study); on cpu, torch 2.6.0, 2026-01-02T" in text
    assert sorted(p.name for p in (workplace / "elsewhere").iterdir()) == [
        "loss_scale.json",
        "loss_scale.md",
        "loss_scale.png",
    ]


def test_report_does_not_overwrite_a_finding(
    workplace: Path, refusal: Callable[..., str]
) -> None:
    """The file of a finding has the name of the report's own JSON."""
    kept = workplace / "study" / "loss_scale.json"
    text, other = json.dumps(finding()), workplace / "finding.json"
    for path in (kept, other):
        path.write_text(text)
    assert "another" in refusal(
        "report", "loss-scale", "study", "--finding", str(other)
    )
    assert kept.read_text() == text


def test_report_that_cannot_be_written_is_a_sentence_and_leaves_nothing(
    workplace: Path, refusal: Callable[..., str]
) -> None:
    (workplace / "finding.json").write_text(json.dumps(finding()))
    (workplace / "out" / "loss_scale.md").mkdir(parents=True)
    options = ["--finding", "finding.json", "--output", "out"]
    said = refusal("report", "loss-scale", "study", *options)
    assert said.startswith(
        "error: out: the report cannot be written: [Errno 21] Is a directory: "
    )
    assert [path.name for path in (workplace / "out").iterdir()] == ["loss_scale.md"]


def test_answer_that_cannot_be_written_is_a_sentence(
    workplace: Path, refusal: Callable[..., str]
) -> None:
    with training.no_file_larger_than(1000):
        said = refusal("find", "experiment.yaml", "--batches", "1", "--json", "a.json")
    assert (
        "the answer cannot be written: [Errno 27] File too large: '.a.json.partial'"
        in said
    )
    assert not list(workplace.glob("*a.json*"))


def test_page_shows_tags_and_bars_as_text(tmp_path: Path) -> None:
    parts: Any = {
        "figure": Figure(),
        "caption": "",
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


def lines_of(rows: Any, metric: str = "loss_scale_score", **others: Any) -> str:
    return "\n".join(
        search_sentences(found_scale(top=18), observed(rows, metric, **others))
    )


def of_scores(*scales: int) -> Rows:
    return [(float(scale), None, scored(scale), {}) for scale in scales]


WRONG = [*of_scores(8, 18, 19), (20.0, None, scored(20, top=20), {})]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            of_scores(8, 18, 19),
            "overflow: predicted above 2^18, and 3 of 3 trials agree\n",
        ),
        (WRONG, "3 of 4 trials agree; not those at 2^20"),
        # Of equal scores the one nearest to the default.
        (of_scores(19, 18, 8, 14, -8), "best trial: 2^18 with loss_scale_score 0\n"),
        (
            of_scores(19, 18, 8, 14, -8),
            "in 3 of 5 trials, at 2^8 to 2^18: default is fine: 2^16 i",
        ),
        (of_scores(21, 20, -8), "best trial: 2^20 with loss_scale_score 1.585"),
        (
            of_scores(21, 20, -8),
            "every scale of this search loses steps, and the best one 2",
        ),
    ],
)
def test_scores_are_held_against_the_prediction(rows: Rows, words: str) -> None:
    assert words in lines_of(rows)


@pytest.mark.parametrize(
    ("low", "top", "scale"), [(0, 18, None), (0, 14, 8), (2, 5, 3)]
)
def test_search_report_and_finder_recommend_the_same_scale(
    low: int, top: int, scale: int | None, tmp_path: Path
) -> None:
    """A line to paste, or none and that the default is fine."""
    rows = [(2.0**log2, scored(log2, top=top)) for log2 in range(low, 25)]
    search = read_search(write_study(tmp_path / "study", rows))
    known = found_scale(low, top)
    choice = choice_of(low, top)
    verdict = Verdict.DEFAULT if scale is None else Verdict.SCALE
    found = dataclasses.replace(known.finding, choice_log2=choice, verdict=verdict)
    predicted = dataclasses.replace(known, finding=found)
    (tmp_path / "finding.json").write_text(predicted.json_text())
    reported = write_loss_scale_report(search, tmp_path, str(tmp_path / "finding.json"))
    said = [str(predicted), reported.text]
    said.append("\n".join(closing_lines(search, tmp_path, stopped=False)))
    for text in said:
        scales = re.findall(r"^ +init_scale: (.*)$", text, re.MULTILINE)
        assert scales == ([] if scale is None else [str(2.0**scale)])
        assert ("default is fine" in text) is (scale is None)


def searched(
    *trials: tuple[float, RunState, Sequence[float]], smaller_is_better: bool
) -> Search:
    """A search that trained: scale_log2, state and validation losses of each trial."""
    runs = []
    for number, (scale, state, losses) in enumerate(trials):
        reports = Reports()
        for batches, loss in enumerate(losses, 1):
            reports.add("validation", Report(batches, {"validation_loss": loss}))
        hparams = {"amp.init_scale": 2.0**scale}
        runs.append(Run("a", state, reports=reports, number=number, hparams=hparams))
    searcher = {"metric": "validation_loss", "smaller_is_better": smaller_is_better}
    return Search(
        "here", tuple(runs), {**SEARCH, "searcher": {**SEARCH["searcher"], **searcher}}
    )


@pytest.mark.parametrize(("smaller_is_better", "best"), [(True, 16), (False, 18)])
def test_best_trial_is_the_platforms_which_has_the_best_of_all_validations(
    best: int, *, smaller_is_better: bool
) -> None:
    """A trial that ASHA stopped early may have the best validation and a worse last
    one.
    """
    search = searched(
        (16.0, RunState.PRUNED, [0.5, 0.1, 0.6]),
        (17.0, RunState.COMPLETED, [0.5, 0.4, 0.3]),
        (18.0, RunState.COMPLETED, [0.9, math.nan, 0.2]),
        smaller_is_better=smaller_is_better,
    )
    said = list(search_sentences(None, search))
    assert said[0].startswith(f"best trial: 2^{best} with validation_loss ")


def test_failed_trial_does_not_count_whatever_it_reported() -> None:
    failed = (16.0, RunState.FAILED, [0.1])
    search = searched(failed, (17.0, RunState.COMPLETED, [0.3]), smaller_is_better=True)
    best, lost = search_sentences(None, search)
    assert best.startswith("best trial: 2^17 with validation_loss 0.3")
    assert lost.startswith(
        "1 of 2 trials failed: they do not count, although the platform may name"
    )


def test_search_over_more_than_the_scale_ranks_no_scales() -> None:
    rows: Rows = [(float(i), None, {"validation_loss": 1.0 + i}, {}) for i in range(4)]
    shown = lines_of(rows, "validation_loss", learning_rate=[1, 2, 3, 4])
    assert "differ in learning_rate, too" in shown

"""`report loss-scale`: a picture, a page that needs nothing else, and clear errors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from determined_amp import __main__ as door
from determined_amp.cli import report as loss_scale
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.found_scale import FoundScale
from determined_amp.report import page
from determined_amp.report.loss_scale_figure import draw
from determined_amp.report.loss_scale_report import sentences, text
from determined_amp.report.page import as_html, as_svg
from tests import training
from tests.reporting import (
    SEARCH,
    Rows,
    finding,
    found_scale,
    observed,
    scored,
    write_experiment,
    write_study,
)

PNG = b"\x89PNG\r\n"
TRIALS = [(2.0**scale, scored(scale)) for scale in (8, 16, 17, 18, 19, 24)]


def needs_the_network(document: str) -> list[str]:
    """What a document asks for from elsewhere."""
    foreign = r'(?:src|href|srcset|action)="(?!#|data:)[^"]*"|<script|<link|@import'
    return re.findall(rf"{foreign}|url\((?!#|\"?data:)[^)]*\)", document)


def shown(document: str) -> str:
    """Its words."""
    return unescape(re.sub(r"<[^>]*>", "", document))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a small experiment and a search over it."""
    monkeypatch.chdir(tmp_path)
    write_experiment(tmp_path)
    write_study(tmp_path / "study", TRIALS)
    return tmp_path


def test_report_of_a_local_search_predicts_on_its_own(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loss_scale.main(["loss-scale", "study"]) == 0
    output = capsys.readouterr().out
    document = (workplace / "study/loss_scale.html").read_text()
    assert needs_the_network(document) == []
    # The small MLP, four batches of 32 samples in four passes.
    window = re.search(r"safe window: 2\^-?\d+ to 2\^(\d+)", output)
    assert window is not None
    choice = int(window[1]) - 6
    assert f"best trial: 2^16 with loss_scale_score 0; the finder chose 2^{choice}" in output
    assert "no step is lost in 4 of 6 trials, at 2^8 to 2^18: a search can find nothing" in output
    assert "(6 trials)" in output
    for line in output.splitlines()[:-1]:
        assert line in shown(document)
    assert document.count("<svg") == 1
    assert (workplace / "study/loss_scale.md").read_text().startswith("# verdict: ")
    record = json.loads((workplace / "study/loss_scale.json").read_text())
    assert record["answer"] == output.splitlines()[0]
    assert [trial["init_scale"] for trial in record["trials"]] == [scale for scale, _ in TRIALS]
    assert record["finding"]["choice_log2"] == choice


def test_finding_replaces_the_run_of_the_finder(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "finding.json").write_text(json.dumps(finding()))
    (workplace / "elsewhere").mkdir()
    arguments = ["study/study.db", "--finding", "finding.json", "--output", "elsewhere"]
    assert loss_scale.main(["loss-scale", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "verdict: use 2^17" in shown
    # It may be another trial's: a search and a finding rarely have the same name.
    made = "128 samples, on cpu with torch 2.6, 2026-01-01"
    assert f"predicted by finding.json, of small: {made}; nothing tells whether that is" in shown
    table = "| trial | init_scale | state | batches | loss_scale_score | steps_lost |"
    text = (workplace / "elsewhere" / "loss_scale.md").read_text()
    assert table in text
    assert "(study); 1 seed; on cpu, torch 2.6.0, 2026-01-02T" in text
    assert sorted(p.name for p in (workplace / "elsewhere").iterdir()) == [
        "loss_scale.html",
        "loss_scale.json",
        "loss_scale.md",
        "loss_scale.png",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "there is no such folder"),
        (["7"], "DET_MASTER is not set"),
        (["study", "--finding", "none.json"], "none.json: cannot be read: No such file"),
        (["study", "--finding", "experiment.yaml"], "experiment.yaml: is not JSON"),
        (["study", "--finding", "foreign.json"], "foreign.json: is not a finding"),
        (["study", "--output", "none"], "got none, which is no folder"),
        (
            ["study", "--margin", "1"],
            "--margin: belongs to report precision; this one is report lo",
        ),
        (["study", "study"], "report loss-scale: got 2 sources; allowed: one search"),
    ],
)
def test_bad_input_is_one_sentence(
    workplace: Path,
    refusal: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    sentence: str,
) -> None:
    monkeypatch.delenv("DET_MASTER", raising=False)
    (workplace / "foreign.json").write_text('{"a": 1}')
    assert sentence in refusal("report", "loss-scale", *arguments)
    assert not list(workplace.rglob("loss_scale.*"))


def test_report_replaces_no_finding(workplace: Path, refusal: Callable[..., str]) -> None:
    """The file of a finding has the name of the report's own JSON."""
    kept = workplace / "study" / "loss_scale.json"
    text, other = json.dumps(finding()), workplace / "finding.json"
    for path in (kept, other):
        path.write_text(text)
    assert "another" in refusal("report", "loss-scale", "study", "--finding", str(other))
    assert kept.read_text() == text


def test_report_that_cannot_be_written_is_a_sentence_and_leaves_nothing(
    workplace: Path, refusal: Callable[..., str]
) -> None:
    (workplace / "finding.json").write_text(json.dumps(finding()))
    (workplace / "out" / "loss_scale.html").mkdir(parents=True)
    options = ["--finding", "finding.json", "--output", "out"]
    said = refusal("report", "loss-scale", "study", *options)
    assert said.startswith("out: the report cannot be written: [Errno 21] Is a directory: ")
    assert [path.name for path in (workplace / "out").iterdir()] == ["loss_scale.html"]


def test_score_of_a_trial_that_no_scale_helps_is_one_sentence(
    workplace: Path, refusal: Callable[..., str]
) -> None:
    """Determined's context leaves the process with status 0 then, without a word."""
    words = ("--batches", "1", "--config", "hyperparameters.trial=tests.mortal:OverflowingTrial")
    assert refusal("score", "experiment.yaml", *words).startswith("no loss scale helps: ")


@pytest.mark.parametrize(
    ("option", "target"),
    [
        ("--json", "experiment.yaml"),  # its own input
        ("--plot", "experiment.png"),  # a link to it
        ("--json", "picture.png"),
        ("--plot", "notes.png"),
        ("--json", "other.json"),
    ],
)
def test_finder_replaces_no_file_but_an_earlier_answer(
    option: str, target: str, workplace: Path, refusal: Callable[..., str]
) -> None:
    (workplace / "experiment.png").symlink_to("experiment.yaml")
    (workplace / "picture.png").write_bytes(PNG)
    (workplace / "notes.png").write_text("mine")
    (workplace / "other.json").write_text('{"run": 5}')
    before = {path: path.read_bytes() for path in workplace.iterdir() if path.is_file()}
    words = f"got {target}, which is there and no answer of this command"
    assert words in refusal("find", "experiment.yaml", option, target)
    assert before == {path: path.read_bytes() for path in workplace.iterdir() if path.is_file()}


def test_finder_replaces_an_earlier_answer(workplace: Path) -> None:
    words = ["--batches", "1", "--json", "a.json", "--plot", "found.png"]
    for _ in range(2):
        assert door.main(["find", "experiment.yaml", *words]) == 0
    assert (workplace / "found.png").read_bytes().startswith(PNG)
    assert FoundScale.read(workplace / "a.json").finding.answer_log2 is not None


def test_answer_that_cannot_be_written_is_a_sentence(
    workplace: Path, refusal: Callable[..., str]
) -> None:
    with training.no_file_larger_than(1000):
        said = refusal("find", "experiment.yaml", "--batches", "1", "--json", "a.json")
    assert "the answer cannot be written: [Errno 27] File too large: '.a.json.partial'" in said
    assert not list(workplace.glob("*a.json*"))


def test_tags_in_what_others_wrote_stay_text_in_markdown(tmp_path: Path) -> None:
    page.write(tmp_path, "x", "# <script>a</script>, 1 < 2\n", Figure(), {})
    assert (tmp_path / "x.md").read_text() == "# &lt;script>a&lt;/script>, 1 < 2\n"


class TestPage:
    def made(self, svg: str | None = None) -> str:
        search = observed([(8.0, 1, scored(8), {})], "loss_scale_score")
        search = dataclasses.replace(search, config={**search.config, "name": "A <title>"})
        answer = found_scale()
        svg = as_svg(draw(answer, search)) if svg is None else svg
        return as_html(text(["verdict: a < b & c", "more"], answer, search), svg)

    def test_page_needs_nothing_else(self) -> None:
        document = self.made()
        assert needs_the_network(document) == []
        facts = "; predicted on cpu, torch 2.6, 2026-01-01, from 4 batches with 128 samples."
        assert facts in shown(document)

    def test_what_others_wrote_stays_text(self) -> None:
        document = self.made()
        assert "a &lt; b &amp; c" in document
        assert "A &lt;title&gt;" in document

    def test_foreign_address_on_a_page_would_be_noticed(self) -> None:
        """Negative control."""
        assert needs_the_network(self.made('<svg><image href="http://a/b"/></svg>'))
        assert needs_the_network(self.made('<img src="//a/b.png">'))
        assert needs_the_network(self.made("<style>@import 'a'</style>"))
        assert needs_the_network(self.made("<script>1</script>"))


def lines_of(rows: Any, metric: str = "loss_scale_score", **others: Any) -> str:
    return "\n".join(sentences(found_scale(top=18), observed(rows, metric, **others)))


def of_scores(*scales: int) -> Rows:
    return [(float(scale), None, scored(scale), {}) for scale in scales]


WRONG = [*of_scores(8, 18, 19), (20.0, None, scored(20, top=20), {})]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (of_scores(8, 18, 19), "overflow: predicted above 2^18, and 3 of 3 trials agree\n"),
        (WRONG, "3 of 4 trials agree; not those at 2^20"),
        # The finder predicts 1000 steps lost at 2^-8, and no more than 1 at 2^19.
        (of_scores(8, 18, 19), "score: predicted and measured are the same (3 tri"),
        (of_scores(8, 18, -8), "score: predicted and measured differ by 1 at most, at 2^-8 (3 tri"),
        # Of equal scores the one nearest to the default.
        (of_scores(19, 18, 8, 14, -8), "best trial: 2^18 with loss_scale_score 0; the finder chos"),
        (of_scores(19, 18, 8, 14, -8), "in 3 of 5 trials, at 2^8 to 2^18: a search can find nothi"),
        (of_scores(21, 20, -8), "best trial: 2^20 with loss_scale_score 1.585"),
        (of_scores(21, 20, -8), "every scale of this search loses steps, and the best one 2"),
    ],
)
def test_scores_are_held_against_the_prediction(rows: Rows, words: str) -> None:
    assert words in lines_of(rows)


def test_skips_are_held_against_the_prediction() -> None:
    rows: Rows = [
        (float(scale), None, {"validation_loss": 1.0}, {"skipped_steps": skipped})
        for scale, skipped in ((8, 0.0), (20, 3.0), (22, 9.0), (24, 0.0))
    ]
    assert "2 of 4 trials skipped what was expected" in lines_of(rows, "validation_loss")


@pytest.mark.parametrize(("best", "word"), [(0.9, "a tie"), (0.1, "more than the seeds' noise")])
def test_best_within_the_noise_of_the_seeds_is_a_tie(best: float, word: str) -> None:
    losses = enumerate([1.0, 1.1, 0.9, 1.05, 0.95])
    rows: Rows = [(float(i), None, {"validation_loss": loss}, {}) for i, loss in losses]
    outside: Rows = [(20.0, None, {"validation_loss": best}, {})]
    assert f": {word}" in lines_of([*rows, *outside], "validation_loss")


def test_search_over_more_than_the_scale_ranks_no_scales() -> None:
    rows: Rows = [(float(i), None, {"validation_loss": 1.0 + i}, {}) for i in range(4)]
    shown = lines_of(rows, "validation_loss", learning_rate=[1, 2, 3, 4])
    assert "differ in learning_rate, too" in shown
    assert "tie" not in shown


def test_without_the_trial_only_the_observation_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = with_overrides(SEARCH, ["hyperparameters.trial=nowhere:Trial"])
    write_study(tmp_path / "study", TRIALS, elsewhere)
    assert loss_scale.main(["loss-scale", "study"]) == 0
    output = capsys.readouterr().out
    assert "no prediction: " in output
    assert "nowhere:Trial" in output
    # No YAML of this repository: that would find the scale of its own trial.
    assert "--finding; on a cluster, the entrypoint `python3 -m determined_amp find` on" in output

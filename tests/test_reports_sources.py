"""`search.search_folder` reads a local search, and says what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from determined_amp.amp.plain_data import Values
from determined_amp.experiment.dotted import flat, put_by_name
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.scale_score import bits_from_default
from determined_amp.report import ReportError
from determined_amp.report.loss_scale_report import over_loss_scale, search_sentences
from determined_amp.report.sources import read_source
from determined_amp.search.search_folder import read_search
from tests.reporting import SEARCH, scored, write_study


def test_runs_of_a_search_have_the_scales_that_they_used(tmp_path: Path) -> None:
    # 70000 was sampled, 2^16 used; the second trial says nothing about it.
    second = {"loss_scale_score": 0.5}
    search = read_search(
        write_study(tmp_path, [(70000.0, scored(16)), (2.0**10, second)])
    )
    assert [run.scale_log2 for run in search.runs] == [16.0, 10.0]
    assert [run.batches for run in search.runs] == [4, 4]
    assert search.runs[0].hparams["amp.init_scale"] == 70000.0
    assert search.runs[0].overflow is False
    assert search.runs[1].overflow is None
    assert [run.seed for run in search.runs] == [3, 3]
    assert search.name == "small"
    assert search.also_searched == []


def test_ranking_follows_the_searcher(tmp_path: Path) -> None:
    trials = [(2.0**scale, scored(scale)) for scale in (8, 17, 24)]
    rows = read_search(write_study(tmp_path, trials)).ranked()
    assert [run.scale_log2 for run in rows] == [17, 8, 24]
    upwards = with_overrides(SEARCH, ("searcher.smaller_is_better=false",))
    rows = read_search(write_study(tmp_path / "up", trials, upwards)).ranked()
    assert [run.scale_log2 for run in rows] == [24, 17, 8]


def test_equal_trials_are_ranked_by_their_distance_from_the_default(
    tmp_path: Path,
) -> None:
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


def test_values_by_dotted_name_come_from_sections_and_return_to_their_keys() -> None:
    values = {"a": {"b": 1, "c": {"d": [2]}}, "e": None, "f.g": 3, "empty": {}}
    named = {"a.b": 1, "a.c.d": [2], "e": None, "f.g": 3}
    assert flat(values) == named
    again: Values = {"empty": {}}
    put_by_name(again, {**named, "other": 4}, values)
    assert again == values
    space = {"type": "log", "base": 2.0}
    assert flat({"a": {"b": space}, "c": {"type": "const", "val": 3}}) == {
        "a.b": space,
        "c": 3,
    }


def test_search_without_a_scale_is_a_sentence(tmp_path: Path) -> None:
    space = (
        "hyperparameters={learning_rate: {type: log, base: 10, minval: -4, maxval: 0}}"
    )
    search = with_overrides(SEARCH, (space,))
    folder = write_study(
        tmp_path, [(0.1, {"loss_scale_score": 1.0})], search, "learning_rate"
    )
    with pytest.raises(
        ReportError, match="no trial has an initial loss scale; allowed: "
    ):
        over_loss_scale(read_search(folder))


@pytest.mark.parametrize("record", ["{]", "{}"])
def test_trial_with_a_damaged_record_is_left_out_and_named(
    tmp_path: Path, record: str
) -> None:
    write_study(tmp_path, [(2.0**scale, scored(scale)) for scale in (4, 16, 24)])
    (tmp_path / "trials" / "0001" / "run.json").write_text(record)
    search = over_loss_scale(read_search(tmp_path))
    assert [run.number for run in search.runs] == [0, 2]
    (note,) = search.notes
    assert note.startswith(f"left out: {tmp_path}/trials/0001: is not a run folder")
    assert note in list(search_sentences(None, search))


def test_source_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    for name in ("x" * 300, "9" * 5000):
        with pytest.raises(
            ReportError, match=f"^{name}.*: cannot be read: File name too long; al"
        ):
            read_source(name)
    folder = write_study(tmp_path, [(2.0**4, scored(4))])
    assert read_source(str(folder)).origin == str(folder)
    (folder / "trials" / "0000" / "metrics.jsonl").unlink()
    (folder / "trials" / "0000" / "metrics.jsonl").mkdir()
    with pytest.raises(
        ReportError, match=r"metrics\.jsonl: cannot be read: Is a directory; al"
    ):
        read_source(str(folder))


def test_search_without_trials_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has no trials yet"):
        over_loss_scale(read_search(write_study(tmp_path, [])))

"""`reports.master_runs` reads an experiment by Determined's SDK, here from a small HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from determined.experimental import client

from determined_amp.cli import report as any_report
from determined_amp.finder.advice import FoundScale
from determined_amp.finder.frozen import LossScaleError
from determined_amp.report import sources
from determined_amp.report.loss_scale_text import over_loss_scale
from determined_amp.report.master_runs import fetch_comparison, read_experiment, read_finding
from determined_amp.report.source import ReportError, Source
from determined_amp.runs.master import MasterError, log_in
from determined_amp.runs.run import RunState
from tests.report_master import TRIAL, Master, report, serving
from tests.reporting import SEARCH, finding, scored

HPARAMS = {"training": {"max_length": {"batches": 4}}}


def trial(number: int, scale: float) -> dict[str, Any]:
    return {**TRIAL, "id": number, "hparams": {**HPARAMS, "amp": {"init_scale": scale}}}


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Master]:
    made = Master(SEARCH, [trial(11, 65536), trial(12, 2.0**20)])
    made.reports = {
        "validation": [
            report(11, 2, "validation", {"loss_scale_score": 9.0}),
            report(11, 4, "validation", {**scored(16), "note": "text"}),
            report(12, 4, "validation", scored(20)),
        ],
        "training": [report(11, 4, "training", {"skipped_steps": 2})],
    }
    with serving(made, monkeypatch, tmp_path):
        yield made


def test_numbers_are_those_of_the_last_reports_of_each_trial(master: Master) -> None:
    search = read_experiment(7)
    assert [run.number for run in search.runs] == [11, 12]
    assert [run.scale_log2 for run in search.runs] == [16.0, 20.0]
    assert [run.overflow for run in search.runs] == [False, True]
    assert [run.skipped_steps for run in search.runs] == [2.0, None]
    assert [run.batches for run in search.runs] == [4, 4]
    assert {run.state for run in search.runs} == {RunState.COMPLETED}
    assert "note" not in search.runs[0].metrics
    assert search.runs[0].hparams["training.max_length.batches"] == 4
    assert search.metric == "loss_scale_score"


def checkpoint(storage: Path, name: str, text: str) -> dict[str, Any]:
    """A checkpoint with one file, in storage that this machine reaches."""
    (storage / "uuid").mkdir()
    (storage / "uuid" / name).write_text(text)
    config = {"checkpoint_storage": {"type": "shared_fs", "host_path": str(storage)}}
    training = {"trialId": 11, "experimentId": 7, "experimentConfig": config}
    return {
        **{"uuid": "uuid", "state": "STATE_COMPLETED", "metadata": {"steps_completed": 4}},
        **{"resources": {name: str(len(text))}, "training": training},
    }


class TestFinding:
    def test_is_read_from_the_checkpoint(self, master: Master, tmp_path: Path) -> None:
        master.checkpoints = [checkpoint(tmp_path, "loss_scale.json", json.dumps(finding()))]
        assert read_finding(7) == FoundScale.from_json(finding(), "")

    def test_checkpoint_of_something_else_is_not_even_downloaded(
        self, master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        master.checkpoints = [checkpoint(tmp_path, "state_dict.pth", "many GiB")]
        monkeypatch.setattr(client.Checkpoint, "download", None)
        with pytest.raises(ReportError, match=r"experiment 7 .* no checkpoint with loss"):
            read_finding(7)

    def test_file_of_something_else_is_a_sentence(self, master: Master, tmp_path: Path) -> None:
        master.checkpoints = [checkpoint(tmp_path, "loss_scale.json", "{}")]
        with pytest.raises(LossScaleError, match=r"experiment 7 .* is not a finding"):
            read_finding(7)

    def test_storage_out_of_reach_is_a_sentence(self, master: Master, tmp_path: Path) -> None:
        master.checkpoints = [checkpoint(tmp_path, "loss_scale.json", "{}")]
        (tmp_path / "uuid").rename(tmp_path / "elsewhere")
        with pytest.raises(ReportError, match=r"cannot be downloaded from here.*download uuid"):
            read_finding(7)


class TestComparison:
    """What the command `compare` left as a task of the cluster."""

    @pytest.fixture(autouse=True)
    def _compares(self, master: Master) -> None:
        master.config = {**master.config, "entrypoint": "python3 -m determined_amp compare"}

    def test_is_fetched_and_shown(
        self, master: Master, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        master.checkpoints = [checkpoint(tmp_path, "precision.md", "use amp_bf16 here")]
        (tmp_path / "out").mkdir()
        assert any_report.main(["7", "--output", str(tmp_path / "out")]) == 0
        assert capsys.readouterr().out.startswith("use amp_bf16 here")
        assert (tmp_path / "out" / "precision.md").read_text() == "use amp_bf16 here"

    def test_without_an_answer_is_a_sentence(self, master: Master, tmp_path: Path) -> None:
        master.checkpoints = [checkpoint(tmp_path, "state_dict.pth", "x")]
        with pytest.raises(ReportError, match=r"experiment 7 .* has no report: "):
            fetch_comparison(7, tmp_path)

    def test_other_experiment_has_none(self, master: Master, tmp_path: Path) -> None:
        master.config = {**master.config, "entrypoint": "python3 -m determined_amp train"}
        assert fetch_comparison(7, tmp_path) is None


def test_experiment_without_a_scale_is_a_sentence(master: Master) -> None:
    master.trials = [{**TRIAL, "id": 11, "hparams": {"learning_rate": 0.1}}]
    master.reports = {"validation": [], "training": []}
    with pytest.raises(ReportError, match="no hyperparameter is called init_scale"):
        over_loss_scale(read_experiment(7))


def test_experiment_without_trials_is_a_sentence(master: Master) -> None:
    master.trials = []
    with pytest.raises(ReportError, match="has no trials yet"):
        over_loss_scale(read_experiment(7))


def test_unknown_experiment_is_a_sentence(master: Master) -> None:
    with pytest.raises(ReportError, match="has no experiment 8: experiment not found"):
        read_experiment(8)


def test_wrong_password_is_a_sentence(master: Master) -> None:
    master.password = "another"
    with pytest.raises(MasterError, match=r"the login was refused.* user login"):
        read_experiment(7)


def test_what_is_no_master_is_a_sentence(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master, "answer", lambda path, query: (200, "<html>hello</html>"))
    with pytest.raises(MasterError, match="what answers there is not a Determined master"):
        read_experiment(7)


def test_answer_that_is_no_experiment_is_a_sentence(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment: dict[str, Any] = {"experiment": {}}
    monkeypatch.setattr(master, "_experiment", lambda: {"": experiment})
    with pytest.raises(ReportError, match="gave no experiment 7"):
        read_experiment(7)


def test_no_master_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DET_MASTER", raising=False)
    with pytest.raises(ReportError, match="DET_MASTER is not set"):
        read_experiment(7)


@pytest.mark.parametrize("address", ["http://me:hush@host:80", "http://", "http://host:eighty"])
def test_address_of_another_form_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(MasterError, match="http://HOST:PORT") as refused:
        log_in(address)
    assert "hush" not in str(refused.value)


def test_silent_address_is_a_sentence(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_MASTER", "http://127.0.0.1:9")
    with pytest.raises(MasterError, match=r"http://127\.0\.0\.1:9: no master answers there"):
        read_experiment(7)


SCALES = {"amp": {"init_scale": {"type": "log", "minval": 0, "maxval": 24, "base": 2, "count": 2}}}
PRECISIONS = {"amp": {"precision": {"type": "categorical", "vals": ["fp32", "amp_fp16"]}}}
FIND, SCORE = "python3 -m determined_amp find --batches 4", "python3 -m determined_amp score"
TRAIN, COMPARE = "python3 -m determined_amp train", "python3 -m determined_amp compare"


Become = Callable[[str, str, Any], None]


class TestKind:
    """A source of another kind is refused with the command for it."""

    @pytest.fixture
    def become(self, master: Master) -> Become:
        def become(entrypoint: str, searcher: str, space: Any) -> None:
            method = {**master.config["searcher"], "name": searcher}
            sections = {"searcher": method, "hyperparameters": space}
            master.config = {"name": "small", "entrypoint": entrypoint, **sections}
            master.trials, master.reports = [], {"validation": [], "training": []}

        return become

    @pytest.mark.parametrize(
        ("entrypoint", "searcher", "space", "said"),
        [
            (FIND, "single", {}, "report loss-scale SEARCH --finding 7"),
            (TRAIN, "grid", PRECISIONS, "report precision 7"),
            (COMPARE, "single", {}, "report precision 7"),
            (TRAIN, "single", {}, "report precision 7 OTHERS"),
        ],
    )
    def test_that_is_no_search_for_the_loss_scale(
        self, entrypoint: str, searcher: str, space: Any, said: str, become: Become
    ) -> None:
        become(entrypoint, searcher, space)
        with pytest.raises(ReportError, match=rf"experiment 7 on http.*{said}$"):
            any_report.main(["loss-scale", "7"])

    @pytest.mark.parametrize(
        ("entrypoint", "searcher", "space", "said"),
        [
            (FIND, "single", {}, "report loss-scale SEARCH --finding 7"),
            (SCORE, "grid", SCALES, "report loss-scale 7"),
            (TRAIN, "adaptive_asha", SCALES, "report loss-scale 7"),
            (TRAIN, "grid", SCALES, "report loss-scale 7"),
        ],
    )
    def test_that_compares_no_precisions(
        self, entrypoint: str, searcher: str, space: Any, said: str, become: Become
    ) -> None:
        become(entrypoint, searcher, space)
        with pytest.raises(ReportError, match=rf"experiment 7 on http.*{said}$"):
            any_report.main(["precision", "7"])

    @pytest.mark.parametrize(
        ("entrypoint", "searcher", "space", "expected"),
        [
            (FIND, "single", {}, "loss-scale"),
            (SCORE, "grid", SCALES, "loss-scale"),
            (TRAIN, "adaptive_asha", SCALES, "loss-scale"),
            (TRAIN, "grid", SCALES, "loss-scale"),
            (TRAIN, "grid", {"amp": {**SCALES["amp"], **PRECISIONS["amp"]}}, "precision"),
            (TRAIN, "grid", PRECISIONS, "precision"),
            (COMPARE, "single", {}, "precision"),
            (TRAIN, "single", {}, "precision"),
        ],
    )
    def test_is_that_of_the_report_that_is_written(
        self,
        entrypoint: str,
        searcher: str,
        space: Any,
        expected: str,
        become: Become,
    ) -> None:
        become(entrypoint, searcher, space)
        written: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for name, (make_parser, _) in any_report._REPORTS.items():
                write = (make_parser, lambda options, name=name: written.append(name))
                patch.setitem(any_report._REPORTS, name, write)
            any_report.main(["7"])
        assert written == [expected]

    def test_run_folder_is_no_search_over_the_loss_scale(self) -> None:
        said = "runs/x: is a single run, no search.*report precision runs/x OTHERS"
        with pytest.raises(ReportError, match=said):
            sources.refuse_precisions("runs/x", Source("runs/x", ()))


def test_what_a_master_does_not_tell_is_said(master: Master) -> None:
    (side,) = read_experiment(7).notes
    assert "side by side" in side
    master.trials = [{**TRIAL, "id": 11, "hparams": {"learning_rate": 0.1}}]
    master.reports = {"validation": [], "training": []}
    assert read_experiment(7).notes == ()

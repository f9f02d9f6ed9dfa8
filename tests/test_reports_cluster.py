"""`report.master_runs` reads an experiment by Determined's SDK, here from a small HTTP
server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from determined.experimental import client

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import StateDict, Values
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.found_scale import FoundScale
from determined_amp.finder.prediction import LossScaleError
from determined_amp.report import ReportError, loss_scale_figure, sources
from determined_amp.report.loss_scale_report import over_loss_scale
from determined_amp.report.master_runs import (
    fetch_comparison,
    read_experiment,
    read_finding,
)
from determined_amp.runs.master import MasterError
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import Search
from tests.report_master import TRIAL, Master, answering, report, serving
from tests.reporting import SEARCH, finding, scored

HPARAMS = {"training": {"max_length": {"batches": 4}}}


def trial(number: int, scale: float) -> Values:
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


def test_run_of_a_trial_has_the_numbers_of_its_last_reports(master: Master) -> None:
    search = read_experiment(7)
    assert [run.scale_log2 for run in search.runs] == [16.0, 20.0]
    assert [run.overflow for run in search.runs] == [False, True]
    assert [run.skipped_steps for run in search.runs] == [2.0, None]
    assert [run.batches for run in search.runs] == [4, 4]
    assert "note" not in search.runs[0].metrics
    (side_by_side,) = search.notes
    assert "which trials ran side by side" in side_by_side
    with pytest.raises(
        ReportError, match=r"gave no experiment 8: .*: experiment not found; al"
    ):
        read_experiment(8)
    assert search.runs[0].hparams["training.max_length.batches"] == 4


@pytest.mark.parametrize(
    ("batches", "state"),
    [(100, RunState.COMPLETED), (4, RunState.PRUNED), (0, RunState.COMPLETED)],
)
def test_trial_that_a_search_ended_early_is_pruned_though_the_master_says_completed(
    master: Master, batches: int, state: RunState
) -> None:
    """To the master a pruned trial is completed, too. One without a trained batch was
    scored.
    """
    length = {"max_length": {"batches": 100}}
    master.trials[0]["hparams"]["training"] = length
    numbers = {"loss_scale_score": 1.0}
    master.reports["validation"] = [report(11, batches or 4, "validation", numbers)]
    trained = [report(11, batches, "training", {"skipped_steps": 2})]
    master.reports["training"] = trained if batches else []
    assert read_experiment(7).runs[0].state is state


def checkpoint(storage: Path, name: str, text: str) -> StateDict:
    """A checkpoint with one file, in storage that this machine reaches."""
    (storage / "uuid").mkdir()
    (storage / "uuid" / name).write_text(text)
    config = {"checkpoint_storage": {"type": "shared_fs", "host_path": str(storage)}}
    training = {"trialId": 11, "experimentId": 7, "experimentConfig": config}
    return {
        **{
            "uuid": "uuid",
            "state": "STATE_COMPLETED",
            "metadata": {"steps_completed": 4},
        },
        **{"resources": {name: str(len(text))}, "training": training},
    }


def test_finding_is_read_from_the_checkpoint(master: Master, tmp_path: Path) -> None:
    master.checkpoints = [
        checkpoint(tmp_path, "loss_scale.json", json.dumps(finding()))
    ]
    assert read_finding(7) == FoundScale.from_json(finding(), "")


def test_checkpoint_without_a_finding_is_not_downloaded(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.checkpoints = [checkpoint(tmp_path, "state_dict.pth", "many GiB")]
    monkeypatch.setattr(client.Checkpoint, "download", None)
    with pytest.raises(ReportError, match=r"experiment 7 .* no checkpoint with loss"):
        read_finding(7)


def test_finding_that_cannot_be_read_is_a_sentence(
    master: Master, tmp_path: Path
) -> None:
    master.checkpoints = [checkpoint(tmp_path, "loss_scale.json", "{}")]
    with pytest.raises(LossScaleError, match=r"experiment 7 .* is not a finding"):
        read_finding(7)
    (tmp_path / "uuid").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ReportError, match=r"cannot be downloaded from here.*download uuid"
    ):
        read_finding(7)


class TestComparison:
    """What the command `compare` left as a task of the cluster."""

    @pytest.fixture(autouse=True)
    def _compares(self, master: Master) -> None:
        master.config = {
            **master.config,
            "entrypoint": "python3 -m determined_amp compare",
        }

    def test_report_of_a_comparison_is_fetched_and_shown(
        self, master: Master, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        master.checkpoints = [checkpoint(tmp_path, "precision.md", "use amp_bf16 here")]
        (tmp_path / "uuid" / "compare.json").write_text("{}")  # of the search
        for _ in range(2):
            assert door.run(["report", "7", "--output", str(tmp_path / "out")]) == 0
            assert capsys.readouterr().out.startswith("use amp_bf16 here")
        assert (tmp_path / "out" / "precision.md").read_text() == "use amp_bf16 here"
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["precision.md"]
        for more in (["--margin", "1"], ["7"]):
            with pytest.raises(
                UserError, match="its task has written the report; allowed: no"
            ):
                door.run(["report", "7", *more, "--output", str(tmp_path)])

    def test_comparison_without_an_answer_is_a_sentence(
        self, master: Master, tmp_path: Path
    ) -> None:
        master.checkpoints = [checkpoint(tmp_path, "state_dict.pth", "x")]
        with pytest.raises(
            ReportError, match=r"no checkpoint with precision.md: it has not com"
        ):
            fetch_comparison(7, tmp_path)
        master.metadata = {11: {"failure": "the trial cannot be trained in fp32"}}
        with pytest.raises(
            ReportError, match=r"precision.md: the trial cannot be trained in fp"
        ):
            fetch_comparison(7, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("password", "another", r"the login was refused.* user login"),
        (
            "answer",
            lambda path, query: (200, "<html>hello</html>"),
            "what answers there is not a Determined master",
        ),
        ("_experiment", lambda: {"": {"experiment": {}}}, "gave no experiment 7"),
    ],
)
def test_useless_answer_of_a_master_is_a_sentence(
    master: Master, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(master, name, value)
    with pytest.raises((MasterError, ReportError), match=words):
        read_experiment(7)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "DET_MASTER is not set"),
        ("http://127.0.0.1:9", r"http://127\.0\.0\.1:9: no master answers there"),
        ("http://me:hush@host:80", "http://HOST:PORT"),
        ("http://host:eighty", "http://HOST:PORT"),
    ],
)
def test_address_without_a_master_is_a_sentence_that_repeats_no_password(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DET_MASTER", address)
    with pytest.raises(UserError, match=words) as refused:
        read_experiment(7)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "words"),
    [(429, "answers with error 429"), (401, "the login was refused")],
)
def test_refusal_by_a_master_is_named_as_such(
    status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(lambda method, path, sent: (status, "{}")) as address:
        monkeypatch.setenv("DET_MASTER", address)
        with pytest.raises(MasterError, match=words):
            read_experiment(7)


def rewritten(
    master: Master, monkeypatch: pytest.MonkeyPatch, pattern: str, by: str, of: str = ""
) -> None:
    """Let the answers of the master, or those under this path, say something else."""
    answer = master.answer

    def odd(path: str, query: str) -> tuple[int, str]:
        status, body = answer(path, query)
        return status, re.sub(pattern, by, body) if path.endswith(of) else body

    monkeypatch.setattr(master, "answer", odd)


@pytest.mark.parametrize("value", ["NaN", '"text"', "null"])
def test_odd_number_of_a_master_is_a_report_or_a_sentence(
    master: Master, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    numbers = r'"(loss_scale_score|skipped_steps|init_scale_log2)": [\d.]+'
    rewritten(master, monkeypatch, numbers, rf'"\1": {value}')
    with suppress(UserError):
        search = over_loss_scale(read_experiment(7))
        loss_scale_figure.draw_loss_scale(None, search)


@pytest.mark.parametrize(
    ("pattern", "by", "of"),
    [
        ('"trials"', '"other"', "/trials"),
        ('"hparams": {', '"hparams": 5, "x": {', ""),
    ],
)
def test_answer_of_another_version_of_a_master_is_a_sentence(
    master: Master, monkeypatch: pytest.MonkeyPatch, pattern: str, by: str, of: str
) -> None:
    rewritten(master, monkeypatch, pattern, by, of)
    with pytest.raises(
        ReportError, match=r"gave no experiment 7: .*; allowed: .* of Determined 0\.38"
    ):
        read_experiment(7)


FIND = "python3 -m determined_amp find --batches 4"
CHECK = "python3 -m determined_amp check --trial model_def:MyTrial"


@pytest.mark.parametrize(
    ("command", "searched", "fits"),
    [
        ("score", "amp.init_scale", ["loss-scale"]),
        ("train", "amp.precision", ["precision"]),
        ("compare", "", ["precision"]),
        ("train", "learning_rate", ["precision", "loss-scale"]),
    ],
)
def test_command_and_ranges_decide_on_the_report_and_another_is_refused(
    command: str, searched: str, fits: list[str]
) -> None:
    hparams = with_overrides({}, [f"{searched}={{type: double}}"] if searched else [])
    config = {
        "entrypoint": f"python3 -m determined_amp {command}",
        "hyperparameters": hparams,
    }
    search = Search("experiment 7", (), {**config, "searcher": {"name": "grid"}})
    assert sources.report_on("7", search, None) == fits[0]
    for named in ("precision", "loss-scale"):
        other = pytest.raises(
            ReportError, match=rf"^experiment 7: .* report {fits[0]} 7$"
        )
        with nullcontext() if named in fits else other:
            assert sources.report_on("7", search, named) == named


def test_report_on_a_single_run_is_its_own_unless_it_is_compared() -> None:
    single = Search("experiment 7", (), {"searcher": {"name": "single"}})
    assert sources.report_on("7", single, None) == "run"
    assert sources.report_on("7", single, "precision") == "precision"
    assert sources.report_on("7", single, None, is_alone=False) == "precision"


@pytest.mark.parametrize("command", [["7"], ["loss-scale", "7"]])
@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [(FIND, "is the finder's answer"), (CHECK, "is the check of a trial's")],
)
def test_report_on_the_answer_of_a_finder_or_a_check_is_refused(
    master: Master, entrypoint: str, words: str, command: list[str]
) -> None:
    """Its settings are not read: those of a trial with AMP of its own could not be."""
    master.config = {**master.config, "entrypoint": entrypoint}
    with pytest.raises(ReportError, match=words):
        door.run(["report", *command])
    master.reports["validation"].clear()
    master.trials = [{**master.trials[0], "state": "STATE_ERROR"}]
    master.metadata = {11: {"failure": "this trial scales no loss"}}
    with pytest.raises(ReportError, match="has no answer: this trial scales no loss"):
        door.run(["report", *command])

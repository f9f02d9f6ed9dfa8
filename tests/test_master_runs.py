"""`report.master_runs` reads an experiment by Determined's SDK, here from a small HTTP
server.
"""

import pytest

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.experiment.overrides import with_overrides
from determined_amp.report.master_runs import fetch_comparison, read_experiment
from tests.precisions import write_run
from tests.report_master import TRIAL, Master, report, serving
from tests.reporting import SEARCH, scored

NONE = "gave no experiment 7: .*"
HPARAMS = {"training": {"max_length": {"batches": 4}}}


def trial(number, scale):
    return {**TRIAL, "id": number, "hparams": {**HPARAMS, "amp": {"init_scale": scale}}}


@pytest.fixture
def master(monkeypatch, tmp_path):
    made = Master(SEARCH, [trial(11, 65536), trial(12, 2.0**20)])
    made.reports = {
        "validation": [
            report(11, 4, "validation", scored(16)),
            report(12, 4, "validation", scored(20)),
        ],
        "training": [report(11, 4, "training", {"skipped_steps": 2})],
    }
    with serving(made, monkeypatch, tmp_path):
        yield made


def test_report_on_an_experiment_notes_that_trials_ran_side_by_side(master):
    search = read_experiment(7)
    (side_by_side,) = search.notes
    assert "which trials ran side by side" in side_by_side
    assert [run.skipped_steps for run in search.runs] == [2.0, None]
    with pytest.raises(UserError, match=r"gave no experiment 8: .*: experiment not"):
        read_experiment(8)


def checkpoint(storage, name, text):
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


def test_storage_out_of_reach_is_a_sentence(master, tmp_path):
    master.checkpoints = [checkpoint(tmp_path, "precision.md", "{}")]
    (tmp_path / "uuid").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"cannot be downloaded .*download uuid"):
        fetch_comparison(7, tmp_path)


@pytest.fixture
def compared(master, tmp_path):
    """What the command `compare` left as a task of the cluster."""
    master.config = {**SEARCH, "entrypoint": "python3 -m determined_amp compare"}
    master.checkpoints = [checkpoint(tmp_path, "precision.md", "use amp_bf16 here")]
    return master


@pytest.mark.usefixtures("compared")
def test_report_of_a_comparison_is_fetched_and_shown(tmp_path, capsys):
    (tmp_path / "uuid" / "compare.json").write_text("{}")  # of the search
    out = tmp_path / "out"
    for _ in range(2):
        assert door.run(["report", "7", "--output", str(out)]) == 0
        assert capsys.readouterr().out.startswith("use amp_bf16 here")
    (page,) = out.iterdir()
    assert (page.name, page.read_text()) == ("precision.md", "use amp_bf16 here")


@pytest.mark.parametrize("words", ["7 here", "7 --metric f1", "7 --margin 0.1"])
@pytest.mark.usefixtures("compared")
def test_report_of_a_comparison_is_no_other_report(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "here", "fp32", 1)
    with pytest.raises(
        UserError, match=r"experiment 7 ran compare.* det-amp report 7,"
    ):
        door.run(["report", *words.split()])


def test_comparison_without_an_answer_is_a_sentence(compared, tmp_path):
    compared.checkpoints.clear()
    with pytest.raises(UserError, match=r"precision.md: it has not com"):
        fetch_comparison(7, tmp_path)
    failure = ["the trial cannot be tr", "ained in fp32"]  # a long one is in parts
    compared.metadata = {11: {"failure": failure}}
    with pytest.raises(UserError, match=r"precision.md: the trial cannot be trai"):
        fetch_comparison(7, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("password", "another", r"the login was refused.* user login"),
        (
            "answer",
            lambda path, query: (200, "<html>hello</html>"),
            "no Determined master answers there: ",
        ),
        ("answer", lambda path, query: (429, "{}"), "answers there: error 429"),
        ("answer", lambda path, query: (401, "{}"), "the login was refused"),
        ("_experiment", lambda: {"": {"experiment": {}}}, "gave no experiment 7"),
        # Of another version.
        ("trials", [{**TRIAL, "hparams": 5}], f"{NONE}; allowed: .* of Determined 0"),
        ("trials", [{"id": 11}], f"{NONE}; allowed: .* of Determined 0"),
    ],
)
def test_useless_answer_of_a_master_is_a_sentence(
    master, monkeypatch, name, value, words
):
    monkeypatch.setattr(master, name, value)
    with pytest.raises(UserError, match=words):
        read_experiment(7)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "DET_MASTER is not set"),
        (
            "http://127.0.0.1:9",
            r"http://127\.0\.0\.1:9: no Determined master answers there",
        ),
        ("http://me:hush@host:80", "http://HOST:PORT"),
        ("http://host:eighty", "http://HOST:PORT"),
    ],
)
def test_address_without_a_master_is_a_sentence_that_repeats_no_password(
    address, words, monkeypatch
):
    monkeypatch.setenv("DET_MASTER", address)
    with pytest.raises(UserError, match=words) as refused:
        read_experiment(7)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("searcher", "metrics", "begins"),
    [
        (
            "grid",
            scored(16),
            "no step is lost in 1 of 2 trials, at 2^16 to 2^16: default is fine: 2^16",
        ),
        ("single", {}, "the trial's own precision: completed, 4 batches"),
        ("single", {"faults": 1}, "check found 1 fault\n"),
    ],
    ids=["search", "run", "check"],
)
def test_report_on_an_experiment_is_that_of_its_searcher_or_its_command(
    master, tmp_path, capsys, *, searcher, metrics, begins
):
    master.config = with_overrides(master.config, [f"searcher.name={searcher}"])
    master.reports["validation"][0] = report(11, 4, "validation", metrics)
    assert door.run(["report", "7", "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(begins)


@pytest.mark.usefixtures("master")
def test_report_of_several_sources_is_a_comparison():
    said = r"hyperparameters\.amp\.precision: missing; allowed: a trial with"
    with pytest.raises(UserError, match=said):
        door.run(["report", "7", "7"])

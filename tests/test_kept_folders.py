"""Folders that an older checkout has left are gone on with, and reported.

`kept_folders/` holds what commit 1ab76da (torch 2.15.0) left of the YAMLs beside it: a
run that was killed in batch 14 of 32, the end of the same run undisturbed, a search
that was stopped after one of three trials, and a comparison of three precisions with
two seeds. All numbers are powers of two, so that their bits do not depend on a machine.
"""

import shutil
from pathlib import Path

import pytest

from determined_amp import __main__ as door
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import read_search
from tests import run_here, searching

KEPT = Path(__file__).parent / "kept_folders"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A copy of the folders, with their trial, as the working directory."""
    folder = tmp_path / "kept"
    shutil.copytree(KEPT, folder)
    monkeypatch.chdir(folder)
    return folder


def test_killed_run_of_an_older_checkout_ends_as_one_that_nothing_disturbed(kept):
    assert door.main(["train", "--resume", "killed"]) == 0
    before, after = (
        run_here.checkpoint(kept / folder, 32) for folder in ("undisturbed", "killed")
    )
    for content in (before, after):
        # Callbacks without a state come and go; torch 2.3 keeps less of a scheduler.
        content["callbacks"] = [each for each in content["callbacks"].values() if each]
        (schedule,) = content["lr_schedulers_state_dict"]
        content["lr_schedulers_state_dict"] = (
            schedule["last_epoch"],
            schedule["_last_lr"],
        )
    for part in before:
        assert run_here.digest(after[part]) == run_here.digest(before[part]), part
    # A resume makes the audit again.
    killed, undisturbed = (
        run_here.same_numbers(kept / name, "watch_audit_share")
        for name in ("killed", "undisturbed")
    )
    assert killed == undisturbed


@searching.FORKS
@pytest.mark.usefixtures("_workers_are_forks")
def test_stopped_search_of_an_older_checkout_goes_on(kept):
    (first,) = read_search(kept / "stopped_search").runs
    assert door.main(["search", "--resume", "stopped_search"]) == 0
    runs = read_search(kept / "stopped_search").runs
    assert [run.state for run in runs] == [RunState.COMPLETED] * 3
    assert [run.scale_log2 for run in runs] == [2, 10, 24]
    assert runs[0].validations == first.validations


def test_comparison_of_an_older_checkout_is_reported(kept, capsys):
    assert door.main(["report", "comparison"]) == 0
    assert ", seeds 0, 1\n" in capsys.readouterr().out
    page = (kept / "comparison" / "precision.md").read_text()
    for precision in ("fp32", "amp_bf16", "amp_fp16"):
        assert f"| {precision} | 2 | " in page

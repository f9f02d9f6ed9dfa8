"""The process of one trial of a search."""

import multiprocessing
import os
from unittest.mock import Mock

import pytest
import torch

from determined_amp.experiment.entrypoint import Task
from determined_amp.runs.folder import RunFolder
from determined_amp.runs.run import RunState
from determined_amp.search import trial_process
from determined_amp.search.trial_process import Job, TrialProcess


@pytest.fixture
def _six_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


def tell_share(job, connection):
    """In place of a training: end with the threads and the GPU of this process."""
    share = (
        f"{torch.get_num_threads()} threads, GPU {os.environ['CUDA_VISIBLE_DEVICES']}"
    )
    job.folder.end(RunState.COMPLETED, share)


@pytest.mark.usefixtures("_six_threads")
def test_process_of_a_trial_has_its_share_of_the_threads_and_a_gpu_of_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        trial_process, "_processes", multiprocessing.get_context("fork")
    )
    monkeypatch.setattr(trial_process, "_run", tell_share)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    job = Job(Task("train"), Mock(), RunFolder(tmp_path / "run"))
    process = TrialProcess(job, slot=1, workers=2)
    ended = process.run(lambda report: True)
    assert ended.reason == "3 threads, GPU 5"

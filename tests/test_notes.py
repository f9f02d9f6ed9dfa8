"""`trial.notes`: what a run on a cluster notes on the master, its failure included."""

from __future__ import annotations

import json
import math
import os
import platform
import textwrap
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import determined as det
import pytest
import torch
from determined import core
from determined.common.api import errors

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.settings import AmpSettings, FindScale, Precision
from determined_amp.trial import notes
from determined_amp.trial.notes import cause_first
from tests.report_master import answering
from tests.test_guard import guard


class Master(core.TrainContext):
    """Keeps the metadata of a run."""

    def __init__(self, metadata):
        self.metadata = metadata

    def get_metadata(self):
        return self.metadata

    def set_metadata(self, metadata):
        self.metadata = metadata
        return metadata


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (
            "the loss scale is at its floor 1 and steps still overflow. Cause: forward "
            "overflow in module 1: largest |activation| 7e+04",
            "overflow in module 1",
        ),
        (
            "the training loss is nan in amp_bf16. The newest batch alone is finite",
            "training loss",
        ),
        (
            "experiment: hyperparameters.amp.precison: unknown key",
            "amp.precison: unknown key",
        ),
    ],
    ids=["at the floor", "a loss that is NaN", "a wrong key"],
)
def test_status_begins_with_the_cause(reason, status):
    """A card of the WebUI shows twenty characters."""
    assert cause_first(reason).startswith(status)


class TestFailureBeforeAContext:
    """The task of a trial that cannot begin, for instance because of a wrong key."""

    INFO: Any = SimpleNamespace(trial=None, master_url="http://localhost:1")

    def test_failure_is_sent_to_the_run_of_the_task(self, monkeypatch):
        sent, problem = {}, "amp.precison: unknown key" + ", and more" * 500

        def answer(method, path, body):
            sent[method, path] = json.loads(body or "{}")
            return 200, json.dumps({"metadata": {"mine": 1}})

        monkeypatch.setenv("DET_SESSION_TOKEN", "of-the-task")
        monkeypatch.setenv("DET_USER", "someone")
        with answering(answer) as address:
            trial = SimpleNamespace(trial_id=7, experiment_id=3)
            info: Any = SimpleNamespace(trial=trial, master_url=address)
            with pytest.raises(ConfigError), notes.failure_noted(info):
                raise ConfigError("experiment", [problem])
        reason = f"experiment: {problem}"  # too long for one text of the master's
        noted = {"mine": 1, "amp": {"failure": [reason[:5000], reason[5000:]]}}
        assert sent == {
            ("GET", "/api/v1/runs/7/metadata"): {},
            ("POST", "/api/v1/runs/7/metadata"): {"metadata": noted, "runId": 7},
            ("POST", "/api/v1/trials/7/runner/metadata"): {
                "state": textwrap.shorten(problem, 100)
            },
        }

    def test_failure_is_raised_as_it_is_if_the_master_fails(self, monkeypatch):
        monkeypatch.setattr(notes, "train_context_of_task", lambda info: 1 / 0)
        with pytest.raises(ConfigError), notes.failure_noted(self.INFO):
            raise ConfigError("experiment", ["amp.precison: unknown key"])


class TestMetadata:
    def test_metadata_of_a_run_on_a_cluster_has_precision_scale_and_failure(self):
        watched = guard(name="random")
        master = Master(
            {"mine": 1, "amp": {"failure": "of an earlier process", "note": "mine"}}
        )
        watched._context._core = SimpleNamespace(train=master)
        watched.on_training_start()
        assert master.metadata is not None
        assert master.metadata["amp"].pop("machine") == {
            "device": f"cpu ({os.cpu_count()} processors, torch threads: 1)",
            "slots": 1,
            "on_gpu": False,
            "has_tf32": False,
            "torch": torch.__version__,
            "versions": {"python": platform.python_version()},
        }
        datetime.fromisoformat(master.metadata["amp"].pop("date"))
        noted = {
            "precision": "amp_fp16",
            "init_scale": 65536.0,
            "seed": 7,
            "note": "mine",
        }
        assert master.metadata == {"mine": 1, "amp": noted}
        with pytest.raises(det.InvalidHP):
            watched.on_validation_end({"validation_loss": math.nan})
        assert (
            master.metadata["amp"].pop("failure").startswith("validation_loss is nan")
        )
        assert master.metadata == {"mine": 1, "amp": noted}

    @pytest.mark.parametrize("init_scale", [FindScale.FIND, 4.0])
    def test_resume_keeps_the_noted_scale_that_an_earlier_process_has_found(
        self, init_scale
    ):
        watched = guard(AmpSettings(Precision.AMP_FP16, init_scale=init_scale))
        master = Master({"amp": {"init_scale": 8.0}})
        watched._context._core = SimpleNamespace(train=master)
        watched.on_training_start()
        assert master.metadata is not None
        kept = 8.0 if init_scale is FindScale.FIND else 4.0
        assert master.metadata["amp"]["init_scale"] == kept

    def test_only_the_chief_writes_metadata(self):
        watched = guard()
        master = Master(None)
        watched._context._core = SimpleNamespace(train=master)
        watched._context.distributed.rank = 1
        watched.on_training_start()
        assert master.metadata is None

    def test_metadata_that_the_master_refuses_is_one_line_in_the_log(self, caplog):
        class Refusing(Master):
            def get_metadata(self):
                raise errors.NotFoundException("no such address")

        watched = guard(AmpSettings(Precision.FP32))
        watched._context._core = SimpleNamespace(train=Refusing(None))
        watched.on_training_start()
        assert (
            "the master did not take the metadata of this run: no such address"
            in caplog.text
        )

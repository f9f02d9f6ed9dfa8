"""Shows a local run on a Determined master, as an unmanaged experiment.

The run folder is authoritative; the master gets a copy. A run does not wait for a master that is
away: the master gets the missing parts when it answers again, or when the run is resumed. At its
start a run sends every report and checkpoint of its folder that the master lacks.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from determined.common import api
from determined.common.api import bindings, errors

from determined_amp.local.checkpoint_storage import complete_checkpoints, read_metadata
from determined_amp.local.folder import RunFolder, write_whole
from determined_amp.local.master import MasterError
from determined_amp.local.outbox import Outbox
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.run_listener import RunListener

logger = logging.getLogger(__name__)

_State = bindings.trialv1State


class DetachedTrial(RunListener):
    """The experiment of one run folder on a master; a file in the folder holds its id.

    Args:
        session: A login; see `determined_amp.local.master.log_in`.
        config: The experiment configuration, for the WebUI to show.
    """

    def __init__(self, session: api.Session, config: Mapping[str, Any]) -> None:
        self._session = session.with_retry(0)  # the outbox retries, and warns only once
        self._config = config
        self._outbox = Outbox(session.master, idle=self._live)
        self._sending = ExitStack()
        self._listed: set[str] = set()  # storage ids of the checkpoints that the master lists

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        """Make or find the experiment, print its address, and send what the master lacks.

        Raises:
            MasterError: if the master refuses the experiment.
        """
        master = self._session.master
        self._folder = folder
        self._id = _id_of(folder)
        try:
            self._create(self._config)
        except (errors.BadRequestException, OSError) as error:
            raise MasterError(f"{master}: the experiment was refused: {error}") from error
        print(f"shown at {master}/det/experiments/{self._experiment}", flush=True)
        lines = list(folder.read_metrics())
        self._outbox.put(lambda: self._catch_up(lines))
        self.on_checkpoints(complete_checkpoints(folder.checkpoints))
        self._sending.enter_context(self._outbox.sending())

    def _create(self, config: Mapping[str, Any]) -> None:
        session, external_id = self._session, str(self._id)
        storage = {"type": "directory", "container_path": str(self._folder.checkpoints.absolute())}
        shown = yaml.safe_dump({**config, "checkpoint_storage": storage})
        experiment = bindings.v1CreateExperimentRequest(config=shown, unmanaged=True)
        self._experiment = bindings.put_PutExperiment(
            session, body=experiment, externalExperimentId=external_id
        ).experiment.id
        wanted = bindings.v1CreateTrialRequest(
            experimentId=self._experiment,
            hparams=config.get("hyperparameters") or {},
            unmanaged=True,
        )
        put = bindings.v1PutTrialRequest(createTrialRequest=wanted, externalTrialId=external_id)
        trial = bindings.put_PutTrial(session, body=put).trial
        assert trial.taskId is not None
        self._trial, self._task = trial.id, trial.taskId
        # Each process starts a new run of the trial. At its first report, the master drops the
        # reports of later batches, as the folder does on a resume.
        start = bindings.v1StartTrialRequest(trialId=self._trial, resume=True)
        self._run = bindings.post_StartTrial(session, body=start, trialId=self._trial).trialRunId
        prepare = bindings.v1RunPrepareForReportingRequest(
            runId=self._trial, checkpointStorage=storage
        )
        self._storage = bindings.post_RunPrepareForReporting(session, body=prepare).storageId

    def on_report(self, line: Mapping[str, Any]) -> None:
        self._outbox.put(lambda: self._send_report(line))

    def on_progress(self, share: float) -> None:
        self._outbox.put(lambda: self._send_progress(share))

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        """Send how the run ended, and wait for a while until the master has everything."""
        state = _State.PAUSED if stopped else _State.COMPLETED
        if error is not None:
            state = _State.ERROR
            self._outbox.put(partial(self._log, f"{type(error).__name__}: {error}"))
        self._outbox.put(lambda: self._live(state))
        self._sending.close()
        if not self._outbox.all_delivered:
            logger.warning("%s lacks a part of this run; a resume sends it", self._session.master)

    def on_checkpoints(self, checkpoints: Sequence[Path]) -> None:
        # Read now, because the checkpoint may be deleted before the outbox sends this.
        present = {str(uuid.uuid5(self._id, path.name)): _described(path) for path in checkpoints}
        self._link(
            {storage_id: path.name for storage_id, path in zip(present, checkpoints, strict=True)}
        )
        self._outbox.put(lambda: self._send_checkpoints(present))

    def _link(self, names: Mapping[str, str]) -> None:
        """Link each checkpoint under its storage id, where `det checkpoint download` looks."""
        folder = self._folder.checkpoints
        for link in folder.iterdir():
            # Other links are the user's.
            ours = link.is_symlink() and os.readlink(link).startswith("batch-")
            if ours and link.name not in names:
                link.unlink()
        for storage_id, name in names.items():
            if not (folder / storage_id).is_symlink():
                try:
                    (folder / storage_id).symlink_to(name)
                except OSError as error:  # a file system without links; only downloads need them
                    logger.warning("%s: det checkpoint download will not work: %s", folder, error)
                    return

    def _catch_up(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Send the reports that the master lacks, and read which checkpoints it lists."""
        groups = {line["group"] for line in lines}
        listed = {(group, batches) for group in groups for batches in self._reported_batches(group)}
        missing = (i for i, x in enumerate(lines) if (x["group"], x["batches"]) not in listed)
        for line in lines[next(missing, len(lines)) :]:
            self._send_report(line)
        pages = api.read_paginated(
            lambda offset: bindings.get_GetTrialCheckpoints(
                self._session, id=self._trial, offset=offset
            )
        )
        deleted = bindings.checkpointv1State.DELETED
        self._listed = {c.uuid for page in pages for c in page.checkpoints if c.state != deleted}

    def _reported_batches(self, group: str) -> Iterator[int]:
        for answer in bindings.get_GetMetrics(self._session, group=group, trialIds=[self._trial]):
            yield from (report.totalBatches for report in answer.metrics)

    def _send_report(self, line: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in line.items() if name != "group"}
        report = bindings.v1TrialMetrics(
            metrics=bindings.v1Metrics(avgMetrics=numbers),
            trialId=self._trial,
            trialRunId=self._run,
            stepsCompleted=line["batches"],
        )
        body = bindings.v1ReportTrialMetricsRequest(metrics=report, group=line["group"])
        bindings.post_ReportTrialMetrics(self._session, body=body, metrics_trialId=self._trial)

    def _send_progress(self, share: float) -> None:
        body = bindings.v1ReportTrialProgressRequest(
            progress=share, trialId=self._trial, isRaw=True
        )
        bindings.post_ReportTrialProgress(self._session, body=body, trialId=self._trial)

    def _send_checkpoints(
        self, present: Mapping[str, tuple[dict[str, Any], dict[str, str]]]
    ) -> None:
        for storage_id in present.keys() - self._listed:
            metadata, files = present[storage_id]
            body = bindings.v1Checkpoint(
                metadata=metadata,
                resources=files,
                state=bindings.checkpointv1State.COMPLETED,
                storageId=self._storage,
                taskId=self._task,
                training=bindings.v1CheckpointTrainingMetadata(),
                uuid=storage_id,
                reportTime=_now(),
            )
            bindings.post_ReportCheckpoint(self._session, body=body)
            self._listed.add(storage_id)
        for storage_id in self._listed - present.keys():
            gone = bindings.v1PatchCheckpoint(
                uuid=storage_id, resources=bindings.PatchCheckpointOptionalResources(resources={})
            )
            request = bindings.v1PatchCheckpointsRequest(checkpoints=[gone])
            bindings.patch_PatchCheckpoints(self._session, body=request)
            self._listed.remove(storage_id)

    def _live(self, state: bindings.trialv1State | None = None) -> None:
        """Tell the master that the run is alive, or its new state."""
        body = bindings.v1PatchTrialRequest(trialId=self._trial, state=state)
        bindings.patch_PatchTrial(self._session, body=body, trialId=self._trial)

    def _log(self, text: str) -> None:
        line = bindings.v1TaskLog(log=f"{text}\n", taskId=self._task, timestamp=_now())
        request = bindings.v1PostTaskLogsRequest(logs=[line])
        bindings.post_PostTaskLogs(self._session, body=request)


def _id_of(folder: RunFolder) -> uuid.UUID:
    """The id of a run on every master, from its folder; made at the first call."""
    path = folder.path / "detached.json"
    if path.exists():
        try:
            return uuid.UUID(json.loads(path.read_text())["external_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise MasterError(f"{path}: cannot be read: {error}") from error
    made = uuid.uuid4()
    write_whole(path, json.dumps({"external_id": str(made)}) + "\n")
    return made


def _described(checkpoint: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata of a checkpoint, and its files with their sizes in bytes."""
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(checkpoint)): str(path.stat().st_size) for path in files}
    return read_metadata(checkpoint), sizes


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat()

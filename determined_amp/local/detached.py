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
from concurrent import futures
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from determined.common import api
from determined.common.api import bindings, errors

from determined_amp.local.checkpoint_storage import complete_checkpoints, read_metadata
from determined_amp.local.folder import RunFolder, write_whole
from determined_amp.local.master import (
    NONSENSE,
    MasterAwayError,
    MasterError,
    is_away,
    log_in,
    not_a_master,
)
from determined_amp.local.outbox import Outbox
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.run_listener import RunListener
from determined_amp.trial.checkpoint import CheckpointError

logger = logging.getLogger(__name__)

_State = bindings.trialv1State


class DetachedTrial(RunListener):
    """The experiment of one run folder on a master; a file in the folder holds its id.

    Args:
        address: The address of the master.
        config: The experiment configuration, for the WebUI to show.
        session: A login there; None to log in when the master answers.
        required: Whether a master that is away at the start ends the run. If not, the run is
            shown as soon as the master answers.
    """

    def __init__(
        self,
        address: str,
        config: Mapping[str, Any],
        session: api.Session | None,
        *,
        required: bool,
    ) -> None:
        self._address = address
        self._config = config
        self._logged_in = session
        self._required = required
        self._outbox = Outbox(address, idle=self._live)
        self._sending = ExitStack()
        self._made: int | None = None  # the trial's id; None until the master has the experiment
        self._listed: set[str] = set()  # storage ids of the checkpoints that the master lists

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        """Make or find the experiment, print its address, and send what the master lacks.

        Raises:
            MasterError: if the master refuses the experiment, or is away and required.
            KeyboardInterrupt: if a signal stops the run meanwhile.
        """
        self._folder = folder
        self._id = _id_of(folder)
        created: futures.Future[None] = futures.Future()
        self._outbox.put(partial(self._create, created))
        with ExitStack() as opened:
            opened.enter_context(self._outbox.sending(lambda: stop.requested))
            while not created.done():
                if stop.requested:
                    raise KeyboardInterrupt
                futures.wait([created], timeout=0.1)
            error = created.exception()
            if error is not None and (self._required or not isinstance(error, MasterAwayError)):
                raise error
            self._sending = opened.pop_all()
        lines = list(folder.read_metrics())
        self._outbox.put(lambda: self._catch_up(lines))
        self.on_checkpoints(complete_checkpoints(folder.checkpoints))

    @property
    def _session(self) -> api.Session:
        if self._logged_in is None:
            raise MasterError(f"{self._address}: not logged in")
        return self._logged_in

    @property
    def _trial(self) -> int:
        if self._made is None:
            raise MasterError(f"{self._address}: has no experiment for this run")
        return self._made

    def _create(self, first_try: futures.Future[None]) -> None:
        """Log in, and make or find the experiment; `first_try` tells how the first try ended."""
        try:
            if self._logged_in is None:
                self._logged_in = log_in(self._address)
            self._logged_in = self._logged_in.with_retry(0)  # the outbox retries, and warns once
            self._make(self._config)
        except Exception as error:
            failed = self._explained(error)
            if not first_try.done():
                first_try.set_exception(failed)
            raise failed from error
        if not first_try.done():
            first_try.set_result(None)

    def _explained(self, error: Exception) -> Exception:
        """One sentence for the master's error at the start; any other error is unchanged."""
        if isinstance(error, MasterError):
            return error
        if is_away(error):
            return MasterAwayError(
                f"{self._address}: the master does not answer to a new experiment: {error}"
            )
        if isinstance(error, errors.BadRequestException):
            return MasterError(f"{self._address}: the experiment was refused: {error}")
        return not_a_master(self._address) if isinstance(error, NONSENSE) else error

    def _make(self, config: Mapping[str, Any]) -> None:
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
        if trial.taskId is None:
            raise not_a_master(self._address)
        self._task = trial.taskId
        # Each process starts a new run of the trial. At its first report, the master drops the
        # reports of later batches, as the folder does on a resume.
        start = bindings.v1StartTrialRequest(trialId=trial.id, resume=True)
        self._run = bindings.post_StartTrial(session, body=start, trialId=trial.id).trialRunId
        prepare = bindings.v1RunPrepareForReportingRequest(
            runId=trial.id, checkpointStorage=storage
        )
        self._storage = bindings.post_RunPrepareForReporting(session, body=prepare).storageId
        self._made = trial.id
        print(f"shown at {session.master}/det/experiments/{self._experiment}", flush=True)

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
            logger.warning("%s lacks a part of this run; a resume sends it", self._address)

    def on_checkpoints(self, checkpoints: Sequence[Path]) -> None:
        # Read now, because the checkpoint may be deleted before the outbox sends this.
        present, names = {}, {}
        for path in checkpoints:
            storage_id = str(uuid.uuid5(self._id, path.name))
            try:
                present[storage_id] = _described(path)
            except CheckpointError as error:
                logger.warning("%s; the master does not list it", error)
                continue
            names[storage_id] = path.name
        self._link(names)
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
        if self._logged_in is None:
            raise MasterAwayError(f"{self._address}: not logged in yet")
        if self._made is None:  # the first call is under way; see whether the master answers it
            self._session.get("/api/v1/master")
            return
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
    """The metadata of a checkpoint, and its files with their sizes in bytes.

    Raises:
        CheckpointError: if its metadata are damaged.
    """
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(checkpoint)): str(path.stat().st_size) for path in files}
    return read_metadata(checkpoint), sizes


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat()

"""The task of a trial on a cluster, in this process; a stub takes the place of its
master.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import determined as det
import torch
from determined import core, pytorch

from determined_amp.local.open_trial import core_context_of
from determined_amp.trial import controller, notes


class TaskMaster(core.TrainContext):
    """What a task tells its master.

    Attributes:
        reports: Batches and metrics of its reports, by group.
        metadata: What the library noted in the metadata of the run.
        status: The newest one.
        stops: Its answers whether the search has stopped the trial; then it has not.
    """

    def __init__(self, folder):
        self._folder = folder
        self._trial_id = 1
        self.reports = {}
        self._metadata = {}
        self.status = ""
        self.stops = []

    @property
    def metadata(self):
        return dict(self._metadata.get("amp", {}))

    @property
    def training(self):
        return [metrics for _, metrics in self.reports["training"]]

    def _report_trial_metrics(
        self,
        group,
        steps_completed,
        metrics,
        batch_metrics=None,
    ):
        self.reports.setdefault(group, []).append((steps_completed, dict(metrics)))

    def get_metadata(self):
        return self._metadata

    def set_metadata(self, metadata):
        self._metadata = metadata
        return metadata

    def set_status(self, status):
        self.status = status

    def get_tensorboard_path(self):
        return self._folder / "tensorboard"

    def get_experiment_best_validation(self):
        return None

    def _get_last_validation(self):
        return None

    def report_progress(self, progress, is_source=True):
        """Nothing asks for it."""

    def report_early_exit(self, reason):
        """Nothing asks for it."""

    def upload_tensorboard_files(self, *args, **kwargs):
        """They stay in their folder."""


def start_task(
    monkeypatch,
    folder,
    config,
    hparams,
    *,
    seed=1,
):
    """Let this process be the task of a trial.

    Args:
        monkeypatch: Ends that.
        folder: Its checkpoints are in `folder/checkpoints`.
        config: The experiment configuration.
        hparams: The hyperparameters that were sampled for the trial.
        seed: The trial's seed, which the platform drew.
    """
    trial = SimpleNamespace(
        experiment_id=7,
        _config=config,
        _steps_completed=0,
        _debug=False,
        hparams=hparams,
        trial_seed=seed,
    )
    info = SimpleNamespace(
        task_type="TRIAL",
        latest_checkpoint=None,
        trial=trial,
        slot_ids=[0],
        container_addrs=["localhost"],
    )
    master = TaskMaster(folder)

    @contextmanager
    def connected(distributed=None):
        if len(info.slot_ids) > 1 and distributed is None:  # as `core.init` does
            raise ValueError(
                "you must provide a valid DistributedContext for a multi-slot task"
            )
        with core_context_of(master, folder / "checkpoints") as core_context:
            yield core_context

    @contextmanager
    def init(*, exp_conf=None, **options):
        torch.manual_seed(trial.trial_seed)
        with connected() as core_context:
            yield pytorch.PyTorchTrialContext(
                core_context=core_context,
                trial_seed=trial.trial_seed,
                exp_conf=dict(config if exp_conf is None else exp_conf),
                slots_per_trial=1,
                num_gpus=0,
                steps_completed=0,
                managed_training=True,
                debug_enabled=False,
                **options,
            )

    monkeypatch.setenv("DET_TASK_TYPE", "TRIAL")
    monkeypatch.setattr(notes, "train_context_of_task", lambda of_this: master)
    monkeypatch.setattr(det, "get_cluster_info", lambda: info)
    monkeypatch.setattr(pytorch, "init", init)
    monkeypatch.setattr(core, "init", connected)
    monkeypatch.setattr(
        controller,
        "is_stopped_by_search",
        lambda train: bool(master.stops and master.stops.pop(0)),
    )
    return master

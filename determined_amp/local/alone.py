"""A trial for looking at rather than for training: in one process, and nothing stays behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from determined import core, pytorch

from determined_amp.config.experiment import Experiment, load_trial_class
from determined_amp.config.hparams import Hparams
from determined_amp.local.checkpoints import LocalCheckpoints
from determined_amp.local.run import trial_context


@contextmanager
def core_context_alone(checkpoints: Path | None = None) -> Iterator[core.Context]:
    """What Determined's loop needs of a platform.

    Args:
        checkpoints: Folder to restore checkpoints from.
    """
    processes = core.DummyDistributedContext()
    with tempfile.TemporaryDirectory() as folder:
        core_context = core.Context(
            checkpoint=LocalCheckpoints(processes, checkpoints or Path(folder), None),
            distributed=processes,
            train=core.DummyTrainContext(Path(folder)),
        )
        with core_context:
            yield core_context


@contextmanager
def trial_alone(
    config: Mapping[str, Any], experiment: Experiment[Hparams], checkpoints: Path | None = None
) -> Iterator[tuple[pytorch.PyTorchTrial, pytorch.PyTorchTrialContext]]:
    """The trial of an experiment and its context.

    Args:
        config: The configuration as it was given.
        experiment: The same, parsed.
        checkpoints: Folder to restore checkpoints from.
    """
    with core_context_alone(checkpoints) as core_context:
        context = trial_context(core_context, config, experiment, first_batch=0)
        yield load_trial_class(experiment.hparams.trial)(context, experiment), context

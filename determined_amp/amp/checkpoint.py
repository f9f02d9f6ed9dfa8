"""Checkpoints that every supported torch reads, without unpickling code.

Determined 0.38.1 saves numpy's random state as an array and loads with `torch.load(path)`. From
torch 2.6 on that call unpickles weights only and refuses the array, so no trial can be resumed; up
to torch 2.5 it unpickles anything, so a checkpoint can run code. This module fixes both:
`PortableCheckpoint` saves plain types only, and `SafeController` always loads weights only.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import pytorch, util

from determined_amp.amp.random_state import random_state, restore_random_state, settle_order
from determined_amp.experiment.errors import GuardError, UserError
from determined_amp.experiment.settings import ConfigError


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of another model."""


class PortableCheckpoint(pytorch.PyTorchCallback):
    """Saves numpy's random state as numbers; `numpy.random.set_state` takes them back.

    And the state of schedulers as plain types: that of torch 2.3 holds counters and methods.
    """

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        name, keys, position, has_gauss, gauss = checkpoint["rng_state"]["np_rng_state"]
        checkpoint["rng_state"]["np_rng_state"] = (
            str(name),
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(gauss),
        )
        states = checkpoint.get("lr_schedulers_state_dict", [])
        checkpoint["lr_schedulers_state_dict"] = [_without_code(state) for state in states]


class SafeController(pytorch._PyTorchTrialController):
    """Determined's training loop, loading checkpoints without running what is in them.

    A run that the guard ends leaves a checkpoint of its last good state, and so does one whose
    validation lacks the metric of the searcher. A resumed run sees the batches and the random
    numbers of an undisturbed one.
    """

    _metric_problem: str | None = None
    _before_validation: dict[str, Any] | None = None

    def run(self) -> None:
        # Off a cluster `Trainer` knows of no earlier batches.
        if self.local_training and self.latest_checkpoint is not None and not self.start_from_batch:
            with self.core_context.checkpoint.restore_path(self.latest_checkpoint) as path:
                self.start_from_batch = self._counts_in(path).get("batches_trained", 0)
            self.context._steps_completed = self.start_from_batch
        super().run()

    def _set_data_loaders(self) -> None:
        super()._set_data_loaders()
        seed = self.context._trial_seed  # None off a cluster, where a script sets its own
        seed = self.context.distributed.broadcast(torch.initial_seed() if seed is None else seed)
        settle_order(self.training_loader, seed, say=self.is_chief)
        if not self.context._epoch_len:  # Determined asserts it, at the first batch
            raise UserError(
                "the training data loader has no batch: the data is empty, or smaller than the one "
                "batch that drop_last drops; allowed: more data, or a smaller batch"
            )

    def _run(self) -> None:
        try:
            super()._run()
        except GuardError as error:
            if error.state_is_good and not self._checkpoint_is_current():
                self._checkpoint(already_exiting=True)
            raise

    def _validate(self) -> dict[str, Any]:
        if self._steps_until_complete(self.max_length) <= 0 and not self._is_due():
            # A longer run has no validation here, and each one draws from the random state.
            self._before_validation = random_state(self.context.distributed.local_rank)
        metrics: dict[str, Any] = super()._validate()
        if self.is_chief and self.searcher_metric_name:
            self._check_searcher_metric(metrics)
        # Only the chief has the metrics, and all ranks must end.
        problem = self.context.distributed.broadcast(self._metric_problem)
        if problem is not None:
            if not self._checkpoint_is_current():
                self._checkpoint(already_exiting=True)
            raise ConfigError("experiment", [problem])
        return metrics

    def _is_due(self) -> bool:
        """Whether a validation comes here in a run of any length."""
        assert self.state
        assert self.context._epoch_len
        if isinstance(self.validation_period, pytorch.Batch):
            return self.validation_period.should_stop(self.state.batches_trained)
        epochs, more = divmod(self.state.batches_trained, self.context._epoch_len)
        return not more and self.validation_period.should_stop(epochs)

    def _checkpoint(self, already_exiting: bool) -> None:
        if self._before_validation is not None:
            restore_random_state(self._before_validation, self.context.distributed.local_rank)
        self._of_ranks = self.context.distributed.gather(
            random_state(self.context.distributed.local_rank)
        )
        super()._checkpoint(already_exiting)

    def _save(self, path: Path) -> None:
        save = torch.save

        def save_plain(checkpoint: Any, *others: Any, **named: Any) -> None:
            if isinstance(checkpoint, dict) and "rng_state" in checkpoint:
                PortableCheckpoint().on_checkpoint_save_start(checkpoint)
                if self.context.distributed.size > 1:
                    checkpoint["rng_state_of_ranks"] = self._of_ranks
            save(checkpoint, *others, **named)

        with patched(torch, "save", save_plain):
            super()._save(path)

    def _check_searcher_metric(self, val_metrics: dict[str, Any]) -> Any:
        """Note what is wrong with it, instead of raising while the other ranks wait."""
        metric = self.searcher_metric_name
        numbers = sorted(name for name, x in val_metrics.items() if util.is_numerical_scalar(x))
        if metric in numbers:
            return val_metrics[metric]
        fault = "is no number" if metric in val_metrics else "the trial does not report"
        self._metric_problem = (
            f"searcher.metric: got {metric}, which {fault}; allowed: {', '.join(numbers)}, "
            "or no metric, and then no checkpoint is the best"
        )
        return 0.0

    def _load(self, load_path: Path) -> None:
        """Restore the trial from a checkpoint folder.

        Raises:
            CheckpointError: if the checkpoint is incomplete, damaged, unsafe or does not fit.
        """
        allow_numpy_random_state()
        check_bytes(load_path)
        same_trial = bool(self._counts_in(load_path))
        rank = self.context.distributed.rank
        with _restoring(load_path), patched(torch, "load", partial(_load_plain, torch.load, rank)):
            for callback in self.callbacks.values():
                tell = getattr(callback, "on_checkpoint_of", None)
                if tell is not None:
                    tell(same_trial=same_trial)
            super()._load(load_path)

    def _counts_in(self, load_path: Path) -> dict[str, Any]:
        """The counts of the loop in a checkpoint of this trial; nothing in that of another one."""
        with _restoring(load_path):
            saved = _read_without_code(load_path / "trial_state.pkl")
        return saved if saved.get("trial_id") == self.trial_id else {}


# What torch, pickle and the trial's own `load_state_dict` raise for a state of another kind.
_NOT_RESTORED = (
    *(RuntimeError, LookupError, ValueError, TypeError, AttributeError),
    *(EOFError, OSError, pickle.PickleError),
)


@contextmanager
def _restoring(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except _NOT_RESTORED as error:
        raise CheckpointError(
            f"{checkpoint}: cannot be restored into this trial: {error}"
        ) from error


def _load_plain(load: Callable[..., Any], rank: int, *given: Any, **named: Any) -> dict[str, Any]:
    """Torch's `load` without code. Determined takes what is no dict for nothing to restore."""
    found = load(*given, **named, weights_only=True)
    if not isinstance(found, dict):
        raise TypeError(f"state_dict.pth holds a {type(found).__name__}, not the state of a trial")
    of_ranks = found.pop("rng_state_of_ranks", ())
    if rank < len(of_ranks):
        found["rng_state"] = of_ranks[rank]
    return found


def check_bytes(checkpoint: Path) -> None:
    """Compare the weights of a checkpoint with the checksums that torch wrote beside them.

    Raises:
        CheckpointError: if a byte has changed, or the file is cut off.
    """
    file = checkpoint / "state_dict.pth"
    if not file.exists():
        raise CheckpointError(f"{checkpoint}: not a checkpoint: it has no state_dict.pth")
    try:
        with zipfile.ZipFile(file) as content:
            damaged = content.testzip()
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{checkpoint}: state_dict.pth is damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{checkpoint}: state_dict.pth is damaged: {damaged} has changed")


def use_safe_controller() -> None:
    """Let `pytorch.Trainer.fit` of this process run its loop in `SafeController`, from now on.

    A loop that other code has put there stays.
    """
    if pytorch._PyTorchTrialController is SafeController.__base__:
        pytorch._PyTorchTrialController = SafeController  # type: ignore[misc]


@contextmanager
def controlled_by(controller: Callable[..., pytorch._PyTorchTrialController]) -> Iterator[None]:
    """Let `pytorch.Trainer.fit` run its loop in `controller`; it offers no parameter for that."""
    with patched(pytorch, "_PyTorchTrialController", controller):
        yield


def allow_numpy_random_state() -> None:
    """Let weights-only loading read the array in checkpoints of trials without our callback.

    torch before 2.5 has no such list: there, such a checkpoint is refused.
    """
    add_safe_globals = getattr(torch.serialization, "add_safe_globals", None)
    if add_safe_globals is None:
        return
    reconstruct = np.empty(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    array_types = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    add_safe_globals([*array_types, *((reconstruct, name) for name in names)])


_MOVED_BY_SCHEDULERS = {
    *("lr", "initial_lr", "max_lr", "min_lr"),
    *("betas", "momentum", "base_momentum", "max_momentum"),
}


def plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups (rate, decay, betas), as plain numbers."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def settle_groups(
    checkpoint: dict[str, Any],
    context: pytorch.PyTorchTrialContext,
    constructed: list[list[dict[str, Any]]],
    before: Mapping[str, Any],
) -> None:
    """Decide, for every setting of every optimizer, between a checkpoint and this trial.

    A value that the run itself moved continues from the checkpoint: a rate that follows a scheduler
    of `context.wrap_lr_scheduler`, or that the trial sets by hand. A value that the constructor got
    differently than in the saved run is taken from this trial, because its YAML was changed.

    Args:
        checkpoint: What Determined is about to load; its optimizers' groups are changed in place.
        context: The trial's context.
        constructed: `plain_groups` of every optimizer as this trial made it.
        before: `constructed` and `scheduled` as the saved run noted them; empty for a warm start,
            which only takes over what such a scheduler moves.
    """
    moved = {id(getattr(w._scheduler, "optimizer", None)) for w in context.lr_schedulers}
    saved_optimizers = checkpoint.get("optimizers_state_dict", [])
    for index, (saved, optimizer) in enumerate(
        zip(saved_optimizers, context.optimizers, strict=False)
    ):
        then = _at(before.get("constructed"), index, [])
        # A rate that followed the applied steps is computed again from their count.
        scheduled = _at(before.get("scheduled"), index, False)
        groups = zip(saved["param_groups"], optimizer.param_groups, strict=False)
        for number, (saved_group, group) in enumerate(groups):  # torch itself reports a mismatch
            was, now = _at(then, number, {}), constructed[index][number]
            for key in group.keys() & saved_group.keys() - {"params"}:
                schedulable = key in _MOVED_BY_SCHEDULERS
                # A scheduler of the context continues from the checkpoint, and so does what it
                # has moved.
                moved_there = key == "lr" or key not in was or _plain(saved_group[key]) != was[key]
                if schedulable and id(optimizer) in moved and moved_there:
                    continue
                unchanged = key in was and was[key] == now.get(key)
                if not unchanged or (schedulable and scheduled):
                    saved_group[key] = group[key]
            saved_group.update({key: group[key] for key in group.keys() - saved_group.keys()})


def _without_code(state: Any) -> Any:
    if isinstance(state, (list, tuple)):
        return type(state)(_without_code(item) for item in state)
    if isinstance(state, dict):
        return {key: _without_code(value) for key, value in state.items() if not callable(value)}
    return state


def _at(values: Sequence[Any] | None, index: int, missing: Any) -> Any:
    return values[index] if values is not None and index < len(values) else missing


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain values are allowed")


def _read_without_code(path: Path) -> dict[str, Any]:
    """What Determined unpickles afterwards; refused if it holds more than plain values."""
    with path.open("rb") as file:
        state: Any = _PlainUnpickler(file).load()
    if not isinstance(state, dict):
        raise TypeError(f"{path.name} holds a {type(state).__name__}, not the state of a loop")
    return state


@contextmanager
def patched(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Replace an attribute inside this block, where Determined offers no argument for it."""
    own = vars(owner)
    was_own, before = name in own, own.get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

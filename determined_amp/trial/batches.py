"""What happens to every batch of a training, between Determined's loop and the trial.

A trial that returns the `callbacks` of a `MixedPrecision` has these methods replaced
while it trains:

* `build_training_data_loader` of the trial, to time the wait for each batch.
* `train_batch` of the trial; `Batches.__call__` shows what is done in which order.
* `step_optimizer` of the context, to see clips by the trial's own code. `amp/clips.py`
  sees the clips of torch's functions.

A trial without a `MixedPrecision` gets one from outside. Then `make.py` replaces
`wrap_model` of the context, and `unmodified/calls.py` replaces `backward` and
`step_optimizer` of the context, and `train_batch` and `build_callbacks` of the trial.

If gradients accumulate over several batches, this module exchanges them once per step.
Determined 0.38.1 would exchange them after every batch: it enters `no_sync` around the
backward only, but DistributedDataParallel decides in the forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from determined import pytorch
from torch.nn.parallel import DistributedDataParallel

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError, one_line
from determined_amp.amp.patched import patched
from determined_amp.amp.rehearse.precision_audit import AuditError, audit_rehearsal
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.restored import attributes_apart
from determined_amp.amp.tensors import own_copy, parameters_in, tensors_of
from determined_amp.amp.torch_private import version_of
from determined_amp.trial.determined_private import (
    aggregation_frequency,
    ends_step,
    step_methods,
)
from determined_amp.trial.loss_scale import settings_with_found_scale

logger = logging.getLogger(__name__)


class KeptBatch:
    """The newest batch, as the trial got it, for a rehearsal.

    A trial may take its batch apart and change tensors in place. Copying tensors is
    costly, so only the first batch is copied, and all batches after a change.

    Attributes:
        batch: The batch; None before the first, and if the trial has changed it.
        is_first: Whether no batch was trained yet.
    """

    def __init__(self) -> None:
        self.batch: Any = None
        self.is_first = True
        self._was_changed = False
        self._versions: list[tuple[torch.Tensor, int]] = []

    def keep(self, batch: Any) -> None:
        """Keep a batch that is about to be trained."""
        copied = self.is_first or self._was_changed
        self.batch = own_copy(batch, shared=not copied)
        tensors = [tensor for tensor in tensors_of(batch) if not tensor.is_inference()]
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors]

    def end_training(self) -> None:
        """Forget the batch if the trial has changed the tensors that it shares."""
        shared = not (self.is_first or self._was_changed)
        changed = any(version_of(tensor) != v for tensor, v in self._versions)
        if shared and changed:
            self.batch = None
        self._was_changed |= changed
        self.is_first = False
        self._versions = []


class Batches:
    """Trains each batch of a trial, with the work around it that the settings ask for.

    Args:
        amp: The mixed precision of the trial.
        trial: The trial. Its `train_batch` trains a batch.
        context: The context of the trial.
        checks_clips: Whether the trial's own code must unscale gradients before it
            clips them.

    Attributes:
        kept: The newest batch.
        is_counted: Whether `update` has counted the newest batch.
    """

    def __init__(
        self,
        amp: AmpCore,
        trial: pytorch.PyTorchTrial,
        context: pytorch.PyTorchTrialContext,
        *,
        checks_clips: bool,
    ) -> None:
        self.kept = KeptBatch()
        self.is_counted = False
        self._amp = amp
        self._trial = trial
        self._context = context
        self._original_train_batch = trial.train_batch
        self._original_build_loader = trial.build_training_data_loader
        self._original_step = context.step_optimizer
        self._indices: dict[str, int] = {}
        self._accumulates = aggregation_frequency(context) > 1
        self._patches = ExitStack()
        enter, loader = self._patches.enter_context, self._build_timed_loader
        enter(patched(trial, "build_training_data_loader", loader))
        enter(patched(trial, "train_batch", self))
        if checks_clips:
            enter(patched(context, "step_optimizer", self._step))

    def remove(self) -> None:
        """Restore the original methods of the trial and its context."""
        self._patches.close()
        self.kept.batch = None

    def __call__(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Keep, find, audit, train, check the end; return what the trial returns."""
        self._indices = {"epoch_idx": epoch_idx, "batch_idx": batch_idx}
        self.is_counted = False
        if self._accumulates:
            self._share_gradients_once()
        self.kept.keep(batch)
        audit_error = self._rehearse_first() if self.kept.is_first else None
        result: Any = self._original_train_batch(batch=batch, **self._indices)
        self.kept.end_training()
        for window in self._amp.windows.values():
            window.move("end_batch")
        if audit_error is not None:
            problem = one_line(audit_error)
            logger.warning("the first batch is trained, but not audited: %s", problem)
        if not isinstance(result, (torch.Tensor, Mapping)):
            kind = "nothing" if result is None else f"a {type(result).__name__}"
            problem = f"train_batch: it returns {kind}; allowed: the loss, or metrics"
            raise ConfigError("the trial", [problem])
        if isinstance(result, torch.Tensor) or "loss" in result:
            self._amp.metrics.trial_reports_loss = True
        return result

    def rehearsal(self) -> Rehearsal | None:
        """The rehearsal of the newest batch; None if it is not kept."""
        batch = self.kept.batch
        if batch is None:
            return None
        return self._amp.rehearsal_by(lambda: self._train_again(batch), batch)

    def samples(self) -> int:
        """The samples in the newest batch, as the trial counts them."""
        return int(self._trial.get_batch_length(self.kept.batch))

    # What is done around a batch.

    def _rehearse_first(self) -> Exception | None:
        """Find the scale with the first batch and audit it, in rehearsals.

        Returns:
            The error that the trial raised in the audit. If the batch cannot be trained
            either, training it raises the error again.
        """
        amp, rehearsal = self._amp, self.rehearsal()
        if not amp.guard.enabled or rehearsal is None:
            return None
        if amp.settings.finds_scale:
            trial, context = self._trial, self._context
            amp.settings = settings_with_found_scale(amp, trial, context, rehearsal)
        if not amp.settings.audit:
            return None
        rehearsal = amp.rehearsal_by(self._train_apart)
        try:
            audit = audit_rehearsal(rehearsal, amp.settings.precision, amp.device)
        except AuditError:
            raise
        except Exception as error:  # whatever the trial raises
            return error
        logger.info("audit of the first batch:\n%s", audit.table())
        amp.metrics.once = audit.metrics()
        return None

    def _share_gradients_once(self) -> None:
        """Average the gradients over the ranks only in the last batch of a window.

        By then they are sums over the window, so every rank gets the same average of
        sums. A rehearsal never exchanges gradients, see `undisturbed`.
        """
        is_last = ends_step(self._context)
        for model in self._context.models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = is_last  # of DDP, a bool

    def _train_again(self, batch: Any) -> Any:
        return self._original_train_batch(batch=own_copy(batch), **self._indices)

    def _train_apart(self) -> None:
        """Train the newest batch, and leave no trace in the trial's attributes."""
        amp, context = self._amp, self._context
        modules = [module for model in amp.models for module in model.modules()]
        tensors = parameters_in(amp.models, amp.optimizers)
        owners = [owner for owner, _ in step_methods(context)]
        shared = [amp, amp.scaler, self, *vars(context).values(), *amp.optimizers]
        with attributes_apart(self._trial, [*shared, *owners, *modules, *tensors]):
            self._train_again(self.kept.batch)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Any], Any] | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        """Step, and refuse a `clip_grads` that clips without unscaling first."""

        def clip(parameters: Any) -> None:
            assert clip_grads is not None
            clip_grads(parameters)
            self._amp.windows[optimizer].move("clip")

        its_clip = clip if clip_grads else None
        self._original_step(optimizer, its_clip, *others, **named)

    def _build_timed_loader(self) -> Any:
        loader, name = self._original_build_loader(), "get_data_loader"
        make = getattr(loader, name, None)
        if make is not None:  # a loader of Determined
            timed = partial(timed_loader, make, self._amp.metrics.waited)
            self._patches.enter_context(patched(loader, name, timed))
        return loader


def timed_loader(
    make: Callable[..., Any],
    waited: Callable[[float], None],
    /,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Make a loader that calls `waited` with the seconds of wait per batch.

    Args:
        make: Makes the loader, as `get_data_loader` of Determined does.
        waited: See above.
        arguments: Those of `make`.
        options: Those of `make`.
    """
    made = make(*arguments, **options)
    # Only the training loader repeats. A trial may also use it for validation, and
    # there Determined checks its type.
    return _Timed(made, waited) if options.get("repeat") else made


class _Timed:
    """A loader that times the wait for each batch."""

    def __init__(self, loader: Any, waited: Callable[[float], None]) -> None:
        self._loader = loader
        self._waited = waited

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        # `iter` now, not with the first batch: Determined starts the workers before it
        # restores a state.
        return self._time(iter(self._loader))

    def _time(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited(time.perf_counter() - start)
            yield batch

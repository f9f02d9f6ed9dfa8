"""Saves the state of mixed precision in checkpoints, and restores it on a resume."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import determined as det
import torch
from determined import pytorch
from torch.optim import Optimizer

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.settings import scale_text
from determined_amp.trial.checkpoint import SAME_TRIAL, check_optimizers
from determined_amp.trial.determined_private import (
    aggregation_frequency,
    current_batch,
    is_determineds_own_loop,
    schedulers,
)

logger = logging.getLogger(__name__)

# The key of the state in a checkpoint. No callback of a trial has such a name.
CALLBACK = "determined_amp.mixed_precision"

# The settings of an optimizer's groups, as plain numbers.
Groups = Sequence[Mapping[str, Any]]

# Settings of an optimizer that schedulers move.
_MOVED_BY_SCHEDULERS = frozenset(
    (
        *("lr", "initial_lr", "max_lr", "min_lr"),
        *("betas", "momentum", "base_momentum", "max_momentum"),
    )
)

# Settings that choose the kernels of a step, not its result. GradScaler relies on the
# values from this trial's constructor: with others an overflow would reach the weights.
_KERNELS = frozenset(("foreach", "fused", "capturable", "differentiable"))


class ResumedTraining(pytorch.PyTorchCallback):
    """Saves and restores what Determined does not: counts and schedules.

    Args:
        amp: The mixed precision of the trial.
        context: The trial's context.
    """

    def __init__(self, amp: AmpCore, context: pytorch.PyTorchTrialContext) -> None:
        self._amp = amp
        self._context = context
        self._constructed: list[list[dict[str, Any]]] | None = None
        self._warm_start = False

    def state_dict(self) -> StateDict:
        """Counts, schedules, and the optimizers' settings as constructed."""
        return {**self._amp.windows.state_dict(), "constructed": self._constructed}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Called by Determined after it has restored weights, optimizers and scaler."""
        if not self._warm_start:
            self._amp.windows.load_state_dict(state_dict)

    def on_trial_startup(
        self, first_batch_idx: int, checkpoint_uuid: str | None
    ) -> None:
        self._warm_start = first_batch_idx == 0 and checkpoint_uuid is not None

    def on_training_start(self) -> None:
        self._remember_constructed()

    def on_checkpoint_save_start(self, checkpoint: StateDict) -> None:
        batch_idx = current_batch(self._context)
        frequency = aggregation_frequency(self._context)
        if batch_idx is not None and (batch_idx + 1) % frequency:
            logger.warning(
                "this checkpoint is in the middle of a window of %d batches, and does "
                "not hold the gradients so far: checkpoint and validate at multiples "
                "of aggregation_frequency",
                frequency,
            )

    def on_checkpoint_load_start(self, checkpoint: StateDict) -> None:
        """Let the checkpoint win in a resumed run, and this trial in a warm start.

        A resumed run takes scale, growth tracker and optimizer settings from the
        checkpoint. A warm start (weights from another trial) takes them from this
        trial, and a search relies on that. The scaler's factors and interval always
        come from this trial. So do rates that follow applied steps.

        Raises:
            ConfigError: in Determined's own `Trainer` without a cluster, which begins
                again at batch 0.
        """
        if is_determineds_own_loop() and det.get_cluster_info() is None:
            raise ConfigError(
                "the trial",
                [
                    "latest_checkpoint: without a cluster pytorch.Trainer begins again "
                    "at the first batch; allowed: determined_amp.fit(trial, context, "
                    "latest_checkpoint=...)"
                ],
            )
        if SAME_TRIAL in checkpoint:
            self._warm_start = not checkpoint[SAME_TRIAL]
        elif not self._warm_start:  # in Determined's own loop
            check_optimizers(checkpoint, self._amp.optimizers)
        self._settle_optimizers(checkpoint)
        self._settle_scale(checkpoint)

    def _settle_scale(self, checkpoint: StateDict) -> None:
        """Decide which loss scale the training continues with."""
        state = checkpoint.pop("scaler_state_dict", None)
        amp, settings = self._amp, self._amp.settings
        if not amp.scaler.is_enabled():
            if state:
                precision = settings.precision.value
                logger.info("the checkpoint has a loss scale; %s needs none", precision)
            return
        if not state and not settings.finds_scale:
            logger.info(
                "the checkpoint has no loss scale; starting with %s, which may cost "
                "the first steps; amp.init_scale: find finds it on the first batch "
                "instead",
                scale_text(settings.first_scale),
            )
        if not state or self._warm_start:
            state = amp.scaler.state_dict()
        elif settings.finds_scale:
            scale = max(state["scale"], settings.min_scale)
            amp.settings = dataclasses.replace(settings, init_scale=scale)
        checkpoint["scaler_state_dict"] = state

    def _settle_optimizers(self, checkpoint: StateDict) -> None:
        """Take some settings from this trial; log YAML changes that have no effect."""
        self._remember_constructed()
        before = checkpoint.get("callbacks", {}).get(CALLBACK) or {}
        made_then = () if self._warm_start else before.get("constructed") or ()
        optimizers = self._amp.optimizers
        states = checkpoint.get("optimizers_state_dict", [])
        kept = [
            _settle(state, optimizer, self._settings_of_this_trial(optimizer), then)
            for optimizer, state, then in zip(
                optimizers, states, chain(made_then, repeat(())), strict=False
            )
        ]
        if not any(kept):
            return
        told = []
        for number, (optimizer, keeps) in enumerate(
            zip(optimizers, kept, strict=False)
        ):
            does = f"keeps {', '.join(keeps)}" if keeps else "follows the YAML"
            told.append(f"optimizer {number} ({type(optimizer).__name__}) {does}")
        logger.warning(
            "%s. A new run from the weights of the checkpoint "
            "(searcher.source_checkpoint_uuid on a cluster) begins with the settings "
            "of its YAML",
            "; ".join(told),
        )

    def _settings_of_this_trial(self, optimizer: Optimizer) -> frozenset[str]:
        """The settings that do not come from a checkpoint."""
        if not self._warm_start:
            # A rate that follows the applied steps is computed again from their count.
            follows = self._amp.windows[optimizer].is_scheduled
            return _KERNELS | _MOVED_BY_SCHEDULERS if follows else _KERNELS
        settings = frozenset(key for group in optimizer.param_groups for key in group)
        # Determined restores the context's schedulers, and they continue from there.
        by_context = optimizer in scheduled(self._context)
        return settings - _MOVED_BY_SCHEDULERS if by_context else settings

    def _remember_constructed(self) -> None:
        """Save the optimizers' settings before a checkpoint or a step changes them."""
        if self._constructed is None:
            self._constructed = [
                _plain_groups(optimizer) for optimizer in self._amp.optimizers
            ]


def scheduled(
    context: pytorch.PyTorchTrialContext, *modes: pytorch.LRScheduler.StepMode
) -> frozenset[Optimizer]:
    """The optimizers that have a scheduler of `context.wrap_lr_scheduler`.

    Only schedulers of these modes count; without `modes` all of them.
    """
    moved = (
        scheduler
        for scheduler, mode in schedulers(context)
        if not modes or mode in modes
    )
    return frozenset(s.optimizer for s in moved if hasattr(s, "optimizer"))


def _plain_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups (rate, decay, betas) as plain numbers."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _settle(
    saved: StateDict, optimizer: Optimizer, ours: Collection[str], then: Groups
) -> list[str]:
    """Put this trial's settings into the state of a saved optimizer.

    Args:
        saved: The state of the saved optimizer; changed in place.
        optimizer: This trial's optimizer, as constructed.
        ours: The settings that come from this trial. Settings that the state lacks do,
            too.
        then: `_plain_groups` of the saved run's optimizer, as constructed.

    Returns:
        The settings of the checkpoint that win over a changed YAML, in words.
    """
    kept = []
    were = chain(then, repeat({}))
    groups = zip(_groups_in(saved), optimizer.param_groups, were, strict=False)
    for saved_group, group, was in groups:  # torch reports a mismatch
        for key in sorted(group.keys() - {"params"}):
            if key in ours or key not in saved_group:
                saved_group[key] = group[key]
                continue
            here, value = _plain(group[key]), _plain(saved_group[key])
            if key in was and was[key] != here != value:
                kept.append(f"{key} {value} of the checkpoint (YAML: {here})")
    return list(dict.fromkeys(kept))


def _groups_in(saved: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The groups of a saved optimizer, also of one that is wrapped in another."""
    if "param_groups" in saved:
        groups: Sequence[dict[str, Any]] = saved["param_groups"]
        return groups
    nested = (
        _groups_in(state) for state in saved.values() if isinstance(state, Mapping)
    )
    return next(filter(None, nested), ())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None

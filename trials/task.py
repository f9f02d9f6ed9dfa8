"""The task of an example trial: its data, its loaders, and validation with exact means."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from determined import pytorch

from determined_amp import MixedPrecision
from determined_amp.amp.fields import read_section
from trials.data import loading
from trials.data.loading import DatasetSettings, Samples

SettingsT = TypeVar("SettingsT", bound=DatasetSettings)
Model = Callable[..., torch.Tensor]


class Task(ABC, Generic[SettingsT]):
    """The data of an experiment, and the validation of a model on it.

    Args:
        context: The trial's context.
        amp: The trial's mixed precision.

    Attributes:
        settings_class: The class of the `data` section.
        settings: The `data` section, of that class.

    Raises:
        ConfigError: naming every mistake in the `data` section.
    """

    settings_class: type[SettingsT]

    def __init__(self, context: pytorch.PyTorchTrialContext, amp: MixedPrecision) -> None:
        section = context.get_experiment_config().get("data") or {}
        self.settings = read_section(self.settings_class, section, "data")
        context.experimental.disable_auto_to_device()  # that would wait for every copy
        self._context = context
        self._amp = amp
        self._means = MeanMetrics(context)

    @abstractmethod
    def load(self, seed: int) -> tuple[Samples, Samples]:
        """The samples for training and for validation."""

    @abstractmethod
    def validation_sums(self, model: Model, batch: Any) -> Mapping[str, torch.Tensor]:
        """The sum of each metric over the samples of a batch, (); the batch is on the device."""

    @cached_property
    def samples(self) -> tuple[Samples, Samples]:
        """The samples; they are loaded at the first access, because inference needs none."""
        return self.load(self._context.get_trial_seed())

    def training_loader(self) -> tuple[pytorch.DataLoader, int]:
        """The training loader, and the number of batches that the chief trains per epoch.

        Raises:
            DataError: if there is less than one whole batch.
        """
        size, seed = self._context.get_per_slot_batch_size(), self._context.get_trial_seed()
        loader = loading.training_loader(self.samples[0], size, seed, self.settings.workers)
        return loader, loading.batches_per_epoch(loader, self._context.distributed.size)

    def validation_loader(self) -> pytorch.DataLoader:
        """The validation loader.

        Raises:
            DataError: if there are fewer batches than slots.
        """
        size, slots = self._context.get_per_slot_batch_size(), self._context.distributed.size
        return loading.validation_loader(self.samples[1], size, self.settings.workers, slots)

    def evaluate(self, model: Model, batch: pytorch.TorchData) -> dict[str, float]:
        """Validate on one batch, in float32 unless `eval_precision` says otherwise."""
        on_device = loading.to_device(batch, self._amp.device)
        with self._amp.eval_autocast():
            sums = self.validation_sums(model, on_device)
        return self._means.add(sums, len(on_device[0]))


class MeanMetrics(pytorch.MetricReducer):
    """Means over all samples. Determined's own means give every batch the same weight.

    Args:
        context: The trial's context, where the reducer registers itself.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self._device = context.device
        self._sums: dict[str, torch.Tensor] = {}
        self._samples = 0
        context.wrap_reducer(self, for_training=False)

    def add(self, sums: Mapping[str, torch.Tensor], samples: int) -> dict[str, float]:
        """Add one batch, without synchronisation.

        Args:
            sums: The sum of each metric over the batch, ().
            samples: Number of samples in the batch.

        Returns:
            An empty dict, for `evaluate_batch` to return: the reducer reports the metrics.
        """
        for name, value in sums.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros((), dtype=torch.float64, device=self._device)
            self._sums[name].add_(value)
        self._samples += samples
        return {}

    def reset(self) -> None:
        self._sums.clear()
        self._samples = 0

    def per_slot_reduce(self) -> tuple[dict[str, float], int]:
        values = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        return dict(zip(self._sums, values, strict=True)), self._samples

    def cross_slot_reduce(
        self, per_slot_metrics: list[tuple[dict[str, float], int]]
    ) -> dict[str, Any]:
        samples = sum(count for _, count in per_slot_metrics)
        return {
            name: sum(sums[name] for sums, _ in per_slot_metrics) / samples if samples else math.nan
            for name in per_slot_metrics[0][0]
        }

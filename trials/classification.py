"""What the trials that classify images share: data, loaders, validation."""

from __future__ import annotations

from determined import pytorch
from torch import nn
from torch.nn import functional

from determined_amp import MixedPrecision
from trials.data import images, loading
from trials.validation import MeanMetrics


class ImageClassification(loading.Loaders):
    """The images of one experiment and how a model is validated on them.

    Args:
        context: The trial's context.
        amp: The trial's mixed precision.

    Attributes:
        settings: The `data` section.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext, amp: MixedPrecision) -> None:
        self.settings = loading.data_section(images.DataSettings, context)
        super().__init__(context, self.settings.workers)
        self._amp = amp
        self._metrics = MeanMetrics(context)

    def load(self, seed: int) -> tuple[loading.Samples, loading.Samples]:
        return images.load(self.settings, seed)

    def evaluate(self, model: nn.Module, batch: pytorch.TorchData) -> dict[str, float]:
        """Validate on one batch, in float32 unless `eval_precision` says otherwise.

        Reports `validation_loss` (nats) and `validation_accuracy` in [0, 1], exact means.
        """
        pictures, labels = loading.to_device(batch, self._amp.device)
        with self._amp.eval_autocast():
            logits = model(pictures)
        loss = functional.cross_entropy(logits.float(), labels, reduction="sum")
        correct = (logits.argmax(dim=1) == labels).sum()
        sums = {"validation_loss": loss, "validation_accuracy": correct}
        return self._metrics.add(sums, len(labels))

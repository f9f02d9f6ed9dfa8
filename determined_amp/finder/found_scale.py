"""Formats a finding as text, as lines for a YAML and as JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from determined_amp.amp.plain_data import Values
from determined_amp.amp.precision import DeviceSupport
from determined_amp.amp.settings import SCALER_KEYS, yaml_lines
from determined_amp.finder.scale_finding import ScaleFinding, Verdict
from determined_amp.finder.scale_score import DEFAULT_LOG2, FLUSHED_LIMIT

# The name of the finder's JSON in a run folder, and in the checkpoint of a task on a
# cluster.
FILE_NAME = "loss_scale.json"

# The widths of the columns of the table.
_ROW = "{:>10}  {:>8}  {:>12}  {:>19}"


@dataclass(frozen=True)
class FinderRun:
    """The experiment and the machine that a finding is about."""

    name: str
    device: str  # the device, in words
    torch: str
    date: str  # UTC date of the finding, ISO 8601
    batches: int  # number of training batches that the finder used
    samples: int  # number of samples in these batches, over all slots
    init_scale: float  # initial loss scale of the YAML
    # Whether the trial has a `MixedPrecision`, which reads the section `amp`.
    is_ours: bool = False
    min_scale: float = 0.0  # lower limit of the scale


def run_now(name: str, device: torch.device, **others: Any) -> FinderRun:
    """A `FinderRun` with this device, today's date, this torch and the other fields."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    words = DeviceSupport.of(device).name
    return FinderRun(name, words, torch.__version__, today, **others)


@dataclass(frozen=True)
class FoundScale:
    """A finding and the run it is about; `str()` gives the text that the command line
    prints.
    """

    finding: ScaleFinding  # verdict, range and choice
    run: FinderRun  # experiment and machine

    @property
    def init_scale(self) -> float | None:
        """The value for `torch.amp.GradScaler(init_scale=...)`; None if no scale
        helps.
        """
        choice = self.finding.choice_log2
        return None if choice is None else 2.0**choice

    def json_text(self) -> str:
        """The JSON that `det-amp find --json` writes.

        It has the fields of `ScaleFinding`, those of `FinderRun` under `run`, and the
        advice, both in words and as changes of the section `amp`.
        """
        document = {
            "run": asdict(self.run),
            **asdict(self.finding),
            "verdict": self.finding.verdict.value,
            "sentences": list(scale_sentences(self.finding)),
            "yaml": yaml_changes(self),
        }
        return json.dumps(document, indent=1) + "\n"

    def __str__(self) -> str:
        run = self.run
        ran = f"{run.batches} batches, {run.samples} samples, on {run.device}"
        parts = [
            f"{run.name}: {ran}",
            _table(self.finding),
            "\n".join(scale_sentences(self.finding)),
            scale_lines(self),
        ]
        return "\n\n".join(filter(None, parts))


def _table(finding: ScaleFinding) -> str:
    """Predicted overflow and flush per power of two, and what was measured in
    float16.
    """
    words = {None: "", True: "overflow", False: "sound"}
    head = _ROW.format("init_scale", "overflow", "flushed to 0", "measured in float16")
    lines = ["16-bit gradients by loss scale", head]
    for one in finding.scales:
        shares = _share(one.overflow_share), _share(one.flushed_share)
        row = _ROW.format(f"2^{one.scale_log2}", *shares, words[one.overflow])
        lines.append(row.rstrip())
    return "\n".join(lines)


def scale_sentences(finding: ScaleFinding) -> Iterator[str]:
    """Sentences on the range and the verdict."""
    low, top, bits = finding.low_log2, finding.top_log2, finding.range_bits
    if finding.verdict is Verdict.FORWARD_OVERFLOW:
        yield f"verdict: no scale helps: {finding.cause}"
        return
    if bits < 0:
        yield (
            f"no safe range: above 2^{top} gradients overflow, and below 2^{low} some "
            f"tensor loses more than {FLUSHED_LIMIT:.1%} of its norm, flushed to 0"
        )
    else:
        yield f"safe range: 2^{low} to 2^{top}, {bits + 1} powers of two"
    if finding.verdict is Verdict.DEFAULT:
        yield _fine(finding)
    elif finding.verdict is Verdict.SCALE:
        skips = max(DEFAULT_LOG2 - top, 0)  # each halves the scale
        lost = "1 step is" if skips == 1 else f"{skips} steps are"
        cost = f"; from 2^{DEFAULT_LOG2}, {lost} skipped" if skips else ""
        yield f"verdict: use 2^{finding.choice_log2}{cost}"
    else:
        yield (
            "verdict: use amp_bf16, or fp32 where the device has no bfloat16; float16 "
            f"loses gradients at every scale, the fewest at 2^{finding.choice_log2}"
        )
    if finding.hidden_modules:
        yield (
            f"{len(finding.hidden_modules)} modules have gradients of exactly 0, for "
            f"instance {finding.hidden_modules[0]}: an output that starts at 0 hides "
            "them. Train ten steps and run this again from there (a trial: with "
            "--checkpoint)"
        )


def _fine(finding: ScaleFinding) -> str:
    """The verdict where PyTorch's default is safe."""
    verdict = f"verdict: default is fine: 2^{DEFAULT_LOG2} is safe here"
    bits = finding.top_log2 + 1 - DEFAULT_LOG2
    if finding.choice_log2 == DEFAULT_LOG2:
        return f"{verdict}; tuning it cannot help"
    return (
        f"{verdict}, {bits} bit{'s' * (bits > 1)} below an overflow. Gradients can "
        f"grow by 2 to 5 bits while learning begins: 2^{finding.choice_log2} may save "
        "a short training some skipped steps"
    )


def yaml_changes(answer: FoundScale) -> Values:
    """The changes to the `amp` section for this verdict, by key; None removes the key.

    Empty if the default is fine and the scale of the YAML is safe, too.
    """
    finding, run = answer.finding, answer.run
    log2 = finding.answer_log2
    if log2 is None:
        return {"precision": "amp_bf16", **dict.fromkeys(SCALER_KEYS)}
    is_safe = finding.low_log2 <= math.log2(run.init_scale) <= finding.top_log2
    if finding.verdict is Verdict.DEFAULT and is_safe:
        return {}
    scale = 2.0**log2
    if scale < run.min_scale:
        return {"init_scale": scale, "min_scale": scale * 2.0**-8}
    return {"init_scale": scale}


def scale_lines(answer: FoundScale) -> str:
    """Lines for the YAML, or Python for a trial without `amp`; empty if all is fine."""
    changes = yaml_changes(answer)
    if not changes:
        return ""
    if answer.run.is_ours:
        return yaml_lines(changes)
    if changes.get("init_scale") is not None:  # None removes the key
        return f"torch.amp.GradScaler(..., init_scale={changes['init_scale']!r})"
    return "torch.autocast(..., dtype=torch.bfloat16), without a GradScaler"


def _share(share: float) -> str:
    if share == 0.0:
        return "0"
    return f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"

"""A finding as text, as lines for a YAML and as JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from determined_amp.amp.plain_data import Values
from determined_amp.amp.precision import DeviceSupport
from determined_amp.amp.settings import SCALER_KEYS, yaml_lines
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_finding import (
    Measured,
    ModuleGradients,
    ScaleFinding,
    Shares,
    Verdict,
)
from determined_amp.finder.scale_score import DEFAULT_LOG2, FLUSHED_LIMIT

# The name of the finder's JSON in the checkpoint of a task on a cluster.
FILE_NAME = "loss_scale.json"

# How many modules the table lists for each side of the range.
_MODULES_PER_SIDE = 4


# The fields of a finding that hold several of a kind.
_PARTS: dict[str, Callable[..., Any]] = {
    "predicted": Shares,
    "measured": Measured,
    "modules": ModuleGradients,
}


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
    growth_interval: int  # applied steps before the scale doubles
    # Whether the trial has a `MixedPrecision`, which reads the section `amp`.
    is_ours: bool = False
    min_scale: float = 0.0  # lower limit of the scale


_OF_A_RUN = [field.name for field in fields(FinderRun)]


def run_now(name: str, device: torch.device, *others: Any, **more: Any) -> FinderRun:
    """A `FinderRun` on `device`, with today's date, this version of torch, and its
    other fields.
    """
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return FinderRun(
        name, DeviceSupport.of(device).name, torch.__version__, today, *others, **more
    )


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

    @property
    def passed_samples(self) -> int:
        """Samples over all rehearsals: one in bfloat16, the others in float16."""
        return self.run.samples * (1 + len(self.finding.measured))

    def as_json(self) -> Values:
        """The JSON that `det-amp find --json` writes.

        It has the fields of `ScaleFinding`, those of `FinderRun` under `run`, and the
        advice in words.
        """
        finding, run = self.finding, self.run
        return {
            "run": asdict(run),
            **asdict(finding),
            "verdict": finding.verdict.value,
            "sentences": list(scale_sentences(self)),
            "expected_skips": {
                "default": finding.expected_skips(DEFAULT_LOG2),
                "yaml": finding.expected_skips(math.log2(run.init_scale)),
            },
            "yaml": yaml_changes(self),
        }

    def json_text(self) -> str:
        """What stands in the file of `as_json`."""
        return json.dumps(self.as_json(), indent=1) + "\n"

    @staticmethod
    def from_json(document: Any, source: str) -> FoundScale:
        """The finding in a JSON of this version, for a report on another machine.

        Raises:
            LossScaleError: if the document is not a finding.
        """
        try:
            values = {
                field.name: document[field.name] for field in fields(ScaleFinding)
            }
            values["verdict"] = Verdict(values["verdict"])
            for name, kind in _PARTS.items():
                values[name] = tuple(kind(**one) for one in values[name])
            values["hidden_modules"] = tuple(values["hidden_modules"])
            run = {name: document["run"][name] for name in _OF_A_RUN}
            return FoundScale(ScaleFinding(**values), FinderRun(**run))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise LossScaleError(
                f"{source}: is not a finding: {type(error).__name__} {error}; allowed: "
                "what `det-amp find CONFIG --json FILE` of this "
                "version writes"
            ) from error

    @staticmethod
    def read(path: Path) -> FoundScale:
        """Read the finding from a file.

        Raises:
            LossScaleError: if the file cannot be read or holds no finding.
        """
        try:
            document = json.loads(path.read_text())
        except OSError as error:
            raise LossScaleError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise LossScaleError(f"{path}: is not JSON: {error}") from error
        return FoundScale.from_json(document, str(path))

    def __str__(self) -> str:
        run = self.run
        parts = [
            (
                f"{run.name}: {run.batches} batches, {run.samples} samples, on "
                f"{run.device}"
            ),
            _scale_table(self.finding),
            _module_table(self.finding),
            "\n".join(scale_sentences(self)),
            scale_lines(self),
        ]
        return "\n\n".join(filter(None, parts))


def _scale_table(finding: ScaleFinding) -> str:
    """Predicted overflow and flush per power of two, and what was measured in
    float16.
    """
    measured = {one.scale_log2: one.overflow for one in finding.measured}
    words = {None: "", True: "overflow", False: "sound"}
    rows = [["init_scale", "overflow", "flushed to 0", "measured in float16"]]
    for scale in finding.shown_scales():
        predicted = finding.at(scale)
        shares = _share(predicted.overflow_share), _share(predicted.flushed_share)
        rows.append([f"2^{scale}", *shares, words[measured.get(scale)]])
    return _table("16-bit gradients by loss scale", rows)


def _module_table(finding: ScaleFinding) -> str:
    """The modules with the largest gradients, then the modules with the smallest.

    The largest gradients set the top of the safe range, the smallest gradients its
    bottom.
    """
    large = sorted(finding.modules, key=lambda module: -module.largest_log2)
    small = sorted(finding.modules, key=lambda module: -module.low_log2)
    listed = (*large[:_MODULES_PER_SIDE], *small[:_MODULES_PER_SIDE])
    rows = [
        [
            "module",
            "largest gradient",
            "overflows at",
            f"{FLUSHED_LIMIT:.1%} flushed below",
        ]
    ]
    for module in {module.name: module for module in listed}.values():
        powers = (module.largest_log2, module.first_overflow_log2, module.low_log2)
        rows.append([module.name, *(f"2^{power}" for power in powers)])
    return _table("modules that limit it", rows)


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [title]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def scale_sentences(answer: FoundScale) -> Iterator[str]:
    """Sentences on the range, the verdict, and the cost of the YAML's scale."""
    finding = answer.finding
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
        yield f"verdict: use 2^{finding.choice_log2}"
    else:
        yield (
            "verdict: use amp_bf16, or fp32 where the device has no bfloat16; float16 "
            f"loses gradients at every scale, the fewest at 2^{finding.choice_log2}"
        )
    yield from _cost_of_other_scales(answer)
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


def _cost_of_other_scales(answer: FoundScale) -> Iterator[str]:
    """The cost of the YAML's scale and of PyTorch's default, if they lie outside the
    range.
    """
    finding, run = answer.finding, answer.run
    owner = "the YAML's" if run.is_ours else "the scaler's"
    for scale in dict.fromkeys((math.log2(run.init_scale), float(DEFAULT_LOG2))):
        skips = finding.expected_skips(scale)
        name = (
            f"{owner if scale == math.log2(run.init_scale) else 'the default'}"
            f" 2^{scale:g}"
        )
        if skips:
            yield (
                f"starting at {name} costs {skips} skipped step{'s' * (skips > 1)}: "
                f"negligible beyond {20 * skips} steps"
            )
        elif scale < finding.low_log2 <= finding.top_log2:
            steps = math.ceil(finding.low_log2 - scale) * run.growth_interval
            yield (
                f"starting at {name} flushes {_share(finding.at(scale).flushed_share)} "
                f"of a gradient to 0, and takes {steps} steps to grow into the range"
            )


def yaml_changes(answer: FoundScale) -> Values:
    """The changes to the `amp` section for this verdict, by key; None removes the key.

    Where the default is fine, a YAML whose scale is safe, too, needs none.
    """
    finding, run = answer.finding, answer.run
    if finding.verdict is Verdict.DEFAULT:
        is_safe = math.log2(run.init_scale) in finding
        return {} if is_safe else {"init_scale": 2.0**DEFAULT_LOG2}
    if finding.verdict in (Verdict.BF16, Verdict.FORWARD_OVERFLOW):
        return {"precision": "amp_bf16", **dict.fromkeys(SCALER_KEYS)}
    assert finding.choice_log2 is not None
    changes = {"init_scale": 2.0**finding.choice_log2}
    if changes["init_scale"] < run.min_scale:
        changes["min_scale"] = changes["init_scale"] * 2.0**-8
    return changes


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

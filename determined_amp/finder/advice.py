"""A finding as sentences, as tables, as YAML lines and as JSON."""

from __future__ import annotations

import datetime
import enum
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from determined_amp.amp.precision import DeviceSupport
from determined_amp.amp.settings import SCALER_KEYS
from determined_amp.experiment.files import write_whole
from determined_amp.experiment.yaml_text import yaml_lines, yaml_value
from determined_amp.finder.frozen import LossScaleError
from determined_amp.finder.passes import Observation
from determined_amp.finder.verdict import (
    DEFAULT_LOG2,
    FLUSHED_LIMIT,
    Finding,
    ModuleGradients,
    Shares,
    Verdict,
)

# The name of the finder's JSON in the checkpoint of a task on a cluster.
FILE_NAME = "loss_scale.json"

# The width of `str(FoundScale)`, in characters.
_COLUMNS = 100

# Gradients can shrink by some bits in a training. With fewer than these below the choice, a scale
# that never grows may flush them; growing so many times in a run is enough.
_FEW_BITS = 3
_GROWTHS = 10

# How many modules the table lists for each side of the window.
_MODULES_PER_SIDE = 4


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
    is_ours: bool  # whether the trial has a `MixedPrecision`, which reads the section `amp`
    min_scale: float = 0.0  # lower limit of the scale
    fp32_modules: tuple[str, ...] = ()  # patterns of the modules that already compute in float32
    steps: int | None = None  # optimizer steps of the whole run; None if they are not known


def run_now(name: str, device: torch.device, **others: Any) -> FinderRun:
    """A `FinderRun` on `device`, with today's date, this version of torch, and `others`."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return FinderRun(name, DeviceSupport.of(device).name, torch.__version__, today, **others)


@dataclass(frozen=True)
class FoundScale:
    """A finding and the run it is about; `str()` gives the text that the command line prints."""

    finding: Finding  # verdict, window and choice
    run: FinderRun  # experiment and machine

    @property
    def init_scale(self) -> float | None:
        """The value for `torch.amp.GradScaler(init_scale=...)`; None if no scale helps."""
        choice = self.finding.choice_log2
        return None if choice is None else 2.0**choice

    @property
    def passed_samples(self) -> int:
        """Samples over all passes, forward and backward: one in bfloat16, the others in float16."""
        return self.run.samples * (1 + len(self.finding.verified))

    def as_json(self) -> dict[str, Any]:
        """The JSON that `python -m determined_amp find --json` writes; `from_json` reads it.

        It has the fields of `Finding`, those of `FinderRun` under `run`, and the advice in words.
        """
        finding, run = self.finding, self.run
        return {
            "run": asdict(run),
            **_plain(asdict(finding)),
            "sentences": list(sentences(self)),
            "expected_skips": {
                "default": finding.expected_skips(DEFAULT_LOG2),
                "yaml": finding.expected_skips(math.log2(run.init_scale)),
            },
            "yaml": yaml_changes(self),
        }

    def write(self, path: Path) -> None:
        """Write `as_json` into a file."""
        write_whole(path, json.dumps(self.as_json(), indent=1) + "\n")

    @staticmethod
    def from_json(document: Any, source: str) -> FoundScale:
        """Build a `FoundScale` from the JSON that `as_json` returned.

        Raises:
            LossScaleError: if the document is not a finding.
        """
        try:
            run = {**document["run"], "fp32_modules": tuple(document["run"]["fp32_modules"])}
            values = {field.name: document[field.name] for field in fields(Finding)}
            values["verdict"] = Verdict(values["verdict"])
            values["predicted"] = tuple(Shares(**shares) for shares in values["predicted"])
            values["verified"] = tuple(map(_observation, values["verified"]))
            values["modules"] = tuple(map(_module, values["modules"]))
            return FoundScale(Finding(**values), FinderRun(**run))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise LossScaleError(
                f"{source}: is not a finding: {type(error).__name__} {error}; allowed: what "
                "`python -m determined_amp find CONFIG --json FILE` of this version writes"
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

    def show(self, console: Console) -> None:
        """Print the tables, the verdict and the lines to paste."""
        run = self.run
        console.print(
            f"{escape(run.name)}: {run.batches} batches, {run.samples} samples, on {run.device}\n"
        )
        console.print(_scale_table(self.finding))
        console.print(_module_table(self.finding))
        for text in (*sentences(self), f"\n{lines_to_paste(self)}"):
            console.print(text, soft_wrap=True, highlight=False, markup=False)

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=_COLUMNS))
        return text.getvalue()


def _scale_table(finding: Finding) -> Table:
    """Predicted overflow and flush per power of two, and what the float16 passes measured."""
    table = Table(title="16-bit gradients by loss scale", title_justify="left")
    for column in ("init_scale", "overflow", "flushed to 0", "measured in float16"):
        table.add_column(column, justify="right")
    measured = {o.scale_log2: o for o in finding.verified}
    for scale in finding.shown_scales():
        seen, predicted = measured.get(scale), finding.at(scale)
        style = "" if scale in finding else "dim"
        table.add_row(
            f"2^{scale}",
            _share(predicted.overflow_share),
            _share(predicted.flushed_share),
            "" if seen is None else "overflow" if seen.overflow else _share(seen.flushed_share),
            style="bold" if scale == finding.choice_log2 else style,
        )
    return table


def _module_table(finding: Finding) -> Table:
    """The modules with the largest gradients, then the modules with the smallest.

    The largest gradients set the top of the safe window, the smallest gradients its bottom.
    """
    table = Table(title="modules that limit it", title_justify="left")
    table.add_column("module", overflow="fold")
    flushed = f"{FLUSHED_LIMIT:.1%} flushed below"
    for column in ("largest gradient", "overflows at", flushed):
        table.add_column(column, justify="right")
    modules = [module for module in finding.modules if module.values_by_log2]
    large = sorted(modules, key=lambda module: module.first_overflow_log2 or 0)
    small = sorted(modules, key=lambda module: -(module.low_log2 or 0))
    listed = (*large[:_MODULES_PER_SIDE], *small[:_MODULES_PER_SIDE])
    for module in {module.name: module for module in listed}.values():
        powers = (module.largest_log2, module.first_overflow_log2, module.low_log2)
        table.add_row(escape(module.name), *(f"2^{power}" for power in powers))
    return table


def sentences(answer: FoundScale) -> Iterator[str]:
    """Sentences on the window, the verdict, and the cost of the YAML's scale."""
    finding = answer.finding
    low, top, bits = finding.low_log2, finding.top_log2, finding.window_bits
    if finding.recorded_log2 is not None:
        yield (
            f"recorded in float16 at 2^{finding.recorded_log2}: this trial cannot run in bfloat16: "
            f"{finding.reason}"
        )
    if finding.verdict is Verdict.FORWARD_OVERFLOW:
        yield f"verdict: no scale helps: {finding.cause}"
        return
    if bits < 0:
        yield (
            f"no safe window: above 2^{top} gradients overflow, and below 2^{low} some tensor "
            f"loses more than {FLUSHED_LIMIT:.1%} of its norm, flushed to 0"
        )
    else:
        yield f"safe window: 2^{low} to 2^{top}, {bits + 1} powers of two"
    if finding.verdict is Verdict.DEFAULT:
        yield _fine(finding)
    elif finding.verdict is Verdict.SCALE:
        yield f"verdict: use 2^{finding.choice_log2}"
    else:
        instead = "amp_bf16, or fp32 where the device has no bfloat16"
        yield (
            f"verdict: use {instead if finding.recorded_log2 is None else 'fp32'}; float16 loses "
            f"gradients at every scale, the fewest at 2^{finding.choice_log2}"
        )
    yield from _cost_of_other_scales(answer)
    yield from growth_advice(answer)
    if finding.hidden_modules:
        yield (
            f"{len(finding.hidden_modules)} modules have gradients of exactly 0, for instance "
            f"{finding.hidden_modules[0]}: an output that starts at 0 hides them. Train ten steps "
            "and run this again from there (a trial: with --checkpoint)"
        )


def _fine(finding: Finding) -> str:
    """The verdict where PyTorch's default is safe."""
    verdict = f"verdict: default is fine: 2^{DEFAULT_LOG2} is safe here"
    bits = finding.top_log2 + 1 - DEFAULT_LOG2
    if finding.choice_log2 == DEFAULT_LOG2:
        return f"{verdict}; tuning it cannot help"
    return (
        f"{verdict}, {bits} bit{'s' * (bits > 1)} below an overflow. Gradients can grow by 2 to 5 "
        f"bits while learning begins: 2^{finding.choice_log2} may save a short training some "
        "skipped steps"
    )


def _cost_of_other_scales(answer: FoundScale) -> Iterator[str]:
    """The cost of the YAML's scale and of PyTorch's default, if they lie outside the window."""
    finding, run = answer.finding, answer.run
    owner = "the YAML's" if run.is_ours else "the scaler's"
    for scale in dict.fromkeys((math.log2(run.init_scale), float(DEFAULT_LOG2))):
        skips = finding.expected_skips(scale)
        name = f"{owner if scale == math.log2(run.init_scale) else 'the default'} 2^{scale:g}"
        if skips:
            yield (
                f"starting at {name} costs {skips} skipped step{'s' * (skips > 1)}: negligible "
                f"beyond {20 * skips} steps"
            )
        elif scale < finding.low_log2 <= finding.top_log2:
            steps = math.ceil(finding.low_log2 - scale) * run.growth_interval
            yield (
                f"starting at {name} flushes {_share(finding.at(scale).flushed_share)} of a "
                f"gradient to 0, and takes {steps} steps to grow into the window"
                + (f"; the run has {run.steps}" if run.steps and run.steps < steps else "")
            )


def growth_advice(answer: FoundScale) -> Iterator[str]:
    """What to do about a scale that gradients may outgrow downwards, and that never grows."""
    finding, run = answer.finding, answer.run
    if finding.answer_log2 is None or run.steps is None or run.steps >= run.growth_interval:
        return
    bits = finding.answer_log2 - finding.low_log2
    if bits < _FEW_BITS:
        yield (
            f"in {run.steps} steps the scale never grows with growth_interval "
            f"{run.growth_interval}, and 2^{finding.answer_log2} is {bits} "
            f"bit{'s' * (bits != 1)} above what flushes gradients to 0, which may shrink: "
            f"growth_interval: {max(1, run.steps // _GROWTHS)} lets it follow them"
        )


def yaml_changes(answer: FoundScale) -> dict[str, Any]:
    """The changes to the `amp` section for this verdict, by key; None removes the key."""
    finding, run = answer.finding, answer.run
    if finding.verdict in (Verdict.BF16, Verdict.FORWARD_OVERFLOW):
        # What was recorded in float16 cannot run in bfloat16.
        precision = "amp_bf16" if finding.recorded_log2 is None else "fp32"
        return {"precision": precision, **dict.fromkeys(SCALER_KEYS)}
    assert finding.choice_log2 is not None
    changes = {"init_scale": 2.0**finding.choice_log2}
    if changes["init_scale"] < run.min_scale:
        changes["min_scale"] = changes["init_scale"] * 2.0**-8
    return changes


def lines_to_paste(answer: FoundScale) -> str:
    """Lines for the experiment YAML, or Python for a trial without an `amp` section."""
    changes, finding = yaml_changes(answer), answer.finding
    if answer.run.is_ours:
        return yaml_lines(changes)
    if changes.get("init_scale") is not None:  # None removes the key
        return f"torch.amp.GradScaler(..., init_scale={yaml_value(changes['init_scale'])})"
    if finding.recorded_log2 is not None:
        return "float32, without autocast and GradScaler"
    return "torch.autocast(..., dtype=torch.bfloat16), without a GradScaler"


def _plain(value: Any) -> Any:
    """A value that JSON can hold: the value of a member, None for a number that is not finite."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _observation(values: Mapping[str, Any]) -> Observation:
    headroom = values["backward_headroom_bits"]
    return Observation(
        **{**values, "backward_headroom_bits": -math.inf if headroom is None else headroom}
    )


def _module(values: Mapping[str, Any]) -> ModuleGradients:
    counts = {int(power): count for power, count in values["values_by_log2"].items()}
    return ModuleGradients(**{**values, "values_by_log2": counts})


def _share(share: float) -> str:
    if share == 0.0:
        return "0"
    return f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"

"""A finding in words, in a table, as YAML lines and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from determined_amp.config.amp import SCALER_KEYS
from determined_amp.finder.recorder import OUTSIDE, WHOLE_MODEL
from determined_amp.finder.verdict import DEFAULT_LOG2, FLUSHED_LIMIT, Finding, Verdict

# What a task on a cluster leaves in its checkpoint.
FILE_NAME = "loss_scale.json"

# Rows around the window, in bits.
_MARGIN = 4
_MOST_ROWS = 24

# What a search may have been over, in log2.
_SEARCHED = (-16, 48)

# Modules shown for either side of the window.
_LIMITING = 4


@dataclass(frozen=True)
class Run:
    """What a finding is about.

    Args:
        name: Of the experiment.
        device: In words.
        torch: Its version.
        date: Of the finding, UTC, ISO 8601.
        batches: Training batches looked at.
        samples: Samples in them, over all slots.
        init_scale: What the YAML starts with.
        growth_interval: Applied steps before the scale grows by one bit.
        is_ours: Whether the trial has a `MixedPrecision`, which reads the section `amp`.
        min_scale: The floor of the scale.
        fp32_modules: Patterns of modules that are in float32 already.
    """

    name: str
    device: str
    torch: str
    date: str
    batches: int
    samples: int
    init_scale: float
    growth_interval: int
    is_ours: bool
    min_scale: float = 0.0
    fp32_modules: tuple[str, ...] = ()


def show(finding: Finding, run: Run, console: Console) -> None:
    """Print tables, verdict and the lines to paste."""
    console.print(f"{run.name}: {run.batches} batches, {run.samples} samples, on {run.device}\n")
    console.print(scale_table(finding))
    console.print(module_table(finding))
    for sentence in sentences(finding, run):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    lines = lines_to_paste(finding, run)
    console.print(f"\n{lines}", soft_wrap=True, highlight=False, markup=False)


def scale_table(finding: Finding) -> Table:
    """Overflow and flush at each power of two, predicted and, where there was a pass, measured."""
    table = Table(title="16-bit gradients by loss scale", title_justify="left")
    for column in ("init_scale", "overflow", "flushed to 0", "measured in float16"):
        table.add_column(column, justify="right")
    prediction = finding.prediction
    measured = {o.scale_log2: o for o in finding.verified}
    for scale in shown_scales(finding):
        seen = measured.get(scale)
        table.add_row(
            f"2^{scale}",
            _share(prediction.total.overflow_share(scale)),
            _share(prediction.flushed_share(scale)),
            "" if seen is None else "overflow" if seen.overflow else _share(seen.flushed_share),
            style="bold" if scale == finding.choice_log2 else _style(finding, scale),
        )
    return table


def _style(finding: Finding, scale: int) -> str:
    return "" if finding.low_log2 <= scale <= finding.top_log2 else "dim"


def shown_scales(finding: Finding) -> list[int]:
    """Powers of two from below the window to above it, with 2^16 among them."""
    low = min(finding.low_log2, finding.top_log2, DEFAULT_LOG2) - _MARGIN
    top = max(finding.low_log2, finding.top_log2, DEFAULT_LOG2) + _MARGIN
    step = math.ceil((top - low + 1) / _MOST_ROWS)
    asked = {DEFAULT_LOG2, finding.low_log2, finding.top_log2}
    asked |= {int(o.scale_log2) for o in finding.verified}
    return sorted(asked | set(range(low, top + 1, step)))


def module_table(finding: Finding) -> Table:
    """The modules that limit the scale: the loudest from above, the faintest from below."""
    table = Table(title="modules that limit it", title_justify="left")
    table.add_column("module", overflow="fold")
    flushed = f"{FLUSHED_LIMIT:.1%} flushed below"
    for column in ("largest gradient", "overflows at", flushed):
        table.add_column(column, justify="right")
    limits = module_limits(finding)
    for name in limiting_modules(limits):
        table.add_row(
            name,
            f"2^{limits[name]['largest_log2']}",
            f"2^{limits[name]['first_overflow_log2']}",
            f"2^{limits[name]['low_log2']}",
        )
    return table


def module_limits(finding: Finding) -> dict[str, dict[str, int]]:
    """Of every module with a gradient that is not 0: its range and its own safe window."""
    limits = {}
    for name, histogram in finding.prediction.modules.items():
        if histogram.largest_log2 is None:
            continue
        alone = finding.prediction.of(lambda other, name=name: other == name)  # type: ignore[misc]
        limits[name] = {
            "largest_log2": histogram.largest_log2,
            "first_overflow_log2": alone.first_overflow_log2,
            "low_log2": alone.smallest_scale_log2(FLUSHED_LIMIT),
        }
    return limits


def limiting_modules(limits: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The loudest and the faintest, of what `module_limits` gives."""
    loud = sorted(limits, key=lambda name: limits[name]["first_overflow_log2"])[:_LIMITING]
    faint = sorted(limits, key=lambda name: -limits[name]["low_log2"])[:_LIMITING]
    return list(dict.fromkeys([*loud, *faint]))


def sentences(finding: Finding, run: Run) -> Iterator[str]:
    """The window, the verdict, and what it means for the YAML's own scale."""
    low, top, bits = finding.low_log2, finding.top_log2, finding.window_bits
    if finding.prediction.recorded_log2 is not None:
        yield (
            f"recorded in float16 at 2^{finding.prediction.recorded_log2}: this trial cannot run "
            f"in bfloat16: {finding.prediction.reason}"
        )
    if finding.verdict is Verdict.FORWARD_OVERFLOW:
        yield f"verdict: no scale helps: {finding.cause}"
        return
    if bits < 0:
        yield (
            f"no safe window: above 2^{top} gradients overflow, and below 2^{low} more than "
            f"{FLUSHED_LIMIT:.1%} of one is flushed to 0"
        )
    else:
        yield f"safe window: 2^{low} to 2^{top}, {bits + 1} powers of two"
    if finding.verdict is Verdict.DEFAULT:
        yield f"verdict: default is fine: 2^{DEFAULT_LOG2} lies inside. No search will find better"
    elif finding.verdict is Verdict.SCALE:
        yield f"verdict: use 2^{finding.choice_log2}"
    elif finding.verdict is Verdict.ISLANDS:
        names = ", ".join(finding.islands)
        yield f"verdict: keep these modules in float32: {names}; then run this again"
    else:
        yield (
            "verdict: use amp_bf16, or fp32 where the device has no bfloat16; float16 loses "
            f"gradients at every scale, the fewest at 2^{finding.choice_log2}"
        )
    yield from _cost_of_the_yaml(finding, run)
    if finding.hidden_modules:
        yield (
            f"{len(finding.hidden_modules)} modules have gradients of exactly 0, for instance "
            f"{finding.hidden_modules[0]}: an output that starts at 0 hides them. Train ten steps "
            "and run this again from there (a trial: with --checkpoint)"
        )


def _cost_of_the_yaml(finding: Finding, run: Run) -> Iterator[str]:
    ours = "the YAML's" if run.is_ours else "the scaler's"
    for scale in dict.fromkeys((math.log2(run.init_scale), float(DEFAULT_LOG2))):
        skips = finding.expected_skips(scale)
        whose = ours if scale == math.log2(run.init_scale) else "the default"
        if skips:
            yield (
                f"{whose} 2^{scale:g} skips {skips} steps at the start, which nobody notices in "
                f"a run of more than {20 * skips} steps"
            )
        elif scale < finding.low_log2 <= finding.top_log2:
            bits = math.ceil(finding.low_log2 - scale)
            yield (
                f"{whose} 2^{scale:g} flushes "
                f"{_share(finding.prediction.flushed_share(math.floor(scale)))} of a "
                f"gradient, and takes {bits * run.growth_interval} steps to grow into the "
                "window"
            )


def yaml_changes(finding: Finding, run: Run) -> dict[str, Any]:
    """What the verdict changes in the `amp` section; None takes a key out."""
    if finding.verdict in (Verdict.BF16, Verdict.FORWARD_OVERFLOW):
        return {"precision": "amp_bf16", **dict.fromkeys(SCALER_KEYS)}
    if finding.verdict is Verdict.ISLANDS:
        names = (name.rpartition(": ")[2] for name in finding.islands)  # without the model's number
        patterns = (f"^{name.replace('.', '[.]')}$" for name in names)
        return {"fp32_modules": [*run.fp32_modules, *patterns]}
    assert finding.choice_log2 is not None
    default = finding.verdict is Verdict.DEFAULT
    changes = {"init_scale": 2.0 ** (DEFAULT_LOG2 if default else finding.choice_log2)}
    if changes["init_scale"] < run.min_scale:
        changes["min_scale"] = changes["init_scale"] * 2.0**-8
    return changes


def lines_to_paste(finding: Finding, run: Run) -> str:
    """For an experiment YAML; of a trial that reads no such section, what to give to what."""
    changes = yaml_changes(finding, run)
    if run.is_ours:
        return yaml_lines(changes)
    if "init_scale" in changes:
        return f"torch.amp.GradScaler(..., init_scale={_yaml(changes['init_scale'])})"
    if "fp32_modules" in changes:
        return "torch.autocast(..., enabled=False) around these modules, and float32 inputs"
    return "torch.autocast(..., dtype=torch.bfloat16), without a GradScaler"


def yaml_lines(changes: Mapping[str, Any]) -> str:
    """For pasting into an experiment YAML."""
    lines = ["hyperparameters:", "  amp:"]
    for key, value in changes.items():
        lines.append(f"    # without {key}" if value is None else f"    {key}: {_yaml(value)}")
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # all digits: a power of two stays one
    if isinstance(value, list):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return str(value)


def as_json(finding: Finding, run: Run) -> dict[str, Any]:
    """Everything, for `determined_amp.reports.loss_scale` and for other programs."""
    prediction, limits = finding.prediction, module_limits(finding)
    return {
        "run": {**vars(run)},
        "verdict": finding.verdict.value,
        "sentences": list(sentences(finding, run)),
        "choice_log2": finding.choice_log2,
        "window_log2": [finding.low_log2, finding.top_log2],
        "first_overflow_log2": prediction.first_overflow_log2,
        "headroom_log2": prediction.headroom_log2,
        "recorded_log2": prediction.recorded_log2,
        "islands": list(finding.islands),
        "cause": finding.cause,
        "expected_skips": {
            "default": finding.expected_skips(DEFAULT_LOG2),
            "yaml": finding.expected_skips(math.log2(run.init_scale)),
        },
        "predicted": [
            {
                "scale_log2": scale,
                "overflow_share": prediction.total.overflow_share(scale),
                "flushed_share": prediction.flushed_share(scale),
            }
            for scale in range(
                min(shown_scales(finding)[0], _SEARCHED[0]),
                max(shown_scales(finding)[-1], _SEARCHED[1]) + 1,
            )
        ],
        "measured": [
            {
                "scale_log2": seen.scale_log2,
                "overflow": seen.overflow,
                "flushed_share": seen.flushed_share,
                "headroom_bits": seen.headroom_bits if math.isfinite(seen.headroom_bits) else None,
            }
            for seen in finding.verified
        ],
        "modules": [
            {
                "name": name,
                "in_model": name not in (OUTSIDE, WHOLE_MODEL),
                "zeros": histogram.zeros,
                "values_by_log2": histogram.by_power(),
                **limits.get(name, {}),
            }
            for name, histogram in prediction.modules.items()
        ],
        "yaml": yaml_changes(finding, run),
    }


def json_text(finding: Finding, run: Run) -> str:
    """The content of a file with `as_json` in it."""
    return json.dumps(as_json(finding, run), indent=1) + "\n"


def _share(share: float) -> str:
    if share == 0.0:
        return "0"
    return f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"

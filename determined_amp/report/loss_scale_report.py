"""Writes the report on a loss-scale search: the finder's prediction beside what trials measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.metric_names import MetricName
from determined_amp.finder.advice import FoundScale, lines_to_paste
from determined_amp.finder.advice import sentences as finder_sentences
from determined_amp.report import ReportError, page
from determined_amp.report.loss_scale_figure import draw
from determined_amp.report.loss_scale_text import over_loss_scale, predict, sentences
from determined_amp.report.master_runs import read_finding
from determined_amp.report.sources import is_experiment
from determined_amp.runs.run import Machine
from determined_amp.search.search_folder import Search

NAME = "loss_scale"

# Columns of the trial table, after the searcher's metric.
_METRICS = (
    *("steps_lost", "flushed_share", "overflow", "backward_headroom_bits", "gradient_error"),
    "validation_accuracy",
)

_CAPTION = (
    "Lines are predicted from one bfloat16 backward per batch, dots are measured in float16. "
    "Green: the safe window: nothing overflows, and no gradient loses more than 0.1 % of its norm, "
    "flushed to 0. Red: a gradient overflows, the step is skipped, the scale halved. "
    "Amber band: mean and standard deviation over seeds, inside the window. Hollow: stopped early."
)


def write_report(
    source: Search, folder: Path, finding: str | None = None, *, on_cluster: bool = False
) -> tuple[list[str], list[Path]]:
    """Write the report on a search.

    Args:
        source: The search.
        folder: The output folder.
        finding: The finder's JSON file, or its experiment; None: the finder runs here.
        on_cluster: Whether the search ran on a cluster.

    Returns:
        The sentences of the report, the answer first, and its files.

    Raises:
        UserError: if the report cannot be made.
    """
    predicted = _finding(finding) if finding else None
    if finding and (folder / f"{NAME}.json").resolve() == Path(finding).resolve():
        raise ReportError(
            f"--finding: got {finding}, which the report would replace; allowed: another --output"
        )
    search = over_loss_scale(source)
    missing: list[str] = []
    if predicted is None:
        predicted, missing = _predicted(search)
    lines = [*_answer(predicted), *sentences(predicted, search), *missing]
    if predicted and not finding and on_cluster:
        lines.append(
            f"predicted here, on {predicted.run.device} with torch {predicted.run.torch}, which "
            "the cluster need not have: det experiment create hp_search/find_loss_scale.yaml . "
            "predicts there, for --finding ID"
        )
    record = {
        "answer": lines[0],
        "sentences": lines,
        "search": search.origin,
        "metric": search.metric,
        "trials": [dict(zip(*row, strict=True)) for row in _facts(search)],
        "finding": predicted.as_json() if predicted else None,
    }
    markdown, figure = text(lines, predicted, search), draw(predicted, search)
    return lines, page.write(folder, NAME, markdown, figure, record)


def _finding(source: str) -> FoundScale:
    if is_experiment(source):
        return read_finding(int(source))
    return FoundScale.read(Path(source))


def _predicted(search: Search) -> tuple[FoundScale | None, list[str]]:
    """The finding, or a sentence on why there is none: the report is useful without it too."""
    try:
        return predict(search), []
    except UserError as error:
        return None, [
            f"no prediction: {one_line(error)}. Where the experiment is, `python -m determined_amp "
            "find CONFIG --json FILE` or `det experiment create hp_search/find_loss_scale.yaml .` "
            "makes one for --finding"
        ]


def _answer(predicted: FoundScale | None) -> list[str]:
    """The finder's sentences, its verdict first."""
    of_the_finder = finder_sentences(predicted) if predicted else ()
    return sorted(of_the_finder, key=lambda sentence: not sentence.startswith("verdict: "))


def text(lines: Sequence[str], predicted: FoundScale | None, search: Search) -> str:
    """The report as Markdown: the answer first, then sentences, the picture and the trials.

    Args:
        lines: Sentences, the answer first.
        predicted: The finding; None without one.
        search: The runs of the search.
    """
    facts = _facts(search)
    rows = [[_cell(value) for value in values] for _, values in facts]
    parts = [
        f"# {lines[0]}",
        f"```yaml\n{lines_to_paste(predicted)}\n```" if predicted else "",
        "\n".join(f"* {sentence}" for sentence in lines[1:]),
        f"![{_CAPTION}]({NAME}.png)",
        page.table(facts[0][0], rows),
        _origin(predicted, search),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(search: Search) -> list[tuple[list[str], list[Any]]]:
    """The names and the values of what the table says of each trial, the smallest scale first."""
    known = {name for run in search.runs for name in run.metrics}
    metrics = [m for m in dict.fromkeys((search.metric, *_METRICS)) if m in known]
    skips = any(run.skipped_steps is not None for run in search.runs)
    heads = ["trial", "init_scale", *search.also_searched, "state", "batches", *metrics]
    heads += [MetricName.SKIPPED_STEPS] if skips else []
    facts = []
    for run in sorted(search.runs, key=lambda run: (run.scale_log2, run.number)):
        others = [run.hparams.get(name) for name in search.also_searched]
        values = [run.number, 2.0**run.scale_log2, *others, run.state.value, run.batches]
        values += [run.metrics.get(name) for name in metrics]
        facts.append((heads, [*values, run.skipped_steps] if skips else values))
    return facts


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _origin(predicted: FoundScale | None, search: Search) -> str:
    """What the numbers were measured on."""
    seeds = {run.seed for run in search.runs if run.seed is not None}
    machine, date = search.runs[0].machine, search.runs[0].date
    facts = [f"{len(search.runs)} trials of {search.name} ({search.origin})"]
    facts += [f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"] if seeds else []
    if machine != Machine():
        facts.append(f"on {machine.device}, torch {machine.torch}, {date}")
    if predicted:
        run = predicted.run
        facts.append(
            f"predicted on {run.device}, torch {run.torch}, {run.date}, from {run.batches} batches "
            f"with {run.samples} samples"
        )
    return f"{'; '.join(facts)}."

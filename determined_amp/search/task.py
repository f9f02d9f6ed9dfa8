"""What each trial of a search does: the command in the entrypoint of its YAML, and its options."""

from __future__ import annotations

import dataclasses
import enum
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_amp.experiment.amp_settings import Precision
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.settings import ConfigError
from determined_amp.finder.frozen import MOST_BATCHES
from determined_amp.finder.score import Score

# How many batches are scored, or used by the finder, without `--batches`.
BATCHES = 4

_SCORE_METRICS = tuple(field.name for field in dataclasses.fields(Score))

_COSTS = ("loss_scale_score", "steps_lost", "flushed_share", "gradient_error", "overflow")


class Verb(enum.Enum):
    """A command of this library that can be the entrypoint of an experiment."""

    TRAIN = "train"
    SCORE = "score"
    FIND = "find"
    COMPARE = "compare"


@dataclass(frozen=True)
class Task:
    """The entrypoint of an experiment.

    Args:
        verb: The command. Determined's own entrypoint of a trial class trains, too.
        trial: The option `--trial`; None if the configuration names the trial.
        batches: The option `--batches` of `score` and `find`.
    """

    verb: Verb
    trial: str | None = None
    batches: int = BATCHES

    @staticmethod
    def of(config: Mapping[str, Any]) -> Task | None:
        """The task of an experiment; None if its entrypoint runs another program.

        Raises:
            ConfigError: if `--batches` is not a number that can be used.
        """
        entrypoint = config.get("entrypoint")
        words = entrypoint if isinstance(entrypoint, list) else shlex.split(str(entrypoint or ""))
        if len(words) == 1 and ":" in words[0]:
            return Task(Verb.TRAIN)
        at = words.index("determined_amp") + 1 if "determined_amp" in words else len(words)
        verb = next((verb for verb in Verb if [verb.value] == words[at : at + 1]), None)
        if verb is None:
            return None
        options = dict(_options(words[at + 1 :]))
        if verb in (Verb.TRAIN, Verb.COMPARE):
            return Task(verb, options.get("--trial"))
        return Task(verb, options.get("--trial"), _batches(options.get("--batches", str(BATCHES))))


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """The options `--name value` and `--name=value`."""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        name, equals, after = word.partition("=")
        if name.startswith("--"):
            yield name, after if equals else value


def _batches(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST_BATCHES):
        raise ConfigError(
            "entrypoint", [f"--batches: got {text!r}; allowed: an integer from 1 to {MOST_BATCHES}"]
        )
    return int(text)


def check_score(experiment: Experiment[Any]) -> None:
    """Check that the loss scale of an experiment can be scored.

    Raises:
        ConfigError: naming every reason why it cannot.
    """
    slots = experiment.platform.resources.slots_per_trial
    searcher = experiment.platform.searcher
    problems = []
    if experiment.amp is not None and experiment.amp.precision is not Precision.AMP_FP16:
        problems.append(
            f"hyperparameters.amp.precision: got {experiment.amp.precision.value}, which does not "
            "scale the loss; allowed for a score: amp_fp16"
        )
    if searcher.name != "single" and searcher.metric not in (None, *_SCORE_METRICS):
        problems.append(
            f"searcher.metric: got {searcher.metric}, which no score has; allowed: "
            f"{', '.join(_SCORE_METRICS)}"
        )
    if searcher.metric in _COSTS and not searcher.smaller_is_better:
        problems.append(
            f"searcher.smaller_is_better: got false; allowed with {searcher.metric}: true"
        )
    if slots > 1:
        problems.append(
            f"resources.slots_per_trial: got {slots}; allowed for a score: 1 (set "
            "hyperparameters.global_batch_size to what one slot trains)"
        )
    if problems:
        raise ConfigError(experiment.name, problems)

"""Chooses the next trial of a search without a cluster, and stores the results of all trials.

Optuna draws and stores the trials. The platform's rules decide how many there are, and which of
them are replaced. Only one process opens the study for writing, so the database needs no locks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna import distributions
from optuna.trial import FrozenTrial, TrialState

from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import read_yaml
from determined_amp.runs.folder import RunFolder, trial_folder
from determined_amp.runs.run import RunState
from determined_amp.search.asha import AshaPruner
from determined_amp.search.run_trial import Job, Outcome, TrialResult, Validation
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.searcher_settings import Method
from determined_amp.search.space import Axis, Space, nest


class TrialQueue:
    """The trials of one search in its study.

    Args:
        plan: The search.
        study: Stores the trials; those that were running continue.
        folder: The search folder.
    """

    def __init__(self, plan: SearchPlan, study: optuna.study.Study, folder: Path) -> None:
        self._plan = plan
        self._study = study
        self._folder = folder
        study.pruner = AshaPruner(plan.brackets, plan.settings.divisor)
        for point in plan.grid[len(study.get_trials(deepcopy=False)) :]:
            study.enqueue_trial(point)
        self._lost = [trial.number for trial in self._with(TrialState.RUNNING)]

    @property
    def compared(self) -> bool:
        """Whether this is a comparison, in which each trial needs a new process."""
        return self._plan.compares

    def next_job(self) -> tuple[int, Job] | None:
        """The number and the job of the trial to start next; None if there is none."""
        if self._lost:
            number = self._lost.pop(0)
            return number, self._job(self._running(number))
        bracket = self._open_bracket()
        if bracket is None:
            return None
        trial = self._study.ask()
        trial.set_user_attr("bracket", bracket)
        return trial.number, self._job(trial)

    def _job(self, trial: optuna.Trial) -> Job:
        plan, folder = self._plan, RunFolder(trial_folder(self._folder, trial.number))
        # The values of a trial depend only on its number, not on workers or interruptions.
        draws = plan.drawn(trial.number, 0)
        self._study.sampler = optuna.samplers.RandomSampler(seed=draws)
        point = {axis.name: _suggest(trial, axis) for axis in plan.space.axes}
        sampled = plan.space.nested(point)
        # A trial that continues keeps its configuration, even if the YAML has changed since.
        started = folder.config.exists()
        path = str(folder.config)
        config = read_yaml(path) if started else plan.experiment(trial.number, sampled).config
        used = _used(plan.space, sampled, config)
        folder.describe_trial(trial.number, flat(used))
        trial.set_user_attr("used", used)
        trial.set_user_attr("seed", config["reproducibility"]["experiment_seed"])
        return Job(plan.task, config, folder.path)

    def _open_bracket(self) -> int | None:
        """The bracket of the next new trial; None if the search has all its trials."""
        if self._plan.grid:
            return 0 if self._with(TrialState.WAITING) else None
        trials = self._study.get_trials(deepcopy=False)
        invalid = [trial for trial in trials if trial.user_attrs.get("invalid")]
        if self._plan.replaces_invalid:
            if len(invalid) > self._plan.total:
                return None  # the platform would draw forever
            trials = [trial for trial in trials if not trial.user_attrs.get("invalid")]
        for index, bracket in enumerate(self._plan.brackets):
            there = sum(trial.user_attrs.get("bracket", 0) == index for trial in trials)
            if there < bracket.max_trials:
                return index
        return None

    def validated(self, number: int, validation: Validation) -> bool:
        """Store a validation, and return whether the trial continues."""
        trial = self._running(number)
        stored = self._stored(number)
        history = stored.user_attrs.get("history", [])
        unit = self._plan.settings.time_metric or "batches"
        length = int(validation.metrics.get(unit, validation.batches))
        if length in stored.intermediate_values:
            return True  # it was stored before the process of the trial died
        trial.set_user_attr("history", [*history, [validation.batches, dict(validation.metrics)]])
        value = validation.metrics.get(self._plan.settings.metric)
        if value is None:
            return True
        trial.report(value, length)
        if self._plan.settings.name is not Method.ADAPTIVE_ASHA:
            return True
        return not trial.should_prune()

    def ended(self, number: int, result: TrialResult) -> None:
        """Store how a trial ended; an interrupted one continues later."""
        if result.outcome is Outcome.INTERRUPTED:
            self._lost.append(number)
            return
        trial, folder = self._running(number), RunFolder(trial_folder(self._folder, number))
        if result.training is not None:
            trial.set_user_attr("training", dict(result.training))
        if result.outcome is Outcome.STOPPED:
            folder.end(RunState.PRUNED, "stopped early by the search")
            self._study.tell(number, state=TrialState.PRUNED)
            return
        value = self._last_value(number)
        if result.outcome is Outcome.COMPLETE and value is not None:
            folder.end(RunState.COMPLETED)
            self._study.tell(number, value)
            return
        metric = self._plan.settings.metric
        reason = result.reason or f"{metric} was not reported, or not finite"
        invalid = result.outcome is Outcome.INVALID
        folder.end(RunState.INVALID if invalid else RunState.FAILED, reason)
        trial.set_user_attr("reason", reason)
        trial.set_user_attr("invalid", result.outcome is Outcome.INVALID)
        self._study.tell(number, state=TrialState.FAIL)

    def lost(self, number: int, status: int | None) -> None:
        """Requeue a trial whose process died; after `max_restarts` restarts it counts as failed."""
        trial = self._running(number)
        restarts = trial.user_attrs.get("restarts", 0) + 1
        trial.set_user_attr("restarts", restarts)
        allowed = int(self._plan.search.get("max_restarts", 5))
        if restarts > allowed:
            reason = f"its process died {restarts} times, the last time with status {status}"
            self.ended(number, TrialResult(Outcome.FAILED, reason=reason))
        else:
            self._lost.append(number)

    def _last_value(self, number: int) -> float | None:
        history = self._stored(number).user_attrs.get("history", [])
        value = history[-1][1].get(self._plan.settings.metric) if history else None
        return value if value is not None and math.isfinite(value) else None

    def _with(self, state: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(state,))

    def _stored(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _running(self, number: int) -> optuna.Trial:
        return optuna.Trial(self._study, self._stored(number)._trial_id)


def _used(space: Space, sampled: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The searched hyperparameters, nested; the initial scale is the one in `config`."""
    used = nest(space.axes, sampled)
    if any(axis.name == "amp.init_scale" for axis in space.axes):
        used["amp"]["init_scale"] = config["hyperparameters"]["amp"]["init_scale"]
    return used


def _suggest(trial: optuna.Trial, axis: Axis) -> Any:
    match axis.distribution:
        case distributions.CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(axis.name, choices)
        case distributions.IntDistribution(low=low, high=high):
            return trial.suggest_int(axis.name, low, high)
        case distributions.FloatDistribution(low=low, high=high, log=log):
            return trial.suggest_float(axis.name, low, high, log=log)
    raise TypeError(f"no such distribution: {axis.distribution}")

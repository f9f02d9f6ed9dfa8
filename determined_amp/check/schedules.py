"""Follows the schedules of a training: what makes and moves each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from determined_amp.check.gradients import Gradients
from determined_amp.check.lines import passes, users_line
from determined_amp.check.record import Record, Schedule


class Schedules:
    """What is known of each scheduler.

    Args:
        record: What moves them is noted there.
        gradients_of: Tells the gradients of an optimizer.
        spy_on: Watches a method of an object.
    """

    def __init__(
        self,
        record: Record,
        gradients_of: Callable[[Optimizer], Gradients],
        spy_on: Callable[[Any, str, Callable[..., Any]], None],
    ) -> None:
        self.known: dict[Any, Schedule] = {}
        self._record = record
        self._gradients_of = gradients_of
        self._spy_on = spy_on
        self._outermost: Any = None  # of the schedulers that move now

    def spy_on_making(self, own: Callable[..., Any], it: Any, *args: Any, **kwargs: Any) -> None:
        self._spy_on(it, "step", self.spy_on_step)
        self._run(own, it, *args, **kwargs)  # it moves to its first place
        self._meet(it)

    def spy_on_step(self, own: Callable[..., Any], it: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._run(own, it, *args, **kwargs)
        if self._outermost is not None:
            # A class of the user's may call the method that it overrides: that is no inner one.
            if self._outermost is not it and it in self.known:
                self.known[it].inner = True
        elif passes("amp/schedules.py"):
            self._meet(it).ours = True
        else:
            move = self._record.note("move", schedule=self._meet(it))
            self._gradients_of(it.optimizer).window.moves.append(move)
        return result

    def _run(self, own: Callable[..., Any], it: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = self._outermost
        self._outermost = outermost or it
        try:
            return own(it, *args, **kwargs)
        finally:
            self._outermost = outermost

    def _meet(self, scheduler: Any) -> Schedule:
        if scheduler not in self.known:
            optimizer = self._gradients_of(scheduler.optimizer).number
            self.known[scheduler] = Schedule(type(scheduler).__name__, users_line(), optimizer)
            self._record.schedules.append(self.known[scheduler])
        return self.known[scheduler]

    def take_places(self, moment: str) -> None:
        """Keep the place of each."""
        for scheduler, schedule in self.known.items():
            schedule.places[moment] = getattr(scheduler, "last_epoch", None)

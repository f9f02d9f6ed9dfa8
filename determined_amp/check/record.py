"""What a training did, as plain data: it crosses from the process that trained to the doctor's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from determined_amp.check.finding import Where
from determined_amp.check.lines import users_line


class Event(SimpleNamespace):
    """Something that the training did.

    Each has its `number` in the order of all, its `kind`, the user's line `where` (None if code of
    others alone did it) and its `batch` (-1 before the first). What else is known of it:

    | kind | |
    |---|---|
    | `backward` | its `loss`, whether under `autocast`, the factors of what it was added `onto`, |
    | | whether the loss is `finite`, how many optimizers it `reached`, the norm of what it |
    | | `added`, the largest `scale` then |
    | `changed` | norm and peak of gradients `before` and `after` it, and their `factor` then |
    | `unscale` | whether `in_step` of the scaler |
    | `clip` | `of` norm or value, to what `limit`, the `norm` it saw, `factors` of the gradients |
    | `zero_grad` | |
    | `step` | of which `optimizer`, `scaled` by a scaler or not, `skipped`, `again` with the same |
    | | gradients; their `norm`, and what it was `unscaled`, before a clip; their `factor` and |
    | | `backwards`; `updates` of the scale since; `rates`; the `scale`, whether the doctor has |
    | | `moved` it, and `disturbed` gradients; whether it is `after_save` of a checkpoint |
    | `stale` | forward of a module whose weights autocast had cast before they changed |
    | `update` | the scale `after` it, whether `early`: while scaled gradients wait for a step |
    | `move` | of which `schedule` |
    | `autocast`, `autocast_off` | `dtype`, whether `explicit`, with `grad`, `in_batch` |
    | `refusal` | the `text` of an error that a `GradScaler` raised |
    | `hide` | how many values were `hidden`, the optimizer if `of_gradient`, whether a `scalar` |
    | `tf32` | `name` and `value` of a switch, whether `in_batch`, the file that it is set `by` |
    | `save` | whether the state of an `optimizer`, and a `scale` |
    """


@dataclass(eq=False)
class Scaler:
    """What is known of a `GradScaler`."""

    where: Where | None  # the line that made it
    enabled: bool
    ours: bool  # it is this library's
    used: bool = False  # it scaled a loss
    scales: dict[str, float | None] = field(default_factory=dict)  # at the `start`, at the `end`


@dataclass(eq=False)
class Schedule:
    """What is known of a scheduler."""

    kind: str  # the name of its class
    where: Where | None  # the line that made it
    optimizer: int  # the number of its optimizer
    ours: bool = False  # this library moves it
    inner: bool = False  # another one moves it
    wrapped: bool = False  # Determined moves it
    places: dict[str, Any] = field(default_factory=dict)  # at the `start`, at the `end`


@dataclass(eq=False)
class Window:
    """What happened to one optimizer from the first backward after a step to its next ones."""

    optimizer: int  # its number
    backwards: list[Event] = field(default_factory=list)  # whose gradients it has
    dropped: list[Event] = field(default_factory=list)  # zeroed before any step used them
    lost: int = 0  # of the backwards, whose gradients were zeroed then
    stale: int = 0  # gradients that an earlier step has used and that were not zeroed
    steps: list[Event] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)  # of its schedulers until the next backward
    forced: bool = False  # the doctor made it overflow

    @property
    def used(self) -> list[Event]:
        """The backwards whose gradients a step uses."""
        return self.backwards[self.lost :]

    @property
    def skipped(self) -> bool:
        return bool(self.steps) and all(step.skipped for step in self.steps)


@dataclass
class Record:
    """What a training did."""

    determined: bool = False  # it ran in Determined's loop
    has_cuda: bool = False
    events: list[Event] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)  # in the order of their first backward
    scalers: list[Scaler] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    optimizers: int = 0
    weights: set[str] = field(default_factory=set)  # their dtypes, where an optimizer has stepped
    batches: int = 0  # of the training
    epochs: int = 0  # that ended
    aggregation: int = 1  # batches of one step that Determined counts
    averages: bool = True  # Determined averages the gradients of those
    # Forwards of modules with weights of their own that train: by whether autocast was on for them.
    forwards: Counter[bool] = field(default_factory=Counter)
    syncs: Counter[tuple[Where, str]] = field(default_factory=Counter)  # reads on the host, by what
    # Validation metrics of the same weights: as they are, and in float32.
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)  # weights and buffers, at the end
    first_overflow: str = ""  # what a forward has first that is not finite, and what helps
    error: tuple[str, str] | None = None  # what was raised: its type, its text
    raised: Where | None = None  # by which line
    disturbed: bool = False  # when the doctor had made gradients overflow
    saved: bool = False  # a checkpoint was made
    empty_scaler_state: bool = False  # its checkpoint has the state of a disabled scaler
    scales_of_ranks: list[list[float]] = field(default_factory=list)  # left by each update

    def note(self, kind: str, **known: Any) -> Event:
        """Add an event that the line of the user's does which is being executed."""
        place = {"number": len(self.events), "where": users_line(), "batch": self.batches - 1}
        event = Event(kind=kind, **place, **known)
        self.events.append(event)
        return event

    def of(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def regions(self) -> list[Event]:
        """Regions of autocast that the training was in."""
        return [event for event in self.of("autocast") if event.grad]

    @property
    def regions_of_validation(self) -> list[Event]:
        """Those that a validation was in."""
        return [each for each in self.of("autocast") if not (each.grad or each.in_batch)]

    @property
    def scales(self) -> bool:
        """Whether a loss is scaled."""
        return any(scaler.enabled and scaler.used for scaler in self.scalers)

    @property
    def mixes(self) -> bool:
        """Whether mixed precision has a part in the training."""
        return bool(self.regions) or self.scales

    @property
    def is_amp(self) -> bool:
        """Whether there is any mixed precision."""
        return any(scaler.enabled for scaler in self.scalers) or bool(self.regions)

    @property
    def complete(self) -> list[Window]:
        """Windows that a step has ended."""
        return [window for window in self.windows if window.steps]

"""The ways to a loss scale that `benchmarks.loss_scale` compares, and their rows.

Each way chooses the first scale, or how the scale moves, or both. With a scale, all
train by the same recipe: float16 autocast, torch's `GradScaler`, and no step if a
gradient is not finite.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks import loss_scale_tasks
from benchmarks.loss_scale_tasks import TASKS, Task, Training
from determined_amp.amp.fp32_modules import meanwhile_in_float32
from determined_amp.amp.slots import OneSlot
from determined_amp.finder.model import find_loss_scale, rehearsals_of
from determined_amp.finder.prediction import LossScaleError, predict_float16
from determined_amp.finder.scale_finding import Verdict
from determined_amp.finder.scale_score import DEFAULT_LOG2, bits_from_default
from determined_amp.finder.scoring import NoScaleError, score_batches

STEPS = 200
SEEDS = tuple(range(1, 11))

# Steps between two measurements of the share of the gradient that is flushed to 0.
_PROBE_EVERY = 20

# Steps between two measurements of the growth of gradients, in float32. The first 20
# steps are all measured.
_LOOK_EVERY = 4

# The scales of hp_search/loss_scale_random.yaml.
_SEARCHED_LOG2 = (0.0, 24.0)

# Batches of the finder, the default of its command.
_BATCHES = 4

# The true edge is sought between these scales.
_EDGE_LOG2 = (-64, 127)

_CPU = torch.device("cpu")

# Maps the scale and the largest magnitude of an unscaled gradient to the next scale.
Rule = Callable[[float, float], float]


@dataclass(frozen=True)
class Choice:
    """What a way decides before the first step.

    Args:
        init_log2: log2 of the first loss scale; None trains without one.
        dtype: The dtype of autocast; None turns it off.
        rule: Moves the scale; None leaves this to torch.
        samples: Samples that the choice passed through the model.
        fp32_modules: Names of modules to keep in float32.
        verdict: A value of `Verdict`, or an empty text.
        predicted_log2: log2 of the first power of two that is predicted to overflow;
            None without a prediction, or if no scale helps.
    """

    init_log2: float | None
    dtype: torch.dtype | None = torch.float16
    rule: Rule | None = None
    samples: int = 0
    fp32_modules: tuple[str, ...] = ()
    verdict: str = ""
    predicted_log2: int | None = None


@dataclass(frozen=True)
class Way:
    """A way to choose the initial loss scale.

    Args:
        name: Name in the tables.
        what: What it does, in words.
        choose: Makes the choice for a task and a seed, before the training.
    """

    name: str
    what: str
    choose: Callable[[Task, int], Choice]


@dataclass(frozen=True)
class Row:
    """One training.

    Args:
        task: Name of the task.
        way: Name of the way.
        seed: Seed of parameters and batches.
        trained_in: `float16`, `bfloat16` or `float32`, and the modules that were kept
            in float32.
        init_log2: log2 of the first loss scale; None without one.
        skipped: Number of skipped optimizer steps.
        first_applied: Number of the first applied step, from 1; None if there is none.
        flushed: Share of the norm of float32's gradient that is flushed to 0, in the
            tensor that loses most; mean over every 20th step. None if all of these
            steps were skipped.
        metric: What the task is judged by; None if it is not finite.
        chosen_with: `Choice.samples`.
        verdict: `Choice.verdict`.
        predicted_log2: `Choice.predicted_log2`.
        edge_log2: log2 of the smallest power of two at which float16 overflows on the
            finder's batches; None if every scale overflows. Measured only for the
            finder.
        growth_bits: Bits by which the largest 16-bit gradient of the training exceeds
            that of its first batches. Measured only in float32.
        seconds: Duration of choice and training.
        code: Digest of the code that made the row.
    """

    task: str
    way: str
    seed: int
    trained_in: str
    init_log2: float | None
    skipped: int
    first_applied: int | None
    flushed: float | None
    metric: float | None
    chosen_with: int
    verdict: str
    predicted_log2: int | None
    edge_log2: int | None
    growth_bits: float | None
    seconds: float
    code: str


def measure(task: Task, way: Way, seed: int) -> Row:
    """Let a way choose, and train the task with its choice."""
    begun = time.perf_counter()
    choice = way.choose(task, seed)
    training = task.start(seed)
    islands = [
        m for name, m in training.model.named_modules() if name in choice.fp32_modules
    ]
    growth = _Growth(task.start(seed)) if choice.dtype is None else None
    kept = meanwhile_in_float32(islands, "cpu") if islands else nullcontext()
    with kept:
        outcome = _train(training, choice, growth)
    metric = training.metric()
    trained_in = str(choice.dtype or torch.float32).removeprefix("torch.")
    return Row(
        task=task.name,
        way=way.name,
        seed=seed,
        trained_in=" and ".join([trained_in, *choice.fp32_modules]),
        init_log2=choice.init_log2,
        skipped=outcome.skipped,
        first_applied=outcome.first_applied,
        flushed=mean(outcome.flushed) if outcome.flushed else None,
        metric=metric if math.isfinite(metric) else None,
        chosen_with=choice.samples,
        verdict=choice.verdict,
        predicted_log2=choice.predicted_log2,
        edge_log2=true_edge(task, seed) if way.name == FINDER else None,
        growth_bits=growth.bits if growth else None,
        seconds=round(time.perf_counter() - begun, 2),
        code=code_of(way.name),
    )


@dataclass
class _Outcome:
    skipped: int = 0
    first_applied: int | None = None
    flushed: list[float] = field(default_factory=list)


def _train(training: Training, choice: Choice, growth: _Growth | None) -> _Outcome:
    """Train 200 steps by the recipe of PyTorch's manual."""
    outcome, optimizer = _Outcome(), training.optimizer
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=2.0 ** (choice.init_log2 or 0.0),
        enabled=choice.init_log2 is not None,
    )
    for step, batch in enumerate(itertools.islice(training.batches, STEPS)):
        if growth is not None and (step < _PROBE_EVERY or step % _LOOK_EVERY == 0):
            growth.see(training, batch)
        optimizer.zero_grad()
        with _autocast(choice.dtype):
            loss = training.loss(batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        scaler.unscale_(optimizer)
        largest = _largest(training)
        if math.isfinite(largest):
            if step % _PROBE_EVERY == 0:
                outcome.flushed.append(_flushed(training, batch))
            if outcome.first_applied is None:
                outcome.first_applied = step + 1
        else:
            outcome.skipped += 1
        scaler.step(optimizer)
        scaler.update(choice.rule(scaler.get_scale(), largest) if choice.rule else None)
    return outcome


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _largest(training: Training) -> float:
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients, float("inf")))
    return float(norms.max()) if bool(torch.isfinite(norms).all()) else math.inf


def _flushed(training: Training, batch: Any) -> float:
    """The share of float32's norm that is 0 in `.grad`, for the worst tensor."""
    parameters = [p for p in training.model.parameters() if p.grad is not None]
    exact = torch.autograd.grad(training.loss(batch), parameters)
    shares = [0.0]
    for parameter, reference in zip(parameters, exact, strict=True):
        norm = reference.double().norm()
        if norm > 0:
            assert parameter.grad is not None
            shares.append(float(reference.double()[parameter.grad == 0].norm() / norm))
    return max(shares)


class _Growth:
    """How far the 16-bit gradients of a training outgrow those of its first batches.

    Args:
        fresh: The same training at its start; this uses up its first batches.
    """

    def __init__(self, fresh: Training) -> None:
        batches = list(itertools.islice(fresh.batches, _BATCHES))
        self._room = min(
            filter(math.isfinite, (_room(fresh, batch) for batch in batches))
        )
        self.bits = -math.inf

    def see(self, training: Training, batch: Any) -> None:
        self.bits = max(self.bits, self._room - _room(training, batch))


def _room(training: Training, batch: Any) -> float:
    """Predict log2 of the largest scale at which nothing overflows, from bfloat16."""
    try:
        rehearsals = rehearsals_of(training.model, training.loss, [batch], _CPU)
        return predict_float16(rehearsals, OneSlot()).headroom_log2
    except LossScaleError:  # all gradients are 0
        return math.inf


def true_edge(task: Task, seed: int) -> int | None:
    """Measure log2 of the smallest power of two that overflows on the first batches.

    Returns:
        None if every scale overflows.
    """
    training = task.start(seed)
    batches = list(itertools.islice(training.batches, _BATCHES))

    def overflows(scale_log2: int) -> bool:
        for batch in batches:
            training.optimizer.zero_grad()
            with _autocast(torch.float16):
                loss = training.loss(batch)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**scale_log2)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has no types here
            scaler.unscale_(training.optimizer)
            if not math.isfinite(_largest(training)):
                return True
        return False

    works, fails = _EDGE_LOG2
    if overflows(works):
        return None
    while fails - works > 1:
        middle = (works + fails) // 2
        works, fails = (works, middle) if overflows(middle) else (middle, fails)
    return fails


# The ways.


def _fixed(
    init_log2: float, rule: Callable[[], Rule | None] = lambda: None
) -> Callable[[Task, int], Choice]:
    return lambda task, seed: Choice(init_log2, rule=rule())


def _hysteresis() -> Rule:
    """Megatron's and DeepSpeed's: the first overflow does not lower the scale."""
    left = 2

    def rule(scale: float, largest: float) -> float:
        nonlocal left
        left -= not math.isfinite(largest)
        return scale / 2 if left <= 0 and not math.isfinite(largest) else scale

    return rule


def _log_max() -> Rule:
    """OpenSeq2Seq's: log2 is 16 less mean + 3.09 sd of the largest gradients' log2."""
    fast, slow, squares, steps = 0.0, 0.0, 0.0, 0

    def rule(scale: float, largest: float) -> float:
        nonlocal fast, slow, squares, steps
        x = math.log2(largest) if math.isfinite(largest) and largest > 0 else 16.0
        steps += 1
        fast, slow = 0.99 * fast + 0.01 * x, 0.999 * slow + 0.001 * x
        squares = 0.999 * squares + 0.001 * x * x
        average, of_slow = fast / (1 - 0.99**steps), 1 - 0.999**steps
        variance = max(0.0, squares / of_slow - (slow / of_slow) ** 2)
        proposed = 16.0 - (average + 3.09 * math.sqrt(variance))
        return float(2.0 ** min(max(proposed, 0.0), 24.0))

    return rule


def _static() -> Rule:
    return lambda scale, largest: scale


class _Counted:
    """The loss of a training; counts the samples that pass through the model."""

    def __init__(self, training: Training) -> None:
        self._training, self.samples = training, 0

    def __call__(self, batch: Any) -> torch.Tensor:
        self.samples += self._training.samples
        return self._training.loss(batch)


def _found(task: Task, seed: int) -> Choice:
    """Follow the finder's verdict on the first batches, as a user would."""
    training = task.start(seed)
    loss, batches = (
        _Counted(training),
        list(itertools.islice(training.batches, _BATCHES)),
    )
    finding = find_loss_scale(training.model, loss, batches).finding
    verdict = finding.verdict
    without = verdict in (Verdict.BF16, Verdict.FORWARD_OVERFLOW)
    return Choice(
        init_log2=None if without else finding.choice_log2,
        dtype=torch.bfloat16 if without else torch.float16,
        samples=loss.samples,
        verdict=verdict.value,
        predicted_log2=None
        if verdict is Verdict.FORWARD_OVERFLOW
        else finding.top_log2 + 1,
    )


def _searched(task: Task, seed: int) -> Choice:
    """Score random scales on one batch, for as many samples as the finder needs."""
    training, chance = task.start(seed), random.Random(seed)  # noqa: S311
    loss, budget = _Counted(training), _found(task, seed).samples
    batches = [next(training.batches)]
    rehearsals = rehearsals_of(training.model, loss, batches, _CPU)
    scored: list[tuple[float, float, float]] = []
    while loss.samples < budget:
        at = chance.uniform(*_SEARCHED_LOG2)
        try:
            score = score_batches(rehearsals, OneSlot(), at).loss_scale_score
        except NoScaleError:  # no loss scale helps
            continue
        scored.append((score, bits_from_default(at), at))
    if not scored:
        return Choice(
            None,
            torch.bfloat16,
            samples=loss.samples,
            verdict=Verdict.FORWARD_OVERFLOW.value,
        )
    return Choice(min(scored)[-1], samples=loss.samples)


FLOAT32, DEFAULT, SEARCH, FINDER = "float32", "2^16", "search", "finder"

WAYS = (
    Way(FLOAT32, "no autocast, no scale", lambda task, seed: Choice(None, None)),
    Way(DEFAULT, "PyTorch's default", _fixed(DEFAULT_LOG2)),
    Way(
        "2^32",
        "the default of Megatron and DeepSpeed, with hysteresis 2",
        _fixed(32, _hysteresis),
    ),
    Way("LogMax", "OpenSeq2Seq's rule, from 1", _fixed(0, _log_max)),
    Way("static 1024", "never moves", _fixed(10, _static)),
    Way(
        SEARCH,
        "this repository's search, scales at random, at the cost of the finder",
        _searched,
    ),
    Way(FINDER, "this repository's finder, on the first 4 batches", _found),
)


def wanted(
    tasks: Sequence[Task] = TASKS, ways: Sequence[Way] = WAYS
) -> Iterator[tuple[Task, Way, int]]:
    """All trainings, in the order of their seeds."""
    return ((task, way, seed) for seed in SEEDS for task in tasks for way in ways)


@functools.cache
def code_of(way: str) -> str:
    """A digest of the code that makes a way's rows, without comments and docstrings."""
    here = Path(loss_scale_tasks.__file__).parent
    files = [here / "loss_scale_tasks.py", here / "loss_scale_rows.py"]
    if way in (SEARCH, FINDER):
        files += sorted((here.parent / "determined_amp" / "finder").glob("*.py"))
    parsed = "".join(_statements(file) for file in files)
    return hashlib.sha256(f"{torch.__version__}{parsed}".encode()).hexdigest()[:12]


def _statements(file: Path) -> str:
    """The code of a file without its docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef)
        ) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)

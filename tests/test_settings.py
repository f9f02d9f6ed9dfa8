"""`amp.fields`: every mistake in a section is named, and nothing is guessed."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import pytest

from determined_amp import AmpLoop
from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.amp.fields import read, read_section, setting
from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import (
    AmpSettings,
    Compile,
    EvalPrecision,
    OnOverflow,
    Precision,
)
from determined_amp.trial.mixed_precision import MixedPrecision
from tests.harness import Context


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    depth: int = setting(at_least=1)


@dataclass(frozen=True)
class Section:
    """One field of every kind; `closed` and `open` have both bounds, on either side of
    the edge.
    """

    count: int = setting()
    flag: bool = setting(False)
    ratio: float = setting(0.5)
    closed: float = setting(1.0, at_least=0, at_most=2)
    open: float = setting(1.0, above=0, below=2)
    word: str = setting("a")
    words: tuple[str, ...] = setting(())
    colour: Colour = setting(Colour.RED)
    limit: float | None = setting(None, above=0)
    inner: Inner = setting(Inner(1))

    def contradictions(self, given):
        if self.count == 13:
            yield "count", f"unlucky with {', '.join(sorted(given))}"


def section(**raw):
    """`Section` read from `raw`, with the one required key filled in."""
    problems = []
    made = read(Section, {"count": 1, **raw}, "s", problems)
    assert problems == []
    assert made is not None
    return made


def problems_of(raw):
    try:
        read_section(Section, raw, "s")
    except ConfigError as error:
        return list(error.problems)
    return []


def test_sound_section_is_built_with_defaults():
    assert section() == Section(count=1)
    assert section(inner={"depth": 3}, colour="blue", words=["x", "y"]) == Section(
        count=1, inner=Inner(3), colour=Colour.BLUE, words=("x", "y")
    )


@pytest.mark.parametrize(
    ("key", "raw", "allowed"),
    [
        ("count", True, "an integer"),
        ("count", 1.0, "an integer"),
        ("ratio", True, "a number"),
        ("ratio", math.nan, "a number"),
        ("flag", 1, "true or false"),
        ("word", False, "a string"),
        ("words", "ab", "a list of strings"),
        ("words", ["a", 1], "a list of strings"),
        ("colour", "green", "red, blue"),
        ("ratio", "nan", "a number"),  # no advice to write it so
        ("limit", 0, "a number > 0"),
        ("inner", 3, "a mapping of keys to values"),
    ],
)
def test_wrong_type_is_named_with_what_is_allowed(key, raw, allowed):
    assert problems_of({"count": 1, key: raw}) == [
        f"s.{key}: got {raw!r}; allowed: {allowed}"
    ]


@pytest.mark.parametrize(
    ("key", "inside", "outside", "allowed"),
    [
        ("closed", 0, -1e-9, ">= 0 and <= 2"),
        ("closed", 2, 2.000001, ">= 0 and <= 2"),
        ("open", 1e-9, 0, "> 0 and < 2"),
        ("open", 1.999999, 2, "> 0 and < 2"),
    ],
)
def test_bound_is_kept_on_both_sides_of_its_edge(key, inside, outside, allowed):
    assert getattr(section(**{key: inside}), key) == inside
    message = f"s.{key}: got {outside!r}; allowed: a number {allowed}"
    assert problems_of({"count": 1, key: outside}) == [message]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, "s.count: missing; allowed: an integer"),
        ({"count": 1, "ratoi": 1}, "s.ratoi: unknown key; did you mean ratio?"),
        # One that is required is named once.
        ({"cuont": 1}, "s.cuont: unknown key; did you mean count?"),
        (
            {"count": 1, "inner": {"depth": 0}},
            "s.inner.depth: got 0; allowed: an integer >= 1",
        ),
        (
            {"count": 1, "inner": {"depth": 1, "x": 0}},
            "s.inner.x: unknown key; allowed: depth",
        ),
        (
            {"count": 1, 7: 0},
            f"s.7: unknown key; allowed: {', '.join(Section.__annotations__)}",
        ),
        (None, "s: got None; allowed: a mapping of keys to values"),
        ({"count": "x" * 100}, f"s.count: got '{'x' * 56}...; allowed: an integer"),
        ({"count": 13, "flag": False}, "s.count: unlucky with count, flag"),
    ],
)
def test_mistake_is_named_with_its_place(raw, problem):
    assert problems_of(raw) == [problem]


def test_all_mistakes_are_reported_and_contradictions_wait_for_a_sound_section():
    """`count: 13` contradicts itself, which is not asked while `flag` and others are
    wrong.
    """
    raw = {"count": 13, "flag": 0, "inner": {"depth": "x"}, "colours": "red"}
    assert [problem.key for problem in problems_of(raw)] == [
        "s.colours",
        "s.flag",
        "s.inner.depth",
    ]


def test_script_may_use_the_words_of_a_yaml():
    words: Values = {
        "precision": "amp_fp16",
        "on_overflow": "warn",
        "eval_precision": "same",
        "compile": "default",
        "fp32_modules": ["head"],
    }
    assert AmpSettings(**words) == AmpSettings(
        Precision.AMP_FP16,
        on_overflow=OnOverflow.WARN,
        eval_precision=EvalPrecision.SAME,
        compile=Compile.DEFAULT,
        fp32_modules=("head",),
    )


@pytest.mark.parametrize(
    ("wrong", "problems"),
    [
        ({}, ["precision: missing; allowed: fp32, tf32, amp_fp16, amp_bf16"]),
        (
            {"precision": "fp17", "growth_factor": math.nan, "compile": True},
            [
                "precision: got 'fp17'; allowed: fp32, tf32, amp_fp16, amp_bf16",
                "growth_factor: got nan; allowed: a number > 1",
                "compile: got True; allowed: false, default, reduce-overhead, "
                "max-autotune",
            ],
        ),
        (
            {"precision": "amp_fp16", "init_scale": -1.0, "fp32_modules": "head"},
            [
                "init_scale: got -1.0; allowed: a number > 0 and <= 1.701411835e+38, "
                "find",
                "fp32_modules: got 'head'; allowed: a list of strings",
            ],
        ),
    ],
    ids=["nothing", "words", "numbers"],
)
def test_script_is_refused_what_a_yaml_is_refused_in_the_same_words(wrong, problems):
    with pytest.raises(ConfigError) as in_a_yaml:
        read_section(AmpSettings, wrong, "")
    with pytest.raises(ConfigError) as in_a_script:
        AmpSettings(**wrong)
    assert list(in_a_script.value.problems) == problems
    assert in_a_script.value.problems == in_a_yaml.value.problems


@pytest.mark.parametrize(
    ("values", "named", "problem"),
    [
        (["amp_fp16"] * 15, {}, "got 15 values; allowed: 14, or by name"),
        (
            ["fp32"],
            {"precision": "amp_fp16"},
            "precision: got fp32 and amp_fp16; allowed: one",
        ),
    ],
    ids=["surplus", "twice"],
)
def test_value_by_place_that_is_too_many_is_refused(values, named, problem):
    with pytest.raises(ConfigError) as error:
        AmpSettings(*values, **named)
    assert problem in error.value.problems


def test_error_says_source_count_and_one_line_per_problem():
    assert str(ConfigError("a.yaml", ["x: wrong"])) == "a.yaml: x: wrong"
    error = ConfigError("a.yaml", iter(["x: wrong", "y: missing"]))
    assert str(error) == "a.yaml: x: wrong (1 of 2 problems)\n  - y: missing"
    assert error.problems == ("x: wrong", "y: missing")
    assert isinstance(error, UserError)


@pytest.mark.parametrize("given", [{"precision": "amp_fp16"}, "amp_fp16", None])
def test_settings_of_another_type_are_one_sentence(given):
    words = r"settings: got a \w+; allowed: AmpSettings\("
    with pytest.raises(ConfigError, match=words):
        AmpLoop(given, "cpu")
    context: Any = Context()
    if given is not None:
        with pytest.raises(ConfigError, match=words):
            MixedPrecision(context, given)

"""`experiment.overrides`: what `--config` changes."""

import copy

import pytest

from determined_amp.amp.errors import ConfigError
from determined_amp.experiment.experiment import parse
from determined_amp.experiment.overrides import with_overrides
from determined_amp.experiment.training import Length
from tests.run_here import STRANGE


def test_overrides_set_nested_values_and_leave_their_input_alone():
    config = {"a": {"b": 1, "c": 2}, "d": [1]}
    before = copy.deepcopy(config)
    made = with_overrides(
        config, ["a.b=2", "a.x.y=true", "d=null", "e=w=z", "a.b=[2.5e-3, x]"]
    )
    assert made == {
        "a": {"b": [0.0025, "x"], "c": 2, "x": {"y": True}},
        "d": None,
        "e": "w=z",
    }
    assert config == before


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("a", "got 'a'; allowed: KEY=VALUE"),
        ("=1", "got '=1'; allowed: KEY=VALUE"),
        ("s..u=1", "got 's..u=1'; allowed: KEY=VALUE"),
        ("a.b=1", "a.b: a is a value, not a section"),
        ("a.b.c=1", "a.b.c: a is a value, not a section"),
        ("s.t.u=1", "s.t.u: t is a value, not a section"),
    ],
)
def test_malformed_override_is_a_config_error(override, problem):
    with pytest.raises(ConfigError) as caught:
        with_overrides({"a": 1, "s": {"t": []}}, [override])
    assert str(caught.value).startswith(f"--config: {problem}")


@pytest.mark.parametrize("length", ["{epochs: 3}", "{batches: 9}", "null"])
@pytest.mark.parametrize(
    "override",
    ["searcher.max_length.batches=40", "searcher.max_length={batches: 40}"],
)
def test_length_is_replaced_by_one_in_another_unit(length, override):
    """The first override is what the message proposes where there is no length."""
    config = with_overrides(STRANGE, [f"searcher.max_length={length}", override])
    assert parse(config, "test").max_length == Length(batches=40)

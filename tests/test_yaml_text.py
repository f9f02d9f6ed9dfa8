"""`experiment.yaml_text` against the loader of the platform, by which `det` sends a
YAML.
"""

import json
import math

import pytest
from determined.common import util
from hypothesis import given, settings
from hypothesis import strategies as st

from determined_amp import ConfigError
from determined_amp.amp.settings import yaml_lines
from determined_amp.experiment.overrides import with_overrides
from determined_amp.experiment.yaml_text import dump_yaml, load_yaml, read_text
from tests.test_any_value import BOUNDED

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    st.sampled_from(
        [
            "1e-4",
            "1.5E3",
            "032",
            "0o17",
            "1_000",
            "-_",
            "0o8",
            "1:30",
            "yes",
            "off",
            "null",
            "~",
        ]
    ),
    st.sampled_from(
        [".inf", "-.5", "2020-01-01", "0x1F", "<<", "=", "- a", "a: b", "#", "'", "1."]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text("ab1eE-._y ", min_size=1), inner),
    ),
    max_leaves=8,
)


@settings(BOUNDED, max_examples=150)
@given(VALUES)
def test_what_is_written_is_read_as_the_same_value(value):
    text = dump_yaml({"value": value})
    assert load_yaml(text, "text") == {"value": value}
    assert util.safe_load_yaml_with_exceptions(text) == {"value": value}


@settings(BOUNDED, max_examples=150)
@given(st.text("ab: -1e.4_0o7x'\"[]{}#,&*!|>%@\n~", max_size=30))
def test_text_is_read_as_the_platform_reads_it_or_refused(text):
    try:
        ours = load_yaml(text, "text")
    except ConfigError:
        return
    theirs = json.loads(json.dumps(util.yaml_safe_load(text)))  # as a master stores it
    assert repr(ours) == repr(theirs)  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001),
        ("032", 32),
        ("0o17", 15),
        ("1:30", "1:30"),
        ("yes", "yes"),
        (".inf", math.inf),
        ("true", True),
        ("2.5e-3", 0.0025),
        ("'1e-4'", "1e-4"),
        ("{1: x}", {"1": "x"}),
    ],
)
def test_values_are_those_of_yaml_1_2(text, value):
    assert load_yaml(f"a: {text}", "text") == {"a": value}
    assert with_overrides({}, [f"a={text}"]) == {"a": value}


def test_lines_to_paste_are_read_as_the_changes():
    changes = {"init_scale": 2.0**13, "fp32_modules": ["^a$", "^b[.]c$"]}
    lines = yaml_lines({**changes, "min_scale": None})
    assert lines.endswith("\n    # without min_scale")
    assert load_yaml(lines, "text") == {"hyperparameters": {"amp": changes}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a: 1\na: 2",
            'is not YAML: found duplicate key "a" with value "2" (original value: '
            '"1"): merge the ',
        ),
        (
            "a: [1",
            "is not YAML: expected ',' or ']', but got '<stream end>' (line 1, column "
            "6)",
        ),
        (
            "a: {b: [1, 2020-01-01]}",
            "is not YAML of a configuration: got the date 2020-01-01; allowed: text in "
            "quotes",
        ),
        (
            "a: &x\n  b: *x",
            "is not YAML of a configuration: Circular reference detected",
        ),
        (
            "a: !!python/object:os.system x",
            "is not YAML: could not determine a constructor",
        ),
        ("x: !!binary aGk=", "is not YAML of a configuration: got the bytes b'hi'"),
        # What the reader's constructors raise, none of it a YAMLError.
        ("2001-99-99", "is not YAML of a configuration: month must be in 1..12"),
        ("[" * 1000, "is not YAML of a configuration: "),
    ],
)
def test_text_that_is_no_configuration_is_one_sentence(text, problem):
    with pytest.raises(ConfigError) as raised:
        load_yaml(text, "a.yaml")
    assert str(raised.value).startswith(f"a.yaml: {problem}")
    assert "\n" not in str(raised.value)


def test_file_of_another_encoding_is_a_sentence(tmp_path):
    (tmp_path / "a.yaml").write_bytes("a: ü".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a\.yaml: cannot be read as UTF-8 text"):
        read_text(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text("a\0b")

"""Whatever stands in the place of a value or in an override: the settings are those
that the YAML asks for, or a `ConfigError` names the key.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from determined_amp.amp.errors import ConfigError
from determined_amp.experiment import dotted as dotted_names
from determined_amp.experiment import experiment
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.overrides import with_overrides
from determined_amp.search.search_plan import SearchPlan
from tests import run_here

# The same examples in every run, and no opinion on how busy the machine is.
BOUNDED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)

_YAML = run_here.ROOT / "experiment_configs" / "mlp" / "amp.yaml"
SOUND = yaml.safe_load(_YAML.read_text())
_GRID = run_here.ROOT / "hp_search" / "loss_scale_grid.yaml"
SEARCH = yaml.safe_load(_GRID.read_text())


def dotted(config, path=""):
    """The dotted place of every key in `config`."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            place = f"{path}.{key}" if path else str(key)
            yield place
            yield from dotted(value, place)


def put(path, value, sound=SOUND):
    """The sound configuration with one value replaced."""
    config = copy.deepcopy(dict(sound))
    dotted_names.put(config, path.split("."), value)
    return config


def problems_of(config):
    """What the parser says of it, also of what it reads otherwise than it stands;
    anything but a ConfigError is the caller's to see.
    """
    try:
        found = experiment.parse(config, "mutant")
    except ConfigError as error:
        return error.problems
    read = {**flat(found.config), **flat(found.resolved())}
    return tuple(
        f"{name}: asked for {asked!r}, got {read.get(name)!r}"
        for name, asked in flat(config).items()
        if asked not in (None, {}) and not is_as_asked(asked, read.get(name))
    )


def is_as_asked(asked, got):
    """Equal by their text, since 1 is not true and NaN equals nothing, or as numbers.

    A section has defaults besides.
    """
    if isinstance(asked, dict) and isinstance(got, dict):
        return all(is_as_asked(value, got.get(key)) for key, value in asked.items())
    are_numbers = {type(asked), type(got)} <= {int, float}
    return repr(asked) == repr(got) or (are_numbers and asked == got)


PLACES = sorted(dotted(SOUND))

# Values of the YAML's own kind come up often, so that many examples get past the first
# check.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["fp32", "amp_fp16", "mnist", "cosine", "batches", "trials.mlp:MLPTrial"]
    )
    | st.sampled_from(["1e-4", "0x10", "nan", "2021-02-03", "type", 10**400, 1, 2, 0.5])
)
KEYS = st.text(max_size=8) | st.sampled_from(
    [place.rpartition(".")[2] for place in PLACES]
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


class TestParser:
    @BOUNDED
    @given(path=st.sampled_from(PLACES), value=ANYTHING)
    @example(path="hyperparameters", value=[])
    @example(path="hyperparameters.trial", value="trials.mlp:" + "\ud800")
    @example(path="hyperparameters.amp", value={"amp": {"amp": {}}})
    @example(path="hyperparameters.learning_rate", value=10**400)
    @example(path="searcher", value={"name": ["single"], "max_length": {"batches": 1}})
    def test_experiment_with_any_value_is_parsed_or_its_wrong_keys_are_named(
        self, path, value
    ):
        """Whatever stands in the place of a value: an experiment, or a ConfigError.

        Every problem begins with a key that the sound YAML has or that was put in, with
        one exception: three datasets need `data.directory`, which the digits forbid.
        """
        config = put(path, value)
        known = {*PLACES, *dotted(config), "data.directory"}
        for problem in problems_of(config):
            # without the item of a list
            place = problem.partition(": ")[0].partition("[")[0]
            assert place in known, problem

    @BOUNDED
    @given(path=st.sampled_from(sorted(dotted(SEARCH))), value=ANYTHING)
    def test_search_with_any_value_is_planned_or_is_a_config_error(self, path, value):
        with suppress(ConfigError):
            SearchPlan(put(path, value, SEARCH))

    @pytest.mark.parametrize("path", PLACES)
    def test_value_that_is_never_right_is_one_problem_of_its_key(self, path):
        """No key of ours has a list with null in it. Determined judges its own."""
        theirs = ("description", "entrypoint", "max_restarts", "log_policies")
        named = [p for p in problems_of(put(path, [None])) if p.startswith(f"{path}: ")]
        assert len(named) == (path not in theirs)

    def test_value_that_is_read_as_another_would_be_noticed(self, monkeypatch):
        """Negative control."""
        sound = experiment.parse(SOUND, "sound")
        monkeypatch.setattr(experiment, "parse", lambda config, source: sound)
        (problem,) = problems_of(put("hyperparameters.learning_rate", 0.25))
        assert problem.startswith("hyperparameters.learning_rate: asked for 0.25, got ")


@BOUNDED
@given(
    overrides=st.lists(
        st.text(max_size=20)
        | st.builds(
            "{}={}".format, st.sampled_from(PLACES) | KEYS, st.text(max_size=20)
        ),
        max_size=3,
    )
)
@example(overrides=["="])
@example(overrides=["name.x=1"])
@example(overrides=["a..b=[", "x={1: 2"])
def test_overrides_of_any_text_change_the_config_or_are_a_config_error(overrides):
    before = copy.deepcopy(SOUND)
    with suppress(ConfigError):
        assert with_overrides(SOUND, overrides).keys() >= SOUND.keys()
    assert before == SOUND

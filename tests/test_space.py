"""The points of a search, computed by hand here."""

import pytest
from optuna.distributions import FloatDistribution, IntDistribution

from determined_amp.search.space import read_space


def space(hyperparameters):
    problems = []
    result = read_space(hyperparameters, problems)
    assert problems == []
    return result


def points(**spaces):
    """The grid of one hyperparameter."""
    (axis,) = space({"x": spaces}).axes
    return list(axis.grid)


class TestGrid:
    @pytest.mark.parametrize(
        ("raw", "expected"),
        [
            (
                {"type": "log", "base": 2.0, "minval": 8, "maxval": 24, "count": 5},
                [256, 4096, 65536, 1048576, 16777216],
            ),
            (
                {"type": "log", "base": 2.0, "minval": 0, "maxval": 9, "count": 1},
                [2**4.5],
            ),
            ({"type": "double", "minval": -1, "maxval": 1, "count": 3}, [-1, 0, 1]),
            ({"type": "int", "minval": 0, "maxval": 3, "count": 100}, [0, 1, 2, 3]),
            ({"type": "int", "minval": 0, "maxval": 10, "count": 4}, [0, 3, 7, 10]),
            ({"type": "int", "minval": 1, "maxval": 4, "count": 1}, [2]),
            ({"type": "categorical", "vals": ["b", 1]}, ['"b"', "1"]),
        ],
    )
    def test_grid_has_evenly_spaced_points(self, raw, expected):
        # Powers of two are exact; others differ in their last bits.
        assert points(**raw) == (
            expected
            if isinstance(expected[0], str)
            else pytest.approx(expected, rel=1e-15)
        )

    def test_grid_is_every_combination_and_starts_from_the_end(self):
        """Names are sorted level by level, and the last one changes fastest."""
        result = space(
            {
                "z": {"type": "int", "minval": 0, "maxval": 1, "count": 2},
                "amp": {"init_scale": {"type": "categorical", "vals": [1, 2, 4]}},
                "batch": 32,
            }
        )
        assert [axis.name for axis in result.axes] == ["amp.init_scale", "z"]
        assert [tuple(point.values()) for point in result.grid()] == [
            ("4", 1),
            ("4", 0),
            ("2", 1),
            ("2", 0),
            ("1", 1),
            ("1", 0),
        ]


NESTED = {
    "amp": {
        "init_scale": {"type": "double", "minval": 0, "maxval": 1},
        "precision": "x",
    },
    "fixed": {"type": "const", "val": [1, 2]},
    "empty": {},
    "listed": [{"type": "int"}],  # the platform takes a list as it is
    "nothing": None,
    "choice": {"type": "categorical", "vals": [{"deep": 1}, [2]]},
    "with.dot": {"type": "int", "minval": 0, "maxval": 1},
}


class TestNesting:
    def test_a_trial_gets_constants_and_its_point(self):
        result = space(NESTED)
        point = {"amp.init_scale": 0.25, "choice": '{"deep": 1}', "with.dot": 1}
        hyperparameters = result.nested(point)
        assert hyperparameters == {
            "amp": {"init_scale": 0.25, "precision": "x"},
            "fixed": {"type": "const", "val": [1, 2]},  # `parse` takes its value
            "empty": {},
            "listed": [{"type": "int"}],
            "nothing": None,
            "choice": {"deep": 1},
            "with.dot": 1,
        }


@pytest.mark.parametrize(
    ("raw", "distribution"),
    [
        ({"type": "double", "minval": 0, "maxval": 1}, FloatDistribution(0, 1)),
        ({"type": "int", "minval": 0, "maxval": 9}, IntDistribution(0, 9)),
        (
            {"type": "log", "base": 2.0, "minval": 0, "maxval": 24},
            FloatDistribution(1, 2**24, log=True),
        ),
    ],
)
def test_range_is_drawn_uniformly_and_log_in_the_exponent(raw, distribution):
    (axis,) = space({"x": raw}).axes
    assert axis.distribution == distribution


@pytest.mark.parametrize(
    ("space", "key"),
    [
        ({"type": "logarithmic"}, "type"),
        # exponents
        (
            {"type": "log", "base": 2.0, "minval": 0, "maxval": 5000},
            "minval",
        ),
        ({"type": "int", "minval": 0.5, "maxval": 1}, "minval"),
        ({"type": "int", "minval": 3, "maxval": 3, "count": 1}, "minval"),
        ({"type": "log", "base": 0.5, "minval": 0, "maxval": 1}, "base"),
        ({"type": "double", "minval": 0, "maxval": 1, "counts": 3}, "counts"),
        ({"type": "categorical", "vals": []}, "vals"),
    ],
)
def test_mistake_in_a_range_names_its_key(space, key):
    problems = []
    read_space({"a": {"x": space}}, problems)
    assert problems[0].key == f"hyperparameters.a.x.{key}"

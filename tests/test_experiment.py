"""`experiment.experiment`: one YAML, parsed once, every mistake named; and the
overrides of it.

The configuration of every test is the repository's own `mlp/amp.yaml` with single keys
changed.
"""

from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import yaml
from determined._execution import _make_test_experiment_config

from determined_amp.amp import fields, settings
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.fields import fill
from determined_amp.cli.options import configuration_of
from determined_amp.experiment import experiment
from determined_amp.experiment.dotted import put
from determined_amp.experiment.hyperparameters import with_power_of_two
from determined_amp.experiment.overrides import in_precision, with_overrides
from determined_amp.experiment.training import WITHOUT_EFFECT, Length
from tests import run_here

_YAML = Path(__file__).parent.parent / "experiment_configs" / "mlp" / "amp.yaml"
_LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")

WINDOWS = {
    "hp.aggregation_frequency": 4,
    **{f"hp.training.{name}": {"batches": 8} for name in _LENGTHS},
}


def changed(values):
    """The YAML with each value set at its dotted key, `hp` short for
    hyperparameters.
    """
    config = yaml.safe_load(_YAML.read_text())
    for path, value in values.items():
        put(config, path.replace("hp", "hyperparameters", 1).split("."), value)
    return config


def problems_of(values):
    """The problems of the changed YAML, again with `hp` for hyperparameters."""
    found = run_here.problems_of(changed(values))
    return [problem.replace("hyperparameters", "hp", 1) for problem in found]


@pytest.mark.parametrize(("path", "default"), [row[:2] for row in WITHOUT_EFFECT])
def test_key_without_effect_is_an_error_unless_it_is_the_masters_default(path, default):
    (problem,) = problems_of({path: "other"})
    assert problem.startswith(
        f"{path}: got 'other', which has no effect in Determined 0.38.1; "
    )
    assert problems_of({path: default}) == []


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"hp.global_batch_size": 63, "resources.slots_per_trial": 2},
            (
                "hp.global_batch_size: got 63, which does not divide among 2 slots; "
                "allowed: a multiple of 2"
            ),
        ),
        ({"hp": None}, "hp: got None; allowed: a mapping of keys to values"),
        (
            {"reproducibility": 5, "hp.trial_seed": 7},
            "reproducibility: got 5; allowed: a mapping of keys to values",
        ),
        (
            {"hp.training.max_length": {}},
            "hp.training.max_length.batches: got 0 units; ",
        ),
        (
            {"hp.training.max_length": f"{'9' * 5000} batches"},
            "hp.training.max_length: got '999",
        ),
        (
            {"hp.amp.init_scale": 2.0, "hp.amp.min_scale": 4.0},
            "hp.amp.init_scale: got 2, which is below min_scale 4",
        ),
        (
            {"hp.training.max_length": {"batches": 8, "epochs": 1}},
            ("hp.training.max_length.batches: got 2 units; allowed: {batches: N}, "),
        ),
        *(
            ({"hp.training.max_length": text}, "hp.training.max_length")
            for text in ("0 epochs", "2 records", "2")
        ),
        (
            {"hp.trial": None, "entrypoint": "trials.mlp.MLPTrial"},
            ("hp.trial: missing, and the entrypoint 'trials.mlp.MLPTrial' names none"),
        ),
        # One that is required is named once.
        (
            {"hp.training": {"max_lenght": {"batches": 8}}},
            "hp.training.max_lenght: unknown key; did you mean max_length?",
        ),
        # A key that is nearly one of Determined's is no other.
        ({"nae": 1}, "nae: unknown key; did you mean name?"),
        # Without the class its keys cannot be known: `hidden_features` is not called a
        # mistake.
        *(
            ({"hp.trial": path}, f"hp.trial: got {path!r}, which {because}")
            for path, because in {
                "trials.nope:MLPTrial": ("cannot be imported: 'trials' has no 'nope'"),
                "": "cannot be imported: Empty module name",
                "trials.mlp:MLPHparams": "is not a PyTorchTrial",
            }.items()
        ),
        # Whole accumulation windows.
        *(
            (
                {**WINDOWS, f"hp.training.{name}": {"batches": 13}},
                (
                    f"hp.training.{name}.batches: got 13, which is not a multiple of "
                    "aggregation_fre"
                ),
            )
            for name in _LENGTHS[:3]
        ),
        (WINDOWS, None),
    ],
)
def test_mistake_is_the_one_problem_reported(values, problem):
    found = problems_of(values)
    assert len(found) == (problem is not None)
    assert all(each.startswith(problem or "") for each in found)


@pytest.mark.parametrize(
    "wrong",
    [
        {
            "hp.amp.audit": 3,
            "hp.global_batch_size": 0,
            "scheduling_unit": 5,
            "searcher": 1,
        },
        # Those that only the trial's own classes know.
        {"hp.warmup_steps": -1, "data.classes": 1},
    ],
    ids=["of the library", "of the trial"],
)
def test_mistakes_of_all_sections_are_reported_together(wrong):
    with pytest.raises(ConfigError) as caught:
        experiment.parse(changed(wrong), "test")
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {path.replace("hp", "hyperparameters", 1) for path in wrong}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp_bf16"])
def test_scaler_settings_have_no_effect_in_a_precision_without_a_scaler(precision):
    """One override switches the precision, here and on a cluster, which merges the
    override.
    """
    values = {
        "hp.amp.precision": precision,
        "hp.amp.init_scale": 2.0,
        "hp.amp.min_scale": 4.0,
    }
    parsed = experiment.parse(changed(values), "test")
    assert parsed.amp is not None
    assert parsed.amp.precision.value == precision
    assert {"init_scale", "min_scale"} <= set(parsed.amp.ignored)
    (problem,) = problems_of({**values, "hp.amp.audit": 3})
    assert problem.startswith("hp.amp.audit: got 3")


def test_training_reads_every_section_once(tmp_path, monkeypatch):
    """The trial, its `MixedPrecision` and `fit` take what the command has read."""
    read = Counter()

    def count(settings, *arguments):
        read[type(settings).__name__] += 1
        return fill(settings, *arguments)

    for module in (fields, settings):
        monkeypatch.setattr(module, "fill", count)
    run_here.run_small("mlp/amp.yaml", tmp_path)
    sections = (
        "CommonHyperparameters AmpSettings TrainingSettings MLPHparams DataSettings "
        "Platform Searcher Reproducibility Resources"
    )
    assert read == {**dict.fromkeys(sections.split(), 1), "Length": 4}


def test_precision_of_the_command_line_may_be_in_quotes_as_in_the_yaml():
    changes = ["hyperparameters.amp.precision='amp_bf16'"]
    options = Namespace(config=str(_YAML), overrides=changes, precision=None)
    assert configuration_of(options) == changed({"hp.amp.precision": "amp_bf16"})
    options.precision = "fp32"
    assert configuration_of(options) == changed({"hp.amp.precision": "fp32"})
    words = "^--precision: hyperparameters.amp.precision: amp is a value, not a section"
    with pytest.raises(ConfigError, match=words):
        in_precision({"hyperparameters": {"amp": "own"}}, "fp32")


THEIRS = {
    "entrypoint": "tests.strangers:Stranger",
    "hyperparameters": {"amp": {"precision": "amp_fp16"}},
    "searcher": {"max_length": {"epochs": 2}},
    "min_validation_period": {"batches": 4},
}


@pytest.mark.parametrize("form", ["ours", "Determined's"])
def test_configuration_of_an_experiment_and_of_its_variant_reads_as_the_same(form):
    path = str(run_here.ROOT / "experiment_configs/mlp/amp.yaml")
    given = experiment.read_yaml(path) if form == "ours" else THEIRS
    made = experiment.experiment_in(given, "x", drawn_seed=5)
    key = made.key_of("max_length")
    other = made.variant(
        [f"{key}.batches=8", "hyperparameters.amp.growth_interval=7"],
    )
    assert other.amp is not None
    assert (other.amp.growth_interval, other.max_length) == (7, Length(batches=8))
    for one in (made, other):
        again = experiment.experiment_in(one.config, "x")
        assert one.seed == 5
        assert again.resolved() == one.resolved()
    assert made.config["hyperparameters"] == given["hyperparameters"]


def test_experiment_in_determineds_test_mode_trains_one_batch():
    made = _make_test_experiment_config(changed({}))
    result = experiment.parse(made, "test")
    batch = Length(batches=1)
    training = result.training
    assert (training.max_length, training.validation_period) == (batch, batch)
    assert result.platform.searcher.smaller_is_better


def test_hyperparameters_of_the_searcher_replace_those_of_the_yaml():
    """The master's JSON has 1 for 1.0. The ranges in the YAML are no mistake then."""
    sampled = changed({"hp.learning_rate": 1, "hp.amp.growth_factor": 2})
    space = changed(
        {"hp.learning_rate": {"type": "log", "minval": -4, "maxval": 0, "base": 10}}
    )
    chosen = sampled["hyperparameters"]
    result = experiment.parse(space, "test", hyperparameters=chosen)
    floats = (result.hparams.learning_rate, result.hparams.amp.growth_factor)
    assert floats == (1.0, 2.0)
    assert {type(value) for value in floats} == {float}
    none = {"amp": {"init_scale": 0}}  # which is refused, and not rounded
    of_scales = changed(
        {"hp.amp.init_scale": {"type": "int", "minval": 0, "maxval": 8}}
    )
    assert with_power_of_two(none, of_scales) is none


@pytest.mark.parametrize(
    ("length", "aggregation_frequency", "steps"),
    [
        ({"batches": 24}, 1, 24),
        ({"epochs": 2}, 1, 22),
        ({"epochs": 2}, 2, 11),
    ],
)
def test_steps_are_the_whole_accumulation_windows_of_the_run(
    length, aggregation_frequency, steps
):
    """An epoch is 11 batches; Determined steps after whole windows, which may span
    epochs.
    """
    lengths = {f"hp.training.{name}": length for name in _LENGTHS}
    config = changed({**lengths, "hp.aggregation_frequency": aggregation_frequency})
    hparams = experiment.parse(config, "test").hparams
    assert hparams.steps(batches_per_epoch=11) == steps


def test_epochs_that_end_within_an_accumulation_window_are_refused():
    """Two epochs of 11 batches are five windows of four and two batches that would be
    lost.
    """
    lengths = {f"hp.training.{name}": {"epochs": 2} for name in _LENGTHS}
    hparams = experiment.parse(
        changed({**lengths, "hp.aggregation_frequency": 4}), "test"
    ).hparams
    with pytest.raises(
        ConfigError, match="is 22 batches, which is not a multiple of"
    ) as caught:
        hparams.steps(batches_per_epoch=11)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    "path", ["labels", "environment", "searcher.source_trial_id", "project"]
)
def test_key_that_only_determined_reads_is_accepted(path):
    config = with_overrides(yaml.safe_load(_YAML.read_text()), [f"{path}=1"])
    assert experiment.parse(config, "test").config

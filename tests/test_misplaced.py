"""No run trains in another precision than its YAML seems to ask for without a word."""

from __future__ import annotations

import pytest

from determined_amp import AmpSettings, Precision
from determined_amp import __main__ as door
from determined_amp.amp.errors import ConfigError
from determined_amp.experiment.experiment import NO_AMP_SECTION, parse
from determined_amp.experiment.overrides import with_overrides
from determined_amp.search.search_plan import SearchPlan
from tests.run_here import STRANGE, problems_of, write_yaml
from tests.trials import Weights

PLAIN = with_overrides(
    STRANGE,
    (
        "name=plain",
        "searcher.max_length.batches=4",
        "min_validation_period=null",
        "min_checkpoint_period=null",
    ),
)


class SettingsInCode(Weights):
    """Has its `amp` section in the code."""

    def __init__(self, context):
        super().__init__(context, AmpSettings(Precision.AMP_BF16))


SECTION = "{precision: amp_fp16}"

# An override of the YAML, the key that is named, and what to write.
MISPLACED = [
    (f"amp={SECTION}", "amp", "write hyperparameters: {amp: "),
    ("amp.init_scale=1024", "amp", "write hyperparameters: {amp: "),
    ("precision=amp_bf16", "precision", "{amp: {precision: ...}}"),
    (f"optimizations.amp={SECTION}", "optimizations.amp", "{amp: "),
    (
        "optimizations.mixed_precision=O1",
        "optimizations.mixed_precision",
        "{amp: {precision: ",
    ),
    (f"data.amp={SECTION}", "data.amp", "write hyperparameters: {amp: "),
    *(
        (f"hyperparameters.{name}", f"hyperparameters.{key}", write)
        for name, key, write in [
            ("amp=amp_fp16", "amp", "{amp: {precision: amp_fp16}}"),
            ("amp=[{precision: amp_fp16}]", "amp", "{amp: {precision: amp_fp16}}"),
            ("amp=[precision, amp_fp16]", "amp", "{amp: {precision: amp_fp16}}"),
            (
                "stages=[{amp: {precision: amp_fp16}}]",
                "stages",
                "{amp: {precision: amp_fp16}}",
            ),
            ("precision=amp_bf16", "precision", "{amp: {precision: amp_bf16}}"),
            ("precision={type: const, val: Amp-BF16}", "precision", "amp_bf16}}"),
            ("use_amp=amp_fp16", "use_amp", "{amp: {precision: amp_fp16}}"),
            ("dtype=amp_fp16", "dtype", "{amp: {precision: amp_fp16}}"),
            ("mode=amp_fp16", "mode", "{amp: {precision: amp_fp16}}"),
            (f"AMP={SECTION}", "AMP", "{amp: "),
            ("Amp={init_scale: 1024}", "Amp", "{amp: "),
            (f"optimizer.amp={SECTION}", "optimizer.amp", "{amp: "),
            ("fp32_modules=[head]", "fp32_modules", "{amp: {fp32_modules: "),
            ("max_length={batches: 8}", "max_length", "{training: {max_length: "),
            (
                "reporting_period=2 batches",
                "reporting_period",
                "{training: {reporting_period: ",
            ),
            (
                "Training={max_length: {epochs: 1}}",
                "Training.max_length",
                "{training: ",
            ),
        ]
    ),
]

# What a trial with a mixed precision of its own may have.
OWN = {
    "amp=true": "hyperparameters.amp: True",
    "precision=16": "hyperparameters.precision: 16",
    "dtype=fp32": "hyperparameters.dtype: fp32",
    "fp16=true": "hyperparameters.fp16: True",
    "net.use_amp=true": "hyperparameters.net.use_amp: True",
}


@pytest.mark.parametrize(("override", "key", "write"), MISPLACED)
def test_misplaced_setting_is_one_problem_that_says_where_it_belongs(
    override, key, write
):
    (problem,) = problems_of(with_overrides(PLAIN, [override]))
    assert problem.startswith(f"{key}: got ")
    assert write in problem


@pytest.mark.parametrize("nested", ["amp={precision: amp_fp16}", "precision=amp_fp16"])
def test_amp_section_within_another_section_is_one_problem(nested):
    length = "hyperparameters.training.max_length=4 batches"
    theirs = ("searcher.max_length=null", "scheduling_unit=null")
    ours = with_overrides(PLAIN, (length, *theirs))
    parse(ours, "test")  # the control
    (problem,) = problems_of(
        with_overrides(ours, [f"hyperparameters.training.{nested}"])
    )
    assert "; write hyperparameters: {amp: {precision: " in problem


# A key that Determined's schema closes out, with a value, and what is said of it.
UNKNOWN = {
    "note=4": "allowed there: its own",
    "hyper_parameters=4": "did you mean hyperparameters?",
    "global_batch_size=4": "allowed there: its own",
    "searcher.max_lenght=[1]": "did you mean max_length?",
    "searcher.foo=1": "allowed: name, metric, smaller_is_better, max_length, source_",
    "searcher.max_trials=4": "allowed: name, metric",  # of another searcher
    "searcher.time_metric=batches": "allowed: name, metric",
    "optimizations.agregation_frequency=2": "did you mean aggregation_frequency?",
    "reproducibility.seed=1": "allowed: experiment_seed",
    "resources.slots_per_trail=2": "did you mean slots_per_trial?",
    "profiling.on=true": "allowed: begin_on_batch, enabled",
    "environment.imgae=a": "did you mean image?",
    "checkpoint_storage.host_paht=/a": "did you mean host_path?",
}


@pytest.mark.parametrize(("override", "says"), UNKNOWN.items())
def test_key_that_determined_refuses_is_a_problem_with_its_near_name(override, says):
    key, _, _ = override.partition("=")
    (problem,) = problems_of(with_overrides(PLAIN, [override]))
    assert problem.startswith(f"{key}: unknown key; ")
    assert says in problem
    parse(with_overrides(PLAIN, [f"{key}=null"]), "test")  # which a master fills in


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("singel", "did you mean single?"),
        ("custom", "allowed: single, grid, random, adaptive_asha, async_halving"),
    ],
)
def test_searcher_that_determined_refuses_is_not_trained(name, says, tmp_path, refusal):
    config = with_overrides(PLAIN, [f"searcher.name={name}"])
    said = refusal("train", write_yaml(tmp_path, config))
    assert f"searcher.name: got '{name}'; {says}" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "searcher",
    [
        "{name: random, max_trials: 4, max_concurrent_trials: 2}",
        "{name: grid, source_trial_id: 7}",
        "{name: adaptive_asha, max_trials: 4, time_metric: batches, max_time: 4}",
        "{name: async_halving, num_rungs: 2, stop_once: true}",
    ],
)
def test_searcher_of_determined_is_no_problem(searcher):
    length = {"max_length": {"batches": 4}}
    config = with_overrides(PLAIN, [f"searcher={searcher}"])
    parse({**config, "searcher": {**config["searcher"], **length}}, "test")


@pytest.mark.parametrize(("override", "named"), OWN.items())
def test_hyperparameter_of_amp_of_a_trials_own_is_named_first(override, named):
    found = parse(with_overrides(PLAIN, [f"hyperparameters.{override}"]), "test")
    assert found.amp is None
    assert (
        found.described_precision(found.precision)
        == f"{NO_AMP_SECTION} ({named}: the trial's own)"
    )


@pytest.mark.parametrize(
    "override",
    [
        "name=amp_fp16",
        "checkpoint_storage={type: shared_fs, host_path: /amp_fp16}",
        "data.folder=amp_fp16",
        "data.training={max_length: 128}",
        "hyperparameters.max_length=128",
        "hyperparameters.warmup=4",
        "hyperparameters.scaler={init_scale: 1024, growth_interval: 10}",
        "searcher.metric=precision",
    ],
)
def test_what_only_looks_like_a_setting_is_no_problem_and_not_named(override):
    found = parse(with_overrides(PLAIN, [override]), "test")
    assert found.described_precision(found.precision) == NO_AMP_SECTION


def test_key_with_a_dot_in_it_is_not_taken_for_a_section():
    hyperparameters = {"lr": 0.1, "amp.precision": "amp_fp16"}
    (problem,) = problems_of({**PLAIN, "hyperparameters": hyperparameters})
    assert problem.startswith("hyperparameters.amp.precision: got 'amp_fp16', which")


def test_hyperparameter_that_is_called_type_hides_no_other():
    own = {"lr": 0.1, "type": "const"}
    settings = parse({**PLAIN, "hyperparameters": own}, "test").settings
    assert {name: settings[f"hyperparameters.{name}"] for name in own} == own
    (problem,) = problems_of(
        {**PLAIN, "hyperparameters": {**own, "precision": "amp_fp16"}}
    )
    assert problem.startswith("hyperparameters.precision: got 'amp_fp16'")


@pytest.mark.parametrize("key", ["amp", "precision"])
def test_range_of_a_search_that_holds_a_misplaced_precision_is_refused(key):
    choices = "{type: categorical, vals: [fp32, amp_fp16]}"
    grid = "searcher={name: grid, metric: val_loss, max_length: 4}"
    right = [grid, f"hyperparameters.amp.precision={choices}"]
    SearchPlan(with_overrides(PLAIN, right), "search.yaml")  # the control
    wrong = with_overrides(PLAIN, [grid, f"hyperparameters.{key}={choices}"])
    with pytest.raises(ConfigError, match=f"hyperparameters.{key}: got "):
        SearchPlan(wrong, "search.yaml")


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ((), NO_AMP_SECTION, "no amp section: "),
        (
            ("hyperparameters.amp.precision=amp_bf16",),
            "precision: amp_bf16",
            "amp_bf16\n",
        ),
        (
            (
                "entrypoint=tests.test_misplaced:SettingsInCode",
                "searcher.metric=validation_loss",
            ),
            "precision: amp_bf16 (by AmpSettings in the trial; no amp section)",
            "amp_bf16 (by AmpSettings",
        ),
    ],
    ids=["no section", "amp_bf16", "settings in the code"],
)
def test_log_begins_with_the_precision_and_the_closing_line_names_it(
    changes, first, last, tmp_path, capsys
):
    path = write_yaml(tmp_path, with_overrides(PLAIN, changes))
    run = tmp_path / "run"
    assert door.main(["train", path, "--run-folder", str(run)]) == 0
    log = (run / "log.txt").read_text()
    assert log.splitlines()[0].endswith(f": {first}")
    assert ("no guard" in log) is ("no guard" in first)
    assert f"\nplain: completed; {last}" in capsys.readouterr().out

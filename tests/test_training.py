"""Everything that works for the trials of this repository works for a stranger's.

The configuration of most tests is Determined's own form: an entrypoint,
`searcher.max_length`.
"""

import pytest
import torch
import yaml

from determined_amp import __main__ as door
from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from determined_amp.experiment.training import Length
from determined_amp.local.checkpoint_storage import read_metadata
from determined_amp.runs.folder import complete_checkpoints, read_metrics
from tests import run_here, strangers
from tests.run_here import STRANGE, problems_of, run

TRIAL = STRANGE["entrypoint"]


def changed(*overrides):
    return with_overrides(STRANGE, overrides)


def parse(*overrides, **options):
    return experiment.parse(changed(*overrides), "test", **options)


def write(folder, *overrides, without=()):
    config = {
        key: value for key, value in changed(*overrides).items() if key not in without
    }
    return run_here.write_yaml(folder, config)


class TestDeterminedsForm:
    def test_experiment_in_determineds_form_means_what_it_means_there(self):
        found = parse(
            "min_checkpoint_period={epochs: 2}",
            "optimizations={aggregation_frequency: 3}",
            "perform_initial_validation=true",
        )
        assert (found.trial, found.factory) == (TRIAL, strangers.Stranger)
        assert found.settings["hyperparameters.trial"] == TRIAL
        assert found.training.max_length == Length(batches=12)
        assert found.training.validation_period == Length(batches=6)
        assert found.training.checkpoint_period == Length(epochs=2)
        assert found.training.reporting_period == Length(batches=2)
        assert found.training.cudnn_benchmark is None
        assert found.aggregation_frequency == 3
        assert found.platform.optimizations.average_aggregated_gradients
        assert found.platform.perform_initial_validation
        assert (found.amp, found.hparams, found.data, found.seed) == (None, None, {}, 0)

    def test_number_is_of_batches_and_a_period_of_0_is_never(self):
        """The master fills in such periods."""
        periods = (
            "min_validation_period={batches: 0}",
            "min_checkpoint_period={epochs: 0}",
        )
        found = parse("searcher.max_length=7", *periods)
        assert found.max_length == Length(batches=7)
        assert (
            found.training.validation_period is found.training.checkpoint_period is None
        )

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("searcher.max_length={}", "searcher.max_length.batches: got 0 units; "),
            ("searcher.max_length=soon", "searcher.max_length: got 'soon'; "),
            (
                "min_checkpoint_period={records: 9}",
                "min_checkpoint_period.records: unknown key; allowed: batches",
            ),
            ("scheduling_unit=0", "scheduling_unit: got 0; allowed: an integer >= 1"),
            (
                "optimizations={aggregation_frequency: 0}",
                "optimizations.aggregation_freq",
            ),
            (
                "hyperparameters.global_batch_size=x",
                "hyperparameters.global_batch_size: got 'x'; ",
            ),
            (
                "hyperparameters.lr={type: log, base: 10, minval: -3, maxval: -1}",
                (
                    "hyperparameters.lr: got a range to search; allowed: one value, for"
                    " instance by "
                ),
            ),
        ],
    )
    def test_mistake_is_the_one_problem_reported(self, override, problem):
        (found,) = problems_of(changed(override))
        assert found.startswith(problem)

    def test_constant_is_its_value_and_amp_of_another_meaning_is_no_section(self):
        found = parse(
            "hyperparameters={lr: {type: const, val: 0.5}, net: {n: {type: const}}}"
        )
        assert found.hyperparameters == {"lr": 0.5, "net": {"n": None}}
        assert parse("hyperparameters.amp=true").amp is None
        (problem,) = problems_of(changed("hyperparameters.amp={precision: bf16}"))
        assert problem.startswith(
            "hyperparameters.amp.precision: got 'bf16'; allowed: fp32, "
        )


def test_experiment_in_this_librarys_form_needs_a_length_alone():
    lengths = {"max_length": "2 epochs"}
    config = {"hyperparameters": {"trial": TRIAL, "training": lengths}}
    found = experiment.parse(config, "test")
    assert found.max_length == Length(epochs=2)
    assert found.training.validation_period is None
    assert found.training.checkpoint_period is None
    assert found.training.reporting_period == Length(batches=100)
    assert found.platform.searcher.metric is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stranger")
    return run(directory / "run", write(directory))


class TestTraining:
    def test_reports_are_those_of_the_trial(self, folder):
        lines = list(read_metrics(folder / "metrics.jsonl"))
        validations = [line for line in lines if line["group"] == "validation"]
        assert [line["batches"] for line in validations] == [6, 12]
        assert validations[0]["note"] == "[not] a number"
        assert isinstance(validations[0]["per_class"], str)
        trained = [line for line in lines if line["group"] == "training"]
        assert [line["batches"] for line in trained] == [2, 4, 6, 8, 10, 12]

    def test_trial_and_seed_are_recorded_for_a_resume(self, tmp_path):
        config = write(tmp_path, without=("entrypoint",))
        found = run(tmp_path / "run", config, "--trial", "tests.strangers:make")
        recorded = yaml.safe_load((found / "config.yaml").read_text())
        train = "python3 -m determined_amp train"
        assert recorded["entrypoint"] == f"{train} --trial tests.strangers:make"
        assert recorded["reproducibility"] == {"experiment_seed": 0}
        assert recorded["hyperparameters"] == {"lr": 0.1}  # as the trial gets them
        run_here.resume(found, "--config", "searcher.max_length.batches=14")

    def test_aggregation_is_averaged_or_not_as_the_configuration_says(self, tmp_path):
        """A step of SGD by the mean of two gradients, at twice the rate, is one by
        their sum.
        """
        weights = []
        for average, rate in (("true", 0.2), ("false", 0.1)):
            config = write(
                tmp_path,
                f"hyperparameters.lr={rate}",
                "searcher.max_length.batches=2",
                "optimizations.aggregation_frequency=2",
                f"optimizations.average_aggregated_gradients={average}",
            )
            found = run(tmp_path / average, config)
            weights.append(run_here.checkpoint(found, 2)["models_state_dict"][0])
        for name, weight in weights[0].items():
            assert torch.allclose(weight, weights[1][name], rtol=0, atol=1e-7)

    @pytest.mark.parametrize(
        ("metric", "fault"),
        [("note", "is no number"), ("f1", "is not reported")],
    )
    def test_missing_searcher_metric_loses_no_trained_batch(
        self, metric, fault, tmp_path, refusal
    ):
        path = write(tmp_path, f"searcher.metric={metric}", "checkpoint_policy=none")
        folder = tmp_path / "run"
        said = refusal("train", path, "--run-folder", str(folder))
        names = "allowed: batches, epochs, val_loss"
        assert f"searcher.metric: got {metric}, which {fault}; {names}" in said
        (saved,) = complete_checkpoints(folder / "checkpoints")
        assert read_metadata(saved)["steps_completed"] == run_here.end(folder)[2] == 6
        run_here.resume(folder, "--config", "searcher.metric=val_loss")

    def test_run_without_a_metric_and_with_an_infinite_mask_is_resumed(self, tmp_path):
        masked = "entrypoint=tests.test_training:Masked"
        searcher = "searcher={name: single, max_length: {batches: 4}}"
        found = run(tmp_path / "run", write(tmp_path, masked, searcher))
        run_here.resume(found, "--config", "searcher.max_length.batches=6")
        assert run_here.end(found) == ("completed", "", 6)


def test_audit_of_a_trial_without_mixed_precision_judges_nothing(tmp_path, capsys):
    path = write(tmp_path, without=("entrypoint", "searcher"))
    assert door.run(["audit", path, "--trial", "tests.test_training:InBFloat16"]) == 0
    printed = capsys.readouterr().out
    assert " bfloat16 " in printed
    assert "not judged: the trial has no MixedPrecision" in printed


SAID = "a resumed run sees the batches of an undisturbed one if "


class TestOrderOfTheTrialsOwn:
    @pytest.mark.parametrize(
        ("order", "condition"),
        [
            (
                "generator",
                "the generator of its loader starts with the same seed again",
            ),
            ("sampler", "its FromEnd gives the same order again"),
            (
                "loader",
                "the trial skips them: its loader is no determined.pytorch.DataLoader",
            ),
            ("workers", "its loader's workers draw nothing at random"),
        ],
    )
    def test_condition_for_an_equal_resume_is_one_line_of_the_log(
        self, tmp_path, order, condition
    ):
        overrides = (f"hyperparameters.order={order}", "searcher.max_length.batches=1")
        config = write(tmp_path, "entrypoint=tests.strangers:OwnOrder", *overrides)
        log = (run(tmp_path / "run", config) / "log.txt").read_text()
        assert f"{SAID}{condition}" in log
        assert log.count(SAID) == 1


class Masked(strangers.Stranger):
    """Its model has a mask that is infinite from the start, as that of causal attention
    is.
    """

    def __init__(self, context):
        super().__init__(context)
        self.model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))


class InBFloat16(strangers.Stranger):
    def train_batch(self, batch, epoch_idx, batch_idx):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().train_batch(batch, epoch_idx, batch_idx)

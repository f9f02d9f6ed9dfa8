"""Everything that works for the trials of this repository works for a stranger's.

The configuration of most tests is Determined's own form: an entrypoint,
`searcher.max_length`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from determined import pytorch
from torch import nn

from determined_amp import __main__ as door
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.plain_data import Config, Metrics, Values
from determined_amp.experiment import experiment
from determined_amp.experiment.experiment import experiment_in
from determined_amp.experiment.factory import load_factory
from determined_amp.experiment.failures import fault_in_16_bits
from determined_amp.experiment.overrides import with_overrides
from determined_amp.experiment.training import Length
from determined_amp.local.checkpoint_storage import complete_checkpoints, read_metadata
from determined_amp.local.open_trial import open_trial
from determined_amp.runs.folder import read_metrics
from determined_amp.trial.fitting import fit
from tests import strangers, training
from tests.harness import same_bits

TRIAL = "tests.strangers:Stranger"
LEGACY: Values = {
    "name": "stranger",
    "entrypoint": TRIAL,
    "hyperparameters": {"lr": 0.1},
    "searcher": {"name": "single", "metric": "val_loss", "max_length": {"batches": 12}},
    "min_validation_period": {"batches": 6},
    "min_checkpoint_period": {"batches": 4},
    "scheduling_unit": 2,
}


def changed(*overrides: str) -> Values:
    return with_overrides(LEGACY, overrides)


def parse(*overrides: str, **options: Any) -> experiment.Experiment:
    return experiment.parse(changed(*overrides), "test", **options)


def problems_of(config: Config, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        experiment.parse(config, "test", **options)
    return caught.value.problems


def write(folder: Path, *overrides: str, without: tuple[str, ...] = ()) -> str:
    config = {
        key: value for key, value in changed(*overrides).items() if key not in without
    }
    return training.write_yaml(folder, config)


class TestDeterminedsForm:
    def test_experiment_in_determineds_form_means_what_it_means_there(self) -> None:
        found = parse(
            "optimizations={aggregation_frequency: 3}",
            "perform_initial_validation=true",
        )
        assert (found.trial, found.factory) == (TRIAL, strangers.Stranger)
        assert found.settings["hyperparameters.trial"] == TRIAL
        assert found.training.max_length == Length(batches=12)
        assert found.training.validation_period == Length(batches=6)
        assert found.training.checkpoint_period == Length(batches=4)
        assert found.training.reporting_period == Length(batches=2)
        assert found.training.cudnn_benchmark is None
        assert found.aggregation_frequency == 3
        assert found.platform.optimizations.average_aggregated_gradients
        assert found.platform.perform_initial_validation
        assert (found.amp, found.hparams, found.data, found.seed) == (None, None, {}, 0)

    @pytest.mark.parametrize(
        ("length", "read"),
        [
            ("{batches: 7}", Length(batches=7)),
            ("{epochs: 2}", Length(epochs=2)),
            ("{records: 70}", Length(batches=8)),  # of 8 samples
            ("{records: 3}", Length(batches=1)),
        ],
    )
    def test_length_is_in_any_of_its_units(self, length: str, read: Length) -> None:
        size = "hyperparameters.global_batch_size=8"
        found = parse(
            f"searcher.max_length={length}", f"min_validation_period={length}", size
        )
        assert found.max_length == found.training.validation_period == read

    def test_number_is_of_batches_and_a_period_of_0_is_never(self) -> None:
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
            *(
                (
                    f"{period}={{records: 9}}",
                    f"{period}.records: unknown key; allowed: batches",
                )
                for period in ("min_validation_period", "min_checkpoint_period")
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
    def test_mistake_is_the_one_problem_reported(
        self, override: str, problem: str
    ) -> None:
        (found,) = problems_of(changed(override))
        assert found.startswith(problem)

    def test_constant_is_its_value_and_amp_of_another_meaning_is_no_section(
        self,
    ) -> None:
        found = parse(
            "hyperparameters={lr: {type: const, val: 0.5}, net: {n: {type: const}}}"
        )
        assert found.hyperparameters == {"lr": 0.5, "net": {"n": None}}
        assert parse("hyperparameters.amp=true").amp is None
        (problem,) = problems_of(changed("hyperparameters.amp={precision: bf16}"))
        assert problem.startswith(
            "hyperparameters.amp.precision: got 'bf16'; allowed: fp32, "
        )

    @pytest.mark.parametrize("length", ["{epochs: 3}", "{batches: 9}", "null"])
    @pytest.mark.parametrize(
        "override",
        ["searcher.max_length.batches=40", "searcher.max_length={batches: 40}"],
    )
    def test_length_is_replaced_by_one_in_another_unit(
        self, length: str, override: str
    ) -> None:
        """The first override is what the message proposes where there is no length."""
        assert parse(f"searcher.max_length={length}", override).max_length == Length(
            batches=40
        )


def test_experiment_in_this_librarys_form_needs_a_length_alone() -> None:
    config = {
        "hyperparameters": {"trial": TRIAL, "training": {"max_length": {"epochs": 2}}}
    }
    found = experiment.parse(config, "test")
    assert found.max_length == Length(epochs=2)
    assert found.training.validation_period is None
    assert found.training.checkpoint_period is None
    assert found.training.reporting_period == Length(batches=100)
    assert found.platform.searcher.metric is None


def made(name: str) -> Any:
    with open_trial(
        experiment_in(LEGACY, "test", trial=f"tests.strangers:{name}")
    ) as found:
        assert found.context.get_hparams() == {"lr": 0.1}
        return found.trial


class TestConstructors:
    @pytest.mark.parametrize("name", ["Stranger", "make", "WithDefaults"])
    def test_class_or_function_makes_a_trial_of_the_context_alone(
        self, name: str
    ) -> None:
        assert type(made(name)) in (strangers.Stranger, strangers.WithDefaults)

    def test_second_required_argument_is_the_hyperparameters(self) -> None:
        assert made("WithHparams").given == {"lr": 0.1}

    def test_trial_that_pops_its_hyperparameters_leaves_those_of_the_experiment(
        self,
    ) -> None:
        with open_trial(
            experiment_in(LEGACY, "test", trial="tests.strangers:Greedy")
        ) as found:
            assert found.context.get_hparams() == {}
            assert found.experiment.hyperparameters == {"lr": 0.1}
        assert LEGACY["hyperparameters"] == {"lr": 0.1}

    def test_hparams_of_a_trial_that_are_no_settings_class_are_left_alone(self) -> None:
        assert parse(trial="tests.strangers:WithMarkers").hparams is None

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("WithTokenizer", ", which takes (context: "),
            (
                "make_without",
                "which takes () -> 'None'; allowed: (context) or (context, hparams)",
            ),
            ("OnDeepSpeed", "is a DeepSpeedTrial, and DeepSpeed is out of scope"),
            ("SAMPLES", "is not a PyTorchTrial"),
        ],
    )
    def test_trial_that_cannot_be_made_is_refused_before_anything_starts(
        self, name: str, words: str
    ) -> None:
        (problem,) = problems_of(LEGACY, trial=f"tests.strangers:{name}")
        assert problem.startswith(f"--trial: got 'tests.strangers:{name}', which ")
        assert words in problem

    def test_function_that_makes_no_trial_is_named(self) -> None:
        with pytest.raises(ConfigError, match="make_nothing: made NoneType"):
            made("make_nothing")

    def test_name_with_a_dot_is_looked_up_in_the_class(self) -> None:
        with pytest.raises(ValueError, match="which is not a PyTorchTrial"):
            load_factory("tests.strangers:WithMarkers.Hparams")
        with pytest.raises(ValueError, match="'Stranger' has no attribute 'Nope'"):
            load_factory("tests.strangers:Stranger.Nope")


def run(folder: Path, *arguments: str) -> Path:
    assert door.run(["train", *arguments, "--run-folder", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stranger")
    return run(directory / "run", write(directory))


class TestTraining:
    def test_reports_are_those_of_the_trial(self, folder: Path) -> None:
        lines = list(read_metrics(folder / "metrics.jsonl"))
        validations = [line for line in lines if line["group"] == "validation"]
        assert [line["batches"] for line in validations] == [6, 12]
        assert validations[0]["note"] == "[not] a number"
        assert isinstance(validations[0]["per_class"], str)
        trained = [line for line in lines if line["group"] == "training"]
        assert [line["batches"] for line in trained] == [2, 4, 6, 8, 10, 12]

    @pytest.mark.parametrize("batches", [8, 7])
    def test_run_that_a_resume_makes_longer_is_the_undisturbed_one_to_the_bit(
        self, folder: Path, tmp_path: Path, batches: int
    ) -> None:
        """The scheduler halves the rate every second batch; dropout draws from the
        random state.

        The run of 7 batches ended with one more validation, which draws, too.
        """
        short = write(tmp_path, f"searcher.max_length.batches={batches}")
        again = run(tmp_path / "again", short)
        longer = ["--resume", str(again), "--config", "searcher.max_length.batches=12"]
        assert door.run(["train", *longer]) == 0
        assert same_bits(*(training.checkpoint(path, 12) for path in (folder, again)))
        (schedule,) = training.checkpoint(again, 12)["lr_schedulers_state_dict"]
        assert schedule["last_epoch"] == 12

    def test_trial_and_seed_are_recorded_for_a_resume(self, tmp_path: Path) -> None:
        config = write(tmp_path, without=("entrypoint",))
        found = run(tmp_path / "run", config, "--trial", "tests.strangers:make")
        recorded = yaml.safe_load((found / "config.yaml").read_text())
        assert recorded["entrypoint"] == "tests.strangers:make"
        assert recorded["reproducibility"] == {"experiment_seed": 0}
        assert recorded["hyperparameters"] == {"lr": 0.1}  # as the trial gets them
        longer = ["--resume", str(found), "--config", "searcher.max_length.batches=14"]
        assert door.run(["train", *longer]) == 0
        assert training.checkpoint(found, 14)

    @pytest.mark.parametrize(
        "entrypoint",
        [
            "python3 -m determined_amp train --trial tests.strangers:make",
            ["python3", "-m", "determined_amp", "find", "--trial=tests.strangers:make"],
        ],
        ids=["text", "list"],
    )
    def test_trial_is_the_one_that_the_command_of_the_entrypoint_names(
        self, entrypoint: object
    ) -> None:
        """It counts on a cluster, too, and where the hyperparameters name another
        trial.
        """
        for hyperparameters in (
            {"lr": 0.1},
            {"lr": 0.1, "trial": "tests.strangers:Greedy"},
        ):
            config = {
                **LEGACY,
                "entrypoint": entrypoint,
                "hyperparameters": hyperparameters,
            }
            parsed = experiment.parse(config, "test")
            again = experiment.parse(parsed.config, "test")
            assert parsed.trial == again.trial == "tests.strangers:make"

    def test_aggregation_is_averaged_or_not_as_the_configuration_says(
        self, tmp_path: Path
    ) -> None:
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
            weights.append(training.checkpoint(found, 2)["models_state_dict"][0])
        for name, weight in weights[0].items():
            assert torch.allclose(weight, weights[1][name], rtol=0, atol=1e-7)

    @pytest.mark.parametrize(
        ("policy", "metric", "fault"),
        [
            ("all", "note", "is no number"),
            ("none", "f1", "the trial does not report"),
        ],
    )
    def test_missing_searcher_metric_loses_no_trained_batch(
        self,
        policy: str,
        metric: str,
        fault: str,
        tmp_path: Path,
        refusal: Callable[..., str],
    ) -> None:
        path = write(
            tmp_path, f"searcher.metric={metric}", f"checkpoint_policy={policy}"
        )
        folder = tmp_path / "run"
        said = refusal("train", path, "--run-folder", str(folder))
        words = (
            f"searcher.metric: got {metric}, which {fault}; allowed: batches, epochs,"
            " val_loss"
        )
        assert words in said
        (saved,) = complete_checkpoints(folder / "checkpoints")
        reports = read_metrics(folder / "metrics.jsonl")
        first = next(
            line["batches"] for line in reports if line["group"] == "validation"
        )
        assert read_metadata(saved)["steps_completed"] == first
        again = ["--resume", str(folder), "--config", "searcher.metric=val_loss"]
        assert door.main(["train", *again]) == 0

    def test_searcher_without_a_metric_is_enough_to_train(self, tmp_path: Path) -> None:
        config = write(tmp_path, "searcher={name: single, max_length: {batches: 12}}")
        found = run(tmp_path / "run", config)
        assert training.end(found) == ("completed", "", 12)

    def test_run_whose_model_has_an_infinite_mask_is_resumed(
        self, tmp_path: Path
    ) -> None:
        masked = "entrypoint=tests.test_strangers:Masked"
        found = run(
            tmp_path / "run", write(tmp_path, masked, "searcher.max_length.batches=4")
        )
        training.resume(found, "--config", "searcher.max_length.batches=6")
        assert training.end(found) == ("completed", "", 6)

    def test_trial_of_a_finished_search_can_be_trained_again(
        self, tmp_path: Path
    ) -> None:
        """Its YAML has the searcher of its search, and a value for every
        hyperparameter.
        """
        run(tmp_path / "run", write(tmp_path, "searcher.name=grid"))


def test_audit_of_a_trial_without_mixed_precision_judges_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, without=("entrypoint", "searcher"))
    assert door.run(["audit", path, "--trial", "tests.test_strangers:InBFloat16"]) == 0
    printed = capsys.readouterr().out
    assert " bfloat16 " in printed
    assert "not judged: the trial has no MixedPrecision" in printed


# Trials whose batches are drawn at random, and what their YAML says of it.
SHUFFLED = {
    "workers": ("Shuffled", "hyperparameters.workers=2"),
    "weighted": ("Weighted",),
    "accumulated": (
        "Shuffled",
        "optimizations.aggregation_frequency=2",
        "hyperparameters.amp={precision: amp_fp16, audit: false}",
    ),
}


@pytest.fixture(scope="module", params=SHUFFLED)
def shuffled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, str, Path]:
    """The class of such a trial, its YAML, and the folder of an undisturbed run."""
    name, *overrides = SHUFFLED[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    config = write(directory, f"entrypoint=tests.strangers:{name}", *overrides)
    return getattr(strangers, name), config, run(directory / "run", config)


def test_resumed_run_on_shuffled_batches_is_the_undisturbed_one_to_the_bit(
    shuffled: tuple[Any, str, Path], tmp_path: Path
) -> None:
    """An epoch is 5 or 6 batches, a checkpoint every 4th."""
    trial, config, whole = shuffled
    with training.killed_in_batch(10, trial):
        run(tmp_path, config)
    training.resume(tmp_path)
    assert training.same_numbers(tmp_path) == training.same_numbers(whole)
    assert same_bits(*(training.checkpoint(path, 12) for path in (tmp_path, whole)))


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
        self, tmp_path: Path, order: str, condition: str
    ) -> None:
        overrides = (f"hyperparameters.order={order}", "searcher.max_length.batches=1")
        config = write(tmp_path, "entrypoint=tests.strangers:OwnOrder", *overrides)
        log = (run(tmp_path / "run", config) / "log.txt").read_text()
        assert f"{SAID}{condition}" in log
        assert log.count(SAID) == 1

    def test_shuffled_batches_need_no_condition_for_an_equal_resume(
        self, shuffled: tuple[Any, str, Path]
    ) -> None:
        *_, whole = shuffled
        assert SAID not in (whole / "log.txt").read_text()


class Masked(strangers.Stranger):
    """Its model has a mask that is infinite from the start, as that of causal attention
    is.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))


class InBFloat16(strangers.Stranger):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Metrics:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().train_batch(batch, epoch_idx, batch_idx)


def fitted(config: Config, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Values:
    """What `fit` gives Determined's `Trainer`."""
    given: Values = {}
    monkeypatch.setattr(
        pytorch.Trainer, "fit", lambda trainer, **named: given.update(named)
    )
    with open_trial(experiment_in(config, "test")) as found:
        fit(found.trial, found.context, **options)
    return {
        name: (type(it), it.value) if hasattr(it, "value") else it
        for name, it in given.items()
    }


class TestFit:
    def test_fit_takes_what_the_configuration_and_the_caller_say(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = changed("checkpoint_policy=all", "perform_initial_validation=true")
        given = fitted(config, monkeypatch)
        expected = {
            "max_length": (pytorch.Batch, 12),
            "validation_period": (pytorch.Batch, 6),
            "checkpoint_period": (pytorch.Batch, 4),
            "reporting_period": (pytorch.Batch, 2),
            "checkpoint_policy": "all",
            "step_zero_validation": True,
            "latest_checkpoint": None,
        }
        assert given.items() >= expected.items()
        own = {"max_length": pytorch.Epoch(3), "checkpoint_policy": "none"}
        expected |= {"max_length": (pytorch.Epoch, 3), "checkpoint_policy": "none"}
        given = fitted(config, monkeypatch, **own)
        assert given.items() >= expected.items()

    def test_fit_sets_cudnn_benchmark_only_if_it_is_given(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        section: Values = {"max_length": {"epochs": 2}}
        ours = {"hyperparameters": {"trial": TRIAL, "training": section}}
        assert fitted(ours, monkeypatch)["max_length"] == (pytorch.Epoch, 2)
        assert torch.backends.cudnn.benchmark
        section["cudnn_benchmark"] = False
        fitted(ours, monkeypatch)
        assert not torch.backends.cudnn.benchmark

    def test_fit_refuses_a_context_with_another_aggregation_frequency(self) -> None:
        words = (
            r"^experiment configuration: aggregation_frequency: got \d, .* made with 7;"
            r" allowed: "
        )
        with open_trial(experiment_in(changed(), "test")) as found:
            found.context._aggregation_frequency = 7
            with pytest.raises(ConfigError, match=words):
                fit(found.trial, found.context)


# In the form of Determined's own tutorials: its script is started by the platform.
TUTORIAL = """\
name: tutorial
hyperparameters: {lr: 0.1}
searcher:
  name: single
  metric: val_loss
  max_length: {batches: 4}
  smaller_is_better: true
entrypoint: python3 train.py
"""


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "audit",
        "find --precision amp_fp16",
        "score --config hyperparameters.amp.precision=amp_fp16",
    ],
)
def test_yaml_of_a_tutorial_needs_its_trial_alone(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Callable[..., str],
) -> None:
    (tmp_path / "const.yaml").write_text(TUTORIAL)
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    words = [name, "const.yaml", *options]
    said = refusal(*words)
    assert "the entrypoint 'python3 train.py' names none; allowed: module:Class" in said
    assert door.main([*words, "--trial", "tests.strangers:WithHparams"]) == 0


class TestTrialsThatCannotTrain:
    """Every command that needs what is missing says so in one sentence."""

    @pytest.fixture(autouse=True)
    def _there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        text = (
            "hyperparameters: {global_batch_size: 4}\nsearcher: {max_length: {batches:"
            " 2}}\n"
        )
        (tmp_path / "config.yaml").write_text(text)

    @pytest.mark.parametrize(
        ("command", "trial", "said"),
        [
            *(
                (name, "WithoutData", "the training data")
                for name in ("train", "find", "audit")
            ),
            (
                "train",
                "WithoutValidationData",
                "the validation data loader has no batch",
            ),
            ("find", "WithoutParameters", "no parameter of this trial"),
        ],
    )
    def test_trial_without_data_or_parameters_is_told_what_is_missing(
        self,
        command: str,
        trial: str,
        said: str,
        refusal: Callable[..., str],
    ) -> None:
        names = ["--trial", f"tests.strangers:{trial}", "--precision", "amp_fp16"]
        assert said in refusal(command, "config.yaml", *names)

    @pytest.mark.parametrize("command", ["train", "find", "audit", "score"])
    def test_batch_size_that_the_yaml_lacks_is_named_by_its_key(
        self, command: str, tmp_path: Path, refusal: Callable[..., str]
    ) -> None:
        text = "searcher: {max_length: {batches: 2}}\n"
        (tmp_path / "config.yaml").write_text(text)
        names = ["--trial", "tests.strangers:WithBatchSize"]
        names += ["--precision", "amp_fp16"]
        if command == "score":
            names[2:] = ["--config", "hyperparameters.amp={precision: amp_fp16}"]
        said = refusal(command, "config.yaml", *names)
        key = "hyperparameters.global_batch_size"
        assert f"{key}: missing; allowed: " in said
        assert f"--config {key}=32" in said

    @pytest.mark.parametrize("command", ["train", "find", "audit"])
    def test_code_that_runs_in_float32_alone_is_named_with_its_line(
        self, command: str, refusal: Callable[..., str]
    ) -> None:
        names = ["--trial", "tests.strangers:WithMask", "--precision", "amp_fp16"]
        lines = refusal(command, "config.yaml", *names).splitlines()
        (line,) = [line for line in lines if "a number is beyond float16" in line]
        source = Path(strangers.__file__).read_text().splitlines()
        at = re.search(r"strangers\.py, line (\d+)\); allowed: ", line)
        assert at is not None
        assert "super().forward(points" in source[int(at[1]) - 1]
        assert "torch.finfo(x.dtype).min" in line
        names[-1] = "fp32"
        assert door.main(["audit", "config.yaml", *names]) == 0

    def test_module_with_a_syntax_error_is_named_with_its_line(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        refusal: Callable[..., str],
    ) -> None:
        (tmp_path / "half_written.py").write_text("import torch\ndef f(:\n")
        monkeypatch.syspath_prepend(tmp_path)
        for command in ("train", "find", "audit"):
            said = refusal(command, "config.yaml", "--trial", "half_written:Trial")
            assert "(half_written.py, line 2)" in said


layer, points, rows = nn.Linear(4, 4), torch.ones(6, 4), torch.tensor([0, 2])


def island(operation: Callable[[torch.Tensor], Any]) -> Any:
    """Of a 16-bit tensor, where autocast is off."""
    hidden = layer(points)
    with torch.autocast("cpu", enabled=False):
        return operation(hidden)


BEYOND, MISSING, MIXED = (
    "a number is beyond float16",
    "this device cannot compute an operation in 16 bits",
    "an operation gets a 16-bit tensor",
)
# Code that runs in float32, and what it fails of in 16 bits: one for each wording of
# torch.
IN_FLOAT32_ALONE: dict[str, tuple[str, Callable[[], Any]]] = {
    "full_like": (BEYOND, lambda: torch.full_like(layer(points), -1e30)),
    "logdet": (MISSING, lambda: torch.logdet(layer(points[:4]))),
    "index_put": (
        MIXED,
        lambda: torch.zeros(6, 4).index_put((rows,), layer(points[rows])),
    ),
    "index_add": (
        MIXED,
        lambda: torch.zeros(6, 4).index_add(0, rows, layer(points[rows])),
    ),
    "lerp": (MIXED, lambda: torch.lerp(points, layer(points), 0.5)),
    "dot": (MIXED, lambda: torch.dot(layer(points)[0], points[0])),
    "linear": (MIXED, lambda: island(layer)),
    "bmm": (
        MIXED,
        lambda: island(lambda hidden: torch.bmm(hidden[None], points.T[None])),
    ),
    "conv2d": (
        MIXED,
        lambda: island(lambda hidden: nn.Conv2d(4, 4, 1)(hidden.T.reshape(1, 4, 6, 1))),
    ),
}


@pytest.mark.parametrize("operation", IN_FLOAT32_ALONE)
def test_error_in_16_bits_alone_is_explained_with_its_line(operation: str) -> None:
    fault, code = IN_FLOAT32_ALONE[operation]
    code()
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(Exception) as error,  # noqa: PT011
    ):
        code()
    explained = fault_in_16_bits(error.value)
    assert explained is not None
    assert explained.startswith(fault)
    assert "test_strangers.py, line" in explained


@pytest.mark.parametrize(
    "code",
    [
        lambda: layer(torch.ones(6, 3)),
        lambda: layer(points.double()),
        lambda: nn.CrossEntropyLoss()(points, torch.full((6,), 9)),
        lambda: points.long().mean(),
    ],
    ids=["shape", "double", "class", "mean of integers"],
)
def test_error_that_float32_has_too_is_left_to_its_traceback(
    code: Callable[[], Any],
) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011
        code()
    assert fault_in_16_bits(error.value) is None

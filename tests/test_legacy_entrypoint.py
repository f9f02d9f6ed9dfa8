"""A trial named as `module:Class` in its YAML, run by Determined's harness; a stub for
a master.
"""

import sys
from typing import Any
from unittest.mock import Mock

import determined as det
import pytest
from determined import util
from determined.exec import harness

from determined_amp import ConfigError, TrialAsItIs
from determined_amp.amp.plain_data import Values
from tests.cluster_task import TaskMaster, start_task
from tests.harness import content, same_bits
from tests.trials import FP16_SECTION as FP16
from tests.trials import Weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for legacy entrypoint:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Configuring `max_length` from:FutureWarning"),
]


@pytest.fixture
def legacy(folder, monkeypatch):
    """Runs a trial class as the entrypoint `module:Class` does; what it reported."""

    def run(trial_class, amp, batches=None, first_batch=0, **others):
        hparams = {"global_batch_size": 2, "amp": amp, **others}
        config: Values = {
            "entrypoint": "model_def:Trial",
            "hyperparameters": hparams,
            "searcher": {
                "name": "single",
                "metric": "validation_loss",
                "smaller_is_better": True,
                "max_length": {"batches": batches or len(trial_class.rows)},
            },
            "optimizations": {
                "aggregation_frequency": 1,
                "average_aggregated_gradients": True,
                "gradient_compression": False,
            },
            "min_validation_period": {"batches": 0},
            "min_checkpoint_period": {"batches": 0},
            "scheduling_unit": 1,
            "checkpoint_policy": "none",
            "perform_initial_validation": False,
            "profiling": {"enabled": False},
        }
        master = start_task(monkeypatch, folder, config, hparams, seed=0)
        # of the container
        monkeypatch.setattr(util, "write_user_code", lambda *given: None)
        info: Any = det.get_cluster_info()
        if first_batch:
            info.trial._steps_completed = first_batch
            (info.latest_checkpoint,) = (
                path.name for path in folder.glob("checkpoints/*")
            )
        harness._run_pytorch_trial(trial_class, info, config["entrypoint"])
        return master

    return run


def test_trial_as_it_is_trains_an_unmodified_trial(legacy):
    reports = legacy(
        TrialAsItIs, {"precision": "amp_bf16"}, 8, trial="tests.trials:Plain"
    )
    assert reports.training[0]["watch_audit_share"] == 1
    assert reports.training[-1]["watch_applied_steps"] == 8


def test_mistake_in_the_section_ends_a_task_with_one_line_and_is_on_the_master(
    legacy, monkeypatch, capsys
):
    amp = {"precision": "amp_bf16", "auditt": True}
    hook, noted = sys.excepthook, Mock()
    monkeypatch.setattr(TaskMaster, "set_metadata", noted)
    monkeypatch.setattr(sys, "excepthook", hook)  # put back after the test
    with pytest.raises(ConfigError) as raised:
        legacy(TrialAsItIs, amp, 8, trial="tests.trials:Plain")
    with pytest.raises(SystemExit):
        sys.excepthook(ConfigError, raised.value, None)
    (line,) = capsys.readouterr().err.splitlines()
    reason = "experiment: hyperparameters.amp.auditt: unknown key; did you mean audit?"
    assert line == f"no retry can help: {reason}"
    assert noted.call_args.args == ({"amp": {"failure": reason}},)


class FourRows(Weights):
    rows = ((1.0,),) * 4


def test_run_resumes_to_the_bits_of_an_undisturbed_one(legacy, folder):
    """Torch 2.6 and later load weights alone by default; Determined saves an array of
    NumPy.
    """

    def last():
        return max(
            folder.glob("checkpoints/*"), key=lambda path: path.stat().st_mtime_ns
        )

    legacy(FourRows, FP16)
    undisturbed = content(last())
    last().rename(folder / "undisturbed")
    legacy(FourRows, FP16, batches=2)
    legacy(FourRows, FP16, first_batch=2)
    resumed = content(last())
    assert len(list(folder.glob("checkpoints/*"))) == 2
    for part in (
        "models_state_dict",
        "optimizers_state_dict",
        "scaler_state_dict",
        "callbacks",
    ):
        assert same_bits(resumed[part], undisturbed[part])

"""Runs made by hand for the tests of comparisons, in memory or as folders: the answer
is known.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from determined_amp.experiment.dotted import flat, put
from determined_amp.experiment.machine import Machine
from determined_amp.report.comparison import compare_runs
from determined_amp.runs.run import Part, Run, RunState
from determined_amp.search.search_folder import Search

GPU, CPU = "NVIDIA H100", "cpu"
# As `Experiment.resolved` has it; `test_precision_report` holds it against a real run.
RESOLVED = {
    "searcher": {
        "metric": "validation_loss",
        "smaller_is_better": True,
        "name": "single",
    },
    "reproducibility": {"experiment_seed": 0},
    "name": "a-name",
    "resources": {"slots_per_trial": 1},
    "profiling": {"enabled": False},
    "checkpoint_policy": "best",
    "data": {"dataset": "digits", "classes": 10},
    "hyperparameters": {
        "trial": "trials.mlp:MLPTrial",
        "global_batch_size": 64,
        "learning_rate": 0.001,
        "amp": {
            "precision": "fp32",
            "init_scale": 65536.0,
            "min_scale": 1.0,
            "max_consecutive_skips": 50,
            "max_skip_ratio": 0.5,
        },
        "training": {"max_length": {"batches": 100, "epochs": None}},
    },
}
# Of a run that the guard ended.
LOST = {"state": "failed", "reason": "100% of the optimizer steps were skipped"}
# Of a training report: one that is no first one, and of which nothing is to be said.
TRAINED = {
    "loss": 0.5,
    "loss_scale_log2": 16.0,
    "watch_applied_steps": 98,
    "skipped_steps": 2,
    "watch_consecutive_skips": 0,
    "watch_skip_ratio": 0.0,
    "watch_data_wait_share": 0.05,
}


def record_of(
    precision,
    seed,
    *,
    accuracy=0.9,
    loss=None,
    speed=1000.0,
    memory=1000.0,
    device=GPU,
    last_batch=100,
    settings: Mapping[str, Any] = {},
    machine: Mapping[str, Any] = {},
    versions: Mapping[str, Any] = {},
    trained: Mapping[str, Any] = {},
    audit_share=1.0,
    end=None,
):
    """The record and the reports of a run; without changes of one that has finished.

    Args:
        precision: Of the run.
        seed: Of the run.
        accuracy: After the last batch; it was 0.5 half way.
        loss: The same; half of what the accuracy leaves by default.
        speed: Samples per second of every report but the first, which says 1.
        memory: Peak MiB of every report but the first, in which cuDNN tries algorithms:
            four times.
        device: What it ran on.
        last_batch: After which it ended; only that of batch 100 is validated.
        settings: Changes of `RESOLVED`, by dotted name.
        machine: Changes of what it ran on.
        versions: Changes of the versions that it ran with.
        trained: Changes of the last training report.
        audit_share: Of the first report.
        end: What the run wrote down when it ended; None if it did not.
    """
    changes = {
        "hyperparameters.amp.precision": precision,
        "reproducibility.experiment_seed": seed,
    }
    made = made_on(device)
    part = {
        "first_batch": 0,
        "settings": flat(changed(RESOLVED, {**changes, **settings})),
        "machine": {**made, **machine, "versions": {**made["versions"], **versions}},
        "date": "2026-01-02T03:04:05+00:00",
        "command": [],
    }
    ended = {"state": "running", "reason": ""} if end is None else end
    record = {**ended, "number": 0, "hparams": {}, "parts": [part]}
    peak = {"watch_peak_memory_mib": memory}
    if device != CPU:
        peak["watch_peak_reserved_memory_mib"] = memory + 100
    trials = {name: 4 * value for name, value in peak.items()}
    speeds = [speed, speed] if isinstance(speed, (int, float)) else list(speed)
    first = {} if audit_share is None else {"watch_audit_share": audit_share}
    lines = [
        {"group": "training", **TRAINED, **trials, "samples_per_second": 1.0, **first},
        {"group": "validation", "validation_accuracy": 0.5, "validation_loss": 1.0},
        *(
            {"group": "training", **TRAINED, **peak, "samples_per_second": s}
            for s in speeds
        ),
    ]
    lines[-1].update(trained)
    for i, line in enumerate(lines):
        line["batches"] = last_batch * (i + 1) // len(lines)
    if last_batch == 100:
        final = {
            "validation_accuracy": accuracy,
            "validation_loss": loss or (1 - accuracy) / 2,
        }
        lines.append({"group": "validation", **final, "batches": 100})
    return record, lines


def write_run(folder, precision, seed, **options):
    """A run folder, see `record_of`."""
    return write_record(folder, *record_of(precision, seed, **options))


def write_record(folder, record, lines):
    """A run folder with this record and these reports."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


def run(precision, seed=1, name=None, **options):
    """A run as it is read from a folder, see `record_of`."""
    record, lines = record_of(precision, seed, **options)
    (part,) = record["parts"]
    state, reason = RunState(record["state"]), record["reason"]
    parts = (Part(**{**part, "machine": Machine(**part["machine"])}),)
    made = Run(name or f"{precision}-{seed}", state, reason, parts)
    return made.reported(lines)


def seeds(precision, values, **others):
    """A run per accuracy, of seeds 1, 2, 3 and so on."""
    return [
        run(precision, seed, accuracy=x, **others) for seed, x in enumerate(values, 1)
    ]


def comparison_of(*runs, **options):
    """The comparison of some runs."""
    return compare_runs([Search("", runs)], **options)


def made_on(device):
    """What the record of a run says of a machine with this device."""
    on_gpu = device != CPU
    return {
        "device": device,
        "slots": 1,
        "on_gpu": on_gpu,
        "has_tf32": on_gpu,
        "torch": "2.6.0",
        "versions": {"python": "3.11.7"},
    }


def changed(nested, changes):
    """A copy with other values at some dotted names."""
    made = copy.deepcopy(dict(nested))
    for name, value in changes.items():
        put(made, name.split("."), value)
    return made

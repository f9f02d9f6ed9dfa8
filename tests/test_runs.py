"""`determined_amp.runs`: what a run is, and that reading one takes little memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from determined_amp.experiment.machine import Machine
from determined_amp.runs.folder import RunError, RunFolder, read_run, read_trials, trial_folder
from determined_amp.runs.run import Part, Report, Reports, Run, RunState, Spread, Thinned, judged
from tests.precisions import GPU, findings_of, made_on, run, write_run

SETTINGS = {
    "hyperparameters.amp.precision": "amp_fp16",
    "hyperparameters.global_batch_size": 64,
    "hyperparameters.training.max_length.batches": 100,
    "reproducibility.experiment_seed": 1,
    "searcher.name": "single",
}


def resumed(*changes: dict[str, Any], **machine: Any) -> Run:
    """A run with a part for each change of its settings, the last on a changed machine."""
    machines = [Machine()] * len(changes) + [Machine(**machine)]
    parts = [
        Part(20 * i, {**SETTINGS, **change}, machines[i]) for i, change in enumerate(({}, *changes))
    ]
    return Run("a", RunState.COMPLETED, parts=tuple(parts))


@pytest.mark.parametrize(
    ("reported", "sampled", "known"),
    [
        ({}, 2.0**10, 10.0),
        ({"init_scale_log2": 8.0}, 200.0, 8.0),  # as it was rounded
        ({"init_scale_log2": math.inf}, 2.0**10, 10.0),
        ({"init_scale_log2": 2.0**53}, 2.0**10, 10.0),
        ({}, math.inf, None),
        ({}, 0.0, None),
        ({}, "2^10", None),
        ({}, None, None),
    ],
)
def test_scale_of_a_run_is_finite_or_not_known(
    reported: dict[str, float], sampled: object, known: float | None
) -> None:
    made = Run("a", RunState.COMPLETED, hparams={"amp.init_scale": sampled})
    made.reports.add("validation", Report(4, reported))
    assert made.scale_log2 == known or (known is None and math.isnan(made.scale_log2))


class TestThinned:
    @pytest.mark.parametrize("count", [0, 1, 7, 8])
    def test_few_items_are_all_kept(self, count: int) -> None:
        thinned = Thinned[int](8)
        for item in range(count):
            thinned.add(item)
        assert thinned.items() == list(range(count))

    @pytest.mark.parametrize("count", [9, 16, 17, 100, 1001])
    def test_evenly_spaced_items_and_the_last_of_many_are_kept(self, count: int) -> None:
        thinned = Thinned[int](8)
        for item in range(count):
            thinned.add(item)
        *even, last = thinned.items()
        assert last == count - 1
        assert even[0] == 0
        assert len({b - a for a, b in itertools.pairwise(even)}) == 1
        assert 4 <= len(even) <= 8


class TestReports:
    def test_speed_is_the_median_without_the_first_report_of_a_process(self) -> None:
        reports = Reports()
        for batches, (speed, share) in enumerate(
            ((1.0, 1.0), (100.0, None), (300.0, None), (7.0, 0.5), (200.0, None), (0.0, None))
        ):
            metrics = {"samples_per_second": speed}
            metrics |= {} if share is None else {"watch_audit_share": share}
            reports.add("training", Report(batches, metrics))
        assert reports.speed is not None
        assert (reports.speed.median, reports.speed.low) == (200.0, 100.0)
        assert reports.audit_share == 0.5

    @pytest.mark.parametrize("odd", [math.inf, math.nan, -1.0, 1e300])
    def test_speed_that_no_machine_has_counts_for_nothing(self, odd: float) -> None:
        speeds = enumerate((1.0, odd, 100.0))
        reports = Reports(("training", Report(n, {"samples_per_second": s})) for n, s in speeds)
        assert reports.speed == Spread(100.0, 100.0, 100.0)

    def test_other_groups_count_for_nothing(self) -> None:
        reports = Reports([("loss_scale", Report(4, {"overflow_share": 1.0}))])
        assert reports.training is None
        assert reports.validations == []

    def test_reports_of_a_long_run_take_no_more_memory_than_of_a_short_one(
        self, tmp_path: Path
    ) -> None:
        folder = write_run(tmp_path / "a", "fp32", 1)
        line = {"loss": 0.5, "samples_per_second": 1000.0, "validation_loss": 0.1}

        def peak(lines: int) -> int:
            with (folder / "metrics.jsonl").open("w") as file:
                for batches in range(lines):
                    group = "validation" if batches % 2 else "training"
                    file.write(json.dumps({"group": group, **line, "batches": batches}) + "\n")
            tracemalloc.start()
            run = read_run(folder)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert run.batches == lines - 1
            return most

        peak(2)  # what is imported with the first run
        assert peak(40_000) < 1.5 * peak(10_000)


class TestChanged:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("hyperparameters.amp.precision", "amp_bf16"),
            ("hyperparameters.global_batch_size", 32),
            ("reproducibility.experiment_seed", 2),
        ],
    )
    def test_setting_is_named_with_both_values(self, name: str, value: object) -> None:
        run = resumed({}, {name: value})
        assert run.changed == {name: [(0, SETTINGS[name]), (20, SETTINGS[name]), (40, value)]}

    def test_number_of_slots_is_named(self) -> None:
        assert resumed({}, slots=2).changed == {"slots": [(0, 1), (20, 2)]}

    def test_length_name_and_search_method_change_no_batch(self) -> None:
        longer = {"hyperparameters.training.max_length.batches": 200, "searcher.name": "grid"}
        assert resumed(longer).changed == {}
        assert resumed().changed == {}

    def test_run_that_changed_its_precision_counts_for_neither(self) -> None:
        base, amp, mixed = run("fp32"), run("amp_bf16"), run("fp32", 2)
        (part,) = mixed.parts
        name = "hyperparameters.amp.precision"
        later = dataclasses.replace(
            part, first_batch=80, settings={**part.settings, name: "amp_bf16"}
        )
        findings = findings_of(base, amp, dataclasses.replace(mixed, parts=(part, later)))
        assert findings.runs == [base, amp]
        (left_out,) = findings.left_out
        assert f"{name} changed at a resume: fp32 from batch 0, amp_bf16 from batch 80" in left_out


class TestJudged:
    @pytest.mark.parametrize(
        ("state", "batches", "expected"),
        [
            (RunState.RUNNING, 60, RunState.RUNNING),
            (RunState.RUNNING, 100, RunState.COMPLETED),  # killed after its last validation
            (RunState.STOPPED, 60, RunState.STOPPED),
            (RunState.STOPPED, 100, RunState.COMPLETED),
            (RunState.PRUNED, 60, RunState.PRUNED),
            (RunState.INVALID, 60, RunState.INVALID),
            (RunState.FAILED, 100, RunState.FAILED),
        ],
    )
    def test_state_is_the_recorded_one_unless_the_reports_say_more(
        self, state: RunState, batches: int, expected: RunState
    ) -> None:
        reports = Reports([("validation", Report(batches, {"validation_loss": 1.0}))])
        assert judged(state, "why", SETTINGS, reports)[0] is expected


def test_trials_of_a_search_are_run_folders(tmp_path: Path) -> None:
    for number in (0, 1):
        folder = RunFolder(trial_folder(tmp_path, number))
        folder.describe_trial(number, {"amp.init_scale": 2.0**number})
        folder.append_metrics({"group": "validation", "loss_scale_score": 0.5, "batches": 4})
        folder.end(RunState.PRUNED if number else RunState.COMPLETED, "too slow")
    first, second = read_trials(tmp_path, [])
    assert (first.number, first.state, first.scale_log2) == (0, RunState.COMPLETED, 0.0)
    assert (second.state, second.reason) == (RunState.PRUNED, "4 batches: too slow")
    assert first.metrics == {"loss_scale_score": 0.5}


def test_record_has_what_a_machine_is(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", "fp32", 1))
    assert run.machine == Machine(**made_on(GPU))
    assert run.machine.on_gpu


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "{}", '{"state": "finished"}'])
def test_folder_that_is_no_run_is_a_sentence(tmp_path: Path, content: str | None) -> None:
    folder = write_run(tmp_path / "a", "fp32", 1)
    assert read_run(folder).state is RunState.COMPLETED
    if content is None:
        (folder / "run.json").unlink()
    else:
        (folder / "run.json").write_text(content)
    with pytest.raises(
        RunError, match=r"is not a run folder .*allowed: what .*determined_amp train"
    ):
        read_run(folder)


def test_line_cut_off_by_a_kill_ends_the_reports(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fp32", 1)
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines[:-20])
    cut = read_run(folder)
    assert (cut.state, cut.trained_batches) == (RunState.RUNNING, 100)

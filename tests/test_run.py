"""`determined_amp.runs`: what a run is, and how it is judged."""

import math

import pytest

from determined_amp.amp.errors import UserError
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.machine import Machine
from determined_amp.runs.folder import read_run
from determined_amp.runs.run import (
    Part,
    Report,
    Run,
    RunState,
    Spread,
)
from tests import run_here
from tests.precisions import GPU, made_on, run, write_run

SETTINGS = {
    "hyperparameters.amp.precision": "amp_fp16",
    "hyperparameters.global_batch_size": 64,
    "hyperparameters.training.max_length.batches": 100,
    "reproducibility.experiment_seed": 1,
    "searcher.name": "single",
}


def resumed(*changes, **machine):
    """A run with a part for each change of its settings, the last on a changed
    machine.
    """
    machines = [Machine()] * len(changes) + [Machine(**machine)]
    parts = [
        Part(20 * i, {**SETTINGS, **change}, machines[i])
        for i, change in enumerate(({}, *changes))
    ]
    return Run("a", RunState.COMPLETED, parts=tuple(parts))


@pytest.mark.parametrize(
    ("name", "is_another"),
    [
        ("name", False),
        ("profiling.enabled", False),
        ("checkpoint_policy", False),
        ("searcher.metric", False),
        ("hyperparameters.training.max_length.batches", False),
        ("hyperparameters.learning_rate", True),
        ("resources.slots_per_trial", True),
    ],
)
def test_resume_with_a_changed_setting_is_another_training_if_batches_differ(
    name, is_another
):
    changes = resumed({name: "another"}).changes
    named = [change for change in changes if " changed from " in change]
    assert [change.partition(" ")[0] for change in named] == [name] * is_another


def test_steps_of_several_optimizers_are_added_up():
    """As in a GAN, whose metrics have the number of the optimizer in their name."""
    own = {
        "watch_applied_steps_0": 98,
        "watch_applied_steps_1": 90,
        "skipped_steps_1": 10,
    }
    made = Run("a", RunState.COMPLETED, trained=[Report(100, own)])
    assert (made.last("watch_applied_steps"), made.last("skipped_steps")) == (188, 10)


class TestReports:
    def test_speed_is_the_median_without_the_first_report_of_a_process(self):
        speeds = (1.0, 0.5, 300.0, 7.0, 200.0, 0.0, math.inf, math.nan, -1.0)
        reports = [{"samples_per_second": speed} for speed in speeds]
        reports[0]["watch_audit_share"] = 1.0
        reports[3]["watch_audit_share"] = 0.5
        trained = [*(Report(2, metrics) for metrics in reports), Report(4, {})]
        made = Run("a", RunState.COMPLETED, trained=trained)
        assert made.speed == Spread(200.0, 0.5, 300.0)
        assert made.audit_share == 0.5

    def test_numbers_are_floats_and_other_texts_are_left_out(self):
        given = {
            "batches": 4,
            "a": "NaN",
            "b": "-Infinity",
            "c": "Infinity",
            "d": "x",
            "e": 3,
        }
        read = Report.read(given).metrics
        shown = {name: str(value) for name, value in read.items()}
        assert shown == {"a": "nan", "b": "-inf", "c": "inf", "e": "3.0"}


class TestChanged:
    @pytest.mark.parametrize(
        ("name", "stays"), [("learning_rate", True), ("amp.growth_interval", False)]
    )
    def test_what_an_optimizer_keeps_is_said_of_hyperparameters_of_the_trial(
        self, name, *, stays
    ):
        said = resumed({}, {f"hyperparameters.{name}": 7}).changes
        kept = "a resume keeps the settings of the optimizers"
        assert [text.startswith(kept) for text in said] == [False, *[True] * stays]

    def test_changed_number_of_slots_is_named(self):
        changed = "slots changed from 1 to 2 at the resume after 20 batches"
        assert resumed({}, slots=2).changes == [changed]


@pytest.mark.parametrize(
    ("options", "state", "reason"),
    [
        ({"end": {"state": "stopped", "reason": "stopped"}}, RunState.COMPLETED, ""),
        ({}, RunState.COMPLETED, ""),  # killed after its last validation
        (
            {"end": {"state": "failed", "reason": "disk full"}},
            RunState.FAILED,
            "disk full",
        ),
        ({"loss": math.nan}, RunState.FAILED, "validation_loss is nan at the end"),
        # the searcher's is finite
        (
            {"accuracy": math.inf, "loss": 1.0},
            RunState.COMPLETED,
            "",
        ),
        (
            {
                "last_batch": 60,
                "end": {"state": "stopped", "reason": ""},
                "trained": {"loss": math.nan, "watch_consecutive_skips": 1},
            },
            RunState.STOPPED,
            "60 of 100 batches: it was stopped",
        ),
        *(
            (
                {"last_batch": 60, "end": {"state": state.value, "reason": "why"}},
                state,
                reason,
            )
            for state, reason in {
                RunState.STOPPED: "60 of 100 batches: why",
                RunState.PRUNED: "60 of 100 batches: why",
                RunState.INVALID: "why; it ended after 60 of 100 batches",
                RunState.FAILED: "why; it ended after 60 of 100 batches",
            }.items()
        ),
        *(
            (
                {"last_batch": 60, "trained": trained},
                RunState.RUNNING,
                "60 of 100 batches: it is running",
            )
            for trained in ({}, {"loss": math.nan, "watch_consecutive_skips": 51})
        ),
    ],
)
def test_end_of_a_run_is_judged_by_its_record_and_its_reports(options, state, reason):
    ended = run("amp_fp16", **options)
    assert (ended.state, ended.reason) == (state, reason)


@pytest.mark.parametrize(
    ("unit", "most", "state", "said"),
    [
        ("batches", 4_000_000, RunState.KILLED, "1234567 of 4000000 batches: its pro"),
        ("epochs", 4, RunState.KILLED, "2.5 of 4 epochs: its process is gone"),
        ("epochs", 2.5, RunState.COMPLETED, ""),
    ],
)
def test_run_is_as_far_as_its_reports_in_the_unit_of_its_length(
    unit, most, state, said
):
    lengths = {"batches": None, "epochs": None, unit: most}
    settings = flat({"hyperparameters": {"training": {"max_length": lengths}}})
    report = {"group": "validation", "batches": 1_234_567, "epochs": 2.5}
    killed = Run("a", RunState.KILLED, parts=(Part(settings=settings),))
    found = killed.reported([report])
    assert found.state is state
    assert found.reason.startswith(said)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_folder_that_is_no_run_is_a_sentence(tmp_path, content):
    folder = write_run(tmp_path / "a", "fp32", 1)
    assert read_run(folder).machine == Machine(**made_on(GPU))
    if content is None:
        (folder / "run.json").unlink()
    else:
        (folder / "run.json").write_text(content)
    with pytest.raises(
        UserError, match=r"is not a run folder .*allowed: what .*det-amp train"
    ):
        read_run(folder)


def test_line_cut_off_by_a_kill_ends_the_reports(tmp_path):
    folder = write_run(tmp_path / "a", "fp32", 1)
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines[:-20])
    cut = read_run(folder)
    assert (cut.state, cut.training.batches) == (RunState.KILLED, 100)


def test_run_whose_process_is_gone_was_killed(tmp_path):
    folder = write_run(tmp_path / "a", "fp32", 1, last_batch=60)
    with run_here.locked_by_another_process(folder):
        running = read_run(folder)
    killed = read_run(folder)
    assert (running.state, running.reason) == (
        RunState.RUNNING,
        "60 of 100 batches: it is running",
    )
    assert (killed.state, killed.reason) == (
        RunState.KILLED,
        "60 of 100 batches: its process is gone",
    )


@pytest.mark.parametrize(
    "damaged", [b"{]", b"[]", b"\xff", b'{"group": "training"}', b'{"batches": 6}', b""]
)
def test_damaged_line_of_a_report_is_a_sentence_with_its_number(tmp_path, damaged):
    file = write_run(tmp_path / "a", "fp32", 1) / "metrics.jsonl"
    first, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([first, damaged, b"\n", *others]))
    with pytest.raises(
        UserError, match=r"metrics\.jsonl: line 2 is no report; allowed: "
    ):
        read_run(file.parent)

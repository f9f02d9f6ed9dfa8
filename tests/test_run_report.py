"""`report RUN`: how one run ended, its curves, and where its files are."""

import json

import pytest

from determined_amp import __main__ as door
from determined_amp.report.run_report import curves_of
from tests.precisions import LOST, record_of, run, write_record

RATE = "hyperparameters.learning_rate"


@pytest.fixture
def resumed(tmp_path):
    """The folder of a completed run whose rate was changed at a resume."""
    record, lines = record_of("amp_fp16", 1)
    (part,) = record["parts"]
    later = {"first_batch": 50, "settings": {**part["settings"], RATE: 0.01}}
    record["parts"] = [part, {**part, **later}]
    folder = write_record(tmp_path / "run", record, lines)
    for batches in (50, 100):
        checkpoint = folder / "checkpoints" / f"batch-{batches:08}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "metadata.json").touch()
    return folder


def test_report_on_a_run_says_how_it_ended_and_where_its_files_are(resumed, capsys):
    assert door.run(["report", str(resumed)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("amp_fp16: completed, 100 batches: validation_accuracy 0.9")
    for words in (
        "98 optimizer steps applied, 2 skipped; the last loss scale was 2^16",
        "audit: 100.0% of the FLOPs of the first batch in this precision",
        "1000 samples/s without the first report",
        f"{RATE} changed from 0.001 to 0.01 at the resume after 50 batches",
        "a resume keeps the settings of the optimizers, such as a constant rate, "
        "whatever its YAML says",
        f"checkpoints: batch-00000050, batch-00000100, in {resumed}/checkpoints",
        f"all curves: tensorboard --logdir {resumed}/tensorboard",
        f"the log: {resumed}/log.txt",
    ):
        assert f"* {words}\n" in shown
    assert "go on" not in shown
    record = json.loads((resumed / "report.json").read_text())
    assert record["curves"]["validation_accuracy"] == [[50, 0.5], [100, 0.9]]
    assert (resumed / "report.png").exists()
    assert f"# {record['answer']}\n" in (resumed / "report.md").read_text()


def test_report_on_a_run_that_failed_begins_with_the_reason(tmp_path, capsys):
    record, lines = record_of("amp_bf16", 1, last_batch=60, end=LOST)
    folder = write_record(tmp_path / "run", record, lines)
    assert door.run(["report", str(folder), "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "amp_bf16: failed: 100% of the optimizer steps were skipped; it "
        "ended after 60 of 100 batches"
    )
    assert f"* checkpoints: none, in {folder}/checkpoints\n" in shown


def test_run_killed_before_its_first_validation_has_its_loss_and_no_way_on(
    tmp_path, capsys
):
    record, lines = record_of("amp_bf16", 1, last_batch=60)
    trained = [line for line in lines if line["group"] == "training"]
    folder = write_record(tmp_path / "run", record, trained)
    assert door.run(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "* there is nothing to go on from: start the run anew\n" in shown
    assert "| batches | training loss |" in (folder / "report.md").read_text()


def test_report_on_a_killed_run_has_its_newest_checkpoint_and_how_to_go_on(
    resumed, capsys
):
    record, lines = record_of("amp_bf16", 1, last_batch=60)
    (resumed / "run.json").write_text(json.dumps(record))
    report = "".join(f"{json.dumps(line)}\n" for line in lines)
    (resumed / "metrics.jsonl").write_text(report)
    partial = resumed / "checkpoints" / "batch-00000200"
    partial.mkdir()  # without its metadata
    assert door.run(["report", str(resumed)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("amp_bf16: killed: 60 of 100 batches: its process is gone")
    newest = f"go on from batch-00000100: det-amp train --resume {resumed}"
    assert f"* {newest}\n" in shown


def test_curves_are_those_of_the_reports():
    panels = curves_of(run("amp_fp16", accuracy=0.75))
    curves = {panel.title: panel.dots for panel in panels}
    assert curves["training loss"] == [(25, 0.5), (75, 0.5), (100, 0.5)]
    assert curves["validation_accuracy"] == [(50, 0.5), (100, 0.75)]
    assert [scale for _, scale in curves["log₂ of the loss scale"]] == [16.0] * 3


def test_comparison_of_a_run_that_was_changed_says_what_changed(resumed, refusal):
    """It has finished, and cannot be compared."""
    said = refusal("report", str(resumed), str(resumed))
    assert "no finished run can be compared; amp_fp16, seed 1" in said
    assert f"{RATE} changed from 0.001 to 0.01 at the resume after 50" in said
    assert "no run has finished" not in said

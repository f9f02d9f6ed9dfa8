"""`finder.found_scale`: what is said of a finding, as text, YAML, Python and JSON."""

import dataclasses
import json

import pytest

from determined_amp.amp.settings import yaml_lines
from determined_amp.finder.found_scale import (
    FinderRun,
    FoundScale,
    scale_lines,
    scale_sentences,
    yaml_changes,
)
from determined_amp.finder.scale_finding import AtScale, ScaleFinding, Verdict

# A tenth of a tensor is flushed at 2^6, and a quarter of all values overflows at 2^15.
SCALES = (
    AtScale(6, 0.0, 0.1, None),
    AtScale(8, 0.0, 2e-5, None),
    AtScale(14, 0.0, 0.0, overflow=False),
    AtScale(15, 0.25, 0.0, overflow=True),
)
FINDING = ScaleFinding(
    low_log2=9, top_log2=14, choice_log2=13, verdict=Verdict.SCALE, scales=SCALES
)
RUN = FinderRun(
    name="mlp [amp]",
    device="Some GPU",
    torch="2.15.0",
    date="2026-11-22",
    batches=3,
    samples=192,
    init_scale=65536.0,
    is_ours=True,
    min_scale=1.0,
)
FOUND = FoundScale(FINDING, RUN)


def found(**changes):
    """Another finding of the same run."""
    return FoundScale(dataclasses.replace(FINDING, **changes), RUN)


def of_run(same=FOUND, **changes):
    """The same finding of another run."""
    return FoundScale(same.finding, dataclasses.replace(RUN, **changes))


FINE = found(verdict=Verdict.DEFAULT, top_log2=18, choice_log2=13)


BF16 = found(verdict=Verdict.BF16, low_log2=16, choice_log2=13)
HOPELESS = found(
    verdict=Verdict.FORWARD_OVERFLOW, choice_log2=None, cause="head overflows"
)


def test_text_on_a_fine_default_has_no_lines_to_paste():
    assert str(FINE).endswith("\n".join(scale_sentences(FINE.finding)))
    assert FINE.finding.answer_log2 == 16


def test_text_has_a_table_sentences_and_the_lines_to_paste():
    head, table, sentences, lines = str(FOUND).split("\n\n")
    assert head == "mlp [amp]: 3 batches, 192 samples, on Some GPU"
    title, columns, *rows = table.splitlines()
    assert title == "16-bit gradients by loss scale"
    assert columns.split()[:2] == ["init_scale", "overflow"]
    assert [row.split() for row in rows] == [
        ["2^6", "0", "10.0%"],
        ["2^8", "0", "2e-05"],
        ["2^14", "0", "0", "sound"],
        ["2^15", "25.0%", "0", "overflow"],
    ]
    assert sentences.splitlines() == [*scale_sentences(FINDING)]
    assert lines == scale_lines(FOUND)


NO_WINDOW = (
    "no safe range: above 2^14 gradients overflow, and below 2^16 some tensor loses "
    "more than 0.1% of its norm, flushed to 0"
)
# What is said; "..." stands for the sentences before.
SENTENCES = {
    "another scale than the default": (
        FOUND,
        [
            "safe range: 2^9 to 2^14, 6 powers of two",
            "verdict: use 2^13; from 2^16, 2 steps are skipped",
        ],
    ),
    "scale above the default": (
        found(low_log2=17, top_log2=22, choice_log2=19),
        ["safe range: 2^17 to 2^22, 6 powers of two", "verdict: use 2^19"],
    ),
    "default": (
        found(verdict=Verdict.DEFAULT, top_log2=16, choice_log2=16),
        [
            "safe range: 2^9 to 2^16, 8 powers of two",
            "verdict: default is fine: 2^16 is safe here; tuning it cannot help",
        ],
    ),
    "default close to the top": (
        found(verdict=Verdict.DEFAULT, top_log2=16, choice_log2=12),
        [
            "...",
            "verdict: default is fine: 2^16 is safe here, 1 bit below an overflow. "
            "Gradients can grow by 2 to 5 bits while learning begins: 2^12 may save a "
            "short training some skipped steps",
        ],
    ),
    "bfloat16": (
        BF16,
        [
            NO_WINDOW,
            "verdict: use amp_bf16, or fp32 where the device has no bfloat16; float16 "
            "loses gradients at every scale, the fewest at 2^13",
        ],
    ),
    "forward that overflows": (HOPELESS, ["verdict: no scale helps: head overflows"]),
    "modules without gradients": (
        found(hidden_modules=("dead", "other")),
        [
            "...",
            "2 modules have gradients of exactly 0, for instance dead: an output that "
            "starts at 0 hides them. Train ten steps and run this again from there (a "
            "trial: with --checkpoint)",
        ],
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_say_what_to_do(name):
    given, expected = SENTENCES[name]
    said = [*scale_sentences(given.finding)]
    known = [line for line in expected if line != "..."]
    assert said[-len(known) :] == known
    assert len(said) == len(known) or expected[0] == "..."


class TestChanges:
    @pytest.mark.parametrize(
        ("given", "changes"),
        [
            (FINE, {}),
            (of_run(FINE, init_scale=2.0**20), {"init_scale": 65536.0}),
            (
                of_run(FINE, init_scale=2.0**20, min_scale=2.0**18),
                {"init_scale": 65536.0, "min_scale": 256.0},
            ),
            (FOUND, {"init_scale": 8192.0}),
            (of_run(min_scale=8192.0), {"init_scale": 8192.0}),
            (of_run(min_scale=8193.0), {"init_scale": 8192.0, "min_scale": 32.0}),
        ],
        ids=[
            "fine",
            "not in the YAML",
            "default",
            "scale",
            "at the limit",
            "below the limit",
        ],
    )
    def test_changes_are_those_of_the_verdict(self, given, changes):
        assert yaml_changes(given) == changes

    @pytest.mark.parametrize("given", [BF16, HOPELESS], ids=["bf16", "hopeless"])
    def test_change_to_bfloat16_removes_the_settings_of_the_scale(self, given):
        changes = yaml_changes(given)
        assert changes.pop("precision") == "amp_bf16"
        assert {"init_scale", "growth_interval", "min_scale"} <= changes.keys()
        assert set(changes.values()) == {None}

    @pytest.mark.parametrize(
        ("given", "line"),
        [
            (FOUND, "torch.amp.GradScaler(..., init_scale=8192.0)"),
            (BF16, "torch.autocast(..., dtype=torch.bfloat16), without a GradScaler"),
        ],
        ids=["scale", "bf16"],
    )
    def test_changes_of_a_trial_without_a_section_amp_are_python(self, given, line):
        run = dataclasses.replace(RUN, is_ours=False)
        assert scale_lines(FoundScale(given.finding, run)) == line
        assert scale_lines(given) == yaml_lines(yaml_changes(given))


class TestJson:
    @pytest.mark.parametrize(
        "given", [FOUND, BF16, HOPELESS], ids=lambda f: f.finding.verdict
    )
    def test_json_holds_what_a_program_needs(self, given):
        written = json.loads(given.json_text())
        finding = given.finding
        assert written["verdict"] == finding.verdict.value
        assert written["sentences"] == [*scale_sentences(finding)]
        assert written["yaml"] == yaml_changes(given)
        assert written["run"] == dataclasses.asdict(given.run)
        for name in ("low_log2", "top_log2", "choice_log2", "cause"):
            assert written[name] == getattr(finding, name)
        assert written["scales"] == [dataclasses.asdict(each) for each in SCALES]

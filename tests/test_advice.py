"""`finder.advice`: what is said of a finding, on the terminal, in YAML, in Python and in JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from determined_amp.experiment.yaml_text import yaml_lines
from determined_amp.finder.advice import (
    FinderRun,
    FoundScale,
    growth_advice,
    lines_to_paste,
    run_now,
    sentences,
    yaml_changes,
)
from determined_amp.finder.frozen import LossScaleError
from determined_amp.finder.passes import Observation
from determined_amp.finder.verdict import Finding, ModuleGradients, Shares, Verdict

# Overflows from 2^15 on: half of its values lie in the uppermost power of two.
HEAD = ModuleGradients("head", True, 0, {-3: 2, 0: 2}, 15, 2)
# Is flushed below 2^9.
DEEP = ModuleGradients("blocks[0]", True, 3, {-20: 4}, 36, 9)


def shares(scale: int) -> Shares:
    """At 2^6 a tenth of a tensor is flushed, a bit less at every bit more; 2^15 overflows."""
    return Shares(
        scale, 0.25 if scale >= 15 else 0.0, 0.0 if scale >= 9 else 0.1 / 2 ** (scale - 6)
    )


MEASURED = (
    Observation(14, True, False, 0.0004, 2.0, 1.0),
    Observation(15, False, True, 0.0, -math.inf, 0.5),
    Observation(13, True, False, 0.002, 3.0, 0.75),
)
FINDING = Finding(
    low_log2=9,
    top_log2=14,
    choice_log2=13,
    verdict=Verdict.SCALE,
    predicted=tuple(shares(scale) for scale in range(6, 20)),
    verified=MEASURED,
    modules=(HEAD, DEEP),
    headroom_log2=14.5,
)
RUN = FinderRun(
    name="mlp [amp]",
    device="Some GPU",
    torch="2.15.0",
    date="2026-11-22",
    batches=3,
    samples=192,
    init_scale=65536.0,
    growth_interval=2000,
    is_ours=True,
    min_scale=1.0,
    fp32_modules=("^stem$",),
)
FOUND = FoundScale(FINDING, RUN)


def found(**changes: Any) -> FoundScale:
    """Another finding of the same run."""
    return FoundScale(dataclasses.replace(FINDING, **changes), RUN)


def of_run(**changes: Any) -> FoundScale:
    """The same finding of another run."""
    return FoundScale(FINDING, dataclasses.replace(RUN, **changes))


BF16 = found(verdict=Verdict.BF16, low_log2=16, choice_log2=13)
HOPELESS = found(verdict=Verdict.FORWARD_OVERFLOW, choice_log2=None, cause="head overflows")


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_text_has_tables_sentences_and_the_lines_to_paste() -> None:
    """The choice is 2^13. What lies outside the predictions is that of the nearest of them."""
    text = "\n".join(line.rstrip() for line in str(FOUND).splitlines())
    assert text.startswith("mlp [amp]: 3 batches, 192 samples, on Some GPU\n")
    assert text.endswith("\n".join([*sentences(FOUND), "", lines_to_paste(FOUND)]))
    *scales, head, deep = cells(text)
    assert [row[0] for row in scales] == [f"2^{scale}" for scale in range(5, 21)]
    overflow, flushed, measured = (
        {row[0]: row[column] for row in scales if row[column] not in ("0", "")}
        for column in (1, 2, 3)
    )
    assert overflow == {f"2^{scale}": "25.0%" for scale in range(15, 21)}
    assert flushed == {"2^5": "10.0%", "2^6": "10.0%", "2^7": "5.0%", "2^8": "2.5%"}
    assert measured == {"2^13": "0.2%", "2^14": "4e-04", "2^15": "overflow"}
    assert head == ["head", "2^0", "2^15", "2^2"]
    assert deep == ["blocks[0]", "2^-20", "2^36", "2^9"]


DEAD = ModuleGradients("dead", True, 5, {}, None, None)


def test_text_lists_four_modules_a_side_and_none_without_gradients() -> None:
    made = [ModuleGradients(f"m{i}", True, 0, {0: 1}, 15 + i, i) for i in range(12)]
    listed = [row[0] for row in cells(str(found(modules=(*made, DEAD)))) if "^" not in row[0]]
    assert listed == ["m0", "m1", "m2", "m3", "m11", "m10", "m9", "m8"]


SKIPS = "2^16 costs 2 skipped steps: negligible beyond 40 steps"
NO_WINDOW = (
    "no safe window: above 2^14 gradients overflow, and below 2^16 some tensor loses more than "
    "0.1% of its norm, flushed to 0"
)
# What is said; "..." stands for the sentences before.
SENTENCES: dict[str, tuple[FoundScale, list[str]]] = {
    "another scale than the default": (
        FOUND,
        [
            "safe window: 2^9 to 2^14, 6 powers of two",
            "verdict: use 2^13",
            f"starting at the YAML's {SKIPS}",
        ],
    ),
    "scale below the window": (  # from 2^6 three doublings, each after 2000 steps
        of_run(init_scale=64.0),
        [
            "...",
            "starting at the YAML's 2^6 flushes 10.0% of a gradient to 0, and takes 6000 steps to "
            "grow into the window",
            f"starting at the default {SKIPS}",
        ],
    ),
    "no section amp": (of_run(is_ours=False), ["...", f"starting at the scaler's {SKIPS}"]),
    "default": (
        found(verdict=Verdict.DEFAULT, top_log2=16, choice_log2=16),
        [
            "safe window: 2^9 to 2^16, 8 powers of two",
            "verdict: default is fine: 2^16 is safe here; tuning it cannot help",
        ],
    ),
    "default close to the top": (
        found(verdict=Verdict.DEFAULT, top_log2=16, choice_log2=12),
        [
            "...",
            "verdict: default is fine: 2^16 is safe here, 1 bit below an overflow. Gradients can "
            "grow by 2 to 5 bits while learning begins: 2^12 may save a short training some "
            "skipped steps",
        ],
    ),
    "bfloat16": (
        BF16,
        [
            NO_WINDOW,
            "verdict: use amp_bf16, or fp32 where the device has no bfloat16; float16 loses "
            "gradients at every scale, the fewest at 2^13",
            f"starting at the YAML's {SKIPS}",
        ],
    ),
    "forward that overflows": (HOPELESS, ["verdict: no scale helps: head overflows"]),
    "modules without gradients": (
        found(modules=(HEAD, DEAD, dataclasses.replace(DEAD, name="other"))),
        [
            "...",
            "2 modules have gradients of exactly 0, for instance dead: an output that starts at 0 "
            "hides them. Train ten steps and run this again from there (a trial: with "
            "--checkpoint)",
        ],
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_say_what_to_do(name: str) -> None:
    given, expected = SENTENCES[name]
    said = [*sentences(given)]
    known = [line for line in expected if line != "..."]
    assert said[-len(known) :] == known
    assert len(said) == len(known) or expected[0] == "..."


def test_recording_in_float16_is_said_first_with_the_reason() -> None:
    assert next(sentences(found(recorded_log2=7, reason="no kernel"))) == (
        "recorded in float16 at 2^7: this trial cannot run in bfloat16: no kernel"
    )


class TestChanges:
    @pytest.mark.parametrize(
        ("given", "changes"),
        [
            (FOUND, {"init_scale": 8192.0}),
            (of_run(min_scale=8192.0), {"init_scale": 8192.0}),
            (of_run(min_scale=8193.0), {"init_scale": 8192.0, "min_scale": 32.0}),
        ],
        ids=["scale", "at the limit", "below the limit"],
    )
    def test_changes_are_those_of_the_verdict(
        self, given: FoundScale, changes: dict[str, Any]
    ) -> None:
        assert yaml_changes(given) == changes

    @pytest.mark.parametrize("given", [BF16, HOPELESS], ids=["bf16", "hopeless"])
    def test_change_to_bfloat16_removes_the_settings_of_the_scale(self, given: FoundScale) -> None:
        changes = yaml_changes(given)
        assert changes.pop("precision") == "amp_bf16"
        assert {"init_scale", "growth_interval", "min_scale"} <= changes.keys()
        assert set(changes.values()) == {None}

    def test_changes_are_yaml_as_it_was_meant(self) -> None:
        changes = {"init_scale": 2.0**40, "fp32_modules": ["^a[.]b$"], "precision": "amp_bf16"}
        assert yaml.safe_load(yaml_lines(changes)) == {"hyperparameters": {"amp": changes}}
        assert yaml_lines({"init_scale": None}).endswith("\n    # without init_scale")

    @pytest.mark.parametrize(
        ("given", "line"),
        [
            (FOUND, "torch.amp.GradScaler(..., init_scale=8192.0)"),
            (BF16, "torch.autocast(..., dtype=torch.bfloat16), without a GradScaler"),
        ],
        ids=["scale", "bf16"],
    )
    def test_changes_of_a_trial_without_a_section_amp_are_python(
        self, given: FoundScale, line: str
    ) -> None:
        run = dataclasses.replace(RUN, is_ours=False)
        assert lines_to_paste(FoundScale(given.finding, run)) == line
        assert lines_to_paste(given) == yaml_lines(yaml_changes(given))


class TestJson:
    @pytest.mark.parametrize("given", [FOUND, BF16, HOPELESS], ids=lambda f: f.finding.verdict)
    def test_json_gives_the_same_finding_back(self, given: FoundScale, tmp_path: Path) -> None:
        given.write(tmp_path / "found.json")
        assert FoundScale.read(tmp_path / "found.json") == given

    def test_json_says_what_a_program_asks(self) -> None:
        written = json.loads(json.dumps(found(recorded_log2=7, reason="no kernel").as_json()))
        names = ("choice_log2", "low_log2", "top_log2", "headroom_log2")
        assert [written[name] for name in names] == [13, 9, 14, 14.5]
        assert written["verdict"] == Verdict.SCALE.value
        assert (written["recorded_log2"], written["reason"]) == (7, "no kernel")
        assert written["expected_skips"] == {"default": 2, "yaml": 2}
        assert written["yaml"] == {"init_scale": 8192.0}
        assert written["sentences"][2] == "verdict: use 2^13"
        assert [seen["backward_headroom_bits"] for seen in written["verified"]] == [2.0, None, 3.0]
        assert written["predicted"][0] == {
            "scale_log2": 6,
            "overflow_share": 0.0,
            "flushed_share": 0.1,
        }
        assert [module["name"] for module in written["modules"]] == ["head", "blocks[0]"]
        assert written["run"]["fp32_modules"] == ["^stem$"]

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "found.json: cannot be read: No such file or directory"),
            ("{", "found.json: is not JSON: Expecting property name"),
            ("[]", "found.json: is not a finding: TypeError "),
            (
                '{"run": {}}',
                "found.json: is not a finding: KeyError 'fp32_modules'; allowed: what ",
            ),
        ],
    )
    def test_json_of_another_kind_is_one_sentence(
        self, content: str | None, said: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "found.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(LossScaleError) as caught:
            FoundScale.read(path)
        assert said in str(caught.value)

    def test_json_counts_the_samples_of_all_passes(self) -> None:
        """One pass in bfloat16, three in float16."""
        assert FOUND.passed_samples == 4 * 192

    def test_json_has_the_scale_for_a_scaler(self) -> None:
        assert FOUND.init_scale == 8192.0
        assert HOPELESS.init_scale is None


def test_run_of_today_names_device_and_torch() -> None:
    counts = {"batches": 3, "samples": 192}
    run = run_now(
        "x", torch.device("cpu"), **counts, init_scale=2.0, growth_interval=5, is_ours=False
    )
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    assert run == FinderRun("x", "cpu", torch.__version__, today, 3, 192, 2.0, 5, False)


@pytest.mark.parametrize(
    ("steps", "low", "says"),
    [
        (100, 12, "2^13 is 1 bit above what flushes gradients to 0, which may shrink: growth_i"),
        (1999, 11, "which may shrink: growth_interval: 199 lets it follow them"),
        (9, 11, "in 9 steps the scale never grows with growth_interval 2000, and 2^13 is 2 bits a"),
        (9, 11, "growth_interval: 1 lets it follow them"),
        (2000, 11, None),  # then it grows
        (None, 11, None),
        (100, 10, None),  # far enough from what is flushed
    ],
)
def test_scale_that_never_grows_may_need_another_interval(
    steps: int | None, low: int, says: str | None
) -> None:
    finding = dataclasses.replace(FINDING, low_log2=low)
    answer = FoundScale(finding, dataclasses.replace(RUN, steps=steps))
    assert says is None or says in "".join(growth_advice(answer))
    assert bool([*growth_advice(answer)]) is (says is not None)
    hopeless = dataclasses.replace(answer, finding=HOPELESS.finding)
    assert not [*growth_advice(hopeless)]


def test_precision_without_a_scale_is_one_that_the_trial_bears() -> None:
    assert yaml_changes(BF16)["precision"] == "amp_bf16"
    only_float16 = found(verdict=Verdict.BF16, low_log2=16, choice_log2=13, recorded_log2=0)
    assert yaml_changes(only_float16)["precision"] == "fp32"
    of_a_stranger = dataclasses.replace(only_float16, run=of_run(is_ours=False).run)
    assert lines_to_paste(of_a_stranger) == "float32, without autocast and GradScaler"

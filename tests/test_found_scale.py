"""`finder.found_scale`: what is said of a finding, as text, YAML, Python and JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_amp.amp.settings import yaml_lines
from determined_amp.finder.found_scale import (
    FinderRun,
    FoundScale,
    scale_lines,
    scale_sentences,
    yaml_changes,
)
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_finding import (
    Measured,
    ModuleGradients,
    ScaleFinding,
    Shares,
    Verdict,
)

# Overflows from 2^15 on.
HEAD = ModuleGradients("head", 1, 2)
# Is flushed below 2^9.
DEEP = ModuleGradients("blocks[0]", -20, 9)


def shares(scale: int) -> Shares:
    """At 2^6 a tenth of a tensor is flushed, a bit less at every bit more; 2^15
    overflows.
    """
    return Shares(
        scale,
        0.25 if scale >= 15 else 0.0,
        0.0 if scale >= 9 else 0.1 / 2 ** (scale - 6),
    )


MEASURED = (Measured(14, overflow=False), Measured(15, overflow=True))
FINDING = ScaleFinding(
    low_log2=9,
    top_log2=14,
    choice_log2=13,
    verdict=Verdict.SCALE,
    predicted=tuple(shares(scale) for scale in range(6, 20)),
    measured=MEASURED,
    modules=(HEAD, DEEP),
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
)
FOUND = FoundScale(FINDING, RUN)


def found(**changes: Any) -> FoundScale:
    """Another finding of the same run."""
    return FoundScale(dataclasses.replace(FINDING, **changes), RUN)


def of_run(same: FoundScale = FOUND, **changes: Any) -> FoundScale:
    """The same finding of another run."""
    return FoundScale(same.finding, dataclasses.replace(RUN, **changes))


FINE = found(verdict=Verdict.DEFAULT, top_log2=18, choice_log2=13)


BF16 = found(verdict=Verdict.BF16, low_log2=16, choice_log2=13)
HOPELESS = found(
    verdict=Verdict.FORWARD_OVERFLOW, choice_log2=None, cause="head overflows"
)


def rows(text: str, title: str) -> list[list[str]]:
    """The rows of a table in a text, without its head."""
    _, _, table = text.partition(f"{title}\n")
    lines = table.partition("\n\n")[0].splitlines()
    return [line.split() for line in lines[1:]]


SCALES, MODULES = "16-bit gradients by loss scale", "modules that limit it"


def test_text_on_a_fine_default_has_no_lines_to_paste() -> None:
    assert str(FINE).endswith("\n".join(scale_sentences(FINE)))
    assert FINE.finding.answer_log2 == 16


def test_text_has_tables_sentences_and_the_lines_to_paste() -> None:
    """What lies outside the predictions is that of the nearest of them."""
    text = str(FOUND)
    assert text.startswith("mlp [amp]: 3 batches, 192 samples, on Some GPU\n")
    assert text.endswith("\n".join([*scale_sentences(FOUND), "", scale_lines(FOUND)]))
    scales = {row[0]: row[1:] for row in rows(text, SCALES)}
    assert list(scales) == [f"2^{scale}" for scale in range(5, 21)]
    assert [scales[f"2^{scale}"] for scale in (5, 6, 8, 9)] == [
        ["0", "10.0%"],
        ["0", "10.0%"],
        ["0", "2.5%"],
        ["0", "0"],
    ]
    assert scales["2^14"] == ["0", "0", "sound"]
    assert scales["2^15"] == ["25.0%", "0", "overflow"]
    assert rows(text, MODULES) == [
        ["head", "2^1", "2^15", "2^2"],
        ["blocks[0]", "2^-20", "2^36", "2^9"],
    ]


SKIPS = "2^16 costs 2 skipped steps: negligible beyond 40 steps"
NO_WINDOW = (
    "no safe range: above 2^14 gradients overflow, and below 2^16 some tensor loses "
    "more than 0.1% of its norm, flushed to 0"
)
# What is said; "..." stands for the sentences before.
SENTENCES: dict[str, tuple[FoundScale, list[str]]] = {
    "another scale than the default": (
        FOUND,
        [
            "safe range: 2^9 to 2^14, 6 powers of two",
            "verdict: use 2^13",
            f"starting at the YAML's {SKIPS}",
        ],
    ),
    "scale below the range": (  # from 2^6 three doublings, each after 2000 steps
        of_run(init_scale=64.0),
        [
            "...",
            "starting at the YAML's 2^6 flushes 10.0% of a gradient to 0, and takes "
            "6000 steps to grow into the range",
            f"starting at the default {SKIPS}",
        ],
    ),
    "no section amp": (
        of_run(is_ours=False),
        ["...", f"starting at the scaler's {SKIPS}"],
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
            f"starting at the YAML's {SKIPS}",
        ],
    ),
    "forward that overflows": (HOPELESS, ["verdict: no scale helps: head overflows"]),
    "modules without gradients": (
        found(modules=(HEAD,), hidden_modules=("dead", "other")),
        [
            "...",
            "2 modules have gradients of exactly 0, for instance dead: an output that "
            "starts at 0 hides them. Train ten steps and run this again from there (a "
            "trial: with --checkpoint)",
        ],
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_say_what_to_do(name: str) -> None:
    given, expected = SENTENCES[name]
    said = [*scale_sentences(given)]
    known = [line for line in expected if line != "..."]
    assert said[-len(known) :] == known
    assert len(said) == len(known) or expected[0] == "..."


class TestChanges:
    @pytest.mark.parametrize(
        ("given", "changes"),
        [
            (FINE, {}),
            (of_run(FINE, init_scale=2.0**20), {"init_scale": 65536.0}),
            (FOUND, {"init_scale": 8192.0}),
            (of_run(min_scale=8192.0), {"init_scale": 8192.0}),
            (of_run(min_scale=8193.0), {"init_scale": 8192.0, "min_scale": 32.0}),
        ],
        ids=["fine", "not in the YAML", "scale", "at the limit", "below the limit"],
    )
    def test_changes_are_those_of_the_verdict(
        self, given: FoundScale, changes: dict[str, Any]
    ) -> None:
        assert yaml_changes(given) == changes

    @pytest.mark.parametrize("given", [BF16, HOPELESS], ids=["bf16", "hopeless"])
    def test_change_to_bfloat16_removes_the_settings_of_the_scale(
        self, given: FoundScale
    ) -> None:
        changes = yaml_changes(given)
        assert changes.pop("precision") == "amp_bf16"
        assert {"init_scale", "growth_interval", "min_scale"} <= changes.keys()
        assert set(changes.values()) == {None}

    def test_changes_are_read_back_from_their_yaml(self) -> None:
        changes = {
            "init_scale": 2.0**40,
            "fp32_modules": ["^a[.]b$"],
            "precision": "amp_bf16",
        }
        assert yaml.safe_load(yaml_lines(changes)) == {
            "hyperparameters": {"amp": changes}
        }
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
        assert scale_lines(FoundScale(given.finding, run)) == line
        assert scale_lines(given) == yaml_lines(yaml_changes(given))


class TestJson:
    @pytest.mark.parametrize(
        "given", [FOUND, BF16, HOPELESS], ids=lambda f: f.finding.verdict
    )
    def test_json_gives_the_same_finding_back(
        self, given: FoundScale, tmp_path: Path
    ) -> None:
        (tmp_path / "found.json").write_text(given.json_text())
        assert FoundScale.read(tmp_path / "found.json") == given

    def test_json_holds_what_a_program_needs(self) -> None:
        written = json.loads(json.dumps(FOUND.as_json()))
        known = {
            "choice_log2": 13,
            "low_log2": 9,
            "top_log2": 14,
            "verdict": Verdict.SCALE.value,
            "expected_skips": {"default": 2, "yaml": 2},
            "yaml": {"init_scale": 8192.0},
            "sentences": [*scale_sentences(FOUND)],
        }
        assert {**written, **known} == written
        assert written["measured"][1] == {"scale_log2": 15, "overflow": True}
        shares = {"scale_log2": 6, "overflow_share": 0.0, "flushed_share": 0.1}
        assert written["predicted"][0] == shares
        assert written["modules"][0]["name"] == "head"
        assert written["run"]["samples"] == 192

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "found.json: cannot be read: No such file or directory"),
            ("{", "found.json: is not JSON: Expecting property name"),
            ("[]", "found.json: is not a finding: TypeError "),
            (
                '{"run": {}}',
                "found.json: is not a finding: KeyError 'low_log2'; allowed: what ",
            ),
        ],
    )
    def test_file_without_a_finding_is_refused_in_one_sentence(
        self, content: str | None, said: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "found.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(LossScaleError) as caught:
            FoundScale.read(path)
        assert said in str(caught.value)

    def test_answer_counts_the_samples_of_all_rehearsals(self) -> None:
        """One in bfloat16, two in float16."""
        assert FOUND.passed_samples == 3 * 192

    def test_answer_has_the_init_scale_for_a_scaler(self) -> None:
        assert FOUND.init_scale == 8192.0
        assert HOPELESS.init_scale is None

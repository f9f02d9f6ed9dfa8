"""The pictures of the reports show the numbers that they are given."""

import numpy as np
import pytest

from determined_amp.report.page import Panel, as_png, draw_panels
from determined_amp.report.precision_report import change_panels
from tests.precisions import CPU, comparison_of, run, seeds


def numbers(values):
    return [float(number) for number in values]


def lines_in(axes):
    drawn = axes.get_lines()
    return [(numbers(line.get_xdata()), numbers(line.get_ydata())) for line in drawn]


def test_panels_have_their_dots():
    curve = Panel("loss", "batches", [(1, 0.5), (2, 0.25)])
    dots = Panel("accuracy", "learning_rate", [(0.1, 0.9)], line="")
    axes, others = draw_panels([curve, dots]).axes
    assert (axes.get_title(loc="left"), axes.get_xlabel()) == ("loss", "batches")
    assert lines_in(axes) == [([1.0, 2.0], [0.5, 0.25])]
    assert [each.get_linestyle() for each in others.get_lines()] == ["None"]


def test_change_of_a_precision_has_its_interval_over_the_margin():
    """Differences of the accuracy 0, -0.01 and 0: mean -0.0033, deviation 0.0058."""
    base = seeds("fp32", (0.90, 0.91, 0.92), speed=1000.0)
    amp = seeds("amp_bf16", (0.90, 0.90, 0.92), speed=2000.0)
    found = comparison_of(*base, *amp)
    speed, metric = draw_panels(change_panels(found.pairs, found.metric)).axes
    middle, half = -0.01 / 3, 4.302653 * 0.0057735 / 3**0.5
    ends = [([0.0], [middle]), ([0.0], [middle - half]), ([0.0], [middle + half])]
    assert lines_in(metric) == [(x, pytest.approx(y, rel=1e-4)) for x, y in ends]
    assert lines_in(speed) == [([0.0], pytest.approx([2.0]))] * 3
    (band,) = metric.patches
    box = np.asarray(band.get_extents().transformed(metric.transData.inverted()))
    assert box[:, 1] == pytest.approx([-0.003, 0.003])
    assert speed.get_xlim() == pytest.approx((-0.6, 0.6))  # room for the names
    (name,) = [label.get_text() for label in speed.get_xticklabels()]
    assert name == "amp_bf16\n- fp32:\nbetter"


def test_comparison_without_memory_and_intervals_is_drawn():
    found = comparison_of(*(run(name, device=CPU) for name in ("fp32", "amp_bf16")))
    assert as_png(draw_panels(change_panels(found.pairs, found.metric)))

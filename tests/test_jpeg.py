"""`benchmarks.jpeg` and `benchmarks.photos`: photos like real ones, and what the page
says.
"""

import json

from benchmarks import jpeg
from benchmarks.measured import RESULTS
from tests.run_here import ROOT


def test_page_quotes_the_committed_numbers():
    result = json.loads((RESULTS / "jpeg_cpu.json").read_text())
    page = (ROOT / "docs" / "resnet50.md").read_text()
    assert jpeg.markdown(result) in page
    one = result["one_core"]["image_folder, a batch"]["images_per_second"]
    assert f"decodes {one} photos/s" in page
    assert f"They reach {round(14 * one, -2):,} photos/s" in page
    assert f"{result['mean_kB']:.0f} kB" in page

"""`benchmarks.jpeg` and `benchmarks.photos`: photos like real ones, and what the page
says.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from PIL import Image

from benchmarks import jpeg, photos
from benchmarks.measured import RESULTS
from trials.data.images import DatasetName, DataSettings, load

ROOT = Path(__file__).parents[1]


def test_photos_are_as_large_as_those_of_imagenet_and_make_a_dataset(
    tmp_path: Path,
) -> None:
    one, other = (photos.photo(seed) for seed in (0, 1))
    assert Image.open(io.BytesIO(one)).size == (500, 375)
    assert 60_000 < len(one) < 150_000
    assert photos.photo(0) == one != other
    photos.write_photos(tmp_path, [one, other], copies=3)
    settings = DataSettings(DatasetName.IMAGE_FOLDER, 32, 3, 2, directory=str(tmp_path))
    assert [len(images) for images in load(settings, seed=0)] == [6, 2]


def test_page_quotes_the_committed_numbers() -> None:
    result = json.loads((RESULTS / "jpeg_cpu.json").read_text())
    page = (ROOT / "docs" / "resnet50.md").read_text()
    assert jpeg.markdown(result) in page
    one = result["one_core"]["image_folder, a batch"]["images_per_second"]
    assert f"decodes {one} photos/s" in page
    assert f"They reach {round(14 * one, -2):,} photos/s" in page
    assert f"{result['mean_kB']:.0f} kB" in page

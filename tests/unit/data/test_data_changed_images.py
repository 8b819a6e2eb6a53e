"""Images that change after rows were prepared."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from slurmrl.config.schema import Dataset
from slurmrl.data import image_sources
from slurmrl.data.image_sources import IMAGES
from slurmrl.data.preparation import prepare
from slurmrl.data.prepared import read_manifest
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import ConfigError, EnvironmentFailure
from tests.support.datasets import write_rows
from tests.support.picture_models import draw, write_processor


class Site:
    """Rows with images that a test prepares repeatedly."""

    def __init__(self, folder: Path) -> None:
        write_processor(folder, "gemma3")
        self.a, self.b = folder / "a.bmp", folder / "b.bmp"
        draw(self.a, 2)
        draw(self.b, 3)
        rows = [{"prompt": "One?", "images": [each.name]} for each in (self.a, self.b)]
        path = write_rows(folder, *rows, {"prompt": "None?"})
        self.config = Dataset(type="prompt", path=path, images_key="images", chat_template=True)
        self.tokenizer = load_tokenizer(folder)
        self.folder = folder / "data"

    def prepare(self, incarnation: int) -> tuple[str, str]:
        """Prepare the rows. Return the name of the used directory, and the fingerprint."""
        nothing: Callable[[str], None] = lambda what: None  # noqa: E731 - has a type
        made = prepare(self.folder, incarnation, self.config, self.tokenizer, nothing)
        manifest = read_manifest(made)
        assert manifest is not None
        return made.name.rpartition(".")[2], manifest.source


@pytest.fixture(params=["times", "content"])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a site. ``content``: files were changed so recently that their times are not used."""
    settled = 0 if request.param == "times" else 10**18
    monkeypatch.setattr("slurmrl.data.source_files.SETTLED_NS", settled)
    return Site(tmp_path)


def test_rows_are_prepared_again_only_after_an_image_changed(site: Site) -> None:
    first = site.prepare(1)
    assert site.prepare(2) == first
    os.utime(site.a)
    assert site.prepare(3) == first, "its content is the same"
    size = site.a.stat().st_size
    draw(site.a, 4)
    assert site.a.stat().st_size == size
    number, source = site.prepare(4)
    assert (number, source == first[1]) == ("4", False)
    draw(site.a, 2)
    assert site.prepare(5) == first, "the old content is back"


def test_swapped_images_count_as_changed(site: Site) -> None:
    _, source = site.prepare(1)
    one, other = site.a.read_bytes(), site.b.read_bytes()
    site.a.write_bytes(other)
    site.b.write_bytes(one)
    number, now = site.prepare(2)
    assert (number, now == source) == ("2", False)


def test_missing_image_is_a_problem_of_its_row(site: Site) -> None:
    site.prepare(1)
    site.b.unlink()
    with pytest.raises(ConfigError, match=r"b\.bmp.* cannot be read") as raised:
        site.prepare(2)
    assert raised.value.problems[0].where.endswith("rows.jsonl:2")


@pytest.mark.parametrize("content", ["", "{}", '{"images": {"a.bmp": 1}}', '{"images": {}}'])
def test_damaged_list_of_images_is_made_again(site: Site, content: str) -> None:
    """Without the list, a changed image would not be noticed."""
    _, source = site.prepare(1)
    (listed,) = site.folder.glob(f"*/{IMAGES}")
    listed.write_text(content)
    assert site.prepare(2) == ("2", source)


def test_unreadable_image_is_not_taken_as_a_change(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.prepare(1)

    def fail(*_: object) -> str:
        raise OSError(5, "Input/output error")

    for name in ("state_of_one", "_read_hash"):
        monkeypatch.setattr(image_sources, name, fail)
    with pytest.raises(EnvironmentFailure, match=r"a\.bmp: Input/output error"):
        site.prepare(2)


def test_images_are_not_read_if_their_sizes_and_times_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmrl.data.source_files.SETTLED_NS", 0)
    site = Site(tmp_path)
    first = site.prepare(1)
    monkeypatch.setattr(image_sources, "_read_hash", None)
    assert site.prepare(2) == first


def test_recorded_content_is_the_content_that_was_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image may change while the rows are prepared."""
    site = Site(tmp_path)
    whole = ImageOps.exif_transpose

    def change(image: Image.Image) -> Image.Image:
        monkeypatch.setattr(ImageOps, "exif_transpose", whole)
        draw(site.a, 4)
        return whole(image)

    monkeypatch.setattr(ImageOps, "exif_transpose", change)
    _, source = site.prepare(1)
    number, now = site.prepare(2)
    assert (number, now == source) == ("2", False)

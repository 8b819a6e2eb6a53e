"""Data that have changed since the last commit of a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmrl.data import image_sources
from slurmrl.data.image_sources import ImageFiles
from slurmrl.data.prepared import VERSION
from slurmrl.data.source_files import fingerprint_of, state_of
from slurmrl.desk import content_checks as changed
from slurmrl.desk.content_checks import changed_data
from slurmrl.desk.trial_checks import Finding, Weight
from slurmrl.plan.settings import load_settings
from slurmrl.run.history.slots import Kind
from slurmrl.tensors.checkpoint.manifest import write_manifest
from tests.fake_runs import FakeRun, write_config

ROW = '{"id": "1", "prompt": "a", "answer": "b"}\n'
OTHER = '{"id": "1", "prompt": "a", "answer": "c"}\n'
"""As many bytes, and as many rows."""


class Site:
    """A trial with two data sources, one of which may change."""

    def __init__(self, folder: Path) -> None:
        config = write_config(folder)
        self.files = {"one": folder / "data.jsonl", "two": folder / "two.jsonl"}
        self.files["two"].write_text(ROW)
        sources = {name: {"path": str(path)} for name, path in self.files.items()}
        given = ("dataset.path=", f"dataset.sources={json.dumps(sources)}")
        settings = load_settings(config, given, root=folder / "runs")
        self.config = settings.config
        self.run = FakeRun(folder / "runs")
        self.run.paths.config.write_text("")
        self.run.submission()
        self.run.begin()

    def commit(self, **state: Any) -> None:
        directory = self.run.paths.checkpoint(3, 1)
        directory.mkdir()
        write_manifest(directory, step=3, files=[], state=state)
        self.run.commit(3)

    def sources(self) -> dict[str, str]:
        return {
            name: fingerprint_of([path], lambda share: None) for name, path in self.files.items()
        }

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write prepared rows of the current files."""
        monkeypatch.setattr("slurmrl.data.source_files.SETTLED_NS", 0)
        for number, (name, path) in enumerate(self.files.items()):
            directory = self.run.paths.data / f"recipe.{number}"
            directory.mkdir(parents=True)
            values = {"version": VERSION, "recipe": "r", "source": self.sources()[name]}
            values |= {"source_state": state_of([path]), "rows": 1, "left_out": 0, "token_bytes": 2}
            values |= {"row_bytes": 1, "pictures": False, "tokens": "t"}
            (directory / "manifest.json").write_text(json.dumps(values))

    def findings(self) -> list[Finding]:
        return list(changed_data(self.config))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_changed_file_is_reported_after_a_commit(site: Site) -> None:
    site.commit(dataset={"size": 2, "fingerprint": "f", "sources": site.sources()})
    assert site.findings() == []
    site.files["two"].write_text(OTHER)
    (found,) = site.findings()
    assert (found.weight, found.key) == (Weight.FAILED, "dataset.sources.two.path")
    assert found.message.startswith(f"{site.files['two']} has changed since step 3")
    assert found.message.endswith("start another trial: slurmrl submit CONFIG --new")


@pytest.mark.parametrize("gone", [False, True])
def test_submit_does_not_report_a_damaged_commit(site: Site, gone: bool) -> None:
    """The trial continues from the previous commit."""
    site.commit(dataset={"size": 2, "fingerprint": "f", "sources": site.sources()})
    checkpoint = site.run.paths.checkpoint(3, 1)
    for path in checkpoint.iterdir():
        path.write_text("{")
    if gone:
        checkpoint.rename(checkpoint.with_name("away"))
    assert site.findings() == []


def test_changed_file_is_accepted_before_the_first_commit(site: Site) -> None:
    site.files["two"].write_text(OTHER)
    assert site.findings() == []


@pytest.mark.parametrize("state", [{}, {"dataset": None}, {"dataset": {"size": 2}}])
def test_commit_of_an_older_version_allows_changed_files(site: Site, state: Any) -> None:
    site.commit(**state)
    site.files["two"].write_text(OTHER)
    assert site.findings() == []


def test_changed_file_is_a_warning_for_a_finished_trial(site: Site) -> None:
    site.commit(dataset={"size": 2, "fingerprint": "f", "sources": site.sources()})
    site.run.append(Kind.FINISHED, step=6, reason="total_steps")
    site.files["one"].write_text(OTHER)
    assert [found.weight for found in site.findings()] == [Weight.WARNING]
    longer = site.config.model_copy(update={"total_steps": 9})
    assert [found.weight for found in changed_data(longer)] == [Weight.FAILED]


def test_file_is_not_read_again_if_prepared_rows_have_its_state(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.commit(dataset={"size": 2, "fingerprint": "f", "sources": site.sources()})
    site.prepare(monkeypatch)
    monkeypatch.setattr(image_sources, "fingerprint_of", None)
    assert site.findings() == []


def test_file_with_a_changed_size_is_not_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.commit(dataset={"size": 2, "fingerprint": "f", "sources": site.sources()})
    site.prepare(monkeypatch)
    site.files["two"].write_text(ROW + OTHER)
    monkeypatch.setattr(image_sources, "fingerprint_of", None)
    assert [found.weight for found in site.findings()] == [Weight.FAILED]


def test_submit_does_not_read_a_large_file_with_other_times(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.commit(dataset={"size": 2, "fingerprint": "f", "sources": site.sources()})
    site.prepare(monkeypatch)
    site.files["two"].write_text(OTHER)
    monkeypatch.setattr(changed, "MOST_BYTES", len(ROW) - 1)
    monkeypatch.setattr(image_sources, "fingerprint_of", None)
    (found,) = site.findings()
    assert (found.weight, found.key) == (Weight.WARNING, "dataset.sources.two.path")
    assert "too large to be compared here" in found.message


def with_images(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Give the second source two images; return their files."""
    monkeypatch.setattr("slurmrl.data.source_files.SETTLED_NS", 0)
    dataset = site.config.dataset.model_copy(update={"images_key": "images"})
    site.config = site.config.model_copy(update={"dataset": dataset})
    images = [site.files["two"].with_name(name) for name in ("a.png", "b.png")]
    read = ImageFiles()
    for image in images:
        image.write_bytes(b"one")
        read.read(image.parent, image.name)
    site.prepare(monkeypatch)
    directory = site.run.paths.data / "recipe.1"
    read.write(directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    known = {"pictures": True, "source": read.fingerprint(manifest["source"])}
    known["source_state"] = read.state(manifest["source_state"])
    (directory / "manifest.json").write_text(json.dumps({**manifest, **known}))
    known = {**site.sources(), "two": known["source"]}
    site.commit(dataset={"size": 2, "fingerprint": "f", "sources": known})
    return images


@pytest.mark.parametrize("content", [b"two", b"three", None])
def test_changed_or_missing_image_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    _, image = with_images(site, monkeypatch)
    assert site.findings() == []
    if content is None:
        image.unlink()
    else:
        image.write_bytes(content)
    (found,) = site.findings()
    assert (found.weight, found.key) == (Weight.FAILED, "dataset.sources.two.path")
    assert found.message.startswith(f"image b.png of {site.files['two']} has changed since step 3")
    image.write_bytes(b"one")
    assert site.findings() == [], "the old content is back"


def test_changed_rows_with_images_are_reported_as_rows(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_images(site, monkeypatch)
    site.files["two"].write_text(OTHER)
    (found,) = site.findings()
    assert found.message.startswith(f"{site.files['two']} has changed since step 3")


def test_large_images_are_not_read_on_a_login_node(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, image = with_images(site, monkeypatch)
    monkeypatch.setattr(changed, "MOST_BYTES", 5)
    monkeypatch.setattr(image_sources, "_read_hash", None)
    assert site.findings() == []
    image.write_bytes(b"two")
    (found,) = site.findings()
    assert found.weight == Weight.WARNING
    image.write_bytes(b"three")
    (found,) = site.findings()
    assert (found.weight, found.message.split(" has changed")[0]) == (
        Weight.FAILED,
        f"an image of {site.files['two']}",
    )


def test_run_compares_images_if_prepared_rows_are_gone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, image = with_images(site, monkeypatch)
    image.write_bytes(b"two")
    for path in site.run.paths.data.glob("*/*"):
        path.unlink()
    assert site.findings() == []
    site.files["two"].write_text(OTHER)
    assert [found.weight for found in site.findings()] == [Weight.FAILED]

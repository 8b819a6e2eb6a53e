"""Datasets of several sources, curricula and balanced batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slurmrl.config.schema import Dataset
from slurmrl.data.dataset import SampleRows
from slurmrl.data.order import order_of
from slurmrl.errors import ConfigError
from tests.support.chaos.preparations import Characters
from tests.support.datasets import prepared, write_rows


class Site:
    """A folder with files of rows and a trial's prepared data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, *rows: dict[str, Any]) -> str:
        return write_rows(self.folder, *rows, name=name)

    def make(self, **settings: Any) -> tuple[Dataset, SampleRows]:
        config = Dataset(**{"type": "prompt", **settings})
        return config, prepared(config, Characters(self.folder), self.folder / "data")

    def order(self, made: tuple[Dataset, SampleRows], count: int, batch: int = 2) -> list[str]:
        """Return the ids of the first items."""
        config, rows = made
        directories = [self.folder / "data" / name for name in rows.directories]
        items = order_of(config, 1, batch, rows.size, directories).items(range(count))
        return list(rows.sample(items).ids)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def sources(site: Site, **weights: float) -> dict[str, Any]:
    plain = [{"id": str(n), "prompt": f"{n}+", "answer": "x"} for n in range(4)]
    other = [{"q": f"q{n}", "meta": {"truth": "y"}} for n in range(3)]
    first: dict[str, Any] = {"path": site.write("plain", *plain)}
    second: dict[str, Any] = {
        "path": site.write("other", *other),
        "prompt_key": "q",
        "answer_key": "meta.truth",
        "prompt_template": "{prompt}?",
    }
    if weights:
        first["weight"], second["weight"] = weights["a"], weights["b"]
    return {"a": first, "b": second}


def test_each_source_has_its_own_keys_and_template(site: Site) -> None:
    _, rows = site.make(sources=sources(site))
    sample = rows.sample([(1, 5), (0, 3), (1, 4)])
    assert sample.ids == ("b/2@1", "a/3@0", "b/1@1")
    assert bytes(sample.tensor("prompt_ids").tolist()) == b"q1?3+q0?"
    assert sample.metadata["answer"] == ["y", "x", "y"]
    meta = rows.meta([(1, 5), (0, 3), (1, 4)])
    assert (meta.ids, meta.lengths) == (sample.ids, sample.lengths)
    assert rows.sample([]).ids == ()


def test_epoch_without_weights_has_each_row_once(site: Site) -> None:
    made = site.make(sources=sources(site))
    first, second = (site.order(made, 14)[at : at + 7] for at in (0, 7))
    assert sorted(first) == [*(f"a/{n}@0" for n in range(4)), *(f"b/{n}@0" for n in (1, 2, 3))]
    assert sorted(name.replace("@1", "@0") for name in second) == sorted(first)
    assert [name[:-1] for name in first] != [name[:-1] for name in second]


def test_weights_set_the_ratio_and_change_the_fingerprint(site: Site) -> None:
    made = site.make(sources=sources(site, a=1.0, b=3.0))
    names = site.order(made, 200)
    assert len(set(names)) == 200
    assert abs(sum(name.startswith("b/") for name in names) - 150) <= 2
    other = site.make(sources=sources(site, a=1.0, b=2.0))
    assert other[1].fingerprint != made[1].fingerprint
    assert site.make(sources=sources(site, a=1.0, b=3.0))[1].fingerprint == made[1].fingerprint


def test_a_curriculum_goes_from_small_to_large_numbers(site: Site) -> None:
    numbers = [3, 1.5, 2, 1.5, 3, -1]
    rows = [{"id": f"r{n}", "prompt": "x", "info": {"level": v}} for n, v in enumerate(numbers)]
    path = site.write("rows", *rows)
    settings: dict[str, Any] = {"path": path, "curriculum_key": "info.level"}
    names = site.order(site.make(**settings, shuffle=False), 7)
    assert names == ["r5@0", "r1@0", "r3@0", "r2@0", "r0@0", "r4@0", "r5@1"]
    made = site.make(**settings)
    shuffled = [site.order(made, 60)[at : at + 6] for at in range(0, 60, 6)]
    assert {epoch[0][:2] for epoch in shuffled} == {"r5"}
    assert len({tuple(name[:2] for name in epoch) for epoch in shuffled}) > 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("3", ", but"),
        (None, ", but"),
        (True, ", but"),
        (10**400, " between"),
    ],
)
def test_curriculum_without_numbers_is_rejected(site: Site, value: Any, kind: str) -> None:
    path = site.write("rows", {"prompt": "x", "n": 1}, {"prompt": "y", "n": value})
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: n: must be a number" + kind):
        site.make(path=path, curriculum_key="n")


def test_balanced_batches_come_longest_first(site: Site) -> None:
    rows = [{"id": f"r{n}", "prompt": "x" * n} for n in (1, 2, 3, 4, 5, 6)]
    made = site.make(path=site.write("rows", *rows), balanced_batches=True, shuffle=False)
    names = [name[1] for name in site.order(made, 6, batch=2)]
    assert [{*names[at : at + 2]} for at in (0, 2, 4)] == [{"1", "6"}, {"2", "5"}, {"3", "4"}]
    names = [name[1] for name in site.order(made, 6, batch=4)]
    assert sum(map(int, names[:4])) == 14


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a path, or sources"),
        ({"path": "/x", "sources": {"a": {"path": "/y"}}}, "has both path and sources"),
        (
            {"sources": {"a": {"path": "/y", "weight": 1.0}, "b": {"path": "/z"}}},
            "source 'b' has no weight",
        ),
        ({"path": "/x", "curriculum_key": "n", "balanced_batches": True}, "both order rows"),
        (
            {"sources": {"a": {"path": "/y", "weight": 1.0}}, "balanced_batches": True},
            "balanced_batches needs whole epochs",
        ),
        ({"sources": {"a/b": {"path": "/y"}}}, "a source has a name of"),
    ],
)
def test_contradictory_mixing_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Dataset(type="prompt", **settings)


def test_damaged_index_is_detected_before_use(site: Site) -> None:
    path = site.write("rows", *({"prompt": "x", "n": n} for n in range(3)))
    made = site.make(path=path, curriculum_key="n")
    (name,) = made[1].directories
    index = site.folder / "data" / name / "index.bin"
    content = bytearray(index.read_bytes())
    content[64 + 48] ^= 1
    index.write_bytes(content)
    with pytest.raises(ValueError, match=r"index\.bin is damaged at row 1"):
        site.order(made, 3)

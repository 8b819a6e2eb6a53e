"""The fragments of the changelog and scripts/release, which collects them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CHANGELOG = """# Changelog

## 0.2.0 (2026-12-01)

### Added

- Add tasks ([slurm](docs/slurm.md)).

## 0.1.0 (2026-11-29)

### Added

- Add everything.
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("fragments")


def place(root: Path, **files: str) -> Path:
    """A checkout with one page and some fragments; ``a_added`` is ``a.added.md``."""
    (root / "changelog.d").mkdir()
    (root / "docs").mkdir()
    (root / "docs" / "a.md").touch()
    for name, text in files.items():
        (root / "changelog.d" / f"{name.replace('_', '.')}.md").write_text(text)
    return root


def test_fragments_of_this_repository_are_valid(module: Any) -> None:
    assert module.fragments(ROOT)[1] == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a_added", "Add a thing ([a](docs/a.md#b)).\n", ""),
        ("a_new", "Add a thing ([a](docs/a.md)).", "a.new.md: its name must be NAME.CATEGORY.md"),
        ("added", "Add a thing ([a](docs/a.md)).", "added.md: its name must be"),
        ("a_fixed", "Fix a thing\n([a](docs/a.md)).", "it has 2 lines, and one is allowed"),
        ("a_fixed", "", "it has 0 lines"),
        ("a_fixed", "- Fix a thing ([a](docs/a.md)).", "it must begin with a verb"),
        ("a_fixed", "Fix a thing.", "it must link the page"),
        ("a_fixed", "Fix a thing ([a](docs/b.md)).", "it links docs/b.md, which does not exist"),
        ("a_fixed", f"Fix {'a' * 300} ([a](docs/a.md)).", "characters, and 240 are allowed"),
    ],
)
def test_fragment_with_a_wrong_name_or_text_is_a_problem(
    module: Any, tmp_path: Path, name: str, text: str, said: str
) -> None:
    found, problems = module.fragments(place(tmp_path, **{name: text}))
    assert [said in problem for problem in problems] == ([True] if said else [])
    assert len(found) == (0 if said else 1)


def test_release_collects_fragments_in_a_new_section_or_a_prepared_one(
    module: Any, tmp_path: Path
) -> None:
    root = place(
        tmp_path,
        b_added="Add b ([a](docs/a.md)).",
        a_added="Add a ([a](docs/a.md)).",
        c_breaking="Remove c ([a](docs/a.md)).",
    )
    changes = module.fragments(root)[0]
    new = module.with_release(CHANGELOG, "0.3.0", "2027-01-02", changes)
    added = "- Add a ([a](docs/a.md)).\n- Add b ([a](docs/a.md)).\n\n"
    breaking = "### Breaking\n\n- Remove c ([a](docs/a.md)).\n\n### Added\n\n"
    assert new == CHANGELOG.replace(
        "## 0.2.0", f"## 0.3.0 (2027-01-02)\n\n{breaking}{added}## 0.2.0"
    )
    prepared = module.with_release(CHANGELOG, "0.2.0", "2027-01-02", changes)
    expected = CHANGELOG.replace("2026-12-01", "2027-01-02").replace(
        "### Added\n\n- Add tasks ([slurm](docs/slurm.md)).\n\n",
        f"{breaking}- Add tasks ([slurm](docs/slurm.md)).\n{added}",
    )
    assert prepared == expected
    assert module.section(prepared, "0.2.0").startswith("### Breaking")
    assert module.section(prepared, "0.2") == ""

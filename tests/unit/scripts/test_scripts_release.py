"""The fragments of the changelog and scripts/release, which collects them."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clone import call

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
    """Make a checkout with one page and some fragments. ``a_added`` is the file ``a.added.md``."""
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
        ("a_fixed", f"Fix {'a' * 300} ([a](docs/a.md)).", "characters, and 280 are allowed"),
    ],
)
def test_fragment_with_a_wrong_name_or_text_is_a_problem(
    module: Any, tmp_path: Path, name: str, text: str, said: str
) -> None:
    found, problems = module.fragments(place(tmp_path, **{name: text}))
    assert [said in problem for problem in problems] == ([True] if said else [])
    assert len(found) == (0 if said else 1)


def test_release_collects_fragments_in_a_new_or_prepared_section(
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


GREEN = ("unit", "distributed", "slurm", "faults", "engines")
LONG = '<properties><property name="long" value="True"/></properties>'


def results(path: Path, name: str, *, lanes: tuple[str, ...] = GREEN, failures: int = 0) -> Path:
    """Write test results with a passed test of each kind in each test folder."""
    cases = "".join(
        f'<testcase classname="tests.{lane}.test_x" name="x">{kind}</testcase>'
        for lane in lanes
        for kind in ("", LONG)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    suite = f'<testsuite name="slurmrl {name}" failures="{failures}" errors="0">{cases}</testsuite>'
    path.write_text(f"<testsuites>{suite}</testsuites>")
    return path


class Repository:
    """A repository with the release programs, whose branch main is tested."""

    def __init__(self, root: Path) -> None:
        self.root = place(root, a_added="Add a ([a](docs/a.md)).")
        for name in (
            "scripts/release",
            "scripts/fragments.py",
            "scripts/project.py",
            ".ci/check-lanes",
        ):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
        (root / "slurmrl").mkdir()
        (root / "slurmrl/__init__.py").write_text('__version__ = "0.2.1.dev0"\n')
        (root / "CHANGELOG.md").write_text(CHANGELOG)
        (root / ".gitignore").write_text("/build/\n__pycache__/\n")
        self.git("init", "-q", "-b", "main")
        self.commit()
        self.git("tag", "v0.2.0")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return call(["git", *identity, *words], self.root).strip()

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "all", "--allow-empty")
        results(self.root / "build/tests/all.xml", self.git("rev-parse", "HEAD"))

    def release(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.root / "scripts/release"), *words]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_dry_run_shows_the_changelog_and_changes_nothing(repository: Repository) -> None:
    done = repository.release("0.2.1", "--dry-run")
    assert done.returncode == 0
    assert "release: setup.cfg names no Repository in project_urls" in done.stderr
    assert "### Added\n\n- Add a ([a](docs/a.md)).\n" in done.stdout
    assert "tag v0.2.1" in done.stdout
    assert "commit 'release: begin 0.2.2.dev0'" in done.stdout
    assert (
        "commit 'release: begin 0.3.0rc2.dev0'"
        in repository.release("0.3.0rc1", "--dry-run").stdout
    )
    assert repository.git("status", "--porcelain") == ""
    assert repository.git("tag") == "v0.2.0"


def test_release_reads_the_address_of_the_repository(repository: Repository) -> None:
    setup = repository.root / "setup.cfg"
    setup.write_text("[metadata]\nproject_urls =\n    Repository = https://git.example/a/b\n")
    repository.commit()
    assert repository.release("0.2.1", "--dry-run").stderr == ""
    setup.write_text("[metadata]\nproject_urls =\n    Repository = git@git.example:a/b\n")
    repository.commit()
    done = repository.release("0.2.1", "--dry-run")
    assert done.returncode == 1
    assert "git@git.example:a/b is not https://HOST/OWNER/NAME" in done.stderr


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.2", "'0.2' is not a version with three numbers"),
        ("0.2.2.dev1", "is not a version with three numbers"),
        ("next", "'next' is not a version"),
        ("0.2.0", "0.2.0 is not newer than the tag v0.2.0"),
        ("0.1.9", "0.1.9 is not newer than slurmrl/__init__.py, which has 0.2.1.dev0"),
    ],
)
def test_release_rejects_a_wrong_or_older_version(
    repository: Repository, version: str, said: str
) -> None:
    done = repository.release(version, "--dry-run")
    assert done.returncode == 1
    assert said in done.stderr


def test_release_lists_all_open_points_at_once(repository: Repository) -> None:
    mark = "TO" + "DO"
    (repository.root / "docs/a.md").write_text(f"{mark}: finish\n")
    (repository.root / "changelog.d/b.new.md").write_text("x\n")
    repository.commit()
    repository.git("switch", "-qc", "side")
    (repository.root / "new").touch()
    done = repository.release("0.2.1", "--ci-passed", "abc")
    assert done.returncode == 1
    for said in (
        "the tree has 1 changes, such as ?? new",
        "the branch is side",
        "changelog.d/b.new.md: its name must be",
        f"--ci-passed names abc, but HEAD is {repository.git('rev-parse', 'HEAD')}",
        f"open mark: docs/a.md:1:{mark}: finish",
    ):
        assert said in done.stderr


def test_release_needs_results_of_all_lanes_for_the_commit(repository: Repository) -> None:
    head = repository.git("rev-parse", "HEAD")
    file = repository.root / "build/other.xml"

    def refusal() -> str:
        return repository.release("0.2.1", "--dry-run", "--results", str(file)).stderr

    assert "missing check: no test results in" in refusal()
    results(file, f"{head}+changes")
    assert f"has the tests of {head}+changes, not of {head}" in refusal()
    results(file, head, failures=2)
    assert "failed check:" in refusal()
    assert "has 2 failures" in refusal()
    results(file, head, lanes=GREEN[1:])
    assert "no fast test of lane unit passed" in refusal()
    results(file, head)
    assert "check" not in refusal()
    file.unlink()
    assert repository.release("0.2.1", "--dry-run", "--ci-passed", head).returncode == 0


def test_release_without_changes_is_rejected(repository: Repository) -> None:
    (repository.root / "changelog.d/a.added.md").unlink()
    (repository.root / "changelog.d/README.md").touch()
    repository.commit()
    assert "would have no changes" in repository.release("0.2.1", "--dry-run").stderr

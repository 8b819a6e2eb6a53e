"""Tests of the commit that ``slurmrl --version`` prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slurmrl import package
from slurmrl.desk import provenance


def in_git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", *own, *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the running package appear to be in a folder."""
    monkeypatch.setattr(package, "FOLDER", folder)
    monkeypatch.setattr(package, "read", lambda name: (folder / name).read_bytes())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "slurmrl"
    made.mkdir()
    (made / "a.py").write_text("a = 1\n")
    use(made, monkeypatch)
    return made


def test_version_has_the_commit_of_a_checkout(checkout: Path) -> None:
    assert provenance.commit_of_package() == ""  # no repository
    in_git(checkout.parent, "init", "-q")
    in_git(checkout.parent, "add", "-A")
    in_git(checkout.parent, "commit", "-qm", "one")
    commit = in_git(checkout.parent, "rev-parse", "HEAD")
    assert provenance.commit_of_package() == commit
    (checkout / "a.py").write_text("a = 2\n")
    assert provenance.commit_of_package() == f"{commit}+changes"


def test_recorded_build_commit_takes_precedence(checkout: Path) -> None:
    (checkout / "commit.txt").write_text("abc\n")
    assert package.built_commit() == provenance.commit_of_package() == "abc"


def test_repository_around_the_environment_is_ignored(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout.parent / "venv/lib/site-packages/slurmrl"
    installed.mkdir(parents=True)
    use(installed, monkeypatch)
    in_git(checkout.parent, "init", "-q")
    in_git(checkout.parent, "add", "-A")
    in_git(checkout.parent, "commit", "-qm", "one")
    assert provenance.commit_of_package() == ""

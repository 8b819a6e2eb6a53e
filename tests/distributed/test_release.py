"""scripts/release makes a release in a copy of this repository."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from tests.support.clone import call, checkout


@pytest.mark.long
def test_release_is_built_tested_and_tagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, value in (("name", "a"), ("email", "a@b")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name.upper()}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name.upper()}", value)
    head = checkout(tree)
    monkeypatch.syspath_prepend(str(tree / "scripts"))
    loader = SourceFileLoader("made_release", str(tree / "scripts/release"))
    spec = importlib.util.spec_from_loader("made_release", loader)
    assert spec is not None
    release = importlib.util.module_from_spec(spec)
    loader.exec_module(release)
    # The others run in every test run.
    monkeypatch.setattr(release, "STATIC_CHECKS", (("scripts/make-docs", "--check"),))
    (tree / "changelog.d/z-last.fixed.md").write_text("Fix z ([home](docs/index.md)).\n")
    call(["git", "add", "-A"], tree)
    call(["git", "commit", "-qm", "docs: add z"], tree)
    head = call(["git", "rev-parse", "HEAD"], tree).strip()
    arguments = ["release", "7.8.9", "--ci-passed", head, "--reuse-packages"]
    monkeypatch.setattr(sys, "argv", arguments)
    code = release.main()
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert {path.name for path in (tree / "dist").iterdir()} == {
        "slurmrl-7.8.9-py3-none-any.whl",
        "slurmrl-7.8.9.tar.gz",
    }
    assert "slurmrl submit examples/sft.yaml" in shown.err
    subjects = call(["git", "log", "--format=%s", f"{head}.."], tree).splitlines()
    assert subjects == ["release: begin 7.8.10.dev0", "release: 7.8.9"]
    tagged = call(["git", "rev-parse", "v7.8.9^{commit}"], tree).strip()
    assert tagged == call(["git", "rev-parse", "HEAD^"], tree).strip()
    message = call(["git", "tag", "-n999", "v7.8.9"], tree)
    assert "slurmrl 7.8.9" in message
    assert "### Fixed" in message
    changelog = (tree / "CHANGELOG.md").read_text()
    assert re.search(r"(?m)^## 7\.8\.9 \(\d{4}-\d\d-\d\d\)$", changelog)
    assert "- Fix z ([home](docs/index.md))." in changelog
    assert [path.name for path in (tree / "changelog.d").iterdir()] == ["README.md"]
    assert '__version__ = "7.8.10.dev0"' in (tree / "slurmrl/__init__.py").read_text()
    assert call(["git", "status", "--porcelain"], tree) == ""
    assert len(call(["git", "worktree", "list"], tree).splitlines()) == 1

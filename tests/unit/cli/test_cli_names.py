from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.name_resolve.file import FileNameStore
from tests.fake_runs import FakeRun


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = FakeRun(tmp_path)
    run.submission()
    FileNameStore(run.paths.names, owner="trainer.0.0").add("store", "10.0.0.1:2000")
    FileNameStore(run.paths.names).add("status", "x\x1b[2J" * 100)
    return tmp_path


def test_a_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["names", "add/1", "--root", str(root)]) == 0
    status, store = capsys.readouterr().out.splitlines()
    assert status.startswith("status  x?[2Jx?[2J")
    assert status.endswith("…")
    assert store.startswith("store   10.0.0.1:2000 ")
    assert "trainer.0.0 (silent for 0." in store


def test_json_and_prefix(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["names", "add/1", "store", "--json", "--root", str(root)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["key"], row["value"], row["alive"]) == ("store", "10.0.0.1:2000", False)
    assert main(["names", "add/1", "nothing", "--root", str(root)]) == 0
    assert capsys.readouterr().out == "no names below 'nothing'\n"
    assert main(["names", "add/1", "a/../b", "--root", str(root)]) == 2

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from slurmrl.cli.main import main
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.tensors.weights.format import MANIFEST, VersionId
from slurmrl.tensors.weights.inventory import inventory, prune
from tests.fake_runs import FakeRun
from tests.unit.weights.runs import Ranks, published, random_bits


def test_inventory_lists_versions_with_kind_and_size(tmp_path: Path) -> None:
    published(tmp_path, 5, whole_every=4)
    found = inventory(tmp_path, verify=True)
    assert [one.version for one in found] == ["1.1", "2.1", "3.1", "4.1", "5.1"]
    assert [one.base for one in found] == [None, "1.1", "2.1", "3.1", None]
    assert [one.chain for one in found] == [1, 2, 3, 4, 1]
    assert {(one.state, one.problem, one.tensors, one.time) for one in found} == {
        ("complete", None, 5, 1e9)
    }
    sizes = [file.stat().st_size for file in (tmp_path / "5.1").iterdir()]
    assert found[-1].bytes == sum(sizes)


def test_damaged_version_also_damages_dependent_deltas(tmp_path: Path) -> None:
    published(tmp_path, 6, whole_every=4)
    os.truncate(tmp_path / "2.1" / "part-0.bin", 3)
    (tmp_path / "4.1" / "part-1.bin").unlink()
    (tmp_path / "6.1" / MANIFEST).write_text("{}")
    states = {one.version: (one.state, one.problem) for one in inventory(tmp_path)}
    assert states["1.1"] == states["5.1"] == ("complete", None)
    assert states["2.1"][0] == "broken"
    assert "part-0.bin has 3 bytes instead of" in str(states["2.1"][1])
    assert states["3.1"] == ("broken", "its base 2.1 is broken")
    assert states["4.1"] == ("broken", "part-1.bin is missing")
    assert states["6.1"][0] == "broken"
    assert "manifest.json has no 'format'" in str(states["6.1"][1])


def test_changed_bytes_are_found_only_by_checksum(tmp_path: Path) -> None:
    published(tmp_path, 1)
    path = tmp_path / "1.1" / "part-0.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert [one.state for one in inventory(tmp_path)] == ["complete"]
    (found,) = inventory(tmp_path, verify=True)
    assert found.state == "broken"
    assert "has another checksum" in str(found.problem)


def test_unfinished_versions_are_not_damage(tmp_path: Path) -> None:
    published(tmp_path, 1)
    Ranks(tmp_path).publish(VersionId(2, 1), random_bits(0))
    (tmp_path / "2.1" / MANIFEST).unlink()
    assert [one.state for one in inventory(tmp_path)] == ["complete", "unfinished"]
    assert inventory(tmp_path / "nothing") == []


class Meanwhile:
    """File operations, before one of which another action happens."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.left, self._action = number, action

    def __getattr__(self, name: str) -> Any:
        if self.left == 0:
            self._action()
        self.left -= 1
        return getattr(REAL, name)


def test_versions_removed_during_the_check_are_not_damage(tmp_path: Path) -> None:
    published(tmp_path / "all", 6, whole_every=2)
    for number in count():
        versions = tmp_path / str(number)
        shutil.copytree(tmp_path / "all", versions)
        calls = Meanwhile(number, partial(prune, versions, 1))
        found = inventory(versions, verify=True, calls=cast(SystemCalls, calls))
        told = {one.version: (one.state, one.problem) for one in found}
        assert {state for state, _ in told.values()} == {"complete"}, told
        assert {"5.1", "6.1"} <= told.keys()
        if calls.left >= 0:
            break
    assert number > 50


def test_adapter_versions_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path)
    ranks, bits = Ranks(run.paths.versions, frozen="0123456789abcdef"), random_bits(0)
    ranks.publish(VersionId(1, 1), bits)
    ranks.publish(VersionId(2, 1), bits, VersionId(1, 1))
    command = ["weights", f"{run.paths.experiment}/{run.paths.trial}", "--root", str(tmp_path)]
    assert main([*command, "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  adapters, whole " in lines[1]
    assert "  adapters, delta of 1.1 " in lines[2]
    assert all(line.endswith("verified") for line in lines[1:])
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["frozen"] for one in found] == ["0123456789abcdef"] * 2


def test_versions_in_the_first_format_are_read(tmp_path: Path) -> None:
    """These versions contain all weights.

    Their readers reject current versions, which may contain adapters.
    """
    published(tmp_path, 1)
    path = tmp_path / "1.1" / MANIFEST
    record = json.loads(path.read_bytes())
    assert record["format"] == 2
    path.write_text(json.dumps({**record, "format": 1}))
    (found,) = inventory(tmp_path, verify=True)
    assert (found.state, found.frozen) == ("complete", None)
    path.write_text(json.dumps({**record, "format": 3}))
    (found,) = inventory(tmp_path)
    assert "has format 3; this program reads formats up to 2" in str(found.problem)


def test_weights_command_lists_and_verifies_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path)
    name = f"{run.paths.experiment}/{run.paths.trial}"
    command = ["weights", name, "--root", str(tmp_path)]
    assert main(command) == 0
    assert capsys.readouterr().out == "no weight versions\n"

    published(run.paths.versions, 2)
    assert main([*command, "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["VERSION", "AGE", "CONTENT", "SIZE", "READS", "STATE"]
    assert lines[1].startswith("1.1")
    assert "whole" in lines[1]
    assert "delta of 1.1" in lines[2]
    assert lines[2].endswith("verified")

    os.truncate(run.paths.versions / "2.1" / "part-1.bin", 0)
    assert main([*command, "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["state"], second["state"]) == ("complete", "broken")
    assert main(command) == 1
    assert "  2.1: part-1.bin has 0 bytes" in capsys.readouterr().out

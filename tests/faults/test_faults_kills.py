"""Writers are killed before and after every file operation of every protocol.

The schedules run in separate processes: forks of this one would be slow, since it may have imported
torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmrl.fsio import atomic
from tests.support.chaos import files
from tests.support.chaos.__main__ import SCENARIOS
from tests.support.chaos.linearizable import Operation, is_linearizable
from tests.support.chaos.schedule import Runner, Scenario, ViolationError
from tests.support.chaos.stepping import Actor, Note

REPOSITORY = Path(__file__).parents[2]
SCHEDULES = {
    "attempts": 90,
    "commit": 80,
    "control": 70,
    "deletion": 60,
    "exclusive": 120,
    "history": 120,
    "history-append": 90,
    "lease": 80,
    "names": 100,
    "preparation": 60,
    "replace": 100,
    "samples": 90,
    "submission": 30,
    "weights": 60,
    "weights-copy": 50,
}


LONG_S = 1800
"""Some five hundred operations of several processes in turn, in each of hundreds of schedules:
minutes on a busy machine. A single operation that hangs is reported much sooner."""


def attack(scenario: str, folder: Path, schedules: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.chaos", "--scenario", scenario]
    command += ["--schedules", str(schedules), "--folder", str(folder)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LONG_S - 60, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_at_least_a_thousand_kill_schedules_are_tested() -> None:
    assert SCHEDULES.keys() == SCENARIOS.keys()
    assert sum(SCHEDULES.values()) >= 1000


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("scenario", sorted(SCHEDULES))
def test_no_kill_breaks_an_invariant(scenario: str, tmp_path: Path) -> None:
    result = attack(scenario, tmp_path, SCHEDULES[scenario])
    assert result["kills"] > SCHEDULES[scenario] / 4
    assert result["points"] > 15


@pytest.mark.soak
@pytest.mark.parametrize("scenario", sorted(SCHEDULES))
@pytest.mark.timeout(LONG_S)
def test_kill_at_every_operation_breaks_no_invariant(scenario: str, tmp_path: Path) -> None:
    result = attack(scenario, tmp_path, 600)
    assert result["points"] > 15


# -- the runner and the checker find deliberate faults --------------------------------------------


def check_then_act(path: Path, data: bytes) -> bool:
    if os.path.exists(path):
        return False
    atomic.replace(path, data)
    return True


def in_place(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while data:
        data = data[os.write(descriptor, data) :]
    os.close(descriptor)


def unnoticed(path: Path, data: bytes) -> None:
    """A faulty writer that acknowledges a write without making it."""


def broken_creator(folder: Path, me: int, note: Note) -> None:
    data, recorder = files.pack(str(me)), files.Recorder(note)
    path = folder / "slot-0"
    recorder.call("add", path.name, partial(check_then_act, path, data), str(me))


def broken_writer(write: Any, folder: Path, me: int, note: Note) -> None:
    data, recorder = files.pack(str(me)), files.Recorder(note)
    path = folder / "slot-0"
    recorder.call("put", path.name, partial(write, path, data), str(me))


def _run_all(runner: Runner, folder: Path) -> None:
    for seed in range(60):
        (folder / str(seed)).mkdir()
        runner.run(folder / str(seed), seed, seed % 12)


@pytest.mark.parametrize(
    "actor",
    [broken_creator, partial(broken_writer, in_place), partial(broken_writer, unnoticed)],
    ids=["check then act", "in place", "not at all"],
)
def test_kill_schedules_detect_wrong_protocols(actor: Actor, tmp_path: Path) -> None:
    actors = (actor, actor, files.slot_reader)
    runner = Runner(Scenario("wrong", lambda folder: None, actors, files.check_folder, actor))
    try:
        with pytest.raises(ViolationError, match=r"torn|order"):
            _run_all(runner, tmp_path)
    finally:
        runner.close()


def op(kind: str, argument: str | None, result: Any, begin: int, end: int | None) -> Operation:
    return Operation(kind, argument, result, begin, end)


@pytest.mark.parametrize(
    ("history", "last", "right"),
    [
        ([op("add", "a", True, 0, 1), op("add", "b", True, 2, 3)], False, False),
        ([op("add", "a", True, 0, 1), op("add", "b", False, 2, 3)], "a", True),
        ([op("add", "a", True, 0, 3), op("get", None, None, 1, 2)], "a", True),
        ([op("add", "a", True, 0, 1), op("get", None, None, 2, 3)], "a", False),
        ([op("put", "a", None, 0, None)], "a", True),
        ([op("put", "a", None, 0, None)], None, True),
        ([op("put", "a", None, 0, 1)], None, False),
        ([op("put", "a", None, 0, 1), op("get", None, "b", 2, 3)], "a", False),
    ],
)
def test_history_checker_accepts_exactly_linearizable_histories(
    history: list[Operation], last: str | bool | None, right: bool
) -> None:
    assert is_linearizable(history, last) is right

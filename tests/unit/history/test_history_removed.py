"""The directory of the history was removed, renamed or hidden while its run still exists."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, fold
from slurmrl.run.paths import RunPaths
from tests.support.replaced import replace


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run with a commit."""
    paths = RunPaths(tmp_path / "run")
    paths.history.mkdir(parents=True)
    paths.config.write_text("experiment: x\n")
    writer = begin(History(paths.history), {})
    writer.append(Kind.COMMIT, {"step": 1, "directory": "step-1"})
    return paths


READS: dict[str, Callable[[History], object]] = {
    "read": lambda history: history.read(),
    "count": lambda history: history.count(),
    "begin": lambda history: begin(history, {}),
}


@pytest.mark.parametrize("known", [False, True], ids=["new process", "old process"])
@pytest.mark.parametrize("act", READS.values(), ids=list(READS))
def test_removed_history_is_damage_and_never_an_empty_history(
    run: RunPaths, act: Callable[[History], object], known: bool
) -> None:
    history = History(run.history)
    if known:
        history.read()
    shutil.rmtree(run.history)
    with pytest.raises(CorruptFileError, match=f"{run.history} was removed or renamed; restore"):
        act(history)


@pytest.mark.parametrize("act", READS.values(), ids=list(READS))
def test_dangling_link_in_place_of_the_history_is_damage(
    run: RunPaths, act: Callable[[History], object]
) -> None:
    replace(run.history, "link")
    with pytest.raises(CorruptFileError, match=f"{run.history} was removed or renamed; restore"):
        act(History(run.history))


@pytest.mark.parametrize("kind", ["file", "fifo"])
@pytest.mark.parametrize("act", READS.values(), ids=list(READS))
def test_replaced_history_is_damage(
    run: RunPaths, act: Callable[[History], object], kind: str
) -> None:
    replace(run.history, kind)
    with pytest.raises(CorruptFileError, match=f"{run.history} is not a directory; restore"):
        act(History(run.history))


def test_renamed_history_continues_once_it_is_back(run: RunPaths) -> None:
    history = History(run.history)
    away = run.history.rename(run.run / "history.old")
    with pytest.raises(CorruptFileError, match="removed or renamed"):
        history.read()
    away.rename(run.history)
    assert fold(history.read()).last_commit is not None


@pytest.mark.parametrize("empty", [False, True], ids=["missing", "not mounted"])
def test_missing_run_directory_may_come_back(run: RunPaths, empty: bool) -> None:
    history = History(run.history)
    history.read()
    run.run.rename(run.run.with_name("elsewhere"))
    if empty:
        run.run.mkdir()
    with pytest.raises(EnvironmentFailure, match="No such file"):
        history.read()
    assert History(run.history).read() == []


def test_history_is_empty_before_the_run_has_a_configuration(run: RunPaths) -> None:
    shutil.rmtree(run.history)
    run.config.unlink()
    assert History(run.history).read() == []

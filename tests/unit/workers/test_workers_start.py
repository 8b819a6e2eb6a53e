"""The state that an incarnation resumes from."""

from __future__ import annotations

from typing import Any

import pytest

from slurmrl.errors import DamagedCheckpointError
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import write_manifest
from slurmrl.workers.master.__main__ import restore
from slurmrl.workers.master.progress import STATE, Progress


def commit(paths: RunPaths, state: dict[str, Any]) -> None:
    writer = begin(History(paths.history), {})
    directory = paths.checkpoint(2, 1)
    writer.append(Kind.COMMIT, {"step": 2, "directory": directory.name})
    directory.mkdir()
    write_manifest(directory, step=2, files=[], state=state)


def test_restore_reads_the_last_commit(paths: RunPaths, make_settings: Any) -> None:
    history = History(paths.history)
    assert restore(paths, fold(history.read())) is None
    state = Progress(make_settings(), None).state()
    commit(paths, state)
    assert restore(paths, fold(history.read())) == state


@pytest.mark.parametrize("field", STATE)
def test_state_in_another_format_is_damage(paths: RunPaths, make_settings: Any, field: str) -> None:
    state = Progress(make_settings(), None).state()
    commit(paths, {**state, field: [[0] * 7]})
    with pytest.raises(DamagedCheckpointError, match=rf"state\.json has .* in '{field}'"):
        restore(paths, fold(History(paths.history).read()))

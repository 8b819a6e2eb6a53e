"""The state that an incarnation resumes from."""

from __future__ import annotations

from slurmrl.checkpoint.manifest import write_manifest
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.state import fold
from slurmrl.history.writer import begin
from slurmrl.paths import RunPaths
from slurmrl.workers.master.serve import restore


def test_restore_reads_what_the_last_commit_says(paths: RunPaths) -> None:
    history = History(paths.history)
    writer = begin(history, {})
    assert restore(paths, fold(history.read())) is None
    directory = paths.checkpoint(2, 1)
    writer.append(Kind.COMMIT, {"step": 2, "directory": directory.name})
    directory.mkdir()
    write_manifest(directory, step=2, files=[], state={"step": 2, "cursor": [0, 8]})
    assert restore(paths, fold(history.read())) == {"step": 2, "cursor": [0, 8]}

"""Run directories are private, and readers do not trust data in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.config.load import load_resolved
from slurmrl.desk.proposal import Proposal, prepare, propose, trial_uuid
from slurmrl.errors import CorruptFileError, OwnershipError, SlurmrlError
from slurmrl.fsio import atomic
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.run import events, metrics
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import JobTag
from slurmrl.scheduler.local_chain import ChainState
from slurmrl.scheduler.submission import (
    newest_submission,
    read_jobs,
    submission_numbers,
    write_jobs,
    write_scripts,
)
from slurmrl.tensors.checkpoint.manifest import read_manifest, read_state
from slurmrl.watch import snapshot
from slurmrl.workers.master.futility import read_ending
from tests.fake_runs import FakeRun, write_config


@pytest.fixture
def proposal(tmp_path: Path) -> Proposal:
    return propose(write_config(tmp_path), [], root=str(tmp_path / "runs"), scheduler="local")


@pytest.mark.parametrize("umask", [0, 0o027, 0o777])
def test_all_files_are_private_with_any_umask(proposal: Proposal, umask: int) -> None:
    paths = proposal.paths
    before = os.umask(umask)
    try:
        assert prepare(paths, proposal.settings, proposal.plan, proposal.recorder)
        write_scripts(paths, 1, {"trainer": "#!/bin/bash\n"})
        write_jobs(paths, 1, {"trainer": "41"})
        metrics.MetricsWriter(paths.metrics).write({"step": 1})
        EventWriter(paths, "master.1").write("ready")
        atomic.open_log(paths.log("trainer", 0, 0)).close()
        History(paths.history).append(Kind.BEGIN, 1, {}, after=-1)
        NameStore(paths.names).add("key", "value")
    finally:
        os.umask(before)
    found = [paths.run, *paths.run.rglob("*")]
    assert len(found) > 30
    for path in found:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_directory_writable_by_others_is_rejected(proposal: Proposal) -> None:
    root = proposal.paths.run.parents[2]
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(OwnershipError, match="is world-writable"):
        prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)
    assert not proposal.paths.history.exists()
    root.chmod(0o755)
    assert prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)
    proposal.paths.run.chmod(0o755)
    with pytest.raises(OwnershipError, match="mode 0755"):
        prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)


HOSTILE = (
    b"",
    b"\x00" * 100,
    b"\xff\xfe\xff",
    b"[]",
    b"null",
    b"{}",
    b"3",
    b'"text"',
    b'{"a": ',
    b"[" * 100_000,
    b'{"uuid": 1, "groups": 3, "elements": 5, "files": 7, "version": 1, "scheduler": []}',
    b'{"groups": [{"name": []}], "elements": [{}], "files": [{}], "step": "x", "data": []}',
    b'{"%s": "%s"}' % (b"x" * 100_000, b"y" * 100_000),
)

READERS: dict[str, tuple[Callable[[RunPaths], Path], Callable[[RunPaths], object]]] = {
    "identity": (lambda run: run.identity, trial_uuid),
    "plan": (lambda run: run.plan, lambda run: Plan.read(run.plan)),
    "config": (lambda run: run.config, lambda run: load_resolved(run.config)),
    "status": (lambda run: run.plan, snapshot.read),
    "request": (lambda run: run.submission_request(1), newest_submission),
    "jobs": (lambda run: run.submission_jobs(1), lambda run: read_jobs(run, 1)),
    "chain": (
        lambda run: run.local_chain(1, "trainer"),
        lambda run: ChainState.read(run.local_chain(1, "trainer")),
    ),
    "history": (
        lambda run: run.history / "00000000",
        lambda run: fold(History(run.history).read()),
    ),
    "name": (
        lambda run: run.names / "key",
        lambda run: NameStore(run.names).get("key"),
    ),
    "manifest": (
        lambda run: run.checkpoint(1, 1) / "manifest.json",
        lambda run: read_manifest(run.checkpoint(1, 1)),
    ),
    "state": (
        lambda run: run.checkpoint(1, 1) / "state.json",
        lambda run: read_state(run.checkpoint(1, 1)),
    ),
}
TOLERANT = {"jobs", "status", "state"}
"""Readers that accept some of these: to them an object without their keys is empty."""


@pytest.mark.parametrize("content", HOSTILE, ids=[repr(content[:20]) for content in HOSTILE])
@pytest.mark.parametrize("name", READERS)
def test_hostile_bytes_raise_slurmrl_errors(tmp_path: Path, name: str, content: bytes) -> None:
    run = FakeRun(tmp_path).paths
    place, read = READERS[name]
    atomic.make_private_directory(place(run).parent)
    place(run).write_bytes(content)
    message = ""
    try:
        read(run)
    except SlurmrlError as error:
        message = str(error)
    assert message or name in TOLERANT
    assert len(message) < 5000, "a message must not fill the screen"


@pytest.mark.parametrize("content", HOSTILE, ids=[repr(content[:20]) for content in HOSTILE])
def test_hostile_values_and_lines_raise_slurmrl_errors(tmp_path: Path, content: bytes) -> None:
    run = FakeRun(tmp_path).paths
    names = NameStore(run.names)
    for key in ("status", "attempt/trainer/0/0", "incarnation/1/failure"):
        names.add(key, content.decode(errors="replace"))
    for look in (
        lambda: snapshot.read(run),
        lambda: read_ending(names, Record(0, Kind.BEGIN, 1, 0.0, {}), JobTag("")),
    ):
        with suppress(CorruptFileError):
            look()
    for path in (run.metrics, run.event_file("master.1")):
        path.write_bytes(content + b"\n")
    assert metrics.read(run.metrics) == events.read_all(run) == []


def test_hostile_file_names_are_skipped(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).paths
    for name in ("²", "٣", "-1", "1\n", "..x", "x" * 255):
        (run.submissions / name).mkdir()
    assert submission_numbers(run) == []


def test_tokens_readable_by_others_are_rejected_before_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("MY_TOKEN=secret\n")
    tokens.chmod(0o640)
    command = ["submit", str(write_config(tmp_path)), f"cluster.variables_file={tokens}"]
    root = tmp_path / "runs"
    assert main([*command, "--no-check", "--scheduler", "local", "--root", str(root)]) == 2
    assert "chmod 600" in capsys.readouterr().err
    assert not root.exists()

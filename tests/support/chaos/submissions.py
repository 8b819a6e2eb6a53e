"""Scenario: two processes submit at the same time, and again after a crash, to a fake Slurm in a
folder.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from slurmrl.config.load import dump
from slurmrl.desk import proposal, provenance, submitting, trial_jobs
from slurmrl.errors import UsageError
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.states import QueueRow
from slurmrl.scheduler.submission import newest_submission
from tests.fake_runs import write_config
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note

RUN = Path("run")
SLURM = Path("slurm")
CONFIG = "sft.yaml"
"""Name of the trial that `write_config` configures."""
PENDING, CANCELLED = "PENDING", "CANCELLED"


class FolderSlurm(SlurmClient):
    """A fake Slurm whose jobs are files ``<id>__<job name>__<state>``. Each of its actions is one
    file operation, which has either happened or not when its caller is killed.
    """

    def __init__(self, folder: Path, me: int = 0) -> None:
        super().__init__()
        self._folder = folder
        self._me = me

    def ping(self) -> None:
        pass

    def rows(self) -> list[QueueRow]:
        parts = [name.split("__") for name in sorted(os.listdir(self._folder))]
        return [QueueRow(job, (0,), state, (), name, "") for job, name, state in parts]

    def settings(self) -> dict[str, str]:
        return {}

    def submit_limits(self, user: str) -> str:
        return ""

    def submit(self, script: Path, *options: str) -> str:
        found = re.search(r"^#SBATCH --job-name=(.+)$", script.read_text(), re.MULTILINE)
        assert found
        job = str(100 + 10 * len(os.listdir(self._folder)) + self._me)
        path = self._folder / f"{job}__{found[1]}__{PENDING}"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return job

    def queue(self, jobs: Iterable[str]) -> list[QueueRow]:
        wanted = set(jobs)
        return [row for row in self.rows() if row.job in wanted]

    def queue_by_name(self, names: Iterable[str]) -> list[QueueRow]:
        wanted = set(names)
        return [row for row in self.rows() if row.name in wanted]

    def cancel(self, elements: Iterable[str]) -> None:
        jobs = {element.partition("_")[0] for element in elements}
        for row in self.rows():
            if row.job in jobs and row.raw == PENDING:
                stem = f"{row.job}__{row.name}__"
                os.rename(self._folder / f"{stem}{PENDING}", self._folder / f"{stem}{CANCELLED}")


class FolderScheduler(SlurmScheduler):
    def check(self) -> None:
        pass


@cache
def _proposal() -> proposal.Proposal:
    """Return the proposal. It is made only once, because making it writes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder))
        return proposal.propose(config, [], root=folder, scheduler="local")


@cache
def _configuration() -> str:
    return dump(_proposal().settings.config)


def _put_in(folder: Path, me: int) -> None:
    """Install the fake Slurm and a small package. Slow parts that no protocol depends on run once
    (the configuration, which all submitters share) or not at all.
    """
    proposal.slurmrl.__file__ = str(folder / "slurmrl" / "__init__.py")
    for module in (proposal, submitting, trial_jobs):
        module.make = lambda kind: _scheduler(folder, me)
    proposal.dump = lambda config: _configuration()
    provenance.installed_packages = dict
    provenance.repository_of = lambda place: "not a repository"


def _small_package(folder: Path) -> None:
    """Make a small package for snapshots, in place of the real one with hundreds of files."""
    (folder / "slurmrl").mkdir()
    (folder / "slurmrl" / "__init__.py").write_text("")


def setup(folder: Path) -> None:
    (folder / SLURM).mkdir()
    _small_package(folder)
    write_config(folder)
    make_private_directory(folder / RUN / "user" / "add" / "1")
    _proposal()
    _configuration()


def _scheduler(folder: Path, me: int = 0) -> SlurmScheduler:
    return FolderScheduler(FolderSlurm(folder / SLURM, me))


def _paths(folder: Path) -> RunPaths:
    return RunPaths.of(folder / RUN, "user", "add", "1")


def submitter(folder: Path, me: int, note: Note) -> None:
    _put_in(folder, me)
    planned = _proposal()
    recorder = dataclasses.replace(planned.recorder, config_file=folder / CONFIG)
    changed = dataclasses.replace(planned, paths=_paths(folder), kind="slurm", recorder=recorder)
    try:
        submitted = submitting.submit(changed)
    except UsageError as error:
        note(event="refused", error=str(error))
        return
    assert submitted.jobs is not None
    note(event="submitted", number=submitted.jobs.number, ids=submitted.jobs.ids)


def _check(folder: Path, events: list[Event]) -> None:
    paths, scheduler = _paths(folder), _scheduler(folder)
    rows = FolderSlurm(folder / SLURM).rows()
    pending = {row.job: row.name for row in rows if row.raw == PENDING}
    newest = newest_submission(paths)
    told = {event["number"]: event["ids"] for event in events if event["event"] == "submitted"}
    known: set[str] = set()
    for number in range(1, (newest.number if newest else 0) + 1):
        ids = scheduler.recover(paths, number)
        known |= {job for jobs in ids.values() for job in jobs}
        if number in told and {group: list(jobs) for group, jobs in ids.items()} != told[number]:
            raise ViolationError(f"submission {number} was told {told[number]}, has {ids}")
    if set(pending) - known:
        raise ViolationError(f"jobs that nobody would find again: {pending}, known {known}")
    if len(set(pending.values())) != len(pending):
        raise ViolationError(f"two jobs of one name: {pending}")
    killed = any(event["event"] == "killed" for event in events)
    if told and newest and newest.number not in told and not killed:
        raise ViolationError(f"told {told}, but {newest} is the newest")
    if len(told) > 1 and not killed:
        raise ViolationError(f"several were told that they submitted the trial: {told}")
    if not told and not (killed and pending):
        refused = [event["error"] for event in events if event["event"] == "refused"]
        raise ViolationError(f"nobody submitted: {refused}, pending {pending}")
    if fold(History(paths.history).read()).end is not None:
        raise ViolationError("a trial that never ran has ended")


SCENARIOS = (Scenario("submission", setup, (submitter, submitter), _check, submitter),)

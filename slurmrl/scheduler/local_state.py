"""State file of a local chain, which only the chain writes."""

from __future__ import annotations

import json
import re
import signal
import socket
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import COUNT, TEXT, Fields, list_of, one_of, table
from slurmrl.scheduler import processes
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.scheduler.processes import ProcessId

PREFIX = "local"
_NUMBER = re.compile(r"[0-9]{1,20}")

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
"""Signals that a chain blocks from its first instruction on and reads one at a time."""


_ELEMENT: Fields = {"state": one_of(*JobState), "reason": TEXT, "pid": COUNT}
_FIELDS: Fields = {
    "job": TEXT,
    "host": TEXT,
    "boot": TEXT,
    "elements": list_of(table(_ELEMENT, ("state", "reason"))),
}


@dataclass
class Element:
    state: JobState
    reason: str = ""
    pid: int | None = None
    """Process of a running element, which leads its own process group."""


@dataclass
class ChainState:
    job: str
    host: str
    boot: str
    elements: list[Element] = field(default_factory=list)

    @staticmethod
    def of(process: ProcessId, links: int) -> ChainState:
        """Return the initial state of a chain that this process runs on this machine."""
        pending = [Element(JobState.PENDING, "waits for the previous link") for _ in range(links)]
        return ChainState(job_id(process), socket.gethostname(), processes.boot_id(), pending)

    @property
    def elsewhere(self) -> bool:
        """The chain was started on another machine."""
        return self.boot != processes.boot_id() and self.host != socket.gethostname()

    @property
    def active(self) -> bool:
        return any(element.state.active for element in self.elements)

    def write(self, path: Path) -> None:
        atomic.replace(path, json.dumps(asdict(self)).encode(), durable=False)

    @staticmethod
    def read(path: Path) -> ChainState | None:
        """Return the state; None if the chain has not written it yet. Raises CorruptFileError."""
        try:
            values = documents.read(path, _FIELDS, _FIELDS)
        except FileNotFoundError:
            return None
        elements = [
            Element(JobState(element["state"]), element["reason"], element.get("pid"))
            for element in values["elements"]
        ]
        return ChainState(values["job"], values["host"], values["boot"], elements)

    def after_sudden_end(self) -> ChainState:
        """Return the state after the chain's process vanished without writing its end."""
        reason = "the local chain was killed, or the machine restarted"
        ends = {JobState.RUNNING: JobState.FAILED, JobState.PENDING: JobState.CANCELLED}
        elements = [
            replace(element, state=ends[element.state], reason=reason, pid=None)
            if element.state.active
            else element
            for element in self.elements
        ]
        return replace(self, elements=elements)

    def tasks(self, group: str) -> list[TaskState]:
        return [
            TaskState(
                job_id=f"{self.job}_{index}",
                group=group,
                element=index,
                state=element.state,
                raw=element.state.value,
                reason=element.reason,
                hosts=(self.host,) if element.state is JobState.RUNNING else (),
            )
            for index, element in enumerate(self.elements)
        ]


def job_id(process: ProcessId) -> str:
    """Return the name of the chain that a process runs."""
    return f"{PREFIX}-{process.pid}-{process.start_ticks}"


def chain_process(job: str) -> ProcessId:
    """Return the process of a chain. Raises CorruptFileError for an id of another scheduler."""
    prefix, *numbers = job.split("-")
    if prefix != PREFIX or len(numbers) != 2 or not all(map(_NUMBER.fullmatch, numbers)):
        raise CorruptFileError(f"{job!r} is not a job id of the local scheduler")
    return ProcessId(int(numbers[0]), int(numbers[1]))

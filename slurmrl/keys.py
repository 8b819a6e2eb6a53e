"""Every key of a trial's name store. Keys of one incarnation carry its number."""

from __future__ import annotations

ATTEMPTS = "attempt"
"""Root of all claims."""


def attempt(group: str, task: int, number: int) -> str:
    """Claim of one start of a task; its value says job, host and process."""
    return f"attempt/{group}/{task}/{number}"


def attempts(group: str, task: int) -> str:
    return f"attempt/{group}/{task}"


def incarnation(number: int) -> str:
    """Root of one incarnation's keys."""
    return f"incarnation/{number}"


def group_attempts(group: str) -> str:
    return f"attempt/{group}"


def store(incarnation: int) -> str:
    """Address ``host:port`` of the incarnation's TCPStore."""
    return f"incarnation/{incarnation}/store"


def failure(incarnation: int) -> str:
    """The first failure of an incarnation, as JSON; later ones lose the exclusive add."""
    return f"incarnation/{incarnation}/failure"


def warned(incarnation: int) -> str:
    """What told an incarnation that its job will end: signal, cause and the time left, as JSON."""
    return f"incarnation/{incarnation}/warned"


def batons() -> str:
    """Root of the jobs that took the trial over, one after the other."""
    return "baton"


def baton(number: int) -> str:
    """The job that took the trial over as the ``number``-th, as JSON; of several at once one
    wins."""
    return f"baton/{number}"


def hang(incarnation: int) -> str:
    """Who waited for whom when an incarnation was ended for silence or a deadline, as JSON:
    ``text`` and ``files`` with stacks."""
    return f"incarnation/{incarnation}/hang"


def stacks(incarnation: int, number: int) -> str:
    """The ``number``-th request for stacks, from 1 on, as JSON: ``ranks``, null for all."""
    return f"incarnation/{incarnation}/stacks/{number}"


def lost(host: str) -> str:
    """A host whose agent was seen to be dead, as JSON: the incarnation and its job."""
    return f"lost/{host}"


def devices(incarnation: int, group: str, task: int) -> str:
    """Devices that an agent gave its workers."""
    return f"incarnation/{incarnation}/devices/{group}/{task}"


def status() -> str:
    """What the master last said about the run, replaced as it goes on."""
    return "status"

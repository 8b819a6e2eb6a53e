"""Disturbances of a trial: the process, and the signal or action."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.trials import processes, wait_until

TIMEOUT_S = 600.0
"""Maximum wait for a process: a fork server takes minutes to import torch on a busy machine."""


@dataclass(frozen=True)
class Cause:
    role: str
    """Role of the process, from `tests.support.trials.ROLES`."""
    signal: signal.Signals
    everyone: bool = False
    """Whether all processes of the role get the signal at once."""
    resumes: bool = False
    """Whether the trial needs ``slurmrl resume`` afterwards."""


CAUSES = {
    "worker": Cause("worker", signal.SIGKILL),
    "workers": Cause("worker", signal.SIGKILL, everyone=True),
    "fork_server": Cause("fork_server", signal.SIGKILL),
    "master": Cause("master", signal.SIGKILL),
    "agent": Cause("agent", signal.SIGKILL),
    "supervisor": Cause("supervisor", signal.SIGKILL),
    "warn": Cause("supervisor", signal.SIGUSR2),
    "stop": Cause("worker", signal.SIGSTOP),
    "stop-master": Cause("master", signal.SIGSTOP),
    "stop-agent": Cause("agent", signal.SIGSTOP),
    "chain": Cause("chain", signal.SIGKILL, resumes=True),
}
DEFAULT = ("worker", "master", "agent", "supervisor", "warn")


def strike(cause: Cause, run: Path, choice: float, over: Callable[[], bool]) -> bool:
    """Send the signal to a process of the run when it exists. Return False if ``over`` returned
    True first.
    """

    def struck() -> str | None:
        found = processes(run)[cause.role]
        if not found:
            return "over" if over() else None
        try:
            for pid in found if cause.everyone else [found[int(choice * len(found))]]:
                os.kill(pid, cause.signal)
        except ProcessLookupError:
            return None  # The process just ended: choose another.
        return "struck"

    return wait_until(f"a {cause.role} of {run}", struck, TIMEOUT_S) == "struck"

"""The doorbells of the master, the agents and the rollout tasks (see `run.channel.bell`)."""

from __future__ import annotations

from pathlib import Path

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import is_local
from slurmrl.run.channel.bell import Bell
from slurmrl.workers.address import fabric_address

logger = log.get(__name__)


def install(control: Path, interface: str | None, hosts: int) -> Bell | None:
    """Return a bell on this host's fabric address for the logs in ``control``.

    None where the kernel reports their changes, and where no bell is possible: then they are only
    polled.
    """
    return None if is_local(control) else hang(interface, hosts)


def hang(interface: str | None, hosts: int) -> Bell | None:
    """Return a bell on this host's fabric address; None where none is possible."""
    try:
        return Bell(fabric_address(interface, hosts))
    except (EnvironmentFailure, OSError) as error:
        logger.warning("no doorbell, messages are noticed by polling only: %s", error)
        return None

"""The doorbells of the agents and the master (see `channel.bell`)."""

from __future__ import annotations

from pathlib import Path

from slurmrl import log
from slurmrl.channel.bell import Bell
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import is_local
from slurmrl.workers.address import fabric_address

logger = log.get(__name__)


def install(control: Path, interface: str | None, hosts: int) -> Bell | None:
    """Return a bell on this host's fabric address for the logs in ``control``.

    None where the kernel reports their changes, and where no bell is possible: then they are only
    polled.
    """
    if is_local(control):
        return None
    try:
        return Bell(fabric_address(interface, hosts))
    except (EnvironmentFailure, OSError) as error:
        logger.warning("no doorbell, messages are noticed by polling only: %s", error)
        return None

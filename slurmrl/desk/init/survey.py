"""What the cluster and this host tell about themselves."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from slurmrl.env import user_name
from slurmrl.errors import SchedulerError
from slurmrl.run.channel.bell import default_address, interface_address, interface_of
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import Accounts, Partition

TIMEOUT_S = 20.0
"""For each of Slurm's commands."""
NETWORK = Path("/sys/class/net")
INFINIBAND = "32"
"""ARPHRD_INFINIBAND of linux/if_arp.h."""


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of this host that has an IPv4 address."""

    name: str
    is_infiniband: bool
    is_default: bool
    """Whether the default route uses it."""


@dataclass
class Survey:
    """Answers; what there was no answer to is empty, and ``missing`` tells why."""

    cluster: str = ""
    """Name and version."""
    partitions: list[Partition] = field(default_factory=list)
    accounts: Accounts = field(default_factory=lambda: Accounts((), ""))
    interfaces: list[NetworkInterface] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def survey() -> Survey:
    """Ask Slurm and this host."""
    found, client = Survey(), SlurmClient(timeout_s=TIMEOUT_S)
    try:
        name = client.settings().get("ClusterName", "")
        found.cluster = f"{name} (Slurm {client.version()})".strip()
        found.partitions = client.partitions()
    except SchedulerError as error:
        found.missing.append(f"the partitions: {_brief(error)}")
    try:
        found.accounts = client.accounts(user_name())
        if not found.accounts.names:
            found.missing.append("accounts: sacctmgr knows none of yours")
    except SchedulerError as error:
        found.missing.append(f"your accounts: {_brief(error)}")
    found.interfaces = interfaces()
    if not found.interfaces:
        found.missing.append("network interfaces: this host has none with an IPv4 address")
    return found


def _brief(error: SchedulerError) -> str:
    """The last line of a command's message, which has the reason."""
    return str(error).splitlines()[-1]


def interfaces(folder: Path = NETWORK) -> list[NetworkInterface]:
    """The network interfaces of this host, without loopback."""
    address = default_address()
    default = interface_of(address) if address else None
    names = [name for _, name in socket.if_nameindex() if name != "lo" and interface_address(name)]
    return [NetworkInterface(name, is_infiniband(folder / name), name == default) for name in names]


def is_infiniband(interface: Path) -> bool:
    """Whether the kernel's folder of an interface says so."""
    try:
        return (interface / "type").read_text().strip() == INFINIBAND
    except OSError:
        return False

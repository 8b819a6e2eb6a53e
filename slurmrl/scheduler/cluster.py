"""Pure parsers of what Slurm says about a cluster: its partitions, and a user's accounts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurmrl.scheduler.parse import gpu_count, gpus, rows, said, whole

PARTITIONS_FORMAT = "%P|%a|%l|%D|%c|%m|%G"
"""sinfo's fields, one line for each partition and kind of host: partition (a star marks the
default), availability, time limit, number of hosts, CPUs, megabytes of memory, resources."""
ACCOUNTS_FORMAT = "User,DefaultAccount,Account"


@dataclass(frozen=True)
class HostKind:
    """Equal hosts of a partition."""

    hosts: int
    cpus: int
    memory_mib: int
    gpus: int
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """A partition; its kinds of hosts in sinfo's order."""

    name: str
    is_default: bool
    is_up: bool
    time_limit: str
    """As sinfo prints it: ``1-00:00:00``, ``infinite``."""
    kinds: tuple[HostKind, ...]

    @property
    def hosts(self) -> int:
        return sum(kind.hosts for kind in self.kinds)

    @property
    def most_gpus(self) -> int:
        """Of one host."""
        return max((kind.gpus for kind in self.kinds), default=0)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.gpu_types))


@dataclass(frozen=True)
class Accounts:
    """The accounts that a user may charge."""

    names: tuple[str, ...]
    default: str
    """Empty where there is none."""


def partitions(text: str) -> list[Partition]:
    """Return the partitions in sinfo's output, the default one first."""
    found: dict[str, Partition] = {}
    bars = PARTITIONS_FORMAT.count("|")
    for line in rows(text, "sinfo", lambda line: line.count("|") == bars):
        parts = line.split("|")
        label, state, limit, hosts, cpus, memory, resources = parts
        name = label.removesuffix("*")
        kind = HostKind(
            whole(hosts),
            whole(cpus),
            whole(memory),
            gpu_count(resources),
            tuple(_once(name for name, _ in gpus(resources) if name)),
        )
        before = found[name].kinds if name in found else ()
        found[name] = Partition(name, label != name, state == "up", limit, (*before, kind))
    return sorted(found.values(), key=lambda one: not one.is_default)


def accounts(text: str) -> Accounts:
    """Return the accounts in sacctmgr's output; associations with partitions repeat them."""
    names, default = [], ""
    for line in rows(text, "sacctmgr", lambda line: line.count("|") >= 2):
        parts = line.split("|")
        default = said(parts[1]) or default
        names.append(said(parts[2]))
    return Accounts(tuple(_once(name for name in [default, *names] if name)), default)


def _once(names: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(names)

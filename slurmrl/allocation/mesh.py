"""Meshes of ReaL's ``manual`` mode: ``node[01-02,05]``, ``NODE01:0,1``, ``node01,node03``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slurmrl.allocation.scanner import Scanner

_PREFIX: Final = re.compile(r"[A-Za-z][A-Za-z_-]*")
_DIGITS: Final = re.compile(r"[0-9]+")
_GPUS: Final = re.compile(r"[0-9]+(\s*,\s*[0-9]+)*")


@dataclass(frozen=True)
class Mesh:
    """``gpus`` of a single host, or every GPU of all hosts if empty."""

    hosts: tuple[str, ...]
    gpus: tuple[int, ...] = ()

    def numbers(self, hosts: Sequence[str], gpus_per_host: int) -> tuple[int, ...]:
        """The GPUs' numbers in a trial on ``hosts``, in that order."""
        own = self.gpus or tuple(range(gpus_per_host))
        starts = sorted(hosts.index(host) * gpus_per_host for host in self.hosts)
        return tuple(start + gpu for start in starts for gpu in own)


def mesh(scanner: Scanner, gpus_per_host: int) -> Mesh:
    """Read a mesh. GPUs of a host are 1, 2, 4, … adjacent ones."""
    scanner.skip_blanks()
    start = scanner.position
    hosts = _hosts(scanner)
    while scanner.take_if(","):
        hosts += _hosts(scanner)
    if len(set(hosts)) < len(hosts):
        scanner.fail("a host is listed twice", start)
    gpus: tuple[int, ...] = ()
    if scanner.character == ":" and _digit_follows(scanner):
        gpus = _gpus(scanner, hosts, gpus_per_host)
    return Mesh(tuple(hosts), gpus)


def _digit_follows(scanner: Scanner) -> bool:
    rest = scanner.text[scanner.position + 1 :].lstrip()
    return rest[:1].isdigit()


def _hosts(scanner: Scanner) -> list[str]:
    prefix = scanner.take(_PREFIX)
    if not prefix:
        scanner.fail("expected a host such as node01 or node[01-04,07]")
    if not scanner.take_if("["):
        return [f"{prefix}{_digits(scanner)}"]
    hosts = _range(scanner, prefix)
    while scanner.take_if(","):
        hosts += _range(scanner, prefix)
    scanner.expect("]", "',' or ']' after the numbers of hosts")
    return hosts


def _range(scanner: Scanner, prefix: str) -> list[str]:
    scanner.skip_blanks()
    start = scanner.position
    first = _digits(scanner)
    last = _digits(scanner) if scanner.take_if("-") else first
    if int(last) < int(first) or len(last) != len(first):
        scanner.fail(f"the range {first}-{last} must ascend, with equally many digits", start)
    return [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _digits(scanner: Scanner) -> str:
    digits = scanner.take(_DIGITS)
    if not digits or len(digits) > 6:
        scanner.fail("expected the number of a host, such as 01")
    return digits


def _gpus(scanner: Scanner, hosts: list[str], gpus_per_host: int) -> tuple[int, ...]:
    scanner.take_if(":")
    scanner.skip_blanks()
    start = scanner.position
    numbers = tuple(map(int, scanner.take(_GPUS).split(",")))
    if len(hosts) > 1:
        scanner.fail("GPUs can only be listed for one host; several hosts use all of theirs", start)
    neighbours = tuple(range(numbers[0], numbers[0] + len(numbers)))
    if numbers != neighbours or len(numbers) & (len(numbers) - 1):
        scanner.fail("GPUs must be 1, 2, 4, … consecutive numbers", start)
    if numbers[-1] >= gpus_per_host:
        scanner.fail(f"a host has GPUs 0 to {gpus_per_host - 1}", start)
    return numbers

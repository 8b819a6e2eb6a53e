"""Nodes with separate host names, addresses and ports, so that a test can cut a network.

Each slurmd runs in a network namespace that a veth pair joins to a bridge, in a UTS namespace with
the node's name, and in a mount namespace whose /etc/hosts knows all nodes. Needs root.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAMS = ("ip", "nsenter", "unshare", "mount", "hostname")
FILE = "network.json"


class NetworkError(Exception):
    """Namespaces cannot be made on this machine."""


@dataclass(frozen=True)
class Network:
    """A bridge and one namespace per node, named after the tag of this bed."""

    tag: str
    subnet: str
    """First three numbers of all addresses."""
    nodes: int

    @property
    def gateway(self) -> str:
        """The address of the bridge, at which slurmctld listens."""
        return f"{self.subnet}.1"

    def address(self, index: int) -> str:
        return f"{self.subnet}.{10 + index}"

    @staticmethod
    def read(directory: Path) -> Network | None:
        try:
            return Network(**json.loads((directory / FILE).read_text()))
        except FileNotFoundError:
            return None

    @staticmethod
    def make(directory: Path, nodes: int) -> Network:
        """Make bridge, namespaces and links. Raises NetworkError with the reason."""
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if os.geteuid() != 0 or missing:
            need = f"{', '.join(missing)} (iproute2, util-linux)" if missing else "root"
            raise NetworkError(f"nodes with networks of their own need {need}")
        network = Network(f"bed{random.randrange(16**4):04x}", _free_subnet(), nodes)
        (directory / FILE).write_text(json.dumps(asdict(network)))
        try:
            network._build(directory)
        except NetworkError:
            network.remove()
            raise
        return network

    def _build(self, directory: Path) -> None:
        ip("link", "add", self.tag, "type", "bridge")
        ip("addr", "add", f"{self.gateway}/24", "dev", self.tag)
        ip("link", "set", self.tag, "up")
        lines = ["127.0.0.1 localhost", f"{self.gateway} {os.uname().nodename}"]
        for index in range(self.nodes):
            here, there = self.link(index), "eth0"
            ip("netns", "add", self.namespace(index))
            inside = ("-n", self.namespace(index))
            ip("link", "add", here, "type", "veth", "peer", "name", f"{here}p")
            ip("link", "set", f"{here}p", "netns", self.namespace(index))
            ip(*inside, "link", "set", f"{here}p", "name", there)
            ip("link", "set", here, "master", self.tag, "up")
            ip(*inside, "addr", "add", f"{self.address(index)}/24", "dev", there)
            for device in ("lo", there):
                ip(*inside, "link", "set", device, "up")
            ip(*inside, "route", "add", "default", "via", self.gateway)
            lines.append(f"{self.address(index)} n{index}")
        (directory / "hosts").write_text("\n".join([*lines, ""]))

    def remove(self) -> None:
        """Remove bridge, namespaces and links. Missing parts are no error."""
        for index in range(self.nodes):
            _try("netns", "delete", self.namespace(index))
            _try("link", "delete", self.link(index))
        _try("link", "delete", self.tag)

    def command(self, directory: Path, index: int, *command: str) -> list[str]:
        """Return a command that runs in the network, host name and hosts file of the node."""
        hosts = shlex.quote(str(directory / "hosts"))
        inside = (
            f"hostname n{index} && mount --bind {hosts} /etc/hosts && exec {shlex.join(command)}"
        )
        enter = ["nsenter", f"--net=/run/netns/{self.namespace(index)}"]
        return [*enter, "unshare", "--uts", "--mount", "sh", "-c", inside]

    def set_link(self, index: int, *, up: bool) -> None:
        """Join a node to the others, or cut it off."""
        ip("link", "set", self.link(index), "up" if up else "down")

    def namespace(self, index: int) -> str:
        return f"{self.tag}-n{index}"

    def link(self, index: int) -> str:
        return f"{self.tag}v{index}"


def ip(*arguments: str) -> str:
    """Run ``ip``. Raises NetworkError."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def rename_host(daemon: int, name: str) -> None:
    """Change the output of ``hostname`` for all processes of the node with this slurmd."""
    subprocess.run(["nsenter", f"--target={daemon}", "--uts", "hostname", name], check=True)


def _try(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=False)


def _free_subnet() -> str:
    taken = ip("-o", "-4", "addr")
    free = [f"10.{a}.{b}" for a in (213, 214) for b in range(256) if f" 10.{a}.{b}." not in taken]
    return random.choice(free)

"""The servers of one copy of a model: a server of its own, or some that run already."""

from __future__ import annotations

import os
import secrets
import shutil
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Protocol

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import RolloutEngine, WeightVersion
from slurmrl.engines.rollout.dialect import Dialect
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.instance import InstanceLimits
from slurmrl.engines.rollout.instances import Instances
from slurmrl.engines.rollout.kept import KeptEngine
from slurmrl.engines.rollout.process import HostFolder
from slurmrl.engines.rollout.served import ServedEngine
from slurmrl.engines.rollout.server import Running
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.failures import explain

ROOT_UID = 0


class Speak(Protocol):
    """Makes the dialect of a server. ``control`` is a client with its key for administration;
    without one, ``client`` has it."""

    def __call__(self, client: HttpClient, control: HttpClient | None = None) -> Dialect: ...


class Servers(ABC):
    """Made in a running asyncio loop."""

    engine: RolloutEngine
    folder: Path
    """For weight versions: the servers see it under this path."""

    @abstractmethod
    async def up(self) -> None:
        """Return once requests can be served. Raises RunFailedError if that takes too long,
        UsageError if it will never be so."""

    async def install(self, version: WeightVersion) -> None:
        """Serve ``version``, whose folder is in ``folder``. Raises UsageError if it is refused."""
        await self.engine.update_weights(version)

    async def sleep(self) -> None:  # noqa: B027 - only servers of one's own do
        """Free device memory until the next `install`."""

    @abstractmethod
    async def close(self) -> None:
        """End what was started, and remove ``folder``."""


class PlacedServer(Servers):
    """A server that this process keeps. It reads weights from this host's memory."""

    def __init__(self, folder: HostFolder, kept: KeptEngine) -> None:
        self._host_folder, self.folder = folder, folder.path
        self.engine = self._kept = kept

    async def up(self) -> None:
        await self._kept.up()

    async def sleep(self) -> None:
        await self._kept.sleep()

    async def close(self) -> None:
        await self._kept.close()
        self._host_folder.close()


class RunningServers(Servers):
    """Servers that run already. They read weights from a directory that their hosts share."""

    def __init__(self, running: Running, speak: Speak) -> None:
        self._running, self._speak = running, speak
        self.folder = _new_folder(running.weights)
        patience = running.patience
        self._instances = Instances(
            {address.text: partial(self._connect, address) for address in running.addresses},
            limits=InstanceLimits(silence_s=patience.silence_s, control_s=patience.start_s),
            patience_s=patience.start_s,
        )
        self.engine = self._instances

    async def _connect(self, address: Address) -> RolloutEngine:
        if address.socket is not None:
            _check_owner(address.socket)
        keys = self._running.keys
        clients = (HttpClient(address, api_key=key) for key in (keys.api, keys.admin))
        dialect = self._speak(*clients)
        return await ServedEngine.connect(dialect, least=self._running.context)

    async def install(self, version: WeightVersion) -> None:
        try:
            await super().install(version)
        except UsageError as error:
            raise UsageError(
                f"{error}; do the servers see {version.folder}? If not, set "
                "rollout.server_weights to a folder that they do"
            ) from error

    async def up(self) -> None:
        await self._instances.start(wait_s=self._running.patience.start_s)

    async def close(self) -> None:
        await self._instances.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _new_folder(parent: Path) -> Path:
    """A folder of this process in ``parent``, which is emptied: what is there belongs to
    incarnations that have ended. Raises EnvironmentFailure."""
    try:
        atomic.make_private_directory(parent)
        for older in parent.iterdir():
            shutil.rmtree(older, ignore_errors=True)
        folder = parent / secrets.token_hex(4)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise explain(error, "make a folder for weights in", parent) from error
    return folder


def _check_owner(socket: str) -> None:
    """Another user's server would get the path of the weights, and its tokens would be trained
    on."""
    try:
        owner = os.stat(socket).st_uid
    except OSError as error:
        raise RunFailedError(f"unix:{socket}: {error.strerror}") from error
    if owner not in (os.geteuid(), ROOT_UID):
        raise UsageError(f"unix:{socket} belongs to user {owner}, not to you; not used")

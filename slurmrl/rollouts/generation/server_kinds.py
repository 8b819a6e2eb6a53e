"""The servers of one copy of a model: how a kind of server is started, and which ones generate.

A copy has a server of its own, or uses servers that run already.
"""

from __future__ import annotations

import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.rollout import Address
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import explain
from slurmrl.models.config import ModelConfig
from slurmrl.models.hf import CONFIG_FILE, as_array
from slurmrl.models.shapes import storage_of
from slurmrl.rollouts.generation.base import RolloutEngine, WeightVersion
from slurmrl.rollouts.generation.dialect import Dialect, HttpDialect
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.instances import Instances
from slurmrl.rollouts.generation.managed_server import ManagedServer
from slurmrl.rollouts.generation.process import HostFolder, ServerProgram
from slurmrl.rollouts.generation.server_client import InstanceLimits, ServerClient
from slurmrl.rollouts.generation.server_supervisor import Running, Serving
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from slurmrl.tensors.checkpoint.export import (
    in_written_order,
    write_folder,
    write_json,
    write_weights,
)
from slurmrl.tensors.checkpoint.tensors import TensorEntry, assembled, file_tensors
from slurmrl.tensors.layout import Array, Box, HeldBox, Layout, sources
from slurmrl.tensors.parallel.groups import ParallelContext

ROOT_UID = 0
DROPPED = (
    *("PYTHONPATH", "PYTHONHOME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
    "TORCHINDUCTOR_DETERMINISTIC",
)
"""Variables of a worker that mean something else to a server, or that only its engine needs: a
server cannot free memory of expandable segments."""
SOCKET = "server.sock"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Speak(Protocol):
    """Makes the dialect of a server.

    ``control`` is a client with its key for administration; without one, ``client`` has it.
    """

    def __call__(self, client: HttpClient, control: HttpClient | None = None) -> Dialect: ...


class Servers(ABC):
    """Made in a running asyncio loop."""

    engine: RolloutEngine
    folder: Path
    """For weight versions: the servers see it under this path."""

    @abstractmethod
    async def up(self) -> None:
        """Return once requests can be served.

        Raises RunFailedError if that takes too long, UsageError if it will never be so.
        """

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

    def __init__(self, folder: HostFolder, kept: ManagedServer) -> None:
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
        return await ServerClient.connect(dialect, least=self._running.context)

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
    """Return a folder of this process in ``parent``, which is emptied.

    Older content belongs to incarnations that have ended. Raises EnvironmentFailure.
    """
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
    """Raise UsageError if the socket belongs to another user (except root).

    That user's server would get the path of the weights, and its tokens would be used for training.
    """
    try:
        owner = os.stat(socket).st_uid
    except OSError as error:
        raise RunFailedError(f"unix:{socket}: {error.strerror}") from error
    if owner not in (os.geteuid(), ROOT_UID):
        raise UsageError(f"unix:{socket} belongs to user {owner}, not to you; not used")


class ServerKind(ABC):
    """Servers of one kind for one model."""

    name: str
    speaks: type[HttpDialect]

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        serving: Serving | Running,
        *,
        tensor_ranks: int,
        device: torch.device,
    ) -> None:
        """``tensor_ranks``: GPUs that share the model, of which ``device`` is one."""
        self.config, self.dtype, self.serving = config, dtype, serving
        self.tensor_ranks, self.device = tensor_ranks, device
        self.model = ServedModel.of(config, dtype, text=serving.text, experts=serving.experts)
        self.checks = WeightChecks(device, own=isinstance(serving, Serving))
        self.stale_cache = isinstance(serving, Serving) and serving.stale_cache

    @abstractmethod
    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        """The command that starts a server without weights, over ``tensor_ranks`` GPUs."""

    @staticmethod
    @abstractmethod
    def memory_flags(share: int, free: int, total: int) -> Sequence[str]:
        """Return arguments with which a server uses ``share`` bytes of each GPU.

        Each GPU has ``total`` bytes, and ``free`` of them are free when the server starts.
        """

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Variables of the server, over those of this process."""

    def dialect(self, client: HttpClient, control: HttpClient | None = None) -> Dialect:
        """Return how to speak to it. ``control``: a client with the key for administration."""
        return self.speaks(
            client,
            control,
            model=self.model,
            checks=self.checks,
            health_s=self.serving.patience.silence_s,
            stale_cache=self.stale_cache,
            **self.dialect_options(),
        )

    def dialect_options(self) -> Mapping[str, Any]:
        """Return further arguments of the dialect."""
        return {}

    def keep(self, serving: Serving, folder: Path, *, name: str, visible: str) -> ManagedServer:
        """Start a server and keep it. Call this in a running asyncio loop.

        Only this process uses ``folder``, which has mode 0700: it gets the server's socket and its
        temporary files. ``visible``: CUDA_VISIBLE_DEVICES of the server.
        """
        model, temporary = folder / "model", folder / "tmp"
        for each in (model, temporary):
            each.mkdir(mode=0o700)
        write_json(model / CONFIG_FILE, weights_config(self.config, self.dtype), REAL)
        inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
        own = {"TMPDIR": str(temporary), VISIBLE: visible}
        program = ServerProgram(
            name=name,
            command=self.command(serving, model, folder / SOCKET),
            environment={**inherited, **own, **self.environment()},
            log=serving.log,
            more=partial(self._share_of_memory, serving.memory_bytes),
            events=serving.events,
        )
        address = Address(f"unix:{folder / SOCKET}")
        return ManagedServer(
            program, address, self.dialect, patience=serving.patience, context=serving.context
        )

    def _share_of_memory(self, share: int | None) -> Sequence[str]:
        if share is None:
            return ()
        torch.cuda.empty_cache()
        return self.memory_flags(share, *torch.cuda.mem_get_info(self.device))


def weights_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of weights that servers load, without the model's stop tokens.

    Each request has its own stop tokens.
    """
    return {**config.to_hf(head="lm", dtype=dtype), "eos_token_id": None}


class WholeWeights:
    """Writes the weights of one copy.

    Its leader reads the parts of the other ranks one tensor at a time, so no rank ever holds more
    than its own part and one tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        parameters: Sequence[str],
        layout: Layout,
        context: ParallelContext,
    ) -> None:
        self._config, self._dtype = config, dtype
        self._layout, self._context = layout, context
        self._files = file_tensors(
            ((name, layout.tensors[name]) for name in parameters), storage_of(config)
        )
        alone = context.axis_size("tp") == 1
        self._copy = [context.rank] if alone else context.topology.peers(context.rank, "tp")

    def write(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """On the leader: write ``folder``, complete or not at all, while the others `offer`."""

        def read(name: str, box: Box) -> Array:
            return as_array(self._gather(name, box, tensors[name]))

        def fill(target: Path) -> None:
            entries = [
                TensorEntry(name, file.spec, partial(assembled, read, file))
                for name, file in self._files.items()
            ]
            write_weights(target, entries)
            write_json(target / CONFIG_FILE, weights_config(self._config, self._dtype), REAL)

        write_folder(folder, fill)

    def offer(self, tensors: Mapping[str, Tensor]) -> None:
        """On the other ranks: send the leader what it lacks, in the order in which it writes."""
        entries = [TensorEntry(name, file.spec, _unread) for name, file in self._files.items()]
        for entry in in_written_order(entries):
            for name, spec, stored in self._files[entry.name].shards:
                for holder, part, box in self._senders(name, stored.of(spec.shape)):
                    if holder == self._context.rank:
                        elements = tensors[name][box.inside(part.box)].contiguous()
                        dist.send(_bytes(elements), group=self._context.group("tp"), group_dst=0)

    def _gather(self, name: str, wanted: Box, own: Tensor) -> Tensor:
        """The elements of a box."""
        whole = own.new_empty(wanted.size)
        for part, box in sources(self._layout.holders[name], wanted):
            if self._context.rank in part.ranks:
                whole[box.inside(wanted)] = own[box.inside(part.box)]
        for holder, _, box in self._senders(name, wanted):
            elements = own.new_empty(box.size)
            source = self._copy.index(holder)
            dist.recv(_bytes(elements), group=self._context.group("tp"), group_src=source)
            whole[box.inside(wanted)] = elements
        return whole

    def _senders(self, name: str, wanted: Box) -> Iterator[tuple[int, HeldBox, Box]]:
        """Yield the parts of a box that the leader lacks.

        Each is (rank that sends it, the part that this rank has, the box that is sent).
        """
        for part, box in sources(self._layout.holders[name], wanted):
            if self._copy[0] not in part.ranks:
                yield next(rank for rank in self._copy if rank in part.ranks), part, box


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory, of a type that every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def _unread() -> Array:
    raise AssertionError("only the leader writes files")

"""The servers of one copy of a model: how a kind of server is started, and which ones generate.

A copy has its own server, or uses running servers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.rollout import Address, ServerKeys
from slurmrl.data.picture_encoder import PROCESSOR_FILES
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, explain
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.hf import CONFIG_FILE, as_array
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.shapes import storage_of
from slurmrl.plan.estimates.server_types import fp8_config
from slurmrl.rollouts.generation.dialect import Dialect, HttpDialect
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.fp8_weights import require_fp8
from slurmrl.rollouts.generation.image_requests import placeholders_of
from slurmrl.rollouts.generation.instances import Instances
from slurmrl.rollouts.generation.process import HostFolder, ServerProgram
from slurmrl.rollouts.generation.server_client import ServerClient
from slurmrl.rollouts.generation.server_instance import PROBE_S, Patience
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from slurmrl.run.events import EventWriter
from slurmrl.tensors.checkpoint.export import (
    in_written_order,
    write_folder,
    write_json,
    write_weights,
)
from slurmrl.tensors.checkpoint.tensors import TensorEntry, assembled, file_tensors
from slurmrl.tensors.layout import Array, Box, HeldBox, Layout, sources
from slurmrl.tensors.parallel.groups import ParallelContext

if TYPE_CHECKING:
    from slurmrl.rollouts.generation.http import HttpClient

ROOT_UID = 0
DROPPED = (
    *("PYTHONPATH", "PYTHONHOME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
    "TORCHINDUCTOR_DETERMINISTIC",
)
"""Variables of a worker that a server does not get. They mean something else to a server, or only
the worker's engine needs them: a server cannot free memory of expandable segments."""
SOCKET = "server.sock"
TIED = "tie_word_embeddings"
VIDEO_FILE = "video_preprocessor_config.json"
"""File of a processor's part for videos, without which some processors are not loaded."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Settings with which a rank runs its server."""

    python: str
    """The interpreter of the server's environment."""
    arguments: tuple[str, ...]
    """Further arguments of the server."""
    tokenizer: Path | None
    """Folder of the tokenizer; None if requests need no text."""
    patience: Patience
    log: Path
    events: EventWriter | None = None
    """Gets an event each time the server ends."""
    context: int = 0
    """Maximum number of tokens of a prompt and its completion, which the server must accept."""
    memory_bytes: int | None = None
    """Its share of each GPU; None leaves that to its own settings."""
    sleeps: bool = False
    """Whether it frees its GPUs between generations."""
    experts: bool = False
    """Whether it must record the experts that process each token."""
    stale_cache: bool = False
    """Whether requests in flight keep the cache of older weights over an update."""
    quantized: bool = False
    """Whether it has matrices in FP8."""
    cache_dtype: str | None = None
    """Type of the keys and values in its cache; None: its own default."""

    processor: Path | None = None
    """Folder of the tokenizer and of the processor of a model that reads images."""

    @property
    def text(self) -> bool:
        """Whether requests need a tokenizer on the server."""
        return self.tokenizer is not None


@dataclass(frozen=True, kw_only=True)
class Running:
    """Existing servers, which other programs run."""

    addresses: tuple[Address, ...]
    weights: Path
    """A folder of only this trial, which the servers see under the same path."""
    keys: ServerKeys
    context: int
    """Maximum number of tokens of a prompt and its completion, which a server must accept."""
    text: bool
    """Whether requests need a tokenizer on the server."""
    patience: Patience
    experts: bool = False
    """Whether they must record the experts that process each token."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of one copy of a model."""

    engine: Instances
    folder: Path
    """Folder for weight versions, which the servers see under this path."""
    free: Callable[[], None]
    """Removes ``folder``."""

    async def close(self) -> None:
        """End the servers that were started, and remove ``folder``."""
        await self.engine.close()
        self.free()


def cache_flags(serving: Serving) -> Sequence[str]:
    """Return the arguments with which a server stores keys and values in another type."""
    return () if serving.cache_dtype is None else ("--kv-cache-dtype", serving.cache_dtype)


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


def _client(address: Address, **options: Any) -> HttpClient:
    from slurmrl.rollouts.generation.http import HttpClient  # aiohttp is needed only with servers

    return HttpClient(address, **options)


def _check_owner(socket: str) -> None:
    """Raise UsageError if the socket belongs to another user (except root).

    Otherwise that user's server would get the path of the weights, and training would use its
    tokens.
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
        config: ModelConfig | HFConfig,
        dtype: str,
        serving: Serving | Running,
        *,
        tensor_ranks: int,
        device: torch.device,
    ) -> None:
        """``tensor_ranks``: GPUs that share the model, of which ``device`` is one."""
        self.config, self.dtype, self.serving = config, dtype, serving
        self.tensor_ranks, self.device = tensor_ranks, device
        self.model = ServedModel.of(self.model_config(), text=serving.text, experts=serving.experts)
        self.checks = WeightChecks(device, own=isinstance(serving, Serving))
        self.stale_cache = isinstance(serving, Serving) and serving.stale_cache
        self.placeholders = placeholders_of(config.values) if isinstance(config, HFConfig) else ()
        if self.quantized:
            require_fp8("rollout.quantization", device)

    @abstractmethod
    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        """Return the command that starts a server without weights, over ``tensor_ranks`` GPUs."""

    @staticmethod
    @abstractmethod
    def memory_flags(share: int, free: int, total: int) -> Sequence[str]:
        """Return arguments with which a server uses ``share`` bytes of each GPU.

        Each GPU has ``total`` bytes, and ``free`` of them are free when the server starts.
        """

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Variables of the server, which override this process's variables."""

    def tokenizer(self, serving: Serving) -> Path | None:
        """Return the folder of the tokenizer that the server loads; None if it needs none.

        A model that reads images has a processor there, without which servers do not start.
        """
        return serving.processor if self.placeholders else serving.tokenizer

    @property
    def unties(self) -> bool:
        """Whether the server gets the output layer of a tied model as a tensor."""
        return False

    @property
    def quantized(self) -> bool:
        """Whether servers of this run have matrices in FP8."""
        return isinstance(self.serving, Serving) and self.serving.quantized

    def dialect(self, client: HttpClient, control: HttpClient | None = None) -> Dialect:
        """Return the dialect of a server; ``control`` is a client with the administration key."""
        return self.speaks(
            client,
            control,
            model=self.model,
            checks=self.checks,
            health_s=self.serving.patience.silence_s,
            stale_cache=self.stale_cache,
            placeholders=self.placeholders,
            quantizer=self.device if self.quantized else None,
            **self.dialect_options(),
        )

    def model_config(self) -> dict[str, Any]:
        """Return the ``config.json`` with which a server starts."""
        values = weights_config(self.config, self.dtype, unties=self.unties)
        return fp8_config(values) if self.quantized else values

    def dialect_options(self) -> Mapping[str, Any]:
        """Return further arguments of the dialect."""
        return {}

    def servers(self, *, name: str, visible: str) -> Servers:
        """Start the server of a copy, or use existing servers.

        Call this in a running asyncio loop. The arguments are as for `keep`.
        """
        if isinstance(self.serving, Serving):
            host = HostFolder()
            kept = self.keep(self.serving, host.path, name=name, visible=visible)
            return Servers(engine=kept, folder=host.path, free=host.close)
        folder = _new_folder(self.serving.weights)
        return Servers(
            engine=self._running(self.serving),
            folder=folder,
            free=partial(shutil.rmtree, folder, ignore_errors=True),
        )

    def keep(self, serving: Serving, folder: Path, *, name: str, visible: str) -> Instances:
        """Start a server and supervise it. Call this in a running asyncio loop.

        Only this process uses ``folder``, which has mode 0700: it gets the server's socket and its
        temporary files. ``visible``: CUDA_VISIBLE_DEVICES of the server.
        """
        model, temporary = folder / "model", folder / "tmp"
        for each in (model, temporary):
            each.mkdir(mode=0o700)
        write_json(model / CONFIG_FILE, self.model_config(), REAL)
        if self.placeholders and serving.processor is not None:
            for file in (*PROCESSOR_FILES, VIDEO_FILE):
                with suppress(FileNotFoundError):
                    shutil.copyfile(serving.processor / file, model / file)
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

        async def connect() -> ServerClient:
            await self._until_it_answers(address)
            dialect = self.dialect(_client(address))
            return await ServerClient.connect(dialect, least=serving.context)

        return Instances({name: connect}, serving.patience, program=program)

    async def _until_it_answers(self, address: Address) -> None:
        """Wait until a started server answers."""
        prober = self.dialect(_client(address, patience_s=0.0))
        try:
            while True:
                try:
                    return await prober.health()
                except SlurmrlError:
                    await asyncio.sleep(PROBE_S)
        finally:
            await prober.close()

    def _running(self, running: Running) -> Instances:
        async def connect(address: Address) -> ServerClient:
            if address.socket is not None:
                _check_owner(address.socket)
            clients = (
                _client(address, api_key=key) for key in (running.keys.api, running.keys.admin)
            )
            return await ServerClient.connect(self.dialect(*clients), least=running.context)

        return Instances(
            {address.text: partial(connect, address) for address in running.addresses},
            running.patience,
            wait_s=running.patience.start_s,
        )

    def _share_of_memory(self, share: int | None) -> Sequence[str]:
        if share is None:
            return ()
        torch.cuda.empty_cache()
        return self.memory_flags(share, *torch.cuda.mem_get_info(self.device))


def weights_config(
    config: ModelConfig | HFConfig, dtype: str, *, unties: bool = False
) -> dict[str, Any]:
    """Return the ``config.json`` of weights that servers load, without the model's stop tokens.

    Each request has its own stop tokens. ``unties``: whether the output layer is a tensor of its
    own, although the model ties it.
    """
    values = {**config.to_hf(head="lm", dtype=dtype), "eos_token_id": None}
    tied = {TIED: values[TIED] and not unties} if TIED in values else {}
    text = values.get("text_config")  # servers read the field here
    return {**values, **tied, **({"text_config": {**text, **tied}} if text else {})}


class WholeWeights:
    """Writes the weights of one copy.

    Its leader gets the parts of the other ranks one tensor at a time, so no rank ever has more than
    its own part and one tensor.
    """

    def __init__(
        self,
        config: ModelConfig | HFConfig,
        dtype: str,
        layout: Layout,
        context: ParallelContext,
    ) -> None:
        self._config, self._dtype = config, dtype
        self._layout, self._context = layout, context
        self._files = file_tensors(layout.tensors.items(), storage_of(config))
        alone = context.axis_size("tp") == 1
        self._copy = [context.rank] if alone else context.topology.peers(context.rank, "tp")

    def write(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """On the leader: write ``folder`` completely or not at all, while the others `offer`."""

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
        """On the other ranks: send the leader its missing tensors, in its order."""
        entries = [TensorEntry(name, file.spec, _unread) for name, file in self._files.items()]
        for entry in in_written_order(entries):
            for name, spec, stored in self._files[entry.name].shards:
                for holder, part, box in self._senders(name, stored.of(spec.shape)):
                    if holder == self._context.rank:
                        elements = tensors[name][box.inside(part.box)].contiguous()
                        dist.send(_bytes(elements), group=self._context.group("tp"), group_dst=0)

    def _gather(self, name: str, wanted: Box, own: Tensor) -> Tensor:
        """Return the elements of a box."""
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
    """Return the same memory as a tensor of a type that every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def _unread() -> Array:
    raise AssertionError("only the leader writes files")

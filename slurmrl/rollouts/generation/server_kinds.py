"""The servers of one copy of a model: a server that the copy starts, or existing servers."""

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
"""Environment variables of a worker that its server does not get. Some mean something else to a
server; the others are only for the worker's engine. (A server cannot free expandable segments.)"""
SOCKET = "server.sock"
TIED = "tie_word_embeddings"
VIDEO_FILE = "video_preprocessor_config.json"
"""File with the settings of a processor for videos. Some processors need this file."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Settings with which a rank runs its server."""

    python: str
    """Python interpreter of the server's environment."""
    arguments: tuple[str, ...]
    """Additional arguments of the server."""
    tokenizer: Path | None
    """Folder of the tokenizer; None if requests do not need a tokenizer."""
    patience: Patience
    log: Path
    events: EventWriter | None = None
    """Writer of an event for each end of the server."""
    context: int = 0
    """Maximum number of tokens of a prompt and its completion, which the server must accept."""
    memory_bytes: int | None = None
    """Bytes of each GPU that the server may use; None leaves the limit to the server's settings."""
    sleeps: bool = False
    """Whether the server frees its GPUs between generations."""
    experts: bool = False
    """Whether the server must record the experts that process each token."""
    stale_cache: bool = False
    """Whether requests in flight keep the cache of older weights over an update."""
    quantized: bool = False
    """Whether the server has matrices in FP8."""
    cache_dtype: str | None = None
    """Element type of the keys and values in the cache; None for the server's default."""

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
    """Folder for weight versions of this trial, which the servers see under the same path."""
    keys: ServerKeys
    context: int
    """Maximum number of tokens of a prompt and its completion, which a server must accept."""
    text: bool
    """Whether requests need a tokenizer on the server."""
    patience: Patience
    experts: bool = False
    """Whether the servers must record the experts that process each token."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of one copy of a model."""

    engine: Instances
    folder: Path
    """Folder for weight versions, which the servers see under the same path."""
    free: Callable[[], None]
    """Function that removes ``folder``."""

    async def close(self) -> None:
        """End the servers that were started, and remove ``folder``."""
        await self.engine.close()
        self.free()


def cache_flags(serving: Serving) -> Sequence[str]:
    """Return the arguments for the element type of a server's cache; () for the default."""
    return () if serving.cache_dtype is None else ("--kv-cache-dtype", serving.cache_dtype)


def _new_folder(parent: Path) -> Path:
    """Make a folder for this process in ``parent``, and remove all older content.

    The older content belongs to incarnations that have ended. Raises EnvironmentFailure.
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

    The other user's server would get the path of the weights, and training would use its tokens.
    """
    try:
        owner = os.stat(socket).st_uid
    except OSError as error:
        raise RunFailedError(f"unix:{socket}: {error.strerror}") from error
    if owner not in (os.geteuid(), ROOT_UID):
        raise UsageError(f"unix:{socket} is not used, because it belongs to user {owner}")


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
        """``tensor_ranks`` is the number of GPUs that share the model, including ``device``."""
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
        """Return the command that starts a server without weights on ``tensor_ranks`` GPUs."""

    @staticmethod
    @abstractmethod
    def memory_flags(share: int, free: int, total: int) -> Sequence[str]:
        """Return arguments with which a server uses ``share`` bytes of each GPU.

        Each GPU has ``total`` bytes, and ``free`` of them are free when the server starts.
        """

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Return the server's environment variables that differ from this process's variables."""

    def tokenizer(self, serving: Serving) -> Path | None:
        """Return the folder of the tokenizer that the server loads; None for no tokenizer.

        For a model that reads images, the folder also has the processor, which servers require.
        """
        return serving.processor if self.placeholders else serving.tokenizer

    @property
    def unties(self) -> bool:
        """Whether the server gets the output layer of a tied model as a separate tensor."""
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
        """Return the additional arguments of the dialect of this kind."""
        return {}

    def servers(self, *, name: str, visible: str) -> Servers:
        """Start the server of a copy, or use existing servers.

        Call this method in a running asyncio loop. `keep` describes the arguments.
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
        """Start a server and supervise it. Call this method in a running asyncio loop.

        ``folder`` is a new folder with mode 0700 for the server's socket and temporary files.
        ``visible`` is CUDA_VISIBLE_DEVICES of the server.
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

    Stop tokens are part of each request. ``unties``: the output layer is a separate tensor,
    although the model ties it to the embedding.
    """
    values = {**config.to_hf(head="lm", dtype=dtype), "eos_token_id": None}
    tied = {TIED: values[TIED] and not unties} if TIED in values else {}
    text = values.get("text_config")  # servers read `TIED` here
    return {**values, **tied, **({"text_config": {**text, **tied}} if text else {})}


class WholeWeights:
    """Writes the weights of one copy of a model.

    The copy's leader gets the parts of the other ranks one tensor at a time. A rank therefore needs
    memory only for its part and one tensor.
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
        """Write ``folder`` completely or not at all. Only the leader calls this; others `offer`."""

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
        """Send the leader the tensors that it lacks, in its order, while the leader `write`s."""
        entries = [TensorEntry(name, file.spec, _unread) for name, file in self._files.items()]
        for entry in in_written_order(entries):
            for name, spec, stored in self._files[entry.name].shards:
                for holder, part, box in self._senders(name, stored.of(spec.shape)):
                    if holder == self._context.rank:
                        elements = tensors[name][box.inside(part.box)].contiguous()
                        dist.send(_bytes(elements), group=self._context.group("tp"), group_dst=0)

    def _gather(self, name: str, wanted: Box, own: Tensor) -> Tensor:
        """Return the elements of a box of a tensor, from this rank and the senders."""
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

        A part is (rank that sends it, part of the tensor that this rank has, box to send).
        """
        for part, box in sources(self._layout.holders[name], wanted):
            if self._copy[0] not in part.ranks:
                yield next(rank for rank in self._copy if rank in part.ranks), part, box


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def _unread() -> Array:
    raise AssertionError("only the leader writes files")

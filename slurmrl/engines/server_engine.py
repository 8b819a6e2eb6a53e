"""Generation by servers that ranks of the trainers' job start, or that already run."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.roles import Model
from slurmrl.engines.base import GenerateEngine, Served, ServingOptions
from slurmrl.engines.planned import Placing
from slurmrl.engines.role_weights import served_config
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.parallel.boxes import SharedParameters, TensorSplit
from slurmrl.models.shapes import constant_specs, parameter_shapes
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationRequest, RolloutEngine, WeightVersion
from slurmrl.rollouts.generation.server_kinds import (
    VISIBLE,
    Running,
    ServerKind,
    Servers,
    Serving,
    WholeWeights,
)
from slurmrl.rollouts.generation.sglang import SglangServer
from slurmrl.rollouts.generation.vllm import VllmServer
from slurmrl.tensors.layout import Layout, TensorSpec
from slurmrl.tensors.ops.collectives import broadcast_bytes
from slurmrl.tensors.parallel.groups import ParallelContext

T = TypeVar("T")
REPORT_S = 5.0
"""Seconds between two reports while a server starts."""


class DistantEngine(RolloutEngine):
    """An engine whose asyncio loop runs in another thread.

    Ids of requests get a prefix that distinguishes them from requests of other incarnations and
    runs on the same server.
    """

    def __init__(self, engine: RolloutEngine, loop: asyncio.AbstractEventLoop, prefix: str) -> None:
        self._engine, self._loop, self._prefix = engine, loop, prefix

    @property
    def version(self) -> str | None:
        return self._engine.version

    def submit(self, request: GenerationRequest) -> asyncio.Future[tuple[Completion, ...]]:
        return self._there(self._served(request))

    async def _served(self, request: GenerationRequest) -> tuple[Completion, ...]:
        name = self._named(request.request_id)
        return await self._engine.submit(replace(request, request_id=name))

    def abort(self, request_id: str) -> None:
        asyncio.run_coroutine_threadsafe(self._aborted(request_id), self._loop)

    async def _aborted(self, request_id: str) -> None:
        """Abort a request. The loop starts tasks in order, so an earlier ``submit`` goes first."""
        self._engine.abort(self._named(request_id))

    async def pause(self) -> None:
        await self._there(self._engine.pause())

    async def resume(self) -> None:
        await self._there(self._engine.resume())

    async def update_weights(self, version: WeightVersion) -> None:
        await self._there(self._engine.update_weights(version))

    async def health(self) -> None:
        await self._there(self._engine.health())

    async def close(self) -> None:
        await self._there(self._engine.close())

    def _named(self, request_id: str) -> str:
        return f"{self._prefix}-{request_id}"

    def _there(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class ServerEngine(GenerateEngine):
    """Servers of one kind that generate for the data-parallel ranks of ``context``.

    Each rank has its own server, or all ranks use existing servers.

    Moves fill tensors of this process. Before the next generation, the leader of each copy writes
    the tensors of all tensor ranks into a folder, from which the servers read them. The ranks of
    the copy free their tensors, and then the leader sends the requests.
    """

    kind: type[ServerKind]

    def __init__(
        self,
        role: str,
        model: Model,
        *,
        head: Head,
        trained: bool,
        context: ParallelContext,
        seed: int,
        total_steps: int,
        source: Path | None,
        serving: Serving | Running,
    ) -> None:
        """The arguments are as for ``FSDPEngine``. `wait_until_up` starts the server."""
        assert not trained, "the plan trains no model on this engine"
        self.role, self.head, self.context = role, head, context
        self.config = config = served_config(role, model, source)
        self.tensor_ranks = context.axis_size("tp")
        self._serving = serving
        self._kind = self.kind(
            config, model.dtype, serving, tensor_ranks=self.tensor_ranks, device=context.device
        )
        self._placing = self._placed(model.dtype)
        self._weights = WholeWeights(config, model.dtype, self.layout(), context)
        self._devices = self._visible_devices()
        self._tensors: dict[str, Tensor] = {}
        self._moved = self._away = False
        self._updates = 0
        self._token = secrets.token_hex(4)
        """Token that distinguishes requests and weight versions of different incarnations and runs.
        """
        self._installed: Path | None = None
        self._servers: Servers | None = None
        self._loop = asyncio.new_event_loop()
        if context.is_leader:
            threading.Thread(
                target=self._loop.run_forever, daemon=True, name=self.kind.name
            ).start()

    def _placed(self, dtype: str) -> Placing:
        config, tensor_ranks = self.config, self.tensor_ranks
        constants: Mapping[str, TensorSpec] = {}
        split: SharedParameters | None = None
        if isinstance(config, HFConfig):
            # transformers takes seconds to import
            from slurmrl.models.hf_loading import tensor_specs
            from slurmrl.models.hf_tensor import rows_over

            shapes, constants = tensor_specs(config, self.head)
            split = rows_over(shapes, tensor_ranks) if tensor_ranks > 1 else None
        else:
            shapes, constants = parameter_shapes(config, self.head), constant_specs(config)
            split = TensorSplit(config, tensor_ranks) if tensor_ranks > 1 else None
        return Placing(
            shapes,
            dtype,
            self.context.topology,
            self.context.rank,
            split,
            constants,
            sharded=False,
        )

    def _visible_devices(self) -> str:
        """Return the GPUs of all ranks of this copy. Collective over the ranks of the copy."""
        own = os.environ.get(VISIBLE, "")
        if self.tensor_ranks == 1:
            return own
        group, device = self.context.group("tp"), self.context.device
        contents = (
            broadcast_bytes(own.encode(), group, device, source=rank)
            for rank in range(self.tensor_ranks)
        )
        return ",".join(content.decode() for content in contents)

    def wait_until_up(self, report: Callable[[], None]) -> None:
        """Start the server, and wait until it can generate; call ``report`` periodically.

        Raises RunFailedError if the server does not start, UsageError if slurmrl cannot use it.
        """
        if self.context.is_leader:
            self._servers = self._run(self._start())
            self._wait(self._servers, report)

    def _wait(self, servers: Servers, report: Callable[[], None]) -> None:
        self.context.activity.phase(f"waiting for the {self.kind.name} server")
        up = asyncio.run_coroutine_threadsafe(self._up(servers), self._loop)
        while True:
            try:
                return up.result(REPORT_S)
            except TimeoutError:
                report()

    async def _up(self, servers: Servers) -> None:
        await servers.engine.start()
        if self._away:
            await servers.engine.sleep()

    async def _start(self) -> Servers:
        name = f"{self.kind.name} server of {self.role} {self.context.dp_rank}"
        return self._kind.servers(name=name, visible=self._devices)

    @property
    def served_types(self) -> Collection[str] | None:
        elsewhere = self._servers is not None and isinstance(self._serving, Running)
        return self._kind.checks.types if elsewhere else None

    def layout(self) -> Layout:
        return self._placing.layout()

    def storages(self) -> Mapping[str, Tensor]:
        """Return tensors for a move to fill. Servers get the tensors before they sample again."""
        self._moved = True
        if not self._tensors:
            layout = self.layout()
            self._tensors = {
                shard.storage: torch.empty(
                    shard.box.size,
                    dtype=getattr(torch, layout.tensors[shard.name].dtype),
                    device=self.context.device,
                )
                for shard in layout.held_by(self.context.rank)
            }
        return self._tensors

    def offload(self) -> None:
        """Let the server sleep until the weights move again.

        (This process frees its tensors as soon as the server has them.) Collective over the ranks
        of the copy.
        """
        self._away, self._moved, self._tensors = True, False, {}
        if self._servers is not None:
            self.context.activity.phase(f"waiting for the {self.kind.name} server to sleep")
            self._run(self._servers.engine.sleep())
            self._remove_installed()
        self._meet()  # Wait until the GPUs of all ranks are free.

    def onload(self) -> None:
        """Do nothing, because the server wakes once the weights have moved."""

    def _meet(self) -> None:
        """Wait until all ranks of the copy have called this method."""
        if self.tensor_ranks > 1:
            here = torch.zeros(1, device=self.context.device)
            dist.all_reduce(here, group=self.context.group("tp"))
            here.item()

    def close(self) -> None:
        """Stop the server and remove its folder."""
        if self._servers is not None:
            self._run(self._servers.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    @contextmanager
    def serving(self, version: str, options: ServingOptions) -> Iterator[Served]:
        """Serve requests as `GenerateEngine.serving` does; servers decode text themselves.

        Only the leader of a copy gets an engine, and no rank waits for another rank.
        """
        if self._moved:
            self._install(version)
        assert not self._away, "weights move to a server that sleeps before it generates"
        if self._servers is None:
            yield None
        else:
            yield DistantEngine(self._servers.engine, self._loop, self._token)

    def _install(self, version: str) -> None:
        """Pass the tensors to the servers. Collective over the ranks of the copy."""
        self.context.activity.phase(f"handing the weights to the {self.kind.name} server")
        tensors, self._tensors, self._moved = self._tensors, {}, False
        self._away = False
        if self._servers is None:
            self._weights.offer(tensors)
            self._free(tensors)
            return
        self._updates += 1
        name = f"{version}.{self._updates}.{self._token}"
        folder = self._servers.folder / name
        self._weights.write(tensors, folder)
        self._free(tensors)
        self._run(self._serve(self._servers, WeightVersion(name=name, folder=folder)))
        self._remove_installed()
        self._installed = folder

    async def _serve(self, servers: Servers, version: WeightVersion) -> None:
        """Make the servers load ``version``. Raises UsageError if a server rejects it."""
        try:
            await servers.engine.update_weights(version)
        except UsageError as error:
            if isinstance(self._serving, Serving):
                raise
            raise UsageError(
                f"{error}; do the servers see {version.folder}? If not, set "
                "rollout.server_weights to a folder that they can read"
            ) from error

    def _remove_installed(self) -> None:
        """Remove files that the servers no longer need."""
        if self._installed is not None:
            shutil.rmtree(self._installed)
        self._installed = None

    def _free(self, tensors: dict[str, Tensor]) -> None:
        """Free the GPUs of all ranks of the copy for the server. Collective over them."""
        tensors.clear()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()
        self._meet()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class SglangEngine(ServerEngine):
    """Generation by SGLang servers."""

    kind = SglangServer


class VllmEngine(ServerEngine):
    """Generation by vLLM servers."""

    kind = VllmServer

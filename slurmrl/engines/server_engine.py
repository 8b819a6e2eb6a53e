"""Generation by servers: those that ranks of the trainers' job keep, or some that run already."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import threading
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.model import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.data.support import SampledSupport
from slurmrl.engines.base import PROMPTS, GenerateEngine
from slurmrl.engines.fsdp.parameters import constant_specs, whole_shapes
from slurmrl.engines.fsdp.placing import Placing
from slurmrl.engines.initial_weights import model_config
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.generate import GenerationOptions, GenerationOutput
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.rollouts.generation.base import Completion, GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.native.stops import Decode
from slurmrl.rollouts.generation.process import HostFolder
from slurmrl.rollouts.generation.server import Running, Serving
from slurmrl.rollouts.generation.servers import (
    VISIBLE,
    PlacedServer,
    RunningServers,
    ServerKind,
    Servers,
)
from slurmrl.rollouts.generation.sglang import SglangServer
from slurmrl.rollouts.generation.vllm import VllmServer
from slurmrl.rollouts.generation.whole_weights import WholeWeights
from slurmrl.tensors.layout import Array, Layout
from slurmrl.tensors.ops.collectives import broadcast_bytes
from slurmrl.tensors.parallel.groups import ParallelContext

T = TypeVar("T")
REPORT_S = 5.0
"""Between two reports of a server that starts."""


class ServerEngine(GenerateEngine):
    """Servers of one kind that generate for the data-parallel ranks of ``context``: one of their
    own for each, or some that run already.

    Moves fill tensors of this process. Before the next generation, the leader of each copy writes
    them with those of its tensor ranks into a folder from which the servers read them, and all of
    them free the tensors. Then the leader sends the requests, and the others get its results.
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
        config = model_config(role, model, source)
        assert isinstance(config, ModelConfig), "checked at submission"
        self.role, self.head, self.context = role, head, context
        self.config = config
        self.tensor_ranks = context.axis_size("tp")
        self._serving = serving
        self._kind = self.kind(
            config, model.dtype, serving, tensor_ranks=self.tensor_ranks, device=context.device
        )
        self._placing = self._placed(model.dtype)
        self._weights = WholeWeights(
            config, model.dtype, tuple(self._placing.shapes), self.layout(), context
        )
        self._devices = self._visible_devices()
        self._tensors: dict[str, Tensor] = {}
        self._moved = self._away = False
        self._updates = 0
        self._token = secrets.token_hex(4)
        """Distinguishes requests and weight versions from those of other incarnations and runs."""
        self._installed: Path | None = None
        self._servers: Servers | None = None
        self._loop = asyncio.new_event_loop()
        if context.is_leader:
            threading.Thread(
                target=self._loop.run_forever, daemon=True, name=self.kind.name
            ).start()

    def _placed(self, dtype: str) -> Placing:
        with torch.device("meta"):
            decoder = build(self._kind.config, self.head)
        tensor_ranks = self.tensor_ranks
        return Placing(
            whole_shapes(decoder),
            dtype,
            self.context.topology,
            self.context.rank,
            TensorSplit(self._kind.config, tensor_ranks) if tensor_ranks > 1 else None,
            constant_specs(decoder, trained=False),
            sharded=False,
        )

    def _visible_devices(self) -> str:
        """The GPUs of all ranks of this copy. Collective over them."""
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
        """Start the server, and wait as in the contract. Raises RunFailedError if it does not
        start, UsageError if it cannot be used."""
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
        await servers.up()
        if self._away:
            await servers.sleep()

    async def _start(self) -> Servers:
        if isinstance(self._serving, Running):
            return RunningServers(self._serving, self._kind.dialect)
        folder = HostFolder()
        name = f"{self.kind.name} server of {self.role} {self.context.dp_rank}"
        kept = self._kind.keep(self._serving, folder.path, name=name, visible=self._devices)
        return PlacedServer(folder, kept)

    def layout(self) -> Layout:
        return self._placing.layout()

    def storages(self) -> Mapping[str, Tensor]:
        """Tensors that a move fills; the servers get them before they draw again."""
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
        """Have the server sleep until the weights move again. (This process frees its tensors as
        soon as the server has them.) Collective over the ranks of the copy."""
        self._away, self._moved, self._tensors = True, False, {}
        if self._servers is not None:
            self.context.activity.phase(f"waiting for the {self.kind.name} server to sleep")
            self._run(self._servers.sleep())
            self._remove_installed()
        self._meet()  # the GPUs of all of them are free now

    def onload(self) -> None:
        """No-op: the server wakes once the weights have moved."""

    def _meet(self) -> None:
        """Return once all ranks of the copy have come here."""
        if self.tensor_ranks > 1:
            here = torch.zeros(1, device=self.context.device)
            dist.all_reduce(here, group=self.context.group("tp"))
            here.item()

    def close(self) -> None:
        """End the server and remove its folder."""
        if self._servers is not None:
            self._run(self._servers.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def generate(
        self,
        sample: SequenceSample,
        options: GenerationOptions,
        *,
        seed: int,
        step: int,
        keys: Tensor,
        decode: Decode | None = None,
    ) -> GenerationOutput:
        """See `GenerateEngine`; the servers decode text by themselves."""
        if self._moved:
            self._install(step)
        assert not self._away, "weights move to a server that sleeps before it generates"
        if self._servers is None:
            return self._share(None, options)
        prompts = _prompts(sample)
        copies = len(keys) // max(len(prompts), 1)
        requests = [
            GenerationRequest(
                request_id=f"{self._token}-{step}-{index}",
                prompt=prompt,
                keys=tuple(keys[index * copies : (index + 1) * copies].tolist()),
                seed=seed,
                step=step,
                options=options,
            )
            for index, prompt in enumerate(prompts)
        ]
        completions = self._run(_complete(self._servers, requests))
        output = _output(requests, completions, self.context.device, options)
        return self._share(output, options)

    def _install(self, step: int) -> None:
        """Hand the tensors to the servers. Collective over the ranks of the copy."""
        self.context.activity.phase(f"handing the weights to the {self.kind.name} server")
        tensors, self._tensors, self._moved = self._tensors, {}, False
        self._away = False
        if self._servers is None:
            self._weights.offer(tensors)
            self._free(tensors)
            return
        self._updates += 1
        name = f"{step}.{self._updates}.{self._token}"
        folder = self._servers.folder / name
        self._weights.write(tensors, folder)
        self._free(tensors)
        version = WeightVersion(name=name, folder=folder)
        self._run(self._servers.install(version))
        self._remove_installed()
        self._installed = folder

    def _remove_installed(self) -> None:
        """Remove what the servers need no more."""
        if self._installed is not None:
            shutil.rmtree(self._installed)
        self._installed = None

    def _free(self, tensors: dict[str, Tensor]) -> None:
        """Free the GPUs of all ranks of the copy for the server. Collective over them."""
        tensors.clear()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()
        self._meet()

    def _share(
        self, output: GenerationOutput | None, options: GenerationOptions
    ) -> GenerationOutput:
        """The leader's output on all ranks of the copy. Collective."""
        if self.tensor_ranks > 1:
            group, device = self.context.group("tp"), self.context.device
            shared = _broadcast(output, group, device)
            if options.support:
                shared = replace(shared, support=_broadcast_support(output, group, device))
            if options.experts:
                rows = _broadcast_experts(output, len(shared.tokens), group, device)
                experts = np.split(rows, shared.lengths.cumsum(0).tolist())[:-1]
                shared = replace(shared, experts=experts)
            return shared
        assert output is not None, "a rank without others is the leader"
        return output

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _complete(
    servers: Servers, requests: Sequence[GenerationRequest]
) -> list[tuple[Completion, ...]]:
    return await asyncio.gather(*map(servers.engine.submit, requests))


def _prompts(sample: SequenceSample) -> list[tuple[int, ...]]:
    tokens, ends = sample.tensor(PROMPTS).tolist(), sample.cu_seqlens(PROMPTS).tolist()
    return [tuple(tokens[begin:end]) for begin, end in pairwise(ends)]


def _output(
    requests: Sequence[GenerationRequest],
    completions: Sequence[Sequence[Completion]],
    device: torch.device,
    options: GenerationOptions,
) -> GenerationOutput:
    tokens: list[int] = []
    logprobs: list[float] = []
    sizes: list[tuple[int, int]] = []
    finished: list[bool] = []
    supports = SampledSupport()
    experts: list[Array] = []
    for request, drawn in zip(requests, completions, strict=True):
        for completion in drawn:
            tokens += (*request.prompt, *completion.tokens)
            logprobs += (*(0.0 for _ in request.prompt), *completion.logprobs)
            prompt = len(request.prompt)
            sizes.append((prompt + len(completion.tokens), prompt))
            finished.append(completion.finish == "stop")
            if completion.support is not None:
                supports.skip(prompt)
                supports.extend(completion.support)
            if completion.experts is not None:
                experts.append(completion.experts)
    both = torch.tensor(sizes, dtype=torch.int64).view(-1, 2)
    return GenerationOutput(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        both[:, 0].contiguous(),
        both[:, 1].contiguous(),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
        torch.tensor(finished, dtype=torch.bool),
        supports if options.support else None,
        experts if options.experts else None,
    )


def _broadcast(
    output: GenerationOutput | None, group: dist.ProcessGroup, device: torch.device
) -> GenerationOutput:
    """The output of the group's first rank, which alone has one."""
    sizes = torch.zeros(2, dtype=torch.int64, device=device)
    if output is not None:
        sizes.copy_(torch.tensor([len(output.tokens), len(output.lengths)]))
    dist.broadcast(sizes, group=group, group_src=0)
    tokens, sequences = sizes.tolist()
    numbers = torch.empty(tokens + 3 * sequences, dtype=torch.int64, device=device)
    logprobs = torch.empty(tokens, dtype=torch.float32, device=device)
    if output is not None:
        rest = (output.lengths, output.prompt_lengths, output.finished.long())
        numbers.copy_(torch.cat([output.tokens.cpu(), *rest]))
        logprobs.copy_(output.logprobs)
    for values in (numbers, logprobs):
        dist.broadcast(values, group=group, group_src=0)
    lengths, prompt_lengths, finished = numbers[tokens:].cpu().view(3, sequences)
    return GenerationOutput(numbers[:tokens], lengths, prompt_lengths, logprobs, finished.bool())


def _broadcast_support(
    output: GenerationOutput | None, group: dist.ProcessGroup, device: torch.device
) -> SampledSupport:
    own = SampledSupport() if output is None else output.support
    assert own is not None, "the leader's output has what the options ask for"
    both = (broadcast_bytes(values.tobytes(), group, device) for values in (own.sizes, own.ids))
    return SampledSupport(*(array("i", each) for each in both))


def _broadcast_experts(
    output: GenerationOutput | None, tokens: int, group: dist.ProcessGroup, device: torch.device
) -> Array:
    """int16 [tokens, experts of all blocks]"""
    own = [] if output is None else output.experts
    assert own is not None, "the leader's output has what the options ask for"
    shared = broadcast_bytes(b"".join(rows.tobytes() for rows in own), group, device)
    return np.frombuffer(shared, np.int16).reshape(tokens, len(shared) // 2 // max(tokens, 1))


class SglangEngine(ServerEngine):
    """Generation by SGLang servers."""

    kind = SglangServer


class VllmEngine(ServerEngine):
    """Generation by vLLM servers."""

    kind = VllmServer

"""Servers in the trainers' job: each data-parallel rank of the generation layout keeps one."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slurmrl.checkpoint.export import write_folder, write_json, write_weights
from slurmrl.checkpoint.stored import file_entries
from slurmrl.config.schema.model import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import PROMPTS, GenerateEngine
from slurmrl.engines.fsdp.placing import Placing
from slurmrl.engines.fsdp.weights import constant_specs, whole_shapes
from slurmrl.engines.initial_weights import model_config
from slurmrl.engines.rollout.base import Completion, GenerationRequest, WeightVersion
from slurmrl.engines.rollout.dialect import Dialect, ServedModel
from slurmrl.engines.rollout.host_folder import HostFolder
from slurmrl.engines.rollout.http import Address, HttpClient
from slurmrl.engines.rollout.kept import KeptEngine
from slurmrl.engines.rollout.process import ServerProgram
from slurmrl.engines.rollout.server import Serving
from slurmrl.fsio.calls import REAL
from slurmrl.layout.box import Box
from slurmrl.layout.copy import Array
from slurmrl.layout.layout import Layout
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.generate import GenerationOptions, GenerationOutput
from slurmrl.models.hf import CONFIG_FILE, as_array
from slurmrl.models.storage import storage_of
from slurmrl.parallel.groups import ParallelContext

T = TypeVar("T")
REPORT_S = 5.0
"""Between two reports of a server that starts."""
DROPPED = ("PYTHONPATH", "PYTHONHOME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""Variables of a worker that mean something else to a server."""


class PlacedServer(GenerateEngine):
    """A server on each data-parallel rank of ``context``, with a whole copy of the weights.

    Moves fill tensors of this process. The next generation writes them into a private folder in
    this host's memory, from which the server reads them, and frees the tensors.
    """

    name: str
    """Of the kind of server."""

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
        serving: Serving,
    ) -> None:
        """The arguments are as for ``FSDPEngine``. Starts the server; `wait_until_up` waits."""
        assert not trained, "the plan trains no model on this engine"
        config = model_config(role, model, source)
        assert isinstance(config, ModelConfig), "checked at submission"
        self.role, self.head, self.context = role, head, context
        self.config = self.decoder_config = config
        self.checksums: dict[str, object] = {}
        """Those that the server has reported, by weight version."""
        self.serving, self.dtype = serving, model.dtype
        (architecture,) = config.to_hf(head=head, dtype=model.dtype)["architectures"]
        self.model = ServedModel(architecture=architecture, vocabulary=config.vocab_size)
        with torch.device("meta"):
            decoder = build(config, head)
        self._parameters = tuple(whole_shapes(decoder))
        constants = constant_specs(decoder, trained=False)
        self._placing = Placing(
            whole_shapes(decoder),
            model.dtype,
            context.topology,
            context.rank,
            None,
            constants,
            sharded=False,
        )
        self._tensors: dict[str, Tensor] = {}
        self._moved = False
        self._updates = 0
        self._folder = HostFolder()
        self._installed: Path | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name=self.name).start()
        self._engine = self._run(self._start())

    @abstractmethod
    def command(self, model: Path, socket: Path) -> Sequence[str]:
        """The command that starts a server without weights."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Variables of the server, over those of this process."""

    @abstractmethod
    def dialect(self, client: HttpClient) -> Dialect:
        """How to speak to it. Log-probabilities are under the distribution over all tokens."""

    def wait_until_up(self, report: Callable[[], None]) -> None:
        """As in the contract. Raises RunFailedError if the server does not start, UsageError if it
        cannot be used."""
        self.context.activity.phase(f"waiting for the {self.name} server")
        up = asyncio.run_coroutine_threadsafe(self._engine.up(), self._loop)
        while True:
            try:
                return up.result(REPORT_S)
            except TimeoutError:
                report()

    def layout(self) -> Layout:
        return self._placing.layout()

    def storages(self) -> Mapping[str, Tensor]:
        """Tensors that a move fills; the server gets them before it draws again."""
        self._moved = True
        if not self._tensors:
            self._tensors = {
                name: torch.empty(
                    spec.shape, dtype=getattr(torch, spec.dtype), device=self.context.device
                )
                for name, spec in self.layout().tensors.items()
            }
        return self._tensors

    def offload(self) -> None:
        """No-op: the tensors are freed as soon as the server has them."""

    def onload(self) -> None:
        """No-op."""

    def close(self) -> None:
        """End the server and remove its folder."""
        self._run(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._folder.close()

    def generate(
        self,
        sample: SequenceSample,
        options: GenerationOptions,
        *,
        seed: int,
        step: int,
        keys: Tensor,
    ) -> GenerationOutput:
        if self._moved:
            self._install(step)
        prompts = _prompts(sample)
        copies = len(keys) // max(len(prompts), 1)
        requests = [
            GenerationRequest(
                request_id=f"{step}-{index}",
                prompt=prompt,
                keys=tuple(keys[index * copies : (index + 1) * copies].tolist()),
                seed=seed,
                step=step,
                options=options,
            )
            for index, prompt in enumerate(prompts)
        ]
        completions = self._run(self._complete(requests))
        return _output(requests, completions, self.context.device)

    async def _complete(
        self, requests: Sequence[GenerationRequest]
    ) -> list[tuple[Completion, ...]]:
        return await asyncio.gather(*map(self._engine.submit, requests))

    def _install(self, step: int) -> None:
        """Hand the tensors to the server."""
        self.context.activity.phase(f"handing the weights to the {self.name} server")
        self._updates += 1
        name = f"{step}.{self._updates}"
        folder = write_folder(self._folder.path / name, self._fill)
        self._tensors, self._moved = {}, False
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()  # for the server
        self._run(self._engine.update_weights(WeightVersion(name=name, folder=folder)))
        before, self._installed = self._installed, folder
        if before is not None:
            shutil.rmtree(before)

    def _fill(self, folder: Path) -> None:
        """Write the tensors as a checkpoint."""
        specs = self.layout().tensors

        def read(name: str, box: Box) -> Array:
            return as_array(self._tensors[name][box.slices])

        named = [(name, specs[name]) for name in self._parameters]
        write_weights(folder, file_entries(named, read, storage_of(self.decoder_config)))
        self._write_config(folder)

    def _write_config(self, folder: Path) -> None:
        """Without the model's stop tokens: a request has its own."""
        values = self.decoder_config.to_hf(head=self.head, dtype=self.dtype)
        write_json(folder / CONFIG_FILE, {**values, "eos_token_id": None}, REAL)

    async def _start(self) -> KeptEngine:
        model, temporary = self._folder.path / "model", self._folder.path / "tmp"
        for folder in (model, temporary):
            folder.mkdir(mode=0o700)
        self._write_config(model)
        socket = self._folder.path / "server.sock"
        inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
        program = ServerProgram(
            name=f"{self.name} server of {self.role} {self.context.dp_rank}",
            command=self.command(model, socket),
            environment={**inherited, "TMPDIR": str(temporary), **self.environment()},
            log=self.serving.log,
        )
        address = Address(f"unix:{socket}")
        return KeptEngine(program, address, self.dialect, patience=self.serving.patience)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _prompts(sample: SequenceSample) -> list[tuple[int, ...]]:
    tokens, ends = sample.tensor(PROMPTS).tolist(), sample.cu_seqlens(PROMPTS).tolist()
    return [tuple(tokens[begin:end]) for begin, end in pairwise(ends)]


def _output(
    requests: Sequence[GenerationRequest],
    completions: Sequence[Sequence[Completion]],
    device: torch.device,
) -> GenerationOutput:
    tokens: list[int] = []
    logprobs: list[float] = []
    sizes: list[tuple[int, int]] = []
    finished: list[bool] = []
    for request, drawn in zip(requests, completions, strict=True):
        for completion in drawn:
            tokens += (*request.prompt, *completion.tokens)
            logprobs += (*(0.0 for _ in request.prompt), *completion.logprobs)
            prompt = len(request.prompt)
            sizes.append((prompt + len(completion.tokens), prompt))
            finished.append(completion.finish == "stop")
    both = torch.tensor(sizes, dtype=torch.int64).view(-1, 2)
    return GenerationOutput(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        both[:, 0].contiguous(),
        both[:, 1].contiguous(),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
        torch.tensor(finished, dtype=torch.bool),
    )

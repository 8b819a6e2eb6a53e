"""Servers of SGLang 0.5.20 and later: start, requests, updates and checks.

Weights are replaced while the server is paused, in one of three modes:

- ``retract``: the server keeps its requests, and computes their caches again with the new weights.
- ``abort``: the server returns the tokens so far, and the completions are requested again with
  these tokens in the prompt. This mode is for servers that cannot empty their cache while paused
  (`fitness.retracts`). ``abort`` is also for requests with a minimum number of tokens, because a
  retracting server would count from zero.
- ``in_place``: requests continue with the cache of the old weights (``stale_cache``).

The server listens on a Unix socket in a folder that only the user can enter (`launch_sglang`).

Samples depend on SGLang's random numbers. SGLang uses the seed of a completion only on GPUs, with
``--enable-deterministic-inference``.

SGLang computes checksums of its weights (``/weights_checker``). This module computes the same
checksums as versions 0.5.20 to 0.5.23.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator
from torch import Tensor

from slurmrl import package
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.plan.engine_rules import EXPERTS_FLAG
from slurmrl.plan.estimates.worker_memory import computing
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationRequest
from slurmrl.rollouts.generation.dialect import CONTROL_S, HttpDialect
from slurmrl.rollouts.generation.fitness import examine, field_of, retracts
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.server_kinds import ServerKind, Serving, cache_flags
from slurmrl.rollouts.generation.sglang_requests import (
    PiecewiseSampling,
    RoutedLayers,
    read_reply,
    request_body,
)
from slurmrl.rollouts.generation.weight_checks import Digest, Held, TensorPart, elements, sha256

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
IDLE_S = 30.0
"""Seconds within which a server must end its last batch. The requests are already answered."""


class SglangDialect(HttpDialect):
    """One SGLang server."""

    GENERATE = "/generate"

    def __init__(
        self,
        client: HttpClient,
        control: HttpClient | None = None,
        *,
        routed: RoutedLayers | None = None,
        **common: Any,
    ) -> None:
        """`read_reply` describes ``routed``, and `HttpDialect` the other arguments."""
        super().__init__(client, control, **common)
        self._routed = routed
        self._context = 0
        self._samplings: dict[str, PiecewiseSampling] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._pauses = 0
        self._mode: PauseMode = "abort"
        """Mode of the last pause."""
        self._retracts = False

    async def connect(self) -> int:
        fit = await examine("sglang", self.where, self._get, self._model)
        self._context = fit.context
        self._connected(digest_of(fit.settings), dtype_of(fit.settings))
        self._retracts = retracts(self.where, fit.settings)
        await self.resume()  # a client that died in an update has left it paused
        await self._model.check_vocabulary(self.where, self._knows)
        return self._context

    def _first(self) -> dict[str, Any]:
        return {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}

    async def sample(self, sampling: GenerationRequest) -> Completion:
        name = sampling.request_id
        if sampling.options.experts and self._routed is None:
            raise UsageError(f"{name}: the model has no experts to record")
        token, size = max(sampling.prompt), self._model.vocabulary
        if token >= size:  # SGLang would accept an unknown token
            raise UsageError(f"{name}: token {token} is not in the vocabulary of {size}")
        piecewise = self._samplings[name] = PiecewiseSampling(
            self._within_context(await self._with_images(sampling))
        )
        try:
            while await self._running_before(piecewise.aborted):
                pauses = self._pauses
                finish = piecewise.add(*await self._piece(piecewise.rest()))
                if finish is not None and (finish != "aborted" or pauses == self._pauses):
                    return piecewise.completion(finish)
            return piecewise.completion("aborted")
        finally:
            del self._samplings[name]

    def _within_context(self, sampling: GenerationRequest) -> GenerationRequest:
        options, most = sampling.options, self._context - len(sampling.prompt)
        cut = replace(
            options,
            max_new_tokens=min(options.max_new_tokens, most),
            min_new_tokens=min(options.min_new_tokens, most),
        )
        return replace(sampling, options=cut)

    async def _running_before(self, aborted: asyncio.Event) -> bool:
        """Wait until the server runs or the completion is aborted; return False if aborted."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._running, aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not aborted.is_set()

    async def _piece(self, sampling: GenerationRequest) -> tuple[Completion, str]:
        """Return tokens until the completion ends or is aborted, or the server pauses.

        The string is the stop string that ended them, or "".
        """
        body = request_body(sampling, cache=self._cache)
        reply = await self._client.post(self.GENERATE, body, timeout_s=None)
        return read_reply(self.where + self.GENERATE, reply, sampling, routed=self._routed)

    async def abort(self, name: str) -> None:
        if name in self._samplings:
            self._samplings[name].aborted.set()
        await self._post("/abort_request", {"rid": name + "/"})

    async def pause(self) -> None:
        self._pauses += 1
        if self._running.is_set():  # a second pause must use the first mode
            self._mode = self._mode_now()
            self._running.clear()
        await self._post("/pause_generation", {"mode": self._mode}, None)

    def _mode_now(self) -> PauseMode:
        if self._keeps_cache:
            return "in_place"
        if any(piecewise.sampling.options.min_new_tokens for piecewise in self._samplings.values()):
            return "abort"
        return "retract" if self._retracts else "abort"

    async def resume(self) -> None:
        await self._post("/continue_generation", {})
        self._running.set()

    async def _ready_to_load(self) -> None:
        if self._mode == "abort":
            await self._wait_until_idle()  # A busy server would exit or reject the update.

    async def _load(self, name: str, folder: Path) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": name,
            "flush_cache": self._mode != "in_place",
        }
        await self._succeed("/update_weights_from_disk", body)

    async def version(self) -> str:
        return str(field_of(self.where, await self._get("/model_info"), "weight_version"))

    async def _held(self) -> list[Held]:
        reply = await self._succeed("/weights_checker", {"action": "checksum"})
        return read_checksums(self.where, reply)

    async def sleep(self) -> None:
        await self._wait_until_idle()  # A busy server would exit instead.
        await self._post("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self._post("/resume_memory_occupation", {})

    async def _wait_until_idle(self) -> None:
        """Wait until no batch runs. Raises RunFailedError if a batch does not end.

        The last batch may end after its requests were answered or cancelled.
        """
        try:
            await self._post(f"/flush_cache?timeout={IDLE_S:g}", {}, IDLE_S + CONTROL_S)
        except UsageError as error:
            raise RunFailedError(f"{self.where}: the server is not idle: {error}") from error

    async def health(self) -> None:
        # The server's computing processes answer this request, even while they are paused.
        await self._client.get("/server_info", timeout_s=self._health_s)

    async def _succeed(self, path: str, body: Mapping[str, object]) -> object:
        reply = await self._post(path, body, None)
        if field_of(self.where, reply, "success") is not True:
            raise RunFailedError(f"{self.where}{path}: {reply}")
        return reply


TILE = 8192
"""Number of 32-bit words that are summed to one hash."""
CHUNK = {"cpu": 16 * TILE, "cuda": 512 * TILE}
"""Number of words that are computed at a time, for a CPU's cache or 100 MB of a GPU's memory."""
MOST_WORDS = 2**31 - 1
"""Maximum number of words that SGLang's kernel can count."""
BITS = 2**32 - 1
SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & BITS)
FACTORS = (0x27D4EB2D, 0x165667B1)
TURNS = (15, 13)
TRAINED = "target"
"""Role of the trained model. A draft model of speculative decoding has a different role."""


class _ChecksumPlace(BaseModel):
    tp_rank: int
    tp_size: int
    role: str = TRAINED


class _ChecksumRank(BaseModel):
    checksums: dict[str, str]
    parallelism_info: list[_ChecksumPlace]
    """The rank's place in each model. Versions from 0.5.21 on report all models together, and put
    the role of a draft model before the names of its parameters."""

    @field_validator("parallelism_info", mode="before")
    @classmethod
    def _one_of_0_5_20(cls, value: object) -> object:
        return [value] if isinstance(value, dict) else value

    def of_trained(self) -> Iterator[Held]:
        others = tuple(place.role + "." for place in self.parallelism_info if place.role != TRAINED)
        own = {name: value for name, value in self.checksums.items() if not name.startswith(others)}
        for place in self.parallelism_info:
            if place.role == TRAINED:
                yield Held(TensorPart(place.tp_rank, place.tp_size), own)


class _ChecksumReply(BaseModel):
    ranks: list[_ChecksumRank]


_CHECKSUMS = TypeAdapter(_ChecksumReply)


def digest_of(settings: object) -> Digest | str:
    """Return how a server computes checksums, or the reason why this is unknown.

    ``settings`` is the server's ``/server_info``.
    """
    values: Mapping[str, object] = settings if isinstance(settings, dict) else {}
    if values.get("quantization") or values.get("torchao_config"):
        return "it quantizes weights"
    if values.get("dp_size", 1) != 1:
        return "it is several servers behind one address (--dp-size)"
    if values.get("device") == "cuda":
        return on_gpu
    native = values.get("attention_backend") == "torch_native" and values.get("tp_size") == 1
    if values.get("device") == "cpu" and native:
        return on_cpu
    return "it may store weights in another form (--device, --attention-backend, --tp-size)"


def dtype_of(settings: object) -> object:
    """Return the element type with which a server computes, or ``auto`` if the server chooses."""
    return settings.get("dtype") if isinstance(settings, dict) else None


def read_checksums(where: str, reply: object) -> list[Held]:
    """Parse the reports of the ranks of a server."""
    try:
        ranks = _CHECKSUMS.validate_python(reply).ranks
    except ValidationError as error:
        raise RunFailedError(
            f"{where}/weights_checker: the answer does not have SGLang's form: {error}"
        ) from error
    return [held for rank in ranks for held in rank.of_trained()]


def on_cpu(tensor: Tensor, device: torch.device) -> str:
    """Return the checksum of a parameter in host memory."""
    return sha256(tensor)[:16]


def on_gpu(tensor: Tensor, device: torch.device) -> str | None:
    """Return the checksum of a parameter on a GPU.

    Each tile of words has two 32-bit hashes, which depend on the positions of the words. The two
    sums of hashes over all tiles are mixed to one 64-bit number. Return None for sizes that
    SGLang's kernel does not support.
    """
    found = elements(tensor)
    if missing := -len(found) % 4:
        found = torch.cat([found, found.new_zeros(missing)])
    words = found.view(torch.int32)
    if not 0 < len(words) <= MOST_WORDS:
        return None
    size = CHUNK[device.type]
    high = low = 0
    for begin in range(0, len(words), size):
        chunk = words[begin : begin + size].to(device)
        index = torch.arange(begin, begin + len(chunk), dtype=torch.int32, device=device)
        upper, lower = (
            _tiles(chunk, index, *how, length=4 * len(words))
            for how in zip(SEEDS, FACTORS, TURNS, strict=True)
        )
        high, low = high + upper, low + lower
    return f"{_mixed_64((high << 32) + low):016x}"


def _tiles(words: Tensor, index: Tensor, seed: int, factor: int, turn: int, *, length: int) -> int:
    """Return the sum of the hashes of all tiles. Operations on int32 tensors wrap around."""
    place = (index * factor + _signed(seed)) ^ (index << turn | _shifted(index, 32 - turn))
    mixed = _mixed(words ^ place)
    tiles = torch.nn.functional.pad(mixed, (0, -len(mixed) % TILE)).view(-1, TILE)
    sums = tiles.sum(1, dtype=torch.int32) ^ _signed(length & BITS)
    return int((_mixed(sums).long() & BITS).sum())


def _mixed(words: Tensor) -> Tensor:
    """Apply MurmurHash3's finalizer to words (https://github.com/aappleby/smhasher)."""
    words = (words ^ _shifted(words, 16)) * _signed(0x85EBCA6B)
    words = (words ^ _shifted(words, 13)) * _signed(0xC2B2AE35)
    return words ^ _shifted(words, 16)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift words to the right and fill with zeros; torch's operator fills with the sign bit."""
    shifted: Tensor = (words >> bits) & ((1 << 32 - bits) - 1)
    return shifted


def _signed(bits: int) -> int:
    """Return the int32 number with these bits."""
    return bits - 2**32 if bits >= 2**31 else bits


def _mixed_64(value: int) -> int:
    """Apply splitmix64's finalizer (https://prng.di.unimi.it/splitmix64.c)."""
    value &= 2**64 - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return value ^ value >> 31


LAUNCHER = package.program("rollouts/generation/launch_sglang.py")
FLAGS = (
    "--enable-priority-scheduling",
    "--schedule-low-priority-values-first",
    "--disable-priority-preemption",
    "--skip-server-warmup",
    *("--log-level-http", "warning"),  # do not log each completion
)
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--max-total-tokens", "65536"),
)
"""Flags of a server without a GPU."""
LEAST_SHARE, MOST_SHARE = 0.01, 0.98
ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_PICKLE_IPC": "0",  # do not unpickle data from internal sockets
    "SGLANG_ZMQ_ALLOWED_PEERS": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_VLM_CACHE_SIZE_MB": "0",  # The cache of images would survive updates of weights.
}
"""Environment variables of a server, which override the job's variables."""
UNCOMPILED: Mapping[str, str] = {"TORCHDYNAMO_DISABLE": "1"}
"""Additional variables for images on a CPU. Otherwise, SGLang would compile the image encoder at
the first image for a minute, without answering health checks."""


class SglangServer(ServerKind):
    """SGLang servers."""

    name = "sglang"
    speaks = SglangDialect

    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        """Return the command as `ServerKind.command` does.

        ``model`` has a ``config.json`` without ``eos_token_id``, so that only the stop tokens of a
        request end its completions. Stop strings and a minimum number of tokens need a tokenizer,
        whose end-of-text token then also ends every completion.
        """
        tokenizer = self.tokenizer(serving)  # the folder also has the processor for images
        text: tuple[str, ...] = () if serving.text else ("--skip-tokenizer-init",)
        if tokenizer is not None:
            text = (*text, "--tokenizer-path", str(tokenizer))
        on_cpu = self.device.type == "cpu"
        flags = CPU_FLAGS if on_cpu else ("--enable-memory-saver",) if serving.sleeps else ()
        return (
            *(serving.python, "-P", str(LAUNCHER), str(socket), "--model-path", str(model), *text),
            *("--load-format", "dummy", "--sampling-mask-max-tokens", str(self.model.vocabulary)),
            *FLAGS,
            *("--tp-size", str(self.tensor_ranks)),
            *flags,
            *((EXPERTS_FLAG,) if serving.experts else ()),
            *(self._watched(serving) if serving.stale_cache else ()),
            *("--dtype", self.dtype),
            *cache_flags(serving),
            *serving.arguments,
        )

    @staticmethod
    def _watched(serving: Serving) -> Sequence[str]:
        """Return flags that raise the time limit of SGLang's watchdog.

        With ``in_place``, SGLang mistakes an update for a hanging batch and exits after 300 s.
        """
        return ("--watchdog-timeout", f"{300 + 2 * serving.patience.start_s:g}")

    @staticmethod
    def memory_flags(share: int, free: int, total: int) -> Sequence[str]:
        """Return flags as `ServerKind` does: the part of ``free`` memory for weights and caches.

        The rest of the share is for computing.
        """
        fraction = (share - computing(total)) / max(free, 1)
        return ("--mem-fraction-static", f"{min(max(fraction, LEAST_SHARE), MOST_SHARE):.4f}")

    def environment(self) -> Mapping[str, str]:
        slow = bool(self.placeholders) and self.device.type == "cpu"
        return {**ENVIRONMENT, **(UNCOMPILED if slow else {})}

    def dialect_options(self) -> Mapping[str, Any]:
        return {"routed": RoutedLayers.of(self.config)}

"""Servers of vLLM 0.32 and later: start, requests, updates and checks.

Weights are replaced while the scheduler is paused with ``mode=keep``. The server keeps its requests
and computes their caches again with the new weights (with ``stale_cache``, it keeps the caches).
The server reports the version of each token. The routes for updates need ``VLLM_SERVER_DEV_MODE=1``
and no key, so servers of this run listen on a Unix socket in a folder that only the user can enter.

Log-probabilities are under the sampling distribution: after temperature, top-k, top-p and the ban
of stop tokens before ``min_new_tokens``. Log-probabilities of greedy tokens are at temperature 1.

vLLM computes checksums of its weights (``/weight_checker``) by SHA-256 in host memory, which takes
seconds for each 10 GB. Some kernels, such as CPU kernels, reorder the elements of matrices.
Therefore, only the embedding, norms and biases are compared. Their checksums differ if the server
did not load an update.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.fsio.calls import REAL, explain
from slurmrl.models.model_tensors import SafetensorsFolder
from slurmrl.models.shapes import LM_HEAD, embedding_tensor
from slurmrl.plan.engine_rules import VLLM_FLAGS, VLLM_IMAGE_FLAGS
from slurmrl.rollouts.completions import Completion, Finish
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
from slurmrl.rollouts.generation.dialect import FIRST_S, HttpDialect
from slurmrl.rollouts.generation.fitness import examine, field_of
from slurmrl.rollouts.generation.image_requests import image_features
from slurmrl.rollouts.generation.server_kinds import ServerKind, Serving, cache_flags
from slurmrl.rollouts.generation.weight_checks import (
    Digest,
    Held,
    TensorPart,
    sha256,
)
from slurmrl.tensors.checkpoint.export import write_index
from slurmrl.tensors.checkpoint.tensors import TensorEntry, write_tensors
from slurmrl.tensors.layout import Box

if TYPE_CHECKING:
    from slurmrl.rollouts.generation.http import HttpClient

FIRST = GenerationRequest(
    request_id="first",
    prompt=(0,),
    keys=(0,),
    seed=0,
    step=0,
    options=GenerationOptions(max_new_tokens=1, greedy=True),
)
"""Request that tests a server by asking for one token."""
WITHOUT_HEAD = ("gemma2", "gemma3n", "gemma3n_text")
"""Families whose class in vLLM has no output layer and multiplies by the embedding instead."""
HEAD_FILE = "model-head.safetensors"
"""File with the output layer that `with_head` adds."""
RESET = "/reset_prefix_cache?reset_running_requests=true"
KEEP = "/pause?mode=keep"
LOADING = {"load_config": {"load_format": "auto"}}
"""Setting for a server that starts without weights and loads files later."""


@dataclass(frozen=True)
class _ReplyLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True)
class _ReplyLogprobs:
    content: list[_ReplyLogprob]


@dataclass(frozen=True)
class _ReplySpan:
    """Range of tokens, ``start`` to ``end`` - 1, that the weights ``version`` sampled."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class _ReplyChoice:
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[int]
    logprobs: _ReplyLogprobs
    weight_versions: list[_ReplySpan] | None


@dataclass(frozen=True)
class _Reply:
    choices: list[_ReplyChoice]


REPLY = TypeAdapter(_Reply)
FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}
PREFIX = "generate-tokens-"
"""Prefix that the server puts before the id of a request."""


def request_body(sampling: GenerationRequest, *, cache: str | None = None) -> dict[str, Any]:
    """Return the body of a request for one completion.

    Two requests share cached prefixes only if their ``cache`` is equal (or None for both).
    """
    return {
        "request_id": sampling.request_id,
        "token_ids": list(sampling.prompt),
        "priority": sampling.priority,
        "sampling_params": _sampling(sampling.options, sampling.server_seed),
        "cache_salt": cache,
        **image_features(sampling.images, cache),
    }


def _sampling(options: GenerationOptions, seed: int) -> dict[str, Any]:
    return {
        "max_tokens": options.max_new_tokens,
        "min_tokens": options.min_new_tokens,
        "temperature": 0.0 if options.greedy else options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k or 0,  # 0: no limit
        "stop_token_ids": list(options.stop_token_ids),
        "stop": list(options.stop_strings),
        "ignore_eos": True,  # the stop ids contain the end-of-text token if needed
        "seed": seed,
        "logprobs": 0,  # only log-probabilities of sampled tokens
        "detokenize": bool(options.stop_strings),
        "skip_special_tokens": False,  # stop strings may contain special tokens
    }


def read_reply(where: str, reply: object) -> Completion:
    """Return the completion of a reply."""
    try:
        (choice,) = REPLY.validate_python(reply).choices
    except (ValidationError, ValueError) as error:
        raise RunFailedError(f"{where}: the answer does not have vLLM's form: {error}") from error
    tokens, content = choice.token_ids, choice.logprobs.content
    versions = [
        span.version for span in choice.weight_versions or () for _ in range(span.start, span.end)
    ]
    if tokens != [entry.token_id for entry in content] or len(versions) != len(tokens):
        raise RunFailedError(
            f"{where}: the answer has {len(tokens)} tokens, {len(content)} log-probabilities and "
            f"{len(versions)} weight versions: these counts and the token ids must match"
        )
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(entry.logprob for entry in content),
        versions=tuple(versions),
        finish=FINISH[choice.finish_reason],
    )


class VllmDialect(HttpDialect):
    """One vLLM server."""

    GENERATE = "/inference/v1/generate"

    def __init__(self, *clients: HttpClient, embedding: str | None = None, **options: Any) -> None:
        """``embedding`` is the tensor that is added to each version as the output layer, or None.

        `HttpDialect` describes the other arguments.
        """
        super().__init__(*clients, **options)
        self._embedding = embedding

    async def connect(self) -> int:
        fit = await examine("vllm", self.where, self._get, self._model)
        self._connected(digest_of(fit.settings), dtype_of(fit.settings), first_only=True)
        await self.resume()  # a client that died in an update has left it paused
        await self._try()
        await self._model.check_vocabulary(self.where, self._knows)
        return fit.context

    async def _try(self) -> None:
        """Sample a token, to detect problems before the first request."""
        try:
            reply = await self._client.post(self.GENERATE, self._first(), timeout_s=FIRST_S)
        except UsageError as error:
            raise UsageError(f"{error}; start the server with {' '.join(VLLM_FLAGS)}") from error
        read_reply(self.where + self.GENERATE, reply)

    def _first(self) -> dict[str, Any]:
        return request_body(FIRST)

    async def sample(self, sampling: GenerationRequest) -> Completion:
        if sampling.options.experts:
            raise UsageError(
                f"{self.where}: experts of vLLM's tokens are not recorded; use native or sglang, "
                "or leave out replay_experts"
            )
        if sampling.options.masks:
            raise UsageError(
                f"{self.where}: vLLM reports sampling masks for all requests of a server or for "
                f"none; use native or sglang, or leave out top_k and top_p"
            )
        body = request_body(await self._with_images(sampling), cache=self._cache)
        reply = await self._client.post(self.GENERATE, body, timeout_s=None)
        return read_reply(self.where + self.GENERATE, reply)

    async def abort(self, name: str) -> None:
        await self._post("/inference/v1/abort_requests", {"request_ids": [PREFIX + name]})

    async def pause(self) -> None:
        await self._post(f"{KEEP}&clear_cache=false" if self._keeps_cache else KEEP)

    async def resume(self) -> None:
        await self._post("/resume")

    async def _load(self, name: str, folder: Path) -> None:
        # Until the update succeeds, the server reports a version that no run accepts.
        await self._name(f"in part ({secrets.token_hex(8)})")
        await self._call("update_config", overrides=LOADING)
        if self._embedding is None:
            await self._call("reload_weights", weights_path=str(folder))
        else:
            with ExitStack() as stack:
                making = with_head(folder, self._embedding)
                try:
                    complete = await asyncio.to_thread(stack.enter_context, making)
                except OSError as error:
                    raise explain(error, "add the output layer to", folder) from error
                await self._call("reload_weights", weights_path=str(complete))
        if not self._keeps_cache:
            await self._empty_cache()
        await self._name(name)

    async def _name(self, version: str) -> None:
        """Let the server report this version."""
        await self._post("/update_weight_version", {"new_version": version})

    async def _empty_cache(self) -> None:
        if field_of(self.where, await self._post(RESET), "success") is not True:
            raise RunFailedError(f"{self.where}: the server did not empty its prefix cache")

    async def _held(self) -> list[Held]:
        reply = await self._post("/weight_checker", {"action": "checksum"}, None)
        return read_checksums(self.where, reply)

    async def version(self) -> str:
        return str(field_of(self.where, await self._get("/weight_info"), "weight_version"))

    async def sleep(self) -> None:
        await self._post("/sleep?level=2")  # level 2: keep no weights in host memory

    async def wake(self) -> None:
        await self._post("/wake_up")

    async def health(self) -> None:
        await self._client.get("/health", timeout_s=self._health_s)
        # The server's computing process answers this request.
        await self._client.get("/is_paused", timeout_s=self._health_s)

    async def _call(self, method: str, **arguments: object) -> None:
        """Call a method of the server's computing processes."""
        await self._post("/collective_rpc", {"method": method, "kwargs": arguments}, None)


@contextmanager
def with_head(folder: Path, embedding: str) -> Iterator[Path]:
    """Yield a temporary folder with the weights and an output layer equal to ``embedding``.

    Raises EnvironmentFailure, and UsageError or CorruptFileError if ``folder`` lacks the tensor.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".head.") as made:
        tensors, target = SafetensorsFolder(folder), Path(made)
        specs = tensors.specs()
        if embedding not in specs:
            raise UsageError(f"{folder} has no tensor {embedding}")
        spec = specs[embedding]
        for file in {tensors.file(name) for name in specs}:
            (target / file.name).symlink_to(file.absolute())
        entry = TensorEntry(LM_HEAD, spec, lambda: tensors.read(embedding, Box.whole(spec.shape)))
        write_tensors(target / HEAD_FILE, [entry], {"format": "pt"})
        places = {name: tensors.file(name).name for name in specs} | {LM_HEAD: HEAD_FILE}
        write_index(target, places, sum(one.bytes for one in specs.values()) + spec.bytes, REAL)
        yield target


KEY = re.compile(r"(dp\d+:pp\d+:pcp\d+:tp(\d+)):(.+)")
"""Pattern of a checksum's key: the place of the process, and the name of the parameter."""
COMPARED = ("embed_tokens.weight", "wte.weight", "norm.weight", ".bias")


def digest_of(settings: object) -> Digest | str:
    """Return how a server computes checksums, or the reason why this is unknown.

    ``settings`` is the server's ``/server_info``.
    """
    if _model_config(settings).get("quantization"):
        return "it quantizes weights"
    return _sha256


def dtype_of(settings: object) -> object:
    """Return the element type with which a server computes."""
    return _model_config(settings).get("dtype")


def _model_config(settings: object) -> Mapping[str, object]:
    if not isinstance(settings, dict):
        return {}
    config: Mapping[str, object] = settings["vllm_config"]["model_config"]  # checked by `examine`
    return config


def _sha256(tensor: Tensor, device: torch.device) -> str:
    return sha256(tensor)


def read_checksums(where: str, reply: object) -> list[Held]:
    """Parse the reports of the processes of a server."""
    found = field_of(where, reply, "checksums")
    ranks: dict[str, int] = {}
    held: dict[str, dict[str, str]] = {}
    for key, checksum in (found if isinstance(found, dict) else {}).items():
        if (match := KEY.fullmatch(key)) is None:
            raise RunFailedError(
                f"{where}/weight_checker: {key} does not have the form of vLLM's names"
            )
        place, rank, name = match.groups()
        ranks[place] = int(rank)
        if name.endswith(COMPARED):
            held.setdefault(place, {})[name] = str(checksum)
    of = 1 + max(ranks.values(), default=0)
    return [Held(TensorPart(ranks[place], of), checksums) for place, checksums in held.items()]


MOST_SHARE = 0.98
CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""Flags of a server without a GPU. Chunked prefill rewinds the random stream of a request, which
torch's CPU generators do not support: vLLM 0.32 exits with "CPU Generator does not use offset"."""


ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # otherwise the server would unpickle requests
    "VLLM_API_KEY": "",  # otherwise the server would require this key in requests
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",  # a clone must not shadow vLLM, which runs itself with -m
}
"""Environment variables of a server, which override the job's variables."""
CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers would bind to the same cores
}
"""Additional variables of a server without a GPU."""


class VllmServer(ServerKind):
    """vLLM servers."""

    name = "vllm"
    speaks = VllmDialect

    @property
    def unties(self) -> bool:
        """True on CPUs for a tied model, because vLLM would not update its output layer.

        vLLM on CPUs repacks matrices when it loads them, and reloads only the embedding. The output
        layer would keep its initial random values.
        """
        tied = self.config.tie_embeddings and self.config.model_type not in WITHOUT_HEAD
        return tied and self.device.type == "cpu" and isinstance(self.serving, Serving)

    def dialect_options(self) -> Mapping[str, Any]:
        return {"embedding": embedding_tensor(self.config) if self.unties else None}

    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        """Return the command as `ServerKind.command` does.

        Stop strings need a tokenizer. The model and the memory limit the length of sequences.
        """
        if (tokenizer := self.tokenizer(serving)) is None:
            text: tuple[str, ...] = ("--skip-tokenizer-init",)
        else:
            text = ("--tokenizer", str(tokenizer))
        on_cpu = self.device.type == "cpu"
        return (
            # The server cannot bind a socket whose file exists.
            *("/bin/sh", "-c", 'rm -f -- "$0" && exec "$@"', str(socket)),
            *(serving.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--uds", str(socket), "--load-format", "dummy", *text),
            *VLLM_FLAGS,
            # The model's generation config would change sampling silently.
            *("--generation-config", "vllm"),
            *("--tensor-parallel-size", str(self.tensor_ranks)),
            "--disable-uvicorn-access-log",  # otherwise the server logs each completion
            *("--max-model-len", "-1", "--scheduling-policy", "priority"),
            "--enable-prefix-caching",
            *(CPU_FLAGS if on_cpu else ("--enable-sleep-mode",) if serving.sleeps else ()),
            *(VLLM_IMAGE_FLAGS if self.placeholders else ()),
            *("--dtype", self.dtype),
            *cache_flags(serving),
            *serving.arguments,
        )

    @staticmethod
    def memory_flags(share: int, free: int, total: int) -> Sequence[str]:
        """Return flags as `ServerKind` does: the share as a fraction of the GPU's whole memory."""
        return ("--gpu-memory-utilization", f"{min(share / total, MOST_SHARE):.4f}")

    def environment(self) -> Mapping[str, str]:
        further = CPU_ENVIRONMENT if self.device.type == "cpu" else {}
        return {**ENVIRONMENT, **further}

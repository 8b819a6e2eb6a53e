"""vLLM 0.32 and later as a server: its start, requests, updates and checks.

Weights are replaced while the scheduler is paused with ``mode=keep``: the server keeps its
requests, computes their caches again with the new weights (or keeps them, with ``stale_cache``),
and reports the version of each token. The routes for this need ``VLLM_SERVER_DEV_MODE=1`` and no
key, so servers of this run listen on a Unix socket in a folder that only the user can enter.

Log-probabilities are under the sampling distribution: after temperature, top-k, top-p
and the ban of stop tokens before ``min_new_tokens``. Log-probabilities of greedy tokens are at
temperature 1.

vLLM computes checksums of its weights (``/weight_checker``) by SHA-256 in host memory, which takes
seconds for each 10 GB. Kernels may store matrices in another order (CPU kernels do), so only the
embedding, norms and biases are compared: they differ in a server that did not take an update.
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
"""Request that tests a server."""
WITHOUT_HEAD = ("gemma2", "gemma3n", "gemma3n_text")
"""Families whose class in vLLM has no output layer: it multiplies by the embedding."""
HEAD_FILE = "model-head.safetensors"
"""The output layer that `with_head` adds."""
RESET = "/reset_prefix_cache?reset_running_requests=true"
KEEP = "/pause?mode=keep"
LOADING = {"load_config": {"load_format": "auto"}}
"""Setting with which a server that started without weights reads them later."""


@dataclass(frozen=True)
class _ReplyLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True)
class _ReplyLogprobs:
    content: list[_ReplyLogprob]


@dataclass(frozen=True)
class _ReplySpan:
    """``version`` sampled the tokens ``start`` to ``end`` - 1."""

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

    With ``cache``, prompts share the server's cache only with requests of this name; with None,
    with all requests without a name.
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
        "top_k": options.top_k or 0,  # 0 means all
        "stop_token_ids": list(options.stop_token_ids),
        "stop": list(options.stop_strings),
        "ignore_eos": True,  # the stop ids contain the end-of-text token if it must stop
        "seed": seed,
        "logprobs": 0,  # log-probabilities of the sampled tokens
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
            f"{where}: the log-probabilities ({len(content)}) or weight versions "
            f"({len(versions)}) of the answer do not belong to its {len(tokens)} tokens"
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
        """``embedding``: the tensor that each version also has as the output layer, if any.

        The rest is as for every dialect.
        """
        super().__init__(*clients, **options)
        self._embedding = embedding

    async def connect(self) -> int:
        fit = await examine("vllm", self.where, self._get, self._model)
        self._connected(digest_of(fit.settings), dtype_of(fit.settings), first_only=True)
        await self.resume()  # a client that was lost during an update has left it paused
        await self._try()
        await self._model.check_vocabulary(self.where, self._knows)
        return fit.context

    async def _try(self) -> None:
        """Sample a token, which shows other problems before the first request."""
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
        # If the update fails, the server has a version of no run.
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
        await self._post("/sleep?level=2")  # weights are not kept in host memory

    async def wake(self) -> None:
        await self._post("/wake_up")

    async def health(self) -> None:
        await self._client.get("/health", timeout_s=self._health_s)
        # The process that computes answers this request.
        await self._client.get("/is_paused", timeout_s=self._health_s)

    async def _call(self, method: str, **arguments: object) -> None:
        """Call a method of the processes that compute."""
        await self._post("/collective_rpc", {"method": method, "kwargs": arguments}, None)


@contextmanager
def with_head(folder: Path, embedding: str) -> Iterator[Path]:
    """Yield a folder of the same weights with an output layer, which has the values of a tensor.

    Raises UsageError or CorruptFileError if ``folder`` lacks the tensor, EnvironmentFailure.
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
"""Pattern of the place of the process that has a parameter, and the parameter's name."""
COMPARED = ("embed_tokens.weight", "wte.weight", "norm.weight", ".bias")


def digest_of(settings: object) -> Digest | str:
    """Return how a server computes checksums, or why that is not known.

    ``settings`` are the server's settings (``/server_info``).
    """
    if _model_config(settings).get("quantization"):
        return "it quantizes them"
    return _sha256


def dtype_of(settings: object) -> object:
    """Return the type in which a server with these settings computes."""
    return _model_config(settings).get("dtype")


def _model_config(settings: object) -> Mapping[str, object]:
    if not isinstance(settings, dict):
        return {}
    config: Mapping[str, object] = settings["vllm_config"]["model_config"]  # `examine` has read it
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
torch's CPU generators cannot do: vLLM 0.32 ends with "CPU Generator does not use offset"."""


ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # otherwise the server would unpickle requests
    "VLLM_API_KEY": "",  # otherwise the server would require this key in requests
    "HF_HUB_OFFLINE": "1",
}
"""Variables of a server, which override the job's variables."""
CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers would bind to the same cores
}
"""Further variables of a server without a GPU."""


class VllmServer(ServerKind):
    """vLLM servers."""

    name = "vllm"
    speaks = VllmDialect

    @property
    def unties(self) -> bool:
        """As in the contract.

        vLLM on CPUs repacks matrices when it loads them, and reloads only the embedding of a tied
        model: the output layer would keep the random values that the server started with.
        """
        tied = self.config.tie_embeddings and self.config.model_type not in WITHOUT_HEAD
        return tied and self.device.type == "cpu" and isinstance(self.serving, Serving)

    def dialect_options(self) -> Mapping[str, Any]:
        """As in the contract."""
        return {"embedding": embedding_tensor(self.config) if self.unties else None}

    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        """As in the contract.

        Stop strings need a tokenizer. Sequences may be as long as the model and the memory allow.
        """
        if (tokenizer := self.tokenizer(serving)) is None:
            text: tuple[str, ...] = ("--skip-tokenizer-init",)
        else:
            text = ("--tokenizer", str(tokenizer))
        on_cpu = self.device.type == "cpu"
        return (
            *(
                "/bin/sh",
                "-c",
                'rm -f -- "$0" && exec "$@"',
                str(socket),
            ),  # the server can bind only a new socket
            *(serving.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--uds", str(socket), "--load-format", "dummy", *text),
            *VLLM_FLAGS,
            *(
                "--generation-config",
                "vllm",
            ),  # The model's generation config would change sampling silently.
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
        """Implement the contract. vLLM uses a fraction of the whole memory."""
        return ("--gpu-memory-utilization", f"{min(share / total, MOST_SHARE):.4f}")

    def environment(self) -> Mapping[str, str]:
        further = CPU_ENVIRONMENT if self.device.type == "cpu" else {}
        return {**ENVIRONMENT, **further}

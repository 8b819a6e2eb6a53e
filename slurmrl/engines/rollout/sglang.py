"""SGLang 0.5.20 and later, as a server.

Weights are replaced while the server is paused, in one of three modes. ``retract``: it keeps its
requests, and computes their caches again with the new weights. ``abort``: it returns the tokens
that its requests have, and they are requested again with these as part of the prompt; so with
servers that cannot empty their cache otherwise (`fitness.retracts`), and while a request has a
least number of tokens, which the server would count anew. ``in_place``: requests go on with what
the old weights have computed, if that is wanted (``stale_cache``).

The server listens on a Unix socket in a folder that only the user can enter (`launch_sglang`).

A sample depends on SGLang's own generator. Each completion has a seed of its own, which SGLang uses
only with ``--enable-deterministic-inference``, on GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import contains
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, TypeAdapter, ValidationError

from slurmrl.data.support import SampledSupport
from slurmrl.engines.rollout.base import ABORTED, Completion, Finish, WeightVersion
from slurmrl.engines.rollout.dialect import Dialect, Draw
from slurmrl.engines.rollout.drawn_pieces import DrawnPiece, PiecewiseDraw
from slurmrl.engines.rollout.fitness import (
    ServedModel,
    check_sglang,
    field_of,
    retracts,
)
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.routed_experts import RoutedLayers
from slurmrl.engines.rollout.server_check import ServerCheck
from slurmrl.engines.rollout.sglang_checksums import digest_of, dtype_of, read_checksums
from slurmrl.engines.rollout.weight_checks import Held, WeightChecks
from slurmrl.errors import RunFailedError, UsageError

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
CONTROL_S = 60.0
"""Time limit of pausing, resuming, aborting: the server answers between two steps."""
IDLE_S = 30.0
"""How long a server may take to end its last batch, whose requests are answered."""
FIRST_S = 600.0
"""Time limit of the first token, before which a server may compile."""
NEUTRAL: Mapping[str, float] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Without these a server's ``--preferred-sampling-params`` would apply."""


class _SglangSpan(BaseModel):
    """``version`` drew the tokens ``start`` to ``end`` - 1."""

    version: str
    start: int
    end: int


class _SglangFinish(BaseModel):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


class _SglangMeta(BaseModel):
    finish_reason: _SglangFinish
    weight_versions: list[_SglangSpan] = []
    output_token_logprobs: list[tuple[float, int, str | None]]
    output_token_sampling_logprobs: list[float] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None


class _SglangReply(BaseModel):
    output_ids: list[int]
    text: str | None = None
    """None from a server without a tokenizer."""
    meta_info: _SglangMeta


REPLY = TypeAdapter(_SglangReply)
FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


def restricted(draw: Draw) -> bool:
    """Whether a draw is from a part of the vocabulary."""
    return not draw.options.greedy and (draw.options.top_k is not None or draw.options.top_p < 1.0)


def masks(draw: Draw, *, full: bool) -> bool:
    """Whether the server is to report the support of each token, and log-probabilities under it."""
    return restricted(draw) and (draw.options.support or not full)


def request_body(
    draw: Draw, *, vocabulary: int, full: bool, cache: str | None = None
) -> dict[str, Any]:
    """The body of a request for one completion. ``full``: see `read_reply`. ``cache``: prompts are
    shared in the server's cache with requests of the same name only; None: with all without."""
    options, masked = draw.options, masks(draw, full=full)
    all_tokens = vocabulary if masked else -1  # the support is reported up to a limit
    return {
        "rid": draw.name + "/",  # an abort also ends requests whose names begin with its own
        "input_ids": list(draw.prompt),
        "sampling_params": {
            "max_new_tokens": options.max_new_tokens,
            "min_new_tokens": options.min_new_tokens,
            "temperature": options.temperature,
            "top_p": 1.0 if options.greedy else options.top_p,
            "top_k": 1 if options.greedy else options.top_k or all_tokens,
            **NEUTRAL,
            "stop_token_ids": list(options.stop_token_ids),
            "stop": list(options.stop_strings),
            "sampling_seed": draw.seed,
            "skip_special_tokens": False,  # stop strings may contain them
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "return_sampling_mask": masked,
        "return_routed_experts": options.experts,
        "priority": draw.priority,
        "extra_key": cache,
    }


def read_reply(
    where: str, reply: object, draw: Draw, *, full: bool, routed: RoutedLayers | None = None
) -> DrawnPiece:
    """What a reply brings. ``full``: its log-probabilities are those under the distribution
    over all tokens, whatever the draw was restricted to, unless it records its support.
    ``routed``: the model's blocks of experts."""
    try:
        read = REPLY.validate_python(reply)
    except ValidationError as error:
        raise RunFailedError(f"{where}: the answer does not have SGLang's form: {error}") from error
    tokens, meta = read.output_ids, read.meta_info
    finish, options = meta.finish_reason, draw.options
    masked = masks(draw, full=full)
    if finish.type == "abort" and masked and meta.output_token_sampling_mask is None:
        # It was aborted while it waited: to be read, or to be read again.
        support = SampledSupport() if options.support else None
        return DrawnPiece(completion=replace(ABORTED, support=support))
    logprobs = [entry[0] for entry in meta.output_token_logprobs]
    if masked:
        logprobs = meta.output_token_sampling_logprobs or []
    versions = [span.version for span in meta.weight_versions for _ in range(span.start, span.end)]
    if [entry[1] for entry in meta.output_token_logprobs] != tokens or not (
        len(logprobs) == len(versions) == len(tokens)
    ):
        raise RunFailedError(
            f"{where}: {len(tokens)} tokens came with {len(logprobs)} log-probabilities and "
            f"{len(versions)} weight versions, or with those of other tokens"
        )
    support = None
    if options.support:
        support = _support(where, tokens, meta.output_token_sampling_mask or [])
    experts = None
    if options.experts:
        assert routed is not None, "checked with the request"
        # (a request that was aborted before it was read has none)
        with suppress(RunFailedError) if finish.type == "abort" else nullcontext():
            experts = routed.read(where, meta.routed_experts, len(draw.prompt) + len(tokens))
    stops = (*options.stop_token_ids, *options.stop_strings)
    if finish.type == "stop" and finish.matched not in stops:
        raise RunFailedError(
            f"{where}: the server ended a completion at {finish.matched!r}, which is not among its "
            f"stop tokens and stop strings {stops}"
        )
    if options.stop_strings and read.text is None:
        raise RunFailedError(f"{where}: an answer to a request with stop strings has no text")
    completion = Completion(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish=FINISH[finish.type],
        support=support,
        experts=experts,
    )
    stop = finish.matched if isinstance(finish.matched, str) else ""
    return DrawnPiece(completion=completion, text=read.text or "", stop=stop)


def _support(where: str, tokens: list[int], masks: list[list[int]]) -> SampledSupport:
    """From the tokens that a server says it could have drawn, each time most likely ones first."""
    if len(masks) != len(tokens) or not all(map(contains, masks, tokens)):
        raise RunFailedError(
            f"{where}: {len(tokens)} tokens came with {len(masks)} sampling masks, or with one "
            "that does not have its token"
        )
    support = SampledSupport()
    for mask in masks:
        support.add(sorted(mask))
    return support


class SglangDialect(Dialect):
    """One SGLang server."""

    def __init__(
        self,
        client: HttpClient,
        control: HttpClient | None = None,
        *,
        model: ServedModel,
        routed: RoutedLayers | None = None,
        full_logprobs: bool = False,
        checks: WeightChecks | None = None,
        health_s: float = 30.0,
        stale_cache: bool = False,
    ) -> None:
        """``control``: a client with the key for administration, if that is another one.
        ``model``: `connect` refuses servers of other models. ``routed``, ``full_logprobs``: see
        `read_reply`. ``checks``: those of all servers of this run. ``health_s``: time limit of
        `health`; at least the longest step of the model. ``stale_cache``: requests in flight keep
        what older weights have computed."""
        self._client, self._control = client, control or client
        self._model = model
        self._routed = routed
        self._full = full_logprobs
        self._checks = checks or WeightChecks()
        self._check: ServerCheck | None = None
        self._health_s = health_s
        self._context = 0
        self._draws: dict[str, PiecewiseDraw] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._pauses = 0
        self._mode: PauseMode = "abort"
        """Of the last pause."""
        self._stale_cache, self._retracts = stale_cache, False
        self._loaded: str | None = None
        """The last version that was loaded, since the server was connected to."""
        self.where = client.address.text

    async def connect(self) -> int:
        info = await self._info(CONTROL_S)
        model = await self._get("/model_info")
        self._context = check_sglang(self.where, info, model, self._model)
        digest = self._checks.digest(self.where, digest_of(info), self._model.dtype, dtype_of(info))
        self._check = ServerCheck(self._checks, self.where, digest, self._held)
        self._retracts, self._loaded = retracts(self.where, info), None
        await self.resume()  # a client that was lost during an update has left it paused
        await self._model.check_vocabulary(self.where, self._knows)
        return self._context

    async def _knows(self, token: int) -> bool:
        """Whether the vocabulary has this token id. SGLang reports no size, and computes with
        prompts whatever their token ids are, but it checks those of ``logit_bias``."""
        options = {"max_new_tokens": 1, "temperature": 0.0, "logit_bias": {str(token): 0.0}}
        body = {"input_ids": [0], "sampling_params": options}
        try:
            await self._client.post("/generate", body, timeout_s=FIRST_S)
        except UsageError as error:
            if "logit_bias" not in str(error):
                raise
            return False
        return True

    async def draw(self, draw: Draw) -> Completion:
        if draw.options.experts and self._routed is None:
            raise UsageError(f"{draw.name}: the model has no experts to record")
        if (token := max(draw.prompt)) >= (size := self._model.vocabulary):  # SGLang computes on
            raise UsageError(f"{draw.name}: token {token} is not in the vocabulary of {size}")
        drawing = self._draws[draw.name] = PiecewiseDraw(self._within_context(draw))
        try:
            while await self._running_before(drawing.aborted):
                pauses = self._pauses
                finish = drawing.add(await self._piece(drawing.rest()))
                if finish is not None and (finish != "aborted" or pauses == self._pauses):
                    return drawing.completion(finish)
            return drawing.completion("aborted")
        finally:
            del self._draws[draw.name]

    def _within_context(self, draw: Draw) -> Draw:
        options, most = draw.options, self._context - len(draw.prompt)
        cut = replace(
            options,
            max_new_tokens=min(options.max_new_tokens, most),
            min_new_tokens=min(options.min_new_tokens, most),
        )
        return replace(draw, options=cut)

    async def _running_before(self, aborted: asyncio.Event) -> bool:
        """Whether the server is not paused before the draw is aborted."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._running, aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not aborted.is_set()

    async def _piece(self, draw: Draw) -> DrawnPiece:
        """Tokens until the draw has ended, was aborted, or the server was paused."""
        body = request_body(
            draw,
            vocabulary=self._model.vocabulary,
            full=self._full,
            cache=self._loaded if self._stale_cache else None,
        )
        reply = await self._client.post("/generate", body, timeout_s=None)
        return read_reply(
            f"{self.where}/generate", reply, draw, full=self._full, routed=self._routed
        )

    async def abort(self, name: str) -> None:
        if name in self._draws:
            self._draws[name].aborted.set()
        await self._post("/abort_request", {"rid": name + "/"})

    async def pause(self) -> None:
        self._pauses += 1
        if self._running.is_set():  # a paused server stays in its mode
            self._mode = self._mode_now()
            self._running.clear()
        await self._post("/pause_generation", {"mode": self._mode}, None)

    def _mode_now(self) -> PauseMode:
        if self._stale_cache and self._loaded is not None:  # else its cache may be of another run
            return "in_place"
        if any(drawing.draw.options.min_new_tokens for drawing in self._draws.values()):
            return "abort"
        return "retract" if self._retracts else "abort"

    async def resume(self) -> None:
        await self._post("/continue_generation", {})
        self._running.set()

    async def load(self, version: WeightVersion) -> None:
        if version.folder is None or not version.folder.is_dir():
            raise UsageError(
                f"weight version {version.name}: {version.folder} is not a folder with a checkpoint"
            )
        if self._mode == "abort":
            await self._wait_until_idle()  # 0.5.20 would end, later versions refuse the update
        assert self._check is not None, "a server loads weights once it was connected to"
        await self._check.before_load(version)
        body = {
            "model_path": str(version.folder),
            "load_format": "auto",
            "weight_version": version.name,
            "flush_cache": self._mode != "in_place",
        }
        await self._succeed("/update_weights_from_disk", body)
        await self.check_version(version.name)
        self._loaded = version.name
        await self._check.after_load(version)

    async def version(self) -> str:
        return str(field_of(self.where, await self._get("/model_info"), "weight_version"))

    async def _held(self) -> list[Held]:
        reply = await self._succeed("/weights_checker", {"action": "checksum"})
        return read_checksums(self.where, reply)

    async def sleep(self) -> None:
        await self._wait_until_idle()  # a process of the server that still computes would end
        await self._post("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self._post("/resume_memory_occupation", {})

    async def _wait_until_idle(self) -> None:
        """Return once no batch runs. The last one may end after the answers to its requests, and
        after its requests were cancelled. Raises RunFailedError if it does not end."""
        try:
            await self._post(f"/flush_cache?timeout={IDLE_S:g}", {}, IDLE_S + CONTROL_S)
        except UsageError as error:
            raise RunFailedError(f"{self.where}: the server is not idle: {error}") from error

    async def health(self) -> None:
        await self._info(self._health_s)

    async def close(self) -> None:
        if self._check is not None:
            self._check.close()
        await self._client.close()
        await self._control.close()

    async def _info(self, timeout_s: float) -> object:
        """The settings of the server, with the state of the processes that compute, which they
        report themselves, also while they are paused."""
        return await self._client.get("/server_info", timeout_s=timeout_s)

    async def _get(self, path: str) -> object:
        return await self._client.get(path, timeout_s=CONTROL_S)

    async def _post(
        self, path: str, body: Mapping[str, object], timeout_s: float | None = CONTROL_S
    ) -> object:
        return await self._control.post(path, body, timeout_s=timeout_s)

    async def _succeed(self, path: str, body: Mapping[str, object]) -> object:
        reply = await self._post(path, body, None)
        if field_of(self.where, reply, "success") is not True:
            raise RunFailedError(f"{self.where}{path}: {reply}")
        return reply

"""SGLang 0.5.20 and later, as a server: how it is started, asked, updated and checked.

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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from slurmrl import package
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.plan.estimates.servers import computing
from slurmrl.plan.server_kinds import EXPERTS_FLAG
from slurmrl.rollouts.generation.base import Completion, WeightVersion
from slurmrl.rollouts.generation.dialect import Dialect, Draw
from slurmrl.rollouts.generation.fitness import (
    ServedModel,
    check_sglang,
    field_of,
    retracts,
)
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.server import Serving
from slurmrl.rollouts.generation.servers import ServerKind
from slurmrl.rollouts.generation.sglang_checksums import digest_of, dtype_of, read_checksums
from slurmrl.rollouts.generation.sglang_requests import (
    DrawnPiece,
    PiecewiseDraw,
    RoutedLayers,
    read_reply,
    request_body,
)
from slurmrl.rollouts.generation.weight_checks import Held, ServerCheck, WeightChecks

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
CONTROL_S = 60.0
"""Time limit of pausing, resuming, aborting: the server answers between two steps."""
IDLE_S = 30.0
"""How long a server may take to end its last batch, whose requests are answered."""
FIRST_S = 600.0
"""Time limit of the first token, before which a server may compile."""


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


LAUNCHER = package.program("rollouts/generation/launch_sglang.py")
FLAGS = (
    "--enable-priority-scheduling",
    "--schedule-low-priority-values-first",
    "--disable-priority-preemption",
    "--skip-server-warmup",
    *("--log-level-http", "warning"),  # no line for each completion
)
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--max-total-tokens", "65536"),
)
"""Flags of a server without a GPU."""
LEAST_SHARE, MOST_SHARE = 0.01, 0.98
ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_PICKLE_IPC": "0",  # it would unpickle what arrives on its internal sockets
    "SGLANG_ZMQ_ALLOWED_PEERS": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables of a server, over those of the job."""


def command(
    python: str,
    model: Path,
    socket: Path,
    *,
    vocabulary: int,
    tokenizer: Path | None = None,
    tensor_ranks: int = 1,
    options: Sequence[str] = (),
) -> tuple[str, ...]:
    """Start a server on a Unix socket, whose folder must have mode 0700.

    ``model`` has a ``config.json`` without ``eos_token_id``, so that only the stop tokens of a
    request end it; its weights are undefined until the first version. Stop strings and a minimum
    of new tokens need a ``tokenizer``; its end of a sequence then always ends a completion.
    ``tensor_ranks``: GPUs that share the model. ``options``: further flags, which win over these.
    """
    text = ("--skip-tokenizer-init",) if tokenizer is None else ("--tokenizer-path", str(tokenizer))
    return (
        *(python, "-P", str(LAUNCHER), str(socket), "--model-path", str(model), *text),
        *("--load-format", "dummy", "--sampling-mask-max-tokens", str(vocabulary)),
        *FLAGS,
        *("--tp-size", str(tensor_ranks)),
        *options,
    )


def memory_flags(share: int, free: int, total: int) -> tuple[str, ...]:
    """Arguments with which a server uses ``share`` bytes of a GPU, what it computes with included.
    SGLang takes a fraction of what is ``free`` when it starts for weights and caches; it needs the
    rest of its share besides."""
    fraction = (share - computing(total)) / max(free, 1)
    return ("--mem-fraction-static", f"{min(max(fraction, LEAST_SHARE), MOST_SHARE):.4f}")


class SglangServer(ServerKind):
    """SGLang servers."""

    name = "sglang"

    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        on_cpu = self.device.type == "cpu"
        flags = CPU_FLAGS if on_cpu else ("--enable-memory-saver",) if serving.sleeps else ()
        records = (EXPERTS_FLAG,) if serving.experts else ()
        watched = self._watched(serving) if serving.stale_cache else ()
        return command(
            serving.python,
            model,
            socket,
            vocabulary=self.model.vocabulary,
            tokenizer=serving.tokenizer,
            tensor_ranks=self.tensor_ranks,
            options=(*flags, *records, *watched, "--dtype", self.dtype, *serving.arguments),
        )

    @staticmethod
    def _watched(serving: Serving) -> Sequence[str]:
        """With requests that it keeps in place, SGLang takes an update for a batch that hangs, and
        ends after 300 s."""
        return ("--watchdog-timeout", f"{300 + 2 * serving.patience.start_s:g}")

    def memory_flags(self, share: int, free: int, total: int) -> Sequence[str]:
        return memory_flags(share, free, total)

    def environment(self) -> Mapping[str, str]:
        return ENVIRONMENT

    def dialect(self, client: HttpClient, control: HttpClient | None = None) -> Dialect:
        return SglangDialect(
            client,
            control,
            model=self.model,
            routed=RoutedLayers.of(self.config),
            full_logprobs=True,
            checks=self.checks,
            health_s=self.serving.patience.silence_s,
            stale_cache=self.stale_cache,
        )

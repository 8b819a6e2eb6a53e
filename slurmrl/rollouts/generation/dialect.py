"""The contract of the kinds of servers: HTTP, requests for completions, and updates of weights."""

from __future__ import annotations

import asyncio
import errno
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slurmrl.backoff import Backoff
from slurmrl.config.schema.rollout import Address
from slurmrl.errors import MissingDependencyError, RefusedError, RunFailedError, UsageError
from slurmrl.rollouts.generation.base import Completion, GenerationOptions, WeightVersion
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.weight_checks import Digest, Held, ServerCheck, WeightChecks

try:
    import aiohttp
except ImportError as error:
    raise MissingDependencyError(
        f"servers of rollout.backend need the package aiohttp ({error}): pip install aiohttp"
    ) from error

CONNECT_S = 10.0
"""Time limit of one attempt to connect."""
BUSY = (429, 503)
"""Status codes with which the server has not started to work on the request."""
FAULTS_OF_THE_REQUEST = (400, 401, 403, 404, 405, 413, 415, 422)
"""Status codes of faults of the request: repeating it would give the same answer."""
NEEDS_KEY = (401, 403)
SHOWN_CHARACTERS = 500
"""Maximum number of characters of a response in a message."""


class HttpClient:
    """Requests to one server, whose answers are JSON values or strings.

    They raise RefusedError if the server rejects the request itself, and RunFailedError if it
    cannot be reached, fails, or does not answer in time. Requests that certainly had no effect (no
    connection, status 429 or 503) are repeated for ``patience_s``. Other requests are not repeated,
    because they may have had an effect. Proxies of the environment are not used, and redirects are
    not followed.
    """

    def __init__(self, address: Address, *, api_key: str = "", patience_s: float = 5.0) -> None:
        self.address = address
        self._patience_s = patience_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, *, timeout_s: float) -> object:
        return await self._repeat("GET", path, None, timeout_s)

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None,
    ) -> object:
        return await self._repeat("POST", path, body, timeout_s)

    async def close(self) -> None:
        """Close all connections; current and later requests fail with RunFailedError."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _repeat(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float | None
    ) -> object:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        backoff = Backoff(0.02, 1.0)
        while True:
            try:
                return await self._once(method, path, body, timeout_s)
            except _NotBegunError as error:
                pause_s = backoff.next_s()
                if loop.time() + pause_s > give_up:
                    raise RunFailedError(str(error)) from error
                await asyncio.sleep(pause_s)

    async def _once(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float | None
    ) -> object:
        where = f"{self.address.text} {method} {path.partition('?')[0]}"
        if self._closed:
            raise RunFailedError(f"{where}: this client is closed")
        request = self._connected().request(
            method,
            self.address.url(path),
            json=body,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
            allow_redirects=False,
        )
        try:
            async with request as response:
                status, kind, content = (
                    response.status,
                    response.content_type,
                    await response.read(),
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotBegunError(f"{where}: {error}") from error
        except TimeoutError as error:
            raise RunFailedError(f"{where}: no answer within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOTCONN:
                raise _NotBegunError(f"{where}: the server accepts no more connections") from error
            raise RunFailedError(
                f"{where}: the connection ended before the answer was complete: {error!r}"
            ) from error
        return _value(where, status, kind, content)

    def _connected(self) -> aiohttp.ClientSession:
        """Return the session. It belongs to a loop, so ``__init__`` does not make it."""
        if self._session is None:
            connector = (
                aiohttp.TCPConnector(limit=0, force_close=True)
                if self.address.socket is None
                else aiohttp.UnixConnector(self.address.socket, limit=0, force_close=True)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session


class _NotBegunError(ConnectionError):
    """The server has certainly not started to work on a request."""


def _value(where: str, status: int, kind: str, content: bytes) -> object:
    """Return the value of an answer, by its status and content type."""
    if not 200 <= status < 300:
        text = content.decode(errors="replace").strip()
        message = f"{where}: HTTP status {status}: {_shown(text)}"
        if status in NEEDS_KEY:
            message += "; does rollout.server_keys name the file with the server's key?"
        if status in BUSY:
            raise _NotBegunError(message)
        if status in FAULTS_OF_THE_REQUEST:
            raise RefusedError(message, status)
        raise RunFailedError(message)
    try:
        return json.loads(content) if kind == "application/json" else content.decode()
    except ValueError as error:
        shown = _shown(content.decode(errors="replace"))
        raise RunFailedError(f"{where}: the answer is not valid {kind}: {shown}") from error


def _shown(text: str) -> str:
    """Return the beginning of an answer, without a traceback or an HTML page."""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


CONTROL_S: Final = 60.0
"""Time limit of pausing, resuming, aborting: the server answers between two steps."""
FIRST_S: Final = 600.0
"""Time limit of the first token, before which a server may compile."""


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """A request for one completion."""

    name: str
    """Unique among the requests of the server."""
    prompt: tuple[int, ...]
    seed: int
    """0 to 2**63 - 1; its random stream."""
    options: GenerationOptions
    priority: int
    """Lower begins first."""


class Dialect(ABC):
    """The routes, bodies and replies of one kind of server, used through one client.

    Methods raise RunFailedError if the server cannot be reached, fails, or does not answer in time,
    and UsageError if it rejects the request itself.
    """

    where: str
    """The server's address, for messages."""

    @abstractmethod
    async def connect(self) -> int:
        """Check that the server is of this kind and has the version and flags that are needed.

        The other methods need them. Return the maximum number of tokens of a prompt and its
        completion.
        """

    @abstractmethod
    async def sample(self, sampling: SamplingRequest) -> Completion:
        """Return the completion when it has ended, without a time limit: servers may be paused."""

    @abstractmethod
    async def abort(self, name: str) -> None:
        """Make the server end the sampling of this name and return its tokens as ``aborted``.

        No-op if the server does not know the name (yet).
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling tokens before returning; requests keep waiting. No time limit."""

    @abstractmethod
    async def resume(self) -> None:
        """Undo ``pause``."""

    @abstractmethod
    async def version(self) -> str:
        """The name of the weight version that the server reports."""

    async def check_version(self, name: str) -> None:
        """Return if the server has the version with this name; raise otherwise."""
        held = await self.version()
        if held != name:
            raise RunFailedError(f"{self.where}: holds version {held} instead of {name}")

    @abstractmethod
    async def load(self, version: WeightVersion) -> None:
        """Replace the weights of the paused server by the weights of ``version``.

        Forget the cache of other weights, unless requests in flight are to keep it. Check that the
        server reports the version. There is no time limit: the duration depends on the weights and
        on their location.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Free the device memory of the idle server. Its weights and caches are lost."""

    @abstractmethod
    async def wake(self) -> None:
        """Undo `sleep`; the weights are undefined until `load`."""

    @abstractmethod
    async def health(self) -> None:
        """Return if the part of the server that computes answers."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections. Running requests fail with RunFailedError."""


class HttpDialect(Dialect):
    """The common part of dialects of servers behind HTTP."""

    GENERATE: str
    """The route of completions."""

    def __init__(
        self,
        client: HttpClient,
        control: HttpClient | None = None,
        *,
        model: ServedModel,
        checks: WeightChecks | None = None,
        health_s: float = 30.0,
        stale_cache: bool = False,
    ) -> None:
        """``control``: a client with the key for administration, if that is another one.

        ``model``: `connect` rejects servers of other models. ``checks``: the checks of all servers
        of this run. ``health_s``: time limit of `health`; at least the longest step of the model.
        ``stale_cache``: requests in flight keep the caches of older weights.
        """
        self._client, self._control = client, control or client
        self._model = model
        self._checks = checks or WeightChecks()
        self._check: ServerCheck | None = None
        self._health_s, self._stale_cache = health_s, stale_cache
        self._loaded: str | None = None
        """The last version that was loaded since the connection was made."""
        self.where = client.address.text

    def _connected(self, digest: Digest | str, dtype: object, *, first_only: bool = False) -> None:
        """Start the checks of a server that computes such checksums, in this type."""
        how = self._checks.digest(self.where, digest, self._model.dtype, dtype)
        self._check = ServerCheck(self._checks, self.where, how, self._held, first_only=first_only)
        self._loaded = None

    @abstractmethod
    def _first(self) -> dict[str, Any]:
        """The body of a request for one token."""

    async def _knows(self, token: int) -> bool:
        """Whether the vocabulary has this token id.

        Servers report no size. Unknown tokens in a prompt end vLLM, and SGLang computes with them;
        both check the tokens of ``logit_bias``.
        """
        body = self._first()
        body["sampling_params"]["logit_bias"] = {str(token): 0.0}
        try:
            await self._client.post(self.GENERATE, body, timeout_s=FIRST_S)
        except UsageError as error:
            if "logit_bias" not in str(error):
                raise
            return False
        return True

    @property
    def _cache(self) -> str | None:
        """Return the name under which prompts share the server's cache; None shares all."""
        return self._loaded if self._stale_cache else None

    @property
    def _keeps_cache(self) -> bool:
        """Whether an update keeps the cache.

        Another run may have filled the cache before the first update.
        """
        return self._stale_cache and self._loaded is not None

    async def load(self, version: WeightVersion) -> None:
        folder = version.folder
        if folder is None or not folder.is_dir():
            raise UsageError(
                f"weight version {version.name}: {folder} is not a folder with a checkpoint"
            )
        await self._ready_to_load()
        assert self._check is not None, "a server loads weights once it was connected to"
        await self._check.before_load(version)
        await self._load(version.name, folder)
        await self.check_version(version.name)
        self._loaded = version.name
        await self._check.after_load(version)

    async def _ready_to_load(self) -> None:
        """Wait until the paused server can load weights."""

    @abstractmethod
    async def _load(self, name: str, folder: Path) -> None:
        """Load the weights of ``folder``, and let the server report this version."""

    @abstractmethod
    async def _held(self) -> Sequence[Held]:
        """Return the checksums of the server's weights."""

    async def close(self) -> None:
        if self._check is not None:
            self._check.close()
        await self._client.close()
        await self._control.close()

    async def _get(self, path: str) -> object:
        return await self._client.get(path, timeout_s=CONTROL_S)

    async def _post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float | None = CONTROL_S,
    ) -> object:
        return await self._control.post(path, body, timeout_s=timeout_s)

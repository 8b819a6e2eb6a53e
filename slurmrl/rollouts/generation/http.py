"""A client of one HTTP server, over TCP or a Unix socket, for runs with servers.

Each request uses a new connection. A server may close a reused connection at any time, and the
client would not know whether the server had received the request.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Mapping

from slurmrl.backoff import Backoff
from slurmrl.config.schema.rollout import Address
from slurmrl.errors import MissingDependencyError, RejectedError, RunFailedError

try:
    import aiohttp
except ImportError as error:
    raise MissingDependencyError(
        f"servers of rollout.backend need the package aiohttp ({error}): pip install aiohttp"
    ) from error

CONNECT_S = 10.0
"""Time limit of one attempt to connect in seconds."""
BUSY = (429, 503)
"""Status codes of a server that has not started to process the request."""
FAULTS_OF_THE_REQUEST = (400, 401, 403, 404, 405, 413, 415, 422)
"""Status codes of wrong requests. A repetition would give the same response."""
NEEDS_KEY = (401, 403)
SHOWN_CHARACTERS = 500
"""Maximum number of characters of a response in a message."""


class HttpClient:
    """Sends requests to one server and returns the responses, which are JSON values or strings.

    Requests raise RejectedError if the server rejects the request, and RunFailedError if the server
    cannot be reached, fails, or does not answer in time. Requests that certainly had no effect (no
    connection, status 429 or 503) are repeated for ``patience_s`` seconds. Other requests are not
    repeated, because they may have had an effect. The client uses no proxies and follows no
    redirects.
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
        """Close all connections. Current and later requests fail with RunFailedError."""
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
        """Return the session, made at the first call because it belongs to an asyncio loop."""
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
    """The server has certainly not started to process a request."""


def _value(where: str, status: int, kind: str, content: bytes) -> object:
    """Return the value of a response, or raise the error for its status."""
    if not 200 <= status < 300:
        text = content.decode(errors="replace").strip()
        message = f"{where}: HTTP status {status}: {_shown(text)}"
        if status in NEEDS_KEY:
            message += "; does rollout.server_keys name the file with the server's key?"
        if status in BUSY:
            raise _NotBegunError(message)
        if status in FAULTS_OF_THE_REQUEST:
            raise RejectedError(message, status)
        raise RunFailedError(message)
    try:
        return json.loads(content) if kind == "application/json" else content.decode()
    except ValueError as error:
        shown = _shown(content.decode(errors="replace"))
        raise RunFailedError(f"{where}: the answer is not valid {kind}: {shown}") from error


def _shown(text: str) -> str:
    """Return the beginning of a response for a message, which must not contain a whole page."""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"

"""Requests to HTTP servers that reject, hang, break connections and restart."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slurmrl.config.schema.rollout import Address
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.generation.http import HttpClient

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read the header and the body of a request."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    return head + await reader.readexactly(sum(lengths))


def respond(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    writer.write(
        f"HTTP/1.1 {status} Reason\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )


@asynccontextmanager
async def serving(path: Path, handler: Handler) -> AsyncIterator[None]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(await read_request(reader), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, path, backlog=4096)
    try:
        yield
    finally:
        server.close()
        path.unlink()


@asynccontextmanager
async def client_of(path: Path, **options: object) -> AsyncIterator[HttpClient]:
    client = HttpClient(Address(f"unix:{path}"), **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:80",
        "http://host",
        "http://:80",
        "http://host:port",
        "http://host:80/v1",
        "http://user:secret@host:80",
        "http://host:80?x",
        "unix:relative",
        "unix://host/path",
        "ftp://host:21",
    ],
)
def test_server_address_is_checked_at_once(text: str) -> None:
    with pytest.raises(UsageError, match="allowed: http://HOST:PORT"):
        Address(text)


def test_addresses_may_be_tcp_or_unix_sockets() -> None:
    assert Address("http://[::1]:80/").url("/health") == "http://[::1]:80/health"
    assert Address("http://host:80").socket is None
    assert Address("unix:/run/s").socket == "/run/s"


@pytest.mark.parametrize("status", [429, 503])
def test_request_that_the_server_did_not_begin_is_repeated(tmp_path: Path, status: int) -> None:
    """Covers a server that has not started yet, and a busy server."""
    answers = [status, status, 200]

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        respond(writer, answers.pop(0), "text")

    async def main() -> object:
        path = tmp_path / "s"
        async with client_of(path, patience_s=60.0) as client:
            waiting = asyncio.ensure_future(client.post("/x", {}, timeout_s=60))
            await asyncio.sleep(0.1)
            async with serving(path, handler):
                return await waiting

    assert asyncio.run(main()) == "text"
    assert answers == []


def test_interrupted_response_is_not_requested_again(tmp_path: Path) -> None:
    requests = 0

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"tokens": [1')

    async def main() -> None:
        path = tmp_path / "s"
        async with serving(path, handler), client_of(path) as client:
            with pytest.raises(RunFailedError, match=r"POST /x: the connection ended before"):
                await client.post("/x?secret=1", {}, timeout_s=60)

    asyncio.run(main())
    assert requests == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, UsageError),
        (404, UsageError),
        (401, UsageError),
        (500, RunFailedError),
        (302, RunFailedError),
    ],
)
def test_http_errors_blame_the_request_or_the_server(
    tmp_path: Path, status: int, error: type[Exception]
) -> None:
    requests = 0

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        respond(writer, status, {"error": "prompt too long"})

    async def main() -> None:
        path = tmp_path / "s"
        async with serving(path, handler), client_of(path) as client:
            with pytest.raises(error, match=f"POST /x: HTTP status {status}: .*prompt too long"):
                await client.post("/x", {}, timeout_s=60)

    asyncio.run(main())
    assert requests == 1


def test_hanging_server_ends_with_the_time_limit(tmp_path: Path) -> None:
    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async def main() -> None:
        path = tmp_path / "s"
        async with serving(path, handler), client_of(path) as client:
            with pytest.raises(RunFailedError, match=r"GET /health: no answer within 0.05 s"):
                await client.get("/health", timeout_s=0.05)
            waiting = asyncio.ensure_future(client.post("/x", {}, timeout_s=None))
            await asyncio.sleep(0.05)
            await client.close()
            with pytest.raises(RunFailedError, match="connection ended"):
                await asyncio.wait_for(waiting, 60)
            with pytest.raises(RunFailedError, match="closed"):
                await client.get("/health", timeout_s=1)

    asyncio.run(main())


def test_missing_server_is_reported_with_its_address_after_the_wait(tmp_path: Path) -> None:
    async def main() -> None:
        async with client_of(tmp_path / "none", patience_s=0.1) as client:
            with pytest.raises(RunFailedError, match=f"unix:{tmp_path}/none GET /health: Cannot"):
                await client.get("/health", timeout_s=60)

    asyncio.run(main())


def test_key_is_sent_and_environment_proxies_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = []
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await read_request(reader))
        respond(writer, 200, "here")
        writer.close()

    async def main() -> object:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(Address(f"http://127.0.0.1:{port}"), api_key="k3y", patience_s=0.0)
        try:
            return await client.get("/health", timeout_s=60)
        finally:
            await client.close()
            server.close()

    assert asyncio.run(main()) == "here"
    assert b"Authorization: Bearer k3y" in heads[0]


def test_missing_client_library_is_named_with_its_install_command() -> None:
    """An environment without aiohttp gets one message when an engine with servers is loaded."""
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from slurmrl.engines import ENGINES\n"
        "from slurmrl.errors import MissingDependencyError\n"
        "ENGINES.load('fsdp')\n"
        "try:\n"
        "    ENGINES.load('sglang')\n"
        "except MissingDependencyError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "servers of rollout.backend need the package aiohttp" in done.stdout
    assert "pip install aiohttp" in done.stdout

"""A headless Chromium for tests, controlled by its DevTools protocol without a driver."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",  # they would be part of the pictures in docs
    "--no-first-run",
    "--remote-debugging-port=0",
    "--window-size=1300,1000",
)
DEADLINE_S = 60.0
TALLEST = 3000


class Page:
    """A browser tab. ``complaints`` are uncaught errors and the messages in the browser's console.
    ``requests`` are the URLs that the page requested.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._numbers = itertools.count()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=DEADLINE_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(message["params"]))
            if message.get("method") == "Runtime.consoleAPICalled":
                self.complaints.append(str(message["params"]["args"]))
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])

    async def visit(self, file: Path) -> None:
        """Open a file and wait until it is complete."""
        address = file.absolute().as_uri()
        await self.call("Page.navigate", url=address)
        complete = "document.readyState === 'complete'"
        await self.until(f"location.href === {address!r} && {complete}")

    async def resize(self, width: int, height: int = 1000) -> None:
        """Give the window this size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def prefer(self, scheme: str) -> None:
        """Set the user's preferred color scheme, ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or the result of a promise."""
        done = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (value := await self.evaluate(expression)):
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise TimeoutError(f"not true within {DEADLINE_S:g} s: {expression}") from error
        return value

    async def screenshot(self, path: Path, selector: str | None = None) -> None:
        """Write a picture of the window or of the top ``TALLEST`` pixels of an element."""
        clip: dict[str, Any] = {"format": path.suffix.removeprefix(".")}
        if selector is not None:
            box = f"document.querySelector({selector!r}).getBoundingClientRect()"
            sides = f"((box) => [box.x + scrollX, box.y + scrollY, box.width, box.height])({box})"
            x, y, width, height = await self.evaluate(sides)
            area = {"x": x, "y": y, "width": width, "height": min(height, TALLEST), "scale": 1}
            clip |= {"clip": area, "captureBeyondViewport": True}
        shot = await self.call("Page.captureScreenshot", **clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def opened(file: Path, *, scheme: str = "light", before: str = "") -> AsyncIterator[Page]:
    """Open a file in a new browser whose user prefers this color scheme.

    The browser runs the script ``before`` ahead of the scripts of the page.
    """
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", browser)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json(content_type=None)
                address = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Runtime", "Log", "Page", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.prefer(scheme)
                    await page.call("Page.addScriptToEvaluateOnNewDocument", source=before)
                    await page.visit(file)
                    yield page
        finally:
            browser.kill()
            browser.wait()


async def _port(file: Path, browser: subprocess.Popen[bytes]) -> int:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            assert browser.poll() is None, "the browser did not start"
            text = file.read_text() if file.exists() else ""
            if "\n" in text:
                return int(text.partition("\n")[0])
            await asyncio.sleep(0.05)

"""A server on this machine that answers as the Hugging Face hub does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]


@dataclass
class Repository:
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """Token that a reader must send; "" if everybody may read."""


@dataclass
class Hub:
    """A hub with repositories by ``datasets/org/name`` or ``models/org/name``. ``requests`` are the
    first lines of all requests; after ``breaks_after`` files, downloads fail.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    breaks_after: int | None = None
    pause_s: float = 0.0
    """Seconds before each downloaded file."""

    def commit(self, name: str, files: Mapping[str, bytes | str], branch: str = "main") -> str:
        """Put files into a repository; return the commit."""
        content = {
            path: text.encode() if isinstance(text, str) else text for path, text in files.items()
        }
        commit = sha1(repr((name, sorted(content.items()))).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository())
        repository.commits[commit] = content
        repository.branches[branch] = commit
        return commit

    @property
    def downloads(self) -> list[str]:
        return [line for line in self.requests if line.startswith("GET") and "/resolve/" in line]


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub without repositories on a free port."""
    hub = Hub()
    handler = type("HubHandler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "api":
            kind, owner, name, what, revision = parts[1:6]
            self._answer(f"{kind}/{owner}/{name}", what, revision, "")
            return
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        owner, name, what, revision = parts[:4]
        self._answer(f"{kind}/{owner}/{name}", what, revision, "/".join(parts[4:]))

    def _answer(self, name: str, what: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._reject(404, "RepoNotFound")
        shown = self.headers.get("Authorization", "")
        if repository.token and shown != f"Bearer {repository.token}":
            return self._reject(403 if what == "resolve" else 401, "GatedRepo")
        commit = repository.branches.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            return self._reject(404, "RevisionNotFound")
        if what == "revision":
            siblings = [{"rfilename": each} for each in files]
            return self._send(
                json.dumps({"id": name.partition("/")[2], "sha": commit, "siblings": siblings})
            )
        if what == "tree":
            return self._send(
                json.dumps(
                    [
                        {
                            "type": "file",
                            "path": each,
                            "size": len(data),
                            "oid": sha1(data).hexdigest(),
                        }
                        for each, data in files.items()
                    ]
                )
            )
        if path not in files:
            return self._reject(404, "EntryNotFound")
        time.sleep(self.hub.pause_s)
        most = self.hub.breaks_after
        if self.command == "GET" and most is not None and len(self.hub.downloads) > most:
            self.close_connection = True
            return None
        return self._send(
            files[path], {"X-Repo-Commit": commit, "ETag": f'"{sha1(files[path]).hexdigest()}"'}
        )

    def _send(self, content: bytes | str, headers: Mapping[str, str] | None = None) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.send_response(200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _reject(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass

"""The notice of a trial's end, received by a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import dump, load_resolved
from slurmrl.config.schema import Notify
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end, resume
from slurmrl.run.paths import RunPaths
from slurmrl.workers.supervisor import __main__ as supervisor
from slurmrl.workers.supervisor import end_of_trial

NAME = "TRIAL_WEBHOOK"


class Hook(HTTPServer):
    """A server that stores posted data, and answers with ``codes``, then with 200."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.codes: list[int] = []
        self.tries = 0
        self.received: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/secret"


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tries += 1
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 200:
            self.server.received.append(json.loads(body))
        self.send_response(code)
        self.end_headers()

    def log_message(self, *values: object) -> None:
        """Print nothing."""


@pytest.fixture
def hook(run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    """Start the webhook that the trial's variables file names."""
    hook = Hook()
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(f"{NAME}={hook.url}\n")
    config = load_resolved(run.config)
    cluster = config.cluster.model_copy(update={"variables_file": str(file)})
    update = {"cluster": cluster, "notify": Notify(webhook=NAME)}
    run.config.write_text(dump(config.model_copy(update=update)))
    monkeypatch.setattr(end_of_trial, "PAUSES_S", (0.0, 0.0))
    thread = threading.Thread(target=hook.serve_forever, args=(0.01,))
    thread.start()
    yield hook
    hook.shutdown()
    thread.join()
    hook.server_close()


def test_notification_is_sent_once_for_each_end_of_a_trial(
    run: RunPaths, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of links may see the end. A running or cancelled trial sends no notification."""
    arguments = ["--run", str(run.run), "--submission", "1", "--group", "trainer"]
    options = supervisor.parse(arguments)
    monkeypatch.setattr(supervisor, "parse", lambda: options)
    monkeypatch.setattr(supervisor.calls, "set_private_umask", lambda: None)
    monkeypatch.setattr(supervisor.log, "configure", lambda name: None)
    end_of_trial.announce(run)
    assert hook.received == []
    end(History(run.history), Kind.FAILED, {"reason": "ValueError: x\nmore"})
    assert [supervisor.main(), supervisor.main()] == [0, 0]
    text = "add/1 FAILED at step 0: ValueError: x"
    assert hook.received == [
        {
            "text": text,
            "trial": "add/1",
            "state": "FAILED",
            "reason": "ValueError: x\nmore",
            "step": 0,
            "total_steps": None,
            "run": str(run.run),
        }
    ]
    resume(History(run.history), {})
    end(History(run.history), Kind.CANCELLED, {"reason": "by me"})
    end_of_trial.announce(run)
    resume(History(run.history), {})
    end(History(run.history), Kind.FINISHED, {"step": 6})
    end_of_trial.announce(run)
    assert [one["text"] for one in hook.received] == [text, "add/1 COMPLETED at step 6"]


@pytest.mark.parametrize(
    ("codes", "tries", "said"),
    [([503, 429], 3, ""), ([503] * 3, 3, "HTTP status 503"), ([404], 1, "HTTP status 404")],
)
def test_failed_webhook_is_retried_without_side_effects(
    run: RunPaths,
    hook: Hook,
    caplog: pytest.LogCaptureFixture,
    codes: list[int],
    tries: int,
    said: str,
) -> None:
    end(History(run.history), Kind.FINISHED, {"step": 6})
    hook.codes = codes
    end_of_trial.announce(run)
    assert hook.tries == tries
    assert (said in caplog.text) if said else (caplog.text == "")
    assert "secret" not in caplog.text


def test_notification_that_cannot_be_posted_is_a_warning(
    run: RunPaths, hook: Hook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a missing server, a missing URL, and a server that does not answer in time."""
    history, released = History(run.history), threading.Event()
    end(history, Kind.FINISHED, {"step": 6})
    end_of_trial.post("http://127.0.0.1:9/secret", {})
    assert "cannot be reached" in caplog.text
    (run.config.parent / "tokens").unlink(missing_ok=True)
    monkeypatch.setattr(end_of_trial, "_environment", lambda cluster: {NAME: "no URL"})
    end_of_trial.announce(run)
    assert f"variable {NAME} holds no http or https URL" in caplog.text
    monkeypatch.setattr(end_of_trial, "_environment", lambda cluster: {NAME: hook.url})
    monkeypatch.setattr(end_of_trial, "LONGEST_S", 0.05)
    monkeypatch.setattr(end_of_trial, "post", lambda url, body: released.wait(60))
    end_of_trial.announce(run)
    released.set()
    assert "did not answer within 0 s" in caplog.text
    assert "secret" not in caplog.text

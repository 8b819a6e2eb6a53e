"""Checks of running servers, with a server in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Config
from slurmrl.config.schema.data import Dataset
from slurmrl.config.schema.roles import Model
from slurmrl.config.schema.rollout import Rollout
from slurmrl.desk.doctor import Check, State
from slurmrl.desk.doctor.server_checks import check_running, running_settings
from slurmrl.plan.engine_rules import SERVER_KINDS
from tests.support.trials import ARCHITECTURE
from tests.unit.engines.test_engines_rollout_sglang import INFO as SGLANG_INFO
from tests.unit.engines.test_engines_rollout_vllm import SERVER as VLLM_ANSWERS

SGLANG: dict[str, Any] = {
    "/server_info": SGLANG_INFO,
    "/model_info": SGLANG_INFO,
    "/openapi.json": {"paths": {route: {} for route in SERVER_KINDS["sglang"].routes}},
}
VLLM: dict[str, Any] = {
    **{path.removeprefix("GET "): answer for path, answer in VLLM_ANSWERS.items()},
    "/openapi.json": {"paths": {route: {} for route in SERVER_KINDS["vllm"].routes}},
}


class Handler(BaseHTTPRequestHandler):
    answers: Mapping[str, Any] = {}
    key = ""

    def do_GET(self) -> None:
        found = self.answers.get(self.path.partition("?")[0])
        allowed = not self.key or self.headers.get("Authorization") == f"Bearer {self.key}"
        self.send_response((200 if found is not None else 404) if allowed else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    Handler.answers, Handler.key = {}, ""


def checks_of(
    address: str, backend: str = "sglang", *, elsewhere: bool = False, **rollout: Any
) -> list[Check]:
    made = Rollout(backend=f"{backend}:d1", servers=[address], **rollout)
    config = Config.model_construct(
        rollout=made,
        actor=Model(architecture=ARCHITECTURE, dtype="float32"),
        dataset=Dataset(type="prompt", path="/none", max_prompt_tokens=16),
        evaluation=None,
    )
    settings = running_settings(config)
    assert settings is not None
    return check_running(json.loads(json.dumps(settings)), elsewhere=elsewhere)


def changed(answers: Mapping[str, Any], path: str, **values: Any) -> dict[str, Any]:
    return {**answers, path: {**answers[path], **values}}


def test_usable_server_is_described(address: str, tmp_path: Path) -> None:
    """The check reads the key on its own host, because the settings do not contain it."""
    keys = tmp_path / "keys"
    keys.write_text("the-key")
    keys.chmod(0o600)
    Handler.answers, Handler.key = SGLANG, "the-key"
    [found] = checks_of(address, max_new_tokens=8, server_keys=str(keys))
    assert (found.state, found.measured) == (State.OK, f"{address}: sglang 0.5.20, context 64")
    [found] = checks_of(address, max_new_tokens=8)
    assert found.state is State.FAILED
    assert "HTTP status 401" in found.measured
    keys.chmod(0o644)
    [found] = checks_of(address, max_new_tokens=8, server_keys=str(keys))
    assert (found.name, found.state) == ("server keys", State.FAILED)


def test_vllm_on_a_port_is_a_warning(address: str) -> None:
    """The key does not cover the routes that change weights."""
    Handler.answers = VLLM
    [found] = checks_of(address, "vllm", max_new_tokens=8)
    assert (found.state, found.measured) == (
        State.WARNING,
        f"{address}: vllm 0.32.0, context 256",
    )
    assert "need no key" in found.advice


@pytest.mark.parametrize(
    ("backend", "answers", "state", "text"),
    [
        ("sglang", changed(SGLANG, "/server_info", version="0.5.3"), State.FAILED, "is too old"),
        ("sglang", changed(SGLANG, "/server_info", version="0.6.0"), State.WARNING, "0.5.20 to"),
        ("sglang", changed(SGLANG, "/server_info", max_req_input_len=16), State.FAILED, "may need"),
        (
            "sglang",
            changed(SGLANG, "/openapi.json", paths={"/generate": {}}),
            State.FAILED,
            "lacks /server_info",
        ),
        ("sglang", {**SGLANG, "/openapi.json": None}, State.OK, "context 64"),
        ("vllm", SGLANG, State.FAILED, "/version: HTTP status 404"),
    ],
)
def test_missing_features_of_a_server_are_named(
    address: str, backend: str, answers: dict[str, Any], state: State, text: str
) -> None:
    Handler.answers = answers
    [found] = checks_of(address, backend, max_new_tokens=8)
    assert found.state is state
    assert text in f"{found.measured} {found.advice}"


def test_unreachable_server_is_named_with_its_address(tmp_path: Path) -> None:
    """On a login node, which need not reach the server, this is a warning."""
    [found] = checks_of(f"unix:{tmp_path / 'none'}", max_new_tokens=8)
    assert found.state is State.FAILED
    assert str(tmp_path / "none") in found.measured
    assert "first rank must reach it" in found.advice
    [found] = checks_of(f"unix:{tmp_path / 'none'}", elsewhere=True, max_new_tokens=8)
    assert found.state is State.WARNING
    assert "--job queries the server" in found.advice

"""A whole trial with a real SGLang server that runs already; the server and a worker are killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.rollouts.generation import sglang
from tests.support.served_trials import run_through_kills
from tests.support.servers import UsersServer, save_config, start_command
from tests.support.trials import ARCHITECTURE

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.soak,  # each of its parts is tested with real servers, too
    pytest.mark.skipif(not PYTHON, reason="no SGLang: run scripts/test-engines"),
]
STEPS = 30
MODEL = {**ARCHITECTURE, "hidden_size": 64}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[UsersServer]:
    folder = tmp_path / "server"
    folder.mkdir(mode=0o700)
    save_config(folder / "model", MODEL)
    socket = folder / "server.sock"
    command = start_command(sglang.SglangServer, PYTHON, MODEL, folder)
    made = UsersServer(socket, command, sglang.ENVIRONMENT, folder / "sglang.log")
    made.start()
    yield made
    made.kill()


def test_a_trial_whose_server_and_worker_are_killed_ends_with_the_weights_that_it_trained(
    tmp_path: Path, server: UsersServer
) -> None:
    """A server that was started again reads the newest weights, and the requests of the killed one
    are issued again. The trial leaves no weights.
    """
    run_through_kills(tmp_path, server, "sglang", MODEL, steps=STEPS)

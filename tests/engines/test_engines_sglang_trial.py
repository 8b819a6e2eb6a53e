"""A whole trial of episodes on a real Slurm that generates with a real SGLang server: the server is
killed, and the job is requeued."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.beds import bed
from tests.support.nodes import queued, slurm
from tests.support.servers import check_served, servers
from tests.support.trials import Site, processes, sft_config, wait_until

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="no SGLang: run scripts/test-engines"),
]
STEPS = 30


ENVIRONMENT = """
from slurmrl.rollouts.base import Environment, PolicyTurn, Reply


class Questions(Environment):
    def __init__(self, item, tools):
        super().__init__(item, tools)
        self.left = 3

    async def step(self, turn):
        self.left -= 1
        return Reply(text="1+2=", reward=float(len(set(turn.text))), done=self.left == 0)
"""


@pytest.fixture(autouse=True)
def _slurm() -> Iterator[None]:
    with bed("--nodes", "1", "--gpus", "1", needs=("not installed",)):
        yield


def updates(log: Path) -> int:
    """How often the server has got weights."""
    return log.read_text().count("Update weights end") if log.exists() else 0


def test_a_trial_that_loses_its_server_and_its_job_ends_with_the_weights_that_it_trained(
    tmp_path: Path,
) -> None:
    """The requests of a killed server are issued again while the trainers wait, and the server of
    the next job has the weights of the last commit. The turns of an episode have the tokens that
    were drawn, those that were read masked. Nothing is left when the trial ends."""
    site = Site(tmp_path)
    (tmp_path / "environment_of_mine.py").write_text(ENVIRONMENT)
    config = sft_config(
        experiment="grpo",
        total_steps=STEPS,
        algorithm={"name": "grpo", "batch_size": 8, "n_minibatches": 1},
        cluster={
            "workers_per_host": 2,
            "gpus_per_worker": 0,
            "interface": "lo",
            "slurm": {"partition": "main", "time": "30"},
        },
        rollout={
            "backend": "sglang:d1",
            "gpus": "0",
            "python": PYTHON,
            "n": 4,
            "max_new_tokens": 8,
            "episode": {
                "name": "multi_turn",
                "environment": {"name": "environment_of_mine:Questions"},
                "max_turns": 3,
            },
        },
    )
    config["actor"]["optimizer"] = {"lr": 1e-2}
    config["dataset"]["type"] = "prompt"
    path = site.write("grpo.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "slurm")
    run = site.paths("grpo/1").run
    log = run / "logs" / "trainer" / "sglang.0.log"
    wait_until("weights of three steps", lambda: updates(log) >= 3, timeout_s=400.0)
    first = wait_until("the server", lambda: servers(run))[0]
    os.kill(first.pid, signal.SIGKILL)
    sent = updates(log) + 3
    wait_until("weights of three more steps", lambda: updates(log) >= sent, timeout_s=400.0)
    assert "is started again" in (run / "logs" / "trainer" / "0.0.log").read_text()
    assert site.status("grpo/1")["incarnation"] == 1, "the trainers were not disturbed"
    second = wait_until("the second server", lambda: servers(run))[0]
    slurm("scontrol", "requeue", queued("-t", "R")[0].split()[0])
    status = site.wait_for_end("grpo/1", timeout_s=500.0)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 2)
    lines = site.metrics("grpo/1")
    check_served(lines, STEPS)
    assert max(line["turns"] for line in lines) > 1.0
    wait_until("the end of all processes", lambda: not any(processes(run).values()))
    wait_until("an empty queue", lambda: not queued())
    assert servers(run) == []
    assert not first.folder.exists()
    assert not second.folder.exists()

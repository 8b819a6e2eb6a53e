"""A whole trial that generates with a real SGLang server, which is killed meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slurmrl.engines.rollout.host_folder import ROOT
from tests.support.trials import REPOSITORY, Site, processes, sft_config, wait_until

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="no SGLang: run scripts/test-engines"),
]
STEPS = 30


REWARD = """
def different(prompts, completions, rows):
    return [float(len(set(completion))) for completion in completions]
"""


def servers(run: Path) -> list[int]:
    """The main processes of the servers of a run, whose output goes to its logs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            output = (entry / "fd" / "1").readlink()
        except OSError:
            continue
        if b"launch_sglang" in words and b"warden" not in words and run in output.parents:
            found.append(int(entry.name))
    return found


def updates(log: Path) -> int:
    """How often the server has got weights."""
    return log.read_text().count("Update weights end") if log.exists() else 0


def test_a_trial_whose_server_is_killed_ends_with_the_weights_that_it_trained(
    tmp_path: Path,
) -> None:
    """The requests of a killed server are issued again. Its log-probabilities stay those of the
    training engine, so it held the weights of every step. Nothing is left when the trial ends."""
    site = Site(tmp_path, {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))})
    (tmp_path / "reward_of_mine.py").write_text(REWARD)
    config = sft_config(
        experiment="grpo",
        total_steps=STEPS,
        algorithm={"name": "grpo", "batch_size": 8, "n_minibatches": 1},
        rollout={
            "backend": "sglang:d1",
            "gpus": "0",
            "python": PYTHON,
            "n": 4,
            "max_new_tokens": 8,
            "server_silence_s": 20.0,
        },
        reward={"name": "reward_of_mine:different"},
    )
    config["actor"]["optimizer"] = {"lr": 1e-2}
    config["dataset"]["type"] = "prompt"
    before = set(ROOT.glob("slurmrl-*/*"))
    path = site.write("grpo.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    run = site.paths("grpo/1").run
    log = run / "logs" / "trainer" / "sglang.0.log"
    wait_until("a step with new weights", lambda: updates(log) >= 3, timeout_s=400.0)
    os.kill(wait_until("the server", lambda: servers(run))[0], signal.SIGKILL)
    status = site.wait_for_end("grpo/1", timeout_s=500.0)
    assert status["state"] == "COMPLETED"
    assert status["incarnation"] == 1, "the trainers were not disturbed"
    lines = site.metrics("grpo/1")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert min(line["actor_grad_norm"] for line in lines) > 0.0, "every step changes the weights"
    assert max(abs(line["mismatch/kl"]) for line in lines) < 1e-5
    assert max(line["mismatch/ratio_max"] for line in lines) < 1.001
    assert "is started again" in (run / "logs" / "trainer" / "0.0.log").read_text()
    wait_until("the end of all processes", lambda: not any(processes(run).values()))
    assert servers(run) == []
    assert set(ROOT.glob("slurmrl-*/*")) <= before | set(ROOT.glob("slurmrl-*/lock"))

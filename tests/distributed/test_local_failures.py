"""Local trials that fail permanently, are interrupted by their user, or are submitted again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import paced
from tests.support.rotation import CODE_ERRORS, in_turn
from tests.support.trials import Site, ppo_config, processes, sft_config, wait_until

BROKEN_REWARD = '''
from slurmrl.rewards.base import RewardFunction


class Broken(RewardFunction):
    """Judges once, then raises."""

    def __init__(self, *, good_calls: int) -> None:
        self.left = good_calls

    def __call__(self, prompts, completions, rows):
        if self.left == 0:
            raise LookupError("no such verdict")
        self.left -= 1
        return [0.0 for _ in completions]
'''

NAN_REWARD = """
calls = 0


async def judge(prompts, completions, rows):
    global calls
    calls += 1
    return [float("nan") if calls > 2 and n == 0 else 1 for n, _ in enumerate(completions)]
"""


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[[str], Site]]:
    """A site in its own folder; processes that remain there at the end are killed."""
    sites: list[Site] = []

    def make(name: str) -> Site:
        sites.append(Site(tmp_path / name))
        sites[-1].folder.mkdir()
        return sites[-1]

    yield make
    for site in sites:
        for run in site.root.glob("*/*/*"):
            for chain in processes(run)["chain"]:
                os.kill(chain, signal.SIGKILL)  # its children end with it


@pytest.mark.long
@in_turn(1, CODE_ERRORS)
def test_reward_that_raises_fails_the_trial(
    tmp_path: Path, make_site: Callable[[str], Site]
) -> None:
    """The second incarnation fails in the same way; the third reports it and ends the trial."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "broken_reward.py").write_text(BROKEN_REWARD)
    site = make_site("site")
    config = ppo_config(
        reward={"name": "broken_reward:Broken", "options": {"good_calls": 1}},
        cluster={
            "gpus_per_worker": 0,
            "slurm": {"setup": [f"export PYTHONPATH={modules}"]},
        },
    )
    done = site.slurmrl(
        "submit",
        str(site.write("config.yaml", config)),
        "--scheduler",
        "local",
        "--wait",
        code=1,
    )
    assert "no such verdict" in done.stdout
    status = site.status("ppo/1")
    assert status["state"] == "FAILED"
    assert status["incarnation"] == 2
    assert "failed twice in the same way" in status["reason"]
    assert "reward_inf: LookupError: no such verdict" in status["reason"]
    assert "broken_reward.py" in status["traceback"]
    shown = site.slurmrl("status", "ppo/1").stdout
    assert "broken_reward.py" in shown
    assert "no such verdict" in shown
    wait_until(
        "all processes to leave", lambda: not any(processes(site.paths("ppo/1").run).values())
    )


POOLED_REWARD = """
import os, subprocess

def judge(prompts, completions, rows, *, indices):
    if indices[0] == 0:
        subprocess.Popen(["sleep", "600"])
        os._exit(1)
    return [1.0]
"""


@pytest.mark.long
@in_turn(2, CODE_ERRORS)
def test_failing_pooled_reward_loses_completions_but_not_the_trial(
    make_site: Callable[[str], Site],
) -> None:
    """The first completion of each prompt kills its scoring process. All other completions get
    scores, also from the example's reward, and no process remains.
    """
    site = make_site("site")
    example = Path(__file__).parents[2] / "examples" / "custom" / "rewards.py"
    (site.folder / "rewards.py").write_text(example.read_text())
    (site.folder / "pooled.py").write_text(POOLED_REWARD)
    parts = {
        "pooled": {"name": "pooled:judge", "pool": {"processes": 1, "unjudged_score": -3.0}},
        "novelty": {"name": "rewards:novelty", "options": {"steps": 4}, "weight": 0.0},
    }
    config = ppo_config(
        algorithm={"name": "ppo", "batch_size": 4},
        reward={"parts": parts},
        rollout={"max_new_tokens": 4, "n": 2},
        evaluation=None,
        total_steps=2,
    )
    path = str(site.write("config.yaml", config))
    site.slurmrl("submit", path, "--scheduler", "local", "--wait")
    lines = site.metrics("ppo/1")
    assert [line["reward/pooled"] for line in lines] == [-1.0, -1.0]
    assert [line["reward"] for line in lines] == [-1.0, -1.0]
    assert [line["reward_unjudged"] for line in lines] == [0.5, 0.5]
    assert all(line["reward/novelty"] <= 1 - line["step"] / 4 for line in lines)
    run = site.paths("ppo/1").run
    wait_until("all processes to leave", lambda: not any(processes(run).values()))


@pytest.mark.long
@in_turn(3, CODE_ERRORS)
def test_non_finite_reward_fails_the_trial_at_its_first_start(
    make_site: Callable[[str], Site],
) -> None:
    """A reward function next to the configuration returns a non-finite value. Earlier commits do
    not justify another start.
    """
    site = make_site("site")
    (site.folder / "nan_reward.py").write_text(NAN_REWARD)
    reward = {"name": "nan_reward:judge"}
    config = ppo_config(reward=reward, evaluation=None, checkpoint={"every_steps": 1})
    path = str(site.write("config.yaml", config))
    site.slurmrl("submit", path, "--scheduler", "local", "--wait", code=1)
    status = site.status("ppo/1")
    assert (status["state"], status["incarnation"]) == ("FAILED", 1)
    assert "reward_inf: reward nan_reward:judge returned nan for" in status["reason"]
    assert "train.jsonl:" in status["reason"]
    assert status["traceback"] is None


@pytest.mark.soak
def test_repeated_gpu_failure_on_the_only_machine_fails_the_trial(
    make_site: Callable[[str], Site],
) -> None:
    """The first GPU fault counts against the host. No host can replace it, so later faults count
    against the trial.
    """
    site = make_site("site")
    (site.folder / "faulty").write_text("here")
    config = paced.config(site.folder, "Faulty")
    path = str(site.write("config.yaml", {**config, "total_steps": 2}))
    site.slurmrl("submit", path, "--scheduler", "local", "--wait", code=1)
    status = site.status("ppo/1")
    assert (status["state"], status["incarnation"]) == ("FAILED", 4)
    assert "3 starts in a row without a new commit" in status["reason"]
    assert {one["cause"] for one in status["incarnations"]} == {"gpu_fault"}
    assert all(
        "uncorrectable ECC error encountered" in one["how"] for one in status["incarnations"]
    )


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch may find a GPU")
def test_workers_with_gpus_never_compute_on_the_cpu(make_site: Callable[[str], Site]) -> None:
    """A torch for CPUs is refused before anything is queued, and by the workers themselves."""
    site = make_site("site")
    config = str(site.write("config.yaml", sft_config(cluster={"gpus_per_worker": 1})))
    start = ("submit", config, "--scheduler", "local", "--wait")
    refused = site.slurmrl(*start, code=2)
    assert "cluster.gpus_per_worker: each worker gets a GPU, but torch" in refused.stderr
    assert not site.root.exists()
    site.slurmrl(*start, "--no-check", code=1)
    status = site.status("sft/1")
    assert (status["state"], status["incarnation"], status["step"]) == ("FAILED", 1, 0)
    assert "is built for CPUs only, and the workers need GPUs" in status["reason"]


def test_missing_worker_command_fails_the_trial(
    make_site: Callable[[str], Site],
) -> None:
    """The trial also ends if every start fails before an incarnation begins."""
    site = make_site("site")
    cluster = {"gpus_per_worker": 0, "slurm": {"container": "no-such-container exec"}}
    config = site.write("config.yaml", sft_config(cluster=cluster))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--wait", code=1)
    status = site.status("sft/1")
    assert status["state"] == "FAILED"
    assert "3 starts in a row without a new commit" in status["reason"]
    assert "no-such-container" in status["reason"]


def test_interrupt_while_starting_is_not_lost(make_site: Callable[[str], Site]) -> None:
    """A warning signal before the workers have started stops the run after their start."""
    site = make_site("site")
    config = site.write("config.yaml", sft_config(total_steps=100_000))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--detach")
    run = site.paths("sft/1").run
    wait_until("an agent", lambda: processes(run)["agent"])
    os.kill(processes(run)["chain"][0], signal.SIGUSR2)
    status = site.wait_for_end("sft/1")
    assert status["state"] == "INTERRUPTED"
    assert status["incarnation"] == 1
    assert status["checkpoint"]["step"] == status["step"] < 1000

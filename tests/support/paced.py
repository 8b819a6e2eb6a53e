"""A trial whose steps are slow until the test removes the pauses.

The trial still runs when a test disturbs it, on machines of any speed, and ends soon afterwards.
The pauses do not change its result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.chaos_trials.monkey import succession
from tests.support.chaos_trials.watched import Outcome, Watched
from tests.support.nodes import queued
from tests.support.trials import Site, ppo_config, wait_until

STEPS = 3
"""Steps that an incarnation trains before it is disturbed, which include at least one commit."""
REWARD = '''
import os
import time

from slurmrl.rewards.base import RewardFunction


class Paced(RewardFunction):
    def __init__(self, *, folder, pause_s):
        self.hurry = os.path.join(folder, "hurry")
        self.pause_s = pause_s

    def __call__(self, prompts, completions, rows):
        end = time.monotonic() + self.pause_s
        while not os.path.exists(self.hurry) and time.monotonic() < end:
            time.sleep(0.01)
        return [float(len(completion)) for completion in completions]


class Hungry(Paced):
    """Takes more memory than there is, once for each file ``feast``."""

    def __call__(self, prompts, completions, rows):
        feast = os.path.join(os.path.dirname(self.hurry), "feast")
        try:
            os.remove(feast)
        except FileNotFoundError:
            return super().__call__(prompts, completions, rows)
        return [bytearray(64 << 20) for _ in range(1000)]


class Stuck(Paced):
    """Never comes back, once for each file ``trap``; the interpreter keeps running."""

    def __call__(self, prompts, completions, rows):
        trap = os.path.join(os.path.dirname(self.hurry), "trap")
        try:
            os.remove(trap)
        except FileNotFoundError:
            return super().__call__(prompts, completions, rows)
        time.sleep(100_000)


class Faulty(Paced):
    """The GPU of the node that the file ``faulty`` names fails in every call; without Slurm the
    node is ``here``."""

    def __call__(self, prompts, completions, rows):
        import torch

        faulty = os.path.join(os.path.dirname(self.hurry), "faulty")
        node = os.environ.get("SLURMD_NODENAME", "here")
        if os.path.exists(faulty) and open(faulty).read() == node:
            error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
            error.error_code = 214
            raise error
        return super().__call__(prompts, completions, rows)


class Failing(RewardFunction):
    """Raises; the same every time, or not."""

    def __init__(self, *, same):
        self.same = same

    def __call__(self, prompts, completions, rows):
        raise LookupError("no such verdict" if self.same else f"no verdict at {time.time_ns()}")
'''


def config(folder: Path, reward: str = "Paced", **options: Any) -> dict[str, Any]:
    """Return settings of PPO on 2 ranks with a reward of this module."""
    (folder / "paced_reward.py").write_text(REWARD)
    given = {"folder": str(folder), "pause_s": 1.0} if reward != "Failing" else {}
    return ppo_config(
        total_steps=25,
        evaluation=None,
        reward={"name": f"paced_reward:{reward}", "options": {**given, **options}},
        cluster=cluster(folder),
    )


def cluster(folder: Path, **slurm: Any) -> dict[str, Any]:
    """Return settings of ``cluster``: two hosts with one rank each, if the scheduler has hosts."""
    setup = [f"export PYTHONPATH={folder}"]
    return {
        "workers_per_host": 1,
        "gpus_per_worker": 0,
        "interface": "lo",
        "silence_s": 20,
        "slurm": {"partition": "main", "time": "30", "setup": setup, **slurm},
    }


def hurry(trial: Watched) -> None:
    (trial.site.folder / "hurry").touch()


def start(folder: Path, scheduler: str = "slurm", **changes: Any) -> Watched:
    return Watched(Site(folder), {**config(folder), **changes}, scheduler)


def after(trial: Watched, disturb: Callable[[], object]) -> str:
    """Disturb an incarnation, and return how the next one that trains was started."""
    assert trial.until("some steps", lambda: len(trial.witness.batches(trial.incarnation)) > STEPS)
    before = trial.incarnation
    disturb()
    return recovered(trial, before)


def recovered(trial: Watched, since: int) -> str:
    def trains() -> bool:
        return trial.incarnation > since and trial.witness.has_trained(trial.incarnation)

    assert trial.until(f"recovery of incarnation {since}", trains)
    return succession(trial.witness.job(since), trial.witness.job(trial.incarnation))


def same(trial: Watched, calm: Outcome) -> None:
    """Run the rest of the trial without pauses, and compare the result of the trial."""
    hurry(trial)
    assert calm.differences(trial.outcome()) == []
    wait_until("the chain to be gone from the queue", lambda: not queued())

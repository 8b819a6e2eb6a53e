"""An undisturbed trial and a disturbed one, which must have the same result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl.run import events
from slurmrl.run.history.slots import Kind
from tests.support.chaos_trials.kills import Plan, draw
from tests.support.chaos_trials.monkey import Kill, Monkey, Usual
from tests.support.chaos_trials.watched import Outcome, Watched
from tests.support.trials import Site, generate_config, ppo_config, sft_config

STEPS_PER_KILL = {"sft": 12, "ppo": 4, "generate": 12}
LAST_STEPS = 12
"""Steps after the last possible kill, so that the trial must recover."""


@dataclass(frozen=True)
class Setting:
    """The trial that a chaos run disturbs."""

    algorithm: str
    ranks: int
    kills: int
    scheduler: str = "local"
    hosts: int = 1
    gpu: bool = False
    """Whether each rank computes on a GPU in bfloat16, instead of on a CPU in float32."""
    mixed: bool = False
    """Whether the models of PPO and generation have different layouts on 2 ranks. The reference is
    then on one rank and follows the actor."""

    @property
    def steps(self) -> int:
        return self.kills * STEPS_PER_KILL[self.algorithm] + LAST_STEPS

    def config(self) -> dict[str, Any]:
        """Return a configuration with enough links and starts for any order of the kills."""
        makers = {"sft": sft_config, "ppo": ppo_config, "generate": generate_config}
        make = makers[self.algorithm]
        config = make(
            total_steps=self.steps,
            max_restarts_without_commit=self.kills + 3,
            step_timeout_s=60,
            cluster={
                "gpus_per_worker": int(self.gpu),
                "workers_per_host": self.ranks // self.hosts,
                "interface": "lo",
                "silence_s": 20,
                "slurm": {"links": self.kills + 8, "time": "60"},
            },
        )
        config["actor"]["backend"] = f"fsdp:d{self.ranks}"
        if self.mixed:
            config["actor"]["backend"] = "fsdp:t2"
            config["critic"] = {**config.get("critic", {}), "backend": "fsdp:d2"}
            ref = {"backend": "fsdp:d1", "gpus": "1", "ema": 0.1}
            config["ref"] = config.get("ref", {}) | ref
            config["rollout"] |= {"backend": "native:d2"}
        if self.gpu:
            config["deterministic"] = True  # not the default on GPUs
            for role in {"actor", "critic", "ref"} & config.keys():
                config[role]["dtype"] = "bfloat16"
        return config

    def submit(self, folder: Path) -> Watched:
        folder.mkdir(parents=True)
        return Watched(Site(folder), self.config(), self.scheduler)


@dataclass(frozen=True)
class Undisturbed:
    outcome: Outcome
    usual: Usual


def undisturbed(setting: Setting, folder: Path) -> Undisturbed:
    """Run the trial undisturbed."""
    trial = setting.submit(folder)
    outcome = trial.outcome()
    return Undisturbed(outcome, _usual(trial, outcome))


def disturbed(
    setting: Setting, folder: Path, plans: Sequence[Plan], usual: Usual
) -> tuple[Outcome, list[Kill]]:
    """Run the trial and execute the plans."""
    trial = setting.submit(folder)
    kills = Monkey(trial, usual).run(plans)
    return trial.outcome(), kills


def chaos(
    setting: Setting, folder: Path, seed: int, causes: Sequence[str], calm: Undisturbed
) -> tuple[list[str], list[Kill]]:
    """Return the differences from the undisturbed run, and the kills. A plan that was not executed
    also counts as a difference.
    """
    plans = draw(seed, setting.kills, causes, setting.steps - LAST_STEPS)
    outcome, kills = disturbed(setting, folder, plans, calm.usual)
    missed = len(plans) - len(kills)
    early = [f"{missed} of {len(plans)} kills came too late"] if missed else []
    return [*early, *calm.outcome.differences(outcome)], kills


def _usual(trial: Watched, outcome: Outcome) -> Usual:
    """Return the lengths of phases from the run's records."""
    begun = next(record.time for record in trial.witness.records if record.kind is Kind.BEGIN)
    seen = events.read_all(trial.witness.paths)
    ready = next(event["time"] for event in seen if event["kind"] == "ready")
    lines = trial.site.metrics(trial.name)
    steps = [line["time/total"] for line in lines if "time/total" in line]
    commits = [event["seconds"] for event in seen if event["kind"] == "commit"]
    return Usual(ready - begun, statistics.median(steps), statistics.median(commits))

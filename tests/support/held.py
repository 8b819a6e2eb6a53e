"""Trials that train only as far as the test allows. No trial can end before the test has checked
it, on machines of any speed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl.run.events import read_all
from tests.support.trials import Site, wait_until

CODE = """
import time
from dataclasses import replace
from pathlib import Path

from slurmrl.algorithms.base import Interface
from slurmrl.algorithms.supervised_schema import SFT
from slurmrl.rewards.base import RewardFunction
from slurmrl.rewards.base import ExactMatch
from slurmrl.run import metrics


class HeldSFT(SFT):
    name: str
    allowed: str

    def calls(self, config):
        held = f"{__name__}:HeldInterface"
        return tuple(replace(call, interface=held) for call in super().calls(config))


class HeldInterface(Interface):
    def train_step(self, engine, sample, context):
        from slurmrl.algorithms.supervised import SFTInterface

        allowed = Path(context.settings.algorithm.allowed)
        while context.step > int(allowed.read_text()):
            time.sleep(0.02)
        return SFTInterface().train_step(engine, sample, context)


class Held(RewardFunction):
    def __init__(self, *, allowed, metrics):
        self.allowed, self.metrics = Path(allowed), Path(metrics)

    def __call__(self, prompts, completions, rows):
        while self._trained() >= int(self.allowed.read_text()):
            time.sleep(0.02)
        return self.judge(prompts, completions, rows)

    def judge(self, prompts, completions, rows):
        return [float(len(set(completion))) for completion in completions]

    def _trained(self):
        latest = metrics.read_latest(self.metrics, 1) if self.metrics.exists() else []
        return latest[0]["step"] if latest else 0


class HeldMatch(Held):
    needs_answers = True

    def judge(self, prompts, completions, rows):
        return ExactMatch()(prompts, completions, rows)
"""
NO_LIMIT = 1_000_000


@dataclass(frozen=True)
class Hold:
    """An algorithm and rewards that keep a trial from training beyond the allowed step."""

    site: Site

    @property
    def _code(self) -> Path:
        return self.site.folder / "held.py"

    @property
    def _allowed(self) -> Path:
        return self.site.folder / "allowed"

    def allow(self, step: int) -> None:
        new = self._allowed.with_suffix(".new")
        new.write_text(str(step))
        new.replace(self._allowed)

    def release_after_warning(self, trial: str) -> None:
        """Hold the trial until its agent has told the master that the job will end."""
        paths = self.site.paths(trial)
        wait_until("the warning", lambda: any(e["kind"] == "warned" for e in read_all(paths)))
        self.allow(NO_LIMIT)

    def sft(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a configuration of SFT whose trial is held."""
        self._write_code()
        held = {"name": f"{self._code}:HeldSFT", "allowed": str(self._allowed)}
        return {**config, "algorithm": {**config["algorithm"], **held}}

    def judged(self, config: dict[str, Any], reward: str = "Held") -> dict[str, Any]:
        """Return a configuration whose trial is held by a reward."""
        trial = f"{config['experiment']}/{config.get('trial', '1')}"
        return {**config, "reward": self.reward(trial, reward)}

    def reward(self, trial: str, name: str = "Held") -> dict[str, Any]:
        """Return the settings of a reward that holds ``trial``."""
        self._write_code()
        return {"name": f"{self._code}:{name}", "options": self._options(trial)}

    def settings(self, trial: str) -> dict[str, str]:
        """Return the overrides with which a reward holds ``trial``."""
        self._write_code()
        return {
            "code": json.dumps(sorted(map(str, self.site.folder.glob("*.py")))),
            "reward.name": "held:Held",
            "reward.options": json.dumps(self._options(trial)),
        }

    def _write_code(self) -> None:
        self._code.write_text(CODE)

    def _options(self, trial: str) -> dict[str, str]:
        return {"allowed": str(self._allowed), "metrics": str(self.site.paths(trial).metrics)}

"""Short forms of the GRPO examples that train only as far as the test allows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.distributed.test_examples import EXAMPLES, ShortForms, maker, references, settings_of
from tests.support.held import Hold

PLACES: dict[str, dict[str, Any]] = {
    "shared": {"actor.backend": "fsdp:d2", "rollout.gpus": "'0'"},
    "apart": {"actor.backend": "fsdp:d1", "rollout.gpus": "'1'"},
    "array": {"actor.backend": "fsdp:d2", "rollout.tasks": "{max: 1, max_staleness: 0}"},
    "inside": {
        "actor.backend": "fsdp:d1",
        "rollout.gpus": "'1'",
        "rollout.tasks": "{max_staleness: 0}",
        "cluster.workers_per_host": 2,
    },
}
"""Places of generation: the first of two workers that train, the trainer's other host, a rollout
task in an array, a rollout task in the trainers' job."""


def engine_of(config: str) -> str:
    backend: str = settings_of(config).get("rollout", {}).get("backend", "native")
    return backend.partition(":")[0]


@dataclass(frozen=True)
class HeldForms(ShortForms):
    """Short forms of examples that wait at a step."""

    def allow(self, step: int) -> None:
        Hold(self.site).allow(step)

    def submit(self, config: str, trial: str, place: str, steps: int, *arguments: str) -> str:
        """Submit an example with these arguments. It starts from the model of the previous example.
        Return its full name.
        """
        values = settings_of(config)
        name = f"{values['experiment']}/{trial}"
        for source in references(values):
            self.run(maker(source.partition("/")[0]), source.partition("/")[2])
        settings = {
            **dict(self.overrides(config, values)),
            "trial": trial,
            "total_steps": steps,
            "actor.optimizer.lr": 1e-2,  # Each step changes the samples.
            "checkpoint.every_steps": 2,
            "evaluation.every_steps": 5,
            "cluster.workers_per_host": 1,
            "cluster.gpus_per_worker": 0,
            "cluster.interface": "lo",
            "cluster.slurm": "{partition: main, time: '30'}",
            **Hold(self.site).settings(name),
            "rollout.backend": f"{engine_of(config)}:d1",
            "rollout.gpus": "null",
            **PLACES[place],
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        self.site.slurmrl("submit", str(EXAMPLES / config), *arguments, *overrides)
        return name

    def overrides(self, config: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in super().overrides(config, values):
            if key.endswith("hidden_size"):
                yield key, 64  # vLLM needs heads of 32.
            else:
                yield key, value
        if (variable := f"{engine_of(config).upper()}_PYTHON") in os.environ:
            yield "rollout.python", os.environ[variable]

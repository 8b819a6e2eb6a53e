"""A run directory without processes, small plans, and checked settings."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from slurmrl.desk.proposal import prepare, propose
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.plan.dataflow import Method
from slurmrl.plan.model import CallPlan, GroupPlan, ModelPlan, Plan
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.run.paths import RunPaths
from slurmrl.workers.agent.agent_host import SIGNALS
from tests.fake_runs import write_config

MODEL = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
Change: TypeAlias = Callable[..., Settings]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Make a run directory like ``submit``."""
    found = RunPaths.of(tmp_path, "someone", "exp", "1")
    for directory in found.directories():
        make_private_directory(directory)
    return found


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Make a run directory with a configuration and a plan, which tests copy. (Its preparation
    takes long, because it copies the package file by file, with an fsync each.)
    """
    folder = tmp_path_factory.mktemp("prepared")
    proposal = propose(write_config(folder), [], root=str(folder / "runs"), scheduler="local")
    prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)
    return proposal.paths


@pytest.fixture
def run(tmp_path: Path, prepared: RunPaths) -> RunPaths:
    """Return a run directory with a configuration and a plan of SFT on one host."""
    write_config(tmp_path)
    place = tmp_path / "runs" / prepared.run.relative_to(prepared.run.parents[2])
    shutil.copytree(prepared.run, place, symlinks=True)
    return RunPaths(place)


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Restore the handlers of warning signals afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def make_settings(tmp_path: Path) -> Change:
    """Return settings of a PPO trial with changed sections of the configuration."""

    def make(**changes: Any) -> Settings:
        row = json.dumps({"id": "1", "prompt": "1+1=", "answer": "2"}) + "\n"
        (tmp_path / "data.jsonl").write_text(row)
        config = {
            "experiment": "exp",
            "total_steps": 6,
            "algorithm": {"name": "ppo", "batch_size": 4},
            "actor": {"architecture": MODEL, "tokenizer": str(tmp_path)},
            "dataset": {"type": "prompt", "path": "data.jsonl"},
            "reward": {"name": "exact_match"},
            "evaluation": {
                "dataset": {"type": "prompt", "path": "data.jsonl"},
                "every_steps": 2,
                "samples": 5,
            },
            "checkpoint": {"every_steps": 3},
            **changes,
        }
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(config))
        return load_settings(path)

    return make


def make_call(name: str, *, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> CallPlan:
    values: dict[str, Any] = {
        "name": name,
        "role": "actor",
        "method": Method.INFERENCE,
        "interface": "nowhere:Nothing",
        "inputs": ("input_ids",),
        "outputs": (),
        "ranks": ranks,
    }
    return CallPlan(**{**values, **changes})


def make_plan(
    *,
    hosts: int = 1,
    per_host: int = 2,
    tasks: int = 0,
    calls: tuple[CallPlan, ...] = (),
    evaluation_calls: tuple[CallPlan, ...] = (),
) -> Plan:
    world = hosts * per_host
    group = GroupPlan(
        hosts=hosts,
        workers_per_host=per_host,
        gpus_per_worker=0,
        threads_per_worker=1,
        cpus_per_worker=1,
        links=4,
    )
    actor = ModelPlan(
        role="actor",
        backend=f"fsdp:d{world}",
        engine="fsdp",
        sizes={"dp": world},
        ranks=tuple(range(world)),
        trained=True,
        head="lm",
    )
    rollout = group.model_copy(update={"name": "rollout", "hosts": tasks, "elastic": True})
    ref = actor.model_copy(update={"role": "ref", "trained": False})
    return Plan(
        experiment="exp",
        trial="1",
        groups=(group, rollout) if tasks else (group,),
        models={"actor": actor, "ref": ref},
        calls=calls,
        evaluation_calls=evaluation_calls,
    )


@pytest.fixture
def plans() -> Callable[..., Plan]:
    """``plans(hosts=…, per_host=…, calls=…, evaluation_calls=…)``; ``tasks`` of a group "rollout"
    beside the trainers.
    """
    return make_plan


@pytest.fixture
def calls() -> Callable[..., CallPlan]:
    """``calls(name, ranks=…, …)``"""
    return make_call

"""The GRPO examples on a real Slurm, with real servers.

Each process of a trial is killed, its job is cancelled or requeued, and a host is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.beds import bed
from tests.support.disturbed_examples import STEPS_EACH, Disturbed
from tests.support.held import NO_LIMIT
from tests.support.held_examples import PLACES, HeldForms, engine_of
from tests.support.nodes import slurm, wait_for_empty_queue
from tests.support.rollout_trials import trained
from tests.support.rotation import SERVER_ENDS, rotating
from tests.support.servers import check_served, servers
from tests.support.trials import Site, processes, wait_until

pytestmark = pytest.mark.timeout(1800)

CONFIGS = ("grpo.yaml", "grpo_tools.yaml", "grpo_sglang.yaml", "grpo_vllm.yaml")
OF_TASKS: dict[str, tuple[str, ...]] = {
    "shared": (),
    "apart": (),
    "inside": ("task_worker", "task_agent"),
}
OF_TASKS["array"] = (*OF_TASKS["inside"], "task_batch", "task_cancelled")
OF_TRAINERS = ("master", "agent", "batch", "cancelled", "node")
BATCH = 16
"""Prompts of a step in the short forms."""
ENVIRONMENT = """
from slurmrl.rollouts.base import Environment, Reply


class Questions(Environment):
    def __init__(self, item, tools):
        super().__init__(item, tools)
        self.left = 3

    async def step(self, turn):
        self.left -= 1
        return Reply(text="1+2=", done=self.left == 0)
"""
EPISODE = {
    "name": "multi_turn",
    "environment": {"name": "questions:Questions"},
    "max_turns": 3,
}


@pytest.fixture(scope="module")
def slurm_bed() -> Iterator[Path]:
    with bed("--nodes", "4", "--gpus", "1", needs=("not installed",)) as directory:
        yield directory


@pytest.fixture
def free_bed(slurm_bed: Path) -> Iterator[Path]:
    yield slurm_bed
    slurm("scancel", "--user", str(os.getuid()))
    wait_for_empty_queue()


def kinds_of(config: str, place: str) -> tuple[str, ...]:
    """Return all kinds of disturbances that apply to a trial, the most specific first."""
    native = engine_of(config) == "native"
    worker = "rank" if native or OF_TASKS[place] else "keeper"
    return (*(() if native else ("server",)), *OF_TASKS[place], worker, *OF_TRAINERS)


def run(
    folder: Path, config: str, place: str, bed: Path, kinds: tuple[str, ...], *arguments: str
) -> Disturbed:
    """Run a trial with these disturbances, one after the other. It must complete by itself, train
    each step and prompt once with completions of the right weights, and leave no processes or jobs.
    """
    forms = HeldForms(Site(folder))
    steps = STEPS_EACH * (len(kinds) + 1)
    forms.allow(1)
    name = forms.submit(config, "disturbed", place, steps, "--scheduler", "slurm", *arguments)
    trial = Disturbed(forms, name, bed)
    trial.until("a step", lambda: trial.step() >= 1)
    for kind in kinds:
        print(f"{config} {place}, {kind}:", trial.disturb(kind), flush=True)
    forms.allow(NO_LIMIT)
    status = forms.site.wait_for_end(name)
    trial.witness.look()
    assert (status["state"], status["step"]) == ("COMPLETED", steps)
    assert sorted(trial.witness.committed()) == list(range(1, steps + 1))
    assert trained(forms.site, name) == steps * BATCH
    check_served([line for line in forms.site.metrics(name) if line["step"]], steps)
    wait_until("the end of all processes", lambda: not any(processes(trial.run).values()))
    wait_for_empty_queue()
    assert servers(trial.run) == []
    assert [each for each in trial.folders if each.exists()] == []
    return trial


def without_tasks(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the results that do not depend on the timing of rollout tasks."""
    lines = [
        {name: value for name, value in line.items() if not name.startswith("rollout/")}
        for line in outcome["metrics"]
    ]
    return {**outcome, "ledger": None, "metrics": lines}


def skip_without(engine: str) -> None:
    if engine != "native" and f"{engine.upper()}_PYTHON" not in os.environ:
        pytest.skip(f"no {engine}: run scripts/test-engines")


@pytest.mark.long
@pytest.mark.parametrize("kind", rotating("server", "requeued", first=2, shares=SERVER_ENDS))
def test_episodes_survive_the_loss_of_server_or_job(
    tmp_path: Path, free_bed: Path, kind: str
) -> None:
    """The turns of an episode contain the sampled tokens. Tokens of messages are masked."""
    skip_without("sglang")
    (tmp_path / "questions.py").write_text(ENVIRONMENT)
    episode = f"rollout.episode={json.dumps(EPISODE)}"
    trial = run(tmp_path, "grpo_sglang.yaml", "shared", free_bed, (kind,), episode)
    assert max(line.get("turns", 0.0) for line in trial.forms.site.metrics(trial.name)) > 1.0


@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", CONFIGS)
def test_example_survives_the_loss_of_each_process(
    config: str, place: str, tmp_path: Path, free_bed: Path
) -> None:
    """With the native engine, all results equal an undisturbed trial."""
    skip_without(engine_of(config))
    trial = run(tmp_path, config, place, free_bed, kinds_of(config, place))
    if engine_of(config) == "native":
        forms, steps = trial.forms, trial.step()
        calm = forms.submit(config, "calm", place, steps, "--scheduler", "local", "--wait")
        outcomes = [without_tasks(forms.site.outcome(name)) for name in (trial.name, calm)]
        assert outcomes[0] == outcomes[1]

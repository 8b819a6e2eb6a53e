"""Whole trials whose completions are made by rollout tasks, on one machine."""

from __future__ import annotations

import json
import os
import resource
import signal
from math import prod
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Lora
from slurmrl.desk.report.report_data import read_samples
from slurmrl.models.adapters import trained_shapes
from slurmrl.models.architecture import ModelConfig
from slurmrl.run import events
from slurmrl.scheduler.submission import read_jobs
from slurmrl.tensors.weights.format import read_manifest
from slurmrl.tensors.weights.inventory import COMPLETE, inventory
from tests.support.rollout_checker import Checker
from tests.support.rollout_evidence import Archive
from tests.support.rollout_trials import (
    BATCH,
    STEPS,
    config_of,
    hurry,
    last_ledger,
    of_group,
    site_in,
    train_adapters,
    trained,
)
from tests.support.rotation import TASK_KILLS, in_turn
from tests.support.servers import check_served, servers
from tests.support.stand_ins import python
from tests.support.trials import ARCHITECTURE, Site, processes, wait_until

LOCAL = ("--scheduler", "local", "--detach")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return site_in(tmp_path, {}, pause_s=0.6)


def start(site: Site, trial: str, tasks: dict[str, Any] | None, *arguments: str) -> None:
    path = site.write(f"{trial}.yaml", config_of(trial, tasks))
    site.slurmrl("submit", str(path), "--scheduler", "local", *arguments)


def worlds(site: Site, trial: str) -> int:
    """Return how often the processes of a task have started."""
    return sum(one["kind"] == "world_ready" for one in events.read_all(site.paths(trial)))


def outcome(site: Site, trial: str) -> dict[str, Any]:
    """Return the results that must not depend on the process that generated the completions."""
    found = site.outcome(trial)
    del found["ledger"]
    found["metrics"] = [
        {name: value for name, value in line.items() if not name.startswith("rollout/")}
        for line in found["metrics"]
    ]
    return found


def test_tasks_without_staleness_equal_trainers_despite_kills(
    site: Site,
) -> None:
    """A rollout worker, a rank of the trainers and the master are killed.

    New trainer processes use the same tasks. The weights equal a trial that generates and scores
    itself, with the same stop strings.
    """
    stops = ("12", "33", "5", "70")
    settings = f"rollout.stop_strings={json.dumps(stops)}"
    start(site, "tasks", {"max": 2, "max_staleness": 0}, "--detach", settings)
    trial = "grpo/tasks"
    site.wait_for_step(trial, 2)
    os.kill(of_group(site, trial, "worker", "rollout")[0], signal.SIGKILL)
    site.wait_for_step(trial, 5)
    os.kill(of_group(site, trial, "worker", "trainer")[0], signal.SIGKILL)
    site.wait_for_step(trial, 8)
    wait_until("the next processes of the task", lambda: worlds(site, trial) == 3)
    os.kill(processes(site.paths(trial).run)["master"][0], signal.SIGKILL)
    hurry(site)
    status = site.wait_for_end(trial)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 3)
    assert worlds(site, trial) == 3, "the tasks' processes outlive incarnations"
    start(site, "alone", None, "--wait", settings)
    assert outcome(site, trial) == outcome(site, "grpo/alone")
    assert all(line["rollout/judged"] == 1 for line in site.metrics(trial))
    texts = [row["completion"] for row in read_samples(site.paths(trial).samples).rows]
    assert {text.find("5") == len(text) - 1 for text in texts if "5" in text} == {True}
    told = events.read_all(site.paths(trial))
    assert any(one["kind"] == "rollout_task" and one["state"] == "lost" for one in told)
    wait_until("all processes to leave", lambda: not any(processes(site.paths(trial).run).values()))


@pytest.mark.long
@in_turn(0, TASK_KILLS)
def test_tasks_merge_adapters_to_the_trainers_generation_weights(site: Site) -> None:
    """A rollout worker is killed, then a rank of the trainers.

    The weights equal a trial whose trainers generate in another layout, to which the merged
    weights move. Versions contain only adapters. If the folder of frozen weights changes, the next
    task rejects it and the trainers wait.
    """
    source = site.folder / "source"
    for name, backend, tasks in [("moved", "native:d2", None), ("merged", None, {"max": 1})]:
        config = config_of(name, None if tasks is None else {**tasks, "max_staleness": 0})
        config["total_steps"] = 8
        train_adapters(config, source)
        config["rollout"] |= {} if backend is None else {"backend": backend}
        path = site.write(f"{name}.yaml", config)
        site.slurmrl("submit", str(path), *LOCAL)
    trial = "grpo/merged"
    file = source / "model.safetensors"
    weights = file.read_bytes()
    site.wait_for_step("grpo/moved", 1)
    site.wait_for_step(trial, 2)
    file.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    os.kill(of_group(site, trial, "worker", "rollout")[0], signal.SIGKILL)
    refusal = "does not hold the weights that the trainers read"
    told = wait_until(
        "a refusal", lambda: [e for e in events.read_all(site.paths(trial)) if refusal in str(e)]
    )
    assert told[0]["kind"] == "failure", told
    file.write_bytes(weights)
    site.wait_for_step(trial, 4)
    os.kill(of_group(site, trial, "worker", "trainer")[0], signal.SIGKILL)
    hurry(site)
    for each in (trial, "grpo/moved"):
        assert site.wait_for_end(each)["state"] == "COMPLETED"
    assert outcome(site, trial) == outcome(site, "grpo/moved")
    versions = inventory(site.paths(trial).versions, verify=True)
    assert {one.state for one in versions} == {COMPLETE}
    assert {one.incarnation for one in versions} == {1, 2}
    (frozen,) = {one.frozen for one in versions}
    assert frozen is not None
    newest = read_manifest(site.paths(trial).versions / versions[0].version)
    assert newest.base is None
    shapes = trained_shapes(ModelConfig.from_hf(ARCHITECTURE), "lm", Lora(rank=2))
    assert {one.name: one.shape for one in newest.tensors} == shapes
    assert newest.bytes == 4 * sum(map(prod, shapes.values()))


@pytest.mark.long
@in_turn(1, TASK_KILLS)
def test_tasks_in_the_trainers_job_restart_and_survive_incarnations(
    site: Site,
) -> None:
    """Both tasks are killed, then a rank of the trainers. The tasks have no job array."""
    trial = "grpo/inside"
    config = config_of("inside", {"max_staleness": 1})
    config["rollout"]["gpus"] = "2-3"
    path = site.write("inside.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    site.wait_for_step(trial, 2)
    for agent in of_group(site, trial, "agent", "rollout"):
        os.kill(agent, signal.SIGKILL)
    site.wait_for_step(trial, 6)
    wait_until("both tasks", lambda: worlds(site, trial) == 4)
    os.kill(of_group(site, trial, "worker", "trainer")[0], signal.SIGKILL)
    hurry(site)
    status = site.wait_for_end(trial)
    assert worlds(site, trial) == 4, "the tasks' processes outlive the incarnation"
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 2)
    assert trained(site, trial) == STEPS * BATCH
    jobs = read_jobs(site.paths(trial), 1)
    assert jobs is not None
    assert set(jobs) == {"trainer"}
    told = [one for one in events.read_all(site.paths(trial)) if one["kind"] == "task_started"]
    assert sorted((one["task"], one["failures"]) for one in told) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    wait_until("all processes to leave", lambda: not any(processes(site.paths(trial).run).values()))


@pytest.mark.long
@in_turn(2, TASK_KILLS)
def test_stale_items_are_trained_once_despite_kills(site: Site) -> None:
    """A task is killed, then a rank of the trainers many steps after the last commit. Then a task
    can no longer write, and its items go to the other task. Every token comes from recent enough
    weights of the surviving line of steps. Each item is trained once or dropped by the filter, for
    which tasks generate further ahead.
    """
    config = config_of("stale", {"max": 2, "max_staleness": 2})
    config["checkpoint"]["every_steps"] = 5
    config["algorithm"]["zero_variance"] = "drop"
    config["rollout"]["n"] = 2
    trial = "grpo/stale"
    run = site.paths(trial).run
    with Archive(run, site.folder / "archive"):
        site.slurmrl("submit", str(site.write("stale.yaml", config)), *LOCAL)
        site.wait_for_step(trial, 3)
        os.kill(of_group(site, trial, "agent", "rollout")[0], signal.SIGKILL)
        site.wait_for_step(trial, 7)
        os.kill(of_group(site, trial, "worker", "trainer")[0], signal.SIGKILL)
        wait_until("the second incarnation", lambda: [*(run / "versions").glob("*.2")])
        site.wait_for_step(trial, 9)
        full = of_group(site, trial, "worker", "rollout")[0]
        resource.prlimit(full, resource.RLIMIT_FSIZE, (1, 1))
        hurry(site)
        assert site.wait_for_end(trial)["state"] == "COMPLETED"
    assert Checker(run, site.folder / "archive", BATCH, 2).problems() == []
    lines = site.metrics(trial)
    assert max(line["rollout/staleness_max"] for line in lines) >= 1
    assert sum(line["filter/zero_variance"] for line in lines) > 0
    assert all(line["filter/accepted"] == BATCH for line in lines)
    assert trained(site, trial) == STEPS * BATCH, "no item was trained twice, and none is missing"
    held = [lease["oldest"] for lease in last_ledger(site, trial).get("leased", ())]
    assert all(int(version.partition(".")[0]) > STEPS - 4 for version in held), held


@pytest.mark.long
@in_turn(3, TASK_KILLS)
def test_ranks_of_a_task_sample_with_the_weights_of_each_step(site: Site) -> None:
    """Two processes share the task's decoder, and one of them is killed. The log-probabilities of
    all samples agree with the merged weights of their step.
    """
    config = config_of("split", {"max": 1, "max_staleness": 0})
    train_adapters(config, site.folder / "source")
    config["rollout"]["backend"] = "native:t2"
    config["total_steps"] = steps = 6
    site.slurmrl("submit", str(site.write("split.yaml", config)), *LOCAL)
    trial = "grpo/split"
    site.wait_for_step(trial, 2)
    workers = of_group(site, trial, "worker", "rollout")
    assert len(workers) == 2
    os.kill(max(workers), signal.SIGKILL)
    hurry(site)
    status = site.wait_for_end(trial)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 1)
    assert trained(site, trial) == steps * BATCH
    check_served(site.metrics(trial), steps)
    assert worlds(site, trial) == 2
    wait_until("all processes to leave", lambda: not any(processes(site.paths(trial).run).values()))


@pytest.mark.long
@in_turn(4, TASK_KILLS)
def test_servers_of_tasks_sample_with_the_right_weights_despite_kills(
    site: Site,
) -> None:
    """A server is killed, then a server hangs while steps continue, then a worker is killed with
    its server. The log-probabilities of all samples agree with the merged weights of their step. No
    server processes remain.
    """
    record = site.folder / "record"
    config = config_of("served", {"max": 2, "max_staleness": 0})
    train_adapters(config, site.folder / "source")
    config["rollout"] |= {"backend": "sglang:d2", "python": python(site.folder / "bin", record)}
    config["rollout"]["server_silence_s"] = 15
    config["dataset"]["max_prompt_tokens"] = 16
    site.slurmrl("submit", str(site.write("served.yaml", config)), *LOCAL)
    trial = "grpo/served"
    run = site.paths(trial).run
    site.wait_for_step(trial, 2)
    first = wait_until("a server", lambda: servers(run))
    os.kill(first[0].pid, signal.SIGKILL)
    site.wait_for_step(trial, 4)
    logs = [path.read_text() for path in (run / "logs" / "rollout").glob("?.?.log")]
    assert sum("is started again" in text for text in logs) == 1
    hung = wait_until("both servers", lambda: found if len(found := servers(run)) == 2 else None)
    os.kill(hung[1].pid, signal.SIGSTOP)
    site.wait_for_step(trial, 7)
    worker = of_group(site, trial, "worker", "rollout")[0]
    second = wait_until("both servers", lambda: found if len(found := servers(run)) == 2 else None)
    os.kill(worker, signal.SIGKILL)
    hurry(site)
    assert site.wait_for_end(trial)["state"] == "COMPLETED"
    assert trained(site, trial) == STEPS * BATCH
    check_served(site.metrics(trial), STEPS)
    wait_until("all processes to leave", lambda: not any(processes(run).values()))
    assert servers(run) == []
    every = (*first, *hung, *second)  # a killed server's warden removes its folder
    wait_until("their folders to go", lambda: not any(each.folder.exists() for each in every))

"""The examples for clusters on a real Slurm: tasks are preempted, and a node is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run import events
from tests.support.nodes import kill_node, node_of, private_bed, queued, slurm
from tests.support.rollout_trials import trained
from tests.support.rotation import SPARES, TASK_CHANGES, in_turn
from tests.support.trials import REPOSITORY, Site, processes, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

EXAMPLES = REPOSITORY / "examples"
BATCH = 16
SHORT = (f"algorithm.batch_size={BATCH}", "algorithm.n_minibatches=1", "evaluation=null")
START = ("actor.backend=fsdp:d1", "algorithm.batch_size=16", "evaluation.samples=8")
LONG = "total_steps=100000"
"""More steps than a test waits for, so that a trial runs until the test stops it."""
ONE_MACHINE = ("cluster.interface=lo", "cluster.lease_ttl_s=20")
"""The nodes of a test bed are on one machine."""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return a site with the start model of the examples, trained for two steps."""
    site = Site(tmp_path)
    start = ("--scheduler", "local", "--wait", "total_steps=2", "stop_when=null", *START)
    site.slurmrl("submit", str(EXAMPLES / "sft.yaml"), *start)
    return site


@pytest.fixture
def bed() -> Iterator[Path]:
    """Start a private test bed whose nodes a test may kill."""
    with private_bed() as directory:
        yield directory


def stop(site: Site, trial: str) -> None:
    """Stop a trial; no step may have trained a prompt twice or left one out."""
    site.slurmrl("stop", trial, "--wait")
    status = site.status(trial)
    assert status["state"] == "INTERRUPTED"
    assert trained(site, trial) == status["step"] * BATCH
    wait_until("an empty queue", lambda: not queued())


def hosts_of(run: Path) -> set[str]:
    """Return the nodes on which a trial trains."""
    found = set()
    for pid in processes(run)["worker"]:
        with suppress(OSError):  # it has ended
            found.add(node_of(pid))
    return found


@in_turn(2, TASK_CHANGES)
def test_asynchronous_example_continues_while_its_tasks_are_preempted(
    site: Site, bed: Path
) -> None:
    """A job of a higher tier takes the nodes of both tasks. They exit within the grace time, and
    two other tasks of the array replace them. The trainers keep their incarnation.
    """
    trial = "addition-grpo-async/1"
    apart = ("cluster.slurm.nodelist=n0", 'rollout.slurm.nodelist=""', "rollout.slurm.exclude=n0")
    config = str(EXAMPLES / "grpo_async.yaml")
    site.slurmrl("submit", config, "--detach", *SHORT, *ONE_MACHINE, *apart, LONG)
    paths = site.paths(trial)

    def states(state: str) -> list[dict[str, Any]]:
        return [one for one in events.read_all(paths) if one.get("state") == state]

    wait_until("two rollout tasks", lambda: len(states("joined")) >= 2)
    site.wait_for_step(trial, 2)
    higher = ("-p", "high", "-N3", "-w", "n[1-3]", "--exclusive", "-t1", "-o/dev/null")
    slurm("sbatch", *higher, "--wrap", "sleep 1")
    wait_until("both tasks to leave", lambda: len(states("left")) >= 2)
    wait_until("two tasks to replace them", lambda: len(states("joined")) >= 4)
    step = site.metrics(trial)[-1]["step"]
    site.wait_for_step(trial, step + 2)
    assert site.status(trial)["incarnation"] == 1
    metrics = [line for line in site.metrics(trial) if line["step"]]
    assert max(line["rollout/staleness_max"] for line in metrics) == 1
    stop(site, trial)


@in_turn(4, SPARES)
def test_spare_host_of_the_example_replaces_a_lost_host(site: Site, bed: Path) -> None:
    """The node of the second rank is lost: the same job continues on the spare node, from the last
    commit.
    """
    trial = "addition-grpo-two-hosts/1"
    config = str(EXAMPLES / "grpo_two_hosts.yaml")
    site.slurmrl("submit", config, "--detach", *SHORT, *ONE_MACHINE, LONG)
    paths = site.paths(trial)
    site.wait_for_step(trial, 3)
    job, hosts = slurm("squeue", "-h", "-t", "R", "-o", "%i %D").split()
    assert hosts == "3", "two hosts and the spare"
    batch, first = node_of(processes(paths.run)["supervisor"][0]), hosts_of(paths.run)
    assert len(first) == 2
    (lost,) = first - {batch}
    kill_node(bed, paths.run, lost)
    wait_until("two ranks on other nodes", lambda: len(hosts_of(paths.run) - {lost}) == 2)
    step = site.metrics(trial)[-1]["step"]
    site.wait_for_step(trial, step + 2)
    second = hosts_of(paths.run)
    assert (len(second), lost in second, batch in second) == (2, False, True)
    assert slurm("squeue", "-h", "-t", "R", "-o", "%i") == job
    stop(site, trial)

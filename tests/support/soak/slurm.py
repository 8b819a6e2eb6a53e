"""Faults of the cluster that must not end a trial: hosts on which nothing starts, links that are
alive at once.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from slurmrl.run.paths import RunPaths
from tests.support import paced
from tests.support.chaos_trials.watched import Watched
from tests.support.nodes import private_bed, queued, slurm
from tests.support.trials import Site, sft_config, wait_until

BREAKS = (
    "export PYTHONHOME=/nowhere",  # the interpreter cannot start
    "export PYTHONPATH=/nowhere PATH=/nowhere",  # nothing at all can
    "exit 1{number}",
    "set -e; test {number} = good",
)
"""Ways in which a set-up line breaks a node. Each differs, or the line itself would be at fault."""


def black_hole(folder: Path, chance: random.Random, rounds: int) -> None:
    """Trials on four nodes of which one to three are broken, with chains of two links."""
    with private_bed():
        for number in range(rounds):
            nodes = chance.sample(["n0", "n1", "n2", "n3"], chance.randint(1, 3))
            broken = {node: chance.choice(BREAKS).format(number=node[1:]) for node in nodes}
            print(f"round {number}: {broken}", flush=True)
            site = Site(folder / str(number))
            site.folder.mkdir()
            submit_to_broken(site, broken)
            ended = site.wait_for_end("sft/1")
            assert (ended["state"], ended["incarnation"]) == ("COMPLETED", 1), ended
            assert {one["host"] for one in ended["avoided"]} <= broken.keys()
            assert "FAILED" not in states(array(site.paths("sft/1"))).values()


def submit_to_broken(site: Site, broken: dict[str, str]) -> None:
    """SFT on one host, as ``sft/1``. ``broken``: how a node is broken."""
    cases = " ".join(f"{node}) {how};;" for node, how in broken.items())
    setup = [f"case $SLURMD_NODENAME in {cases} esac"]
    cluster: dict[str, Any] = {
        "workers_per_host": 2,
        "gpus_per_worker": 0,
        "slurm": {"partition": "main", "time": "30", "links": 2, "setup": setup},
    }
    path = site.write("sft.yaml", sft_config(cluster=cluster))
    site.slurmrl("submit", str(path), "--scheduler", "slurm")


def throttle(folder: Path, chance: random.Random, rounds: int) -> None:
    """Arrays without a throttle, and scripts submitted by hand, beside a running link."""
    with private_bed("--nodes", "8"):
        trial = start_throttled(folder)
        for number in range(rounds):
            disturb = chance.choice([lift_throttle, submit_by_hand])
            print(f"round {number}: {disturb.__name__}", flush=True)
            disturb(trial)
        paced.hurry(trial)
        trial.outcome()
        assert trial.site.status(trial.name)["incarnation"] == 1
        wait_until("the chain to be gone from the queue", lambda: not queued())


def start_throttled(folder: Path) -> Watched:
    """A trial that has trained a step, with two further links."""
    slow = paced.config(folder, pause_s=20.0)  # it must not end before it may hurry
    config = {**slow, "cluster": paced.cluster(folder, links=3)}
    trial = Watched(Site(folder), config, "slurm")
    assert trial.until("a step", lambda: trial.witness.has_trained(1))
    return trial


def lift_throttle(trial: Watched) -> None:
    """All links may start; those that do are requeued behind the first."""
    job = array(trial.witness.paths)
    slurm("scontrol", "update", f"JobId={job}", "ArrayTaskThrottle=0")
    wait_until(
        "the other links to be put back",
        lambda: (
            "ArrayTaskThrottle=1 " in slurm("scontrol", "show", "job", job)
            and all(states(job)[f"{job}_{index}"] == "PENDING" for index in (1, 2))
        ),
    )


def submit_by_hand(trial: Watched) -> None:
    script = trial.witness.paths.submission_script(1, "trainer")
    job = slurm("sbatch", "--parsable", "--array=0", str(script))
    wait_until(
        "the script by hand to end", lambda: states(job)[f"{job}_0"] in ("COMPLETED", "FAILED")
    )
    assert states(job)[f"{job}_0"] == "COMPLETED"


def array(paths: RunPaths) -> str:
    """The first submission's job id."""
    return str(json.loads(paths.submission_jobs(1).read_text())["trainer"])


def states(job: str) -> dict[str, str]:
    """The states of all elements of an array."""
    lines = slurm("squeue", "-h", "-r", "-t", "all", "-o", "%i %T", "-j", job).splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}

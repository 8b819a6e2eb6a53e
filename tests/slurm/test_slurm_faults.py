"""Faults of the cluster do not end a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run import events
from slurmrl.run.paths import RunPaths
from tests.support import paced
from tests.support.chaos_trials.watched import Watched
from tests.support.nodes import kill_node, node_of, private_bed, slurm
from tests.support.rotation import SPARES, rotating
from tests.support.trials import Site, processes, sft_config, wait_until

pytestmark = pytest.mark.timeout(1800)


def test_host_that_cannot_start_processes_is_excluded(tmp_path: Path, bed: Path) -> None:
    site = Site(tmp_path)
    submit_to_broken(site, {"n0": "export PYTHONHOME=/nowhere"})
    wait_until("the node to be avoided", lambda: site.status("sft/1")["avoided"])
    status = site.status("sft/1")
    assert [one["host"] for one in status["avoided"]] == ["n0"]
    assert "encodings" in status["avoided"][0]["why"]
    assert "jobs exclude n0" in site.slurmrl("status", "sft/1").stdout
    ended = site.wait_for_end("sft/1")
    assert (ended["state"], ended["step"], ended["incarnation"]) == ("COMPLETED", 8, 1)
    assert "FAILED" not in states(array(site.paths("sft/1"))).values()
    site.slurmrl("resume", "sft/1", "--include", "n1", code=2)
    site.slurmrl("resume", "sft/1", "--include", "n0", "total_steps=9")
    wait_until("the node to be avoided again", lambda: site.status("sft/1")["avoided"])
    assert site.wait_for_end("sft/1")["step"] == 9


def test_setup_line_that_fails_on_every_host_ends_the_trial(tmp_path: Path, bed: Path) -> None:
    """The line is to blame: no host stays excluded, and the trial resumes once it is fixed."""
    site = Site(tmp_path)
    submit_to_broken(site, dict.fromkeys(("n0", "n1", "n2", "n3"), "exit 9"))
    ended = site.wait_for_end("sft/1")
    assert (ended["state"], ended["incarnation"], ended["avoided"]) == ("FAILED", 0, [])
    assert "cluster.slurm.setup ended with exit code 9 at: exit 9" in site.slurmrl(
        "status", "sft/1"
    ).stdout.replace("\n", " ")
    site.slurmrl("resume", "sft/1", "cluster.slurm.setup=[]")
    ended = site.wait_for_end("sft/1")
    assert (ended["state"], ended["step"], ended["incarnation"]) == ("COMPLETED", 8, 1)


@pytest.mark.soak
def test_only_one_of_several_running_jobs_trains(tmp_path: Path, bed: Path) -> None:
    """Other links exit, and only the first one trains."""
    trial = start_throttled(tmp_path)
    submit_by_hand(trial)
    lift_throttle(trial)
    paced.hurry(trial)
    trial.outcome()
    assert trial.site.status(trial.name)["incarnation"] == 1


@pytest.mark.parametrize(
    "of_batch",
    rotating(
        pytest.param(True, id="batch host"),
        pytest.param(False, id="other host"),
        shares=SPARES,
    ),
)
def test_host_with_a_failed_gpu_is_replaced_by_a_spare(
    tmp_path: Path, bed: Path, of_batch: bool
) -> None:
    """The trial has the result of an undisturbed one, in the same job. The message names the host
    and its GPU, and later jobs avoid the host.
    """
    config = paced.config(tmp_path, "Faulty")
    cluster = paced.cluster(tmp_path, spares=1)
    trial = paced.start(tmp_path, **{**config, "cluster": cluster})
    assert trial.until("a step", lambda: trial.witness.has_trained(1))
    running = processes(trial.witness.paths.run)
    first = node_of(running["supervisor"][-1])
    (node,) = {n for n in map(node_of, running["worker"]) if (n == first) == of_batch}
    faulty = tmp_path / "faulty.new"
    faulty.write_text(node)
    faulty.rename(tmp_path / "faulty")
    assert trial.until("the next incarnation", lambda: trial.incarnation > 1)
    paced.hurry(trial)
    trial.outcome()
    status = trial.site.status(trial.name)
    failed, after = status["incarnations"]
    assert failed["cause"] == "gpu_fault"
    assert f" on {node}: GPU" in failed["how"]
    assert "uncorrectable ECC error" in failed["how"]
    assert failed["job_id"] == after["job_id"]
    assert node not in after["hosts"]
    assert [one["host"] for one in status["avoided"]] == [node]


@pytest.mark.long
@pytest.mark.parametrize("hosts", rotating(2, 1, first=2, shares=SPARES))
def test_job_with_spares_is_requeued_if_the_masters_host_is_lost(
    tmp_path: Path, hosts: int
) -> None:
    """Slurm keeps the job without a batch process, and no other link can start. A remaining agent
    requeues the job. If trainers are on one host, a watcher on a spare host does.
    """
    with private_bed() as directory:
        spares = paced.cluster(tmp_path, spares=3 - hosts, extra_lines=["--exclusive"])
        cluster = {**spares, "workers_per_host": 2 // hosts, "lease_ttl_s": 20}
        config = {**paced.config(tmp_path, pause_s=5), "total_steps": 10, "cluster": cluster}
        trial = paced.start(tmp_path, **config)
        assert trial.until("a step", lambda: trial.witness.has_trained(1))
        run = trial.witness.paths.run
        kill_node(directory, run, node_of(processes(run)["supervisor"][-1]))
        assert trial.until("the next start", lambda: trial.incarnation > 1)
        paced.hurry(trial)
        trial.outcome()
        how = trial.site.status(trial.name)["incarnations"][0]
        told = {event["kind"] for event in events.read_all(trial.witness.paths)}
        if hosts == 1:
            assert how["cause"] == "killed", how
            assert "batch_host_lost" in told
        else:
            assert how["cause"] in ("lost_host", "exception"), how


def submit_to_broken(site: Site, broken: dict[str, str]) -> None:
    """Submit SFT on one host as ``sft/1``. ``broken``: the way in which a node is broken."""
    cases = " ".join(f"{node}) {how};;" for node, how in broken.items())
    setup = [f"case $SLURMD_NODENAME in {cases} esac"]
    cluster: dict[str, Any] = {
        "workers_per_host": 2,
        "gpus_per_worker": 0,
        "slurm": {"partition": "main", "time": "30", "links": 2, "setup": setup},
    }
    path = site.write("sft.yaml", sft_config(cluster=cluster))
    site.slurmrl("submit", str(path), "--scheduler", "slurm")


def start_throttled(folder: Path) -> Watched:
    """Start a trial with two further links, which has trained a step."""
    slow = paced.config(folder, pause_s=20.0)  # it must not end before it may hurry
    config = {**slow, "cluster": paced.cluster(folder, links=3)}
    trial = Watched(Site(folder), config, "slurm")
    assert trial.until("a step", lambda: trial.witness.has_trained(1))
    return trial


def lift_throttle(trial: Watched) -> None:
    """Allow all links to start; all except the first are requeued."""
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
    """Return the job id of the first submission."""
    return str(json.loads(paths.submission_jobs(1).read_text())["trainer"])


def states(job: str) -> dict[str, str]:
    """Return the states of all elements of an array."""
    lines = slurm("squeue", "-h", "-r", "-t", "all", "-o", "%i %T", "-j", job).splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}

"""Workers run in a container, and their agent outside.

A stand-in behaves like Apptainer with --cleanenv: it stays as the parent of the command, and
passes open descriptors, but no environment variables and no ignored signals.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest

from slurmrl.workers.child_process import IGNORED
from tests.support.held import NO_LIMIT, Hold
from tests.support.trials import Site, kill_one, processes, sft_config, wait_until

APPTAINER = """\
#!/bin/sh
for word; do printf '<%s>' "$word"; done >>'{folder}/calls'
echo >>'{folder}/calls'
shift 5
env -i --default-signal PATH="$PATH" HOME="$HOME" APPTAINER_CONTAINER=image.sif "$@"
exit $?
"""


def ignored(pid: int) -> set[int]:
    """Return the signals that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in status if line.startswith("SigIgn:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.long
def test_trial_with_workers_in_containers_finishes(tmp_path: Path) -> None:
    """A worker is killed while its container's parent stays; the next incarnation finishes."""
    stub = tmp_path / "my programs" / "apptainer"
    stub.parent.mkdir()
    stub.write_text(APPTAINER.format(folder=tmp_path))
    stub.chmod(0o700)
    container = f"'{stub}' exec --nv --bind '/shared data' image.sif"
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    token = secrets.token_hex()
    tokens.write_text(f"MY_TOKEN={token}\n")
    cluster = {
        "gpus_per_worker": 0,
        "variables_file": str(tokens),
        "slurm": {"container": container, "container_python": sys.executable},
    }
    site = Site(tmp_path)
    hold = Hold(site)
    hold.allow(3)
    config = site.write("sft.yaml", hold.sft(sft_config(cluster=cluster)))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--detach")
    run = site.paths("sft/1").run
    site.wait_for_step("sft/1", 3)
    inside = [Path(f"/proc/{pid}/environ").read_bytes() for pid in processes(run)["worker"]]
    assert len(inside) == 2
    assert all(b"APPTAINER_CONTAINER=image.sif" in environ for environ in inside)
    assert all(ignored(pid) >= set(IGNORED) for pid in processes(run)["worker"])
    (agent,) = processes(run)["agent"]
    assert f"MY_TOKEN={token}".encode() in Path(f"/proc/{agent}/environ").read_bytes()
    kill_one(run, "worker")
    hold.allow(NO_LIMIT)
    ended = site.wait_for_end("sft/1")
    assert (ended["state"], ended["step"], ended["incarnation"]) == ("COMPLETED", 8, 2)
    wait_until("all processes to leave", lambda: not any(processes(run).values()))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != tokens]
    assert not [path for path in files if token.encode() in path.read_bytes()]
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith(
        f"<exec><--nv><--bind></shared data><image.sif><env><CUDA_VISIBLE_DEVICES=>"
        f"<OMP_NUM_THREADS=1><OPENBLAS_NUM_THREADS=1><PYTHONDONTWRITEBYTECODE=1>"
        f"<PYTHONPATH={run}/code>"
    )
    assert f"<{sys.executable}><-P><-m><slurmrl.workers.worker><--run><{run}>" in call
    assert "<--world><trainer>" in call

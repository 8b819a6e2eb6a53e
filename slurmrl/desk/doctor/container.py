"""Checks of the container that workers run in, from a host of the job.

The container is started once, with the workers' command. The stage that it reaches shows what is
missing. `inside` has the checks inside the container.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from slurmrl.config.schema.cluster import Slurm
from slurmrl.desk.doctor import inside
from slurmrl.desk.doctor.check import Check, failed, ok
from slurmrl.desk.doctor.directory import seconds
from slurmrl.fsio import documents
from slurmrl.workers.agent.fork_environment import interpreter

TIMEOUT_S = 60.0
_PROGRAM = """\
import os, sys
print("has python", flush=True)
os.listdir(sys.argv[1])
print("sees the folder", flush=True)
import slurmrl.config.load
from slurmrl.desk.doctor import inside
print("has slurmrl", flush=True)
inside.main(sys.argv[1:])
"""
_STAGES = ("has python", "sees the folder", "has slurmrl")
_ADVICE = (
    "try cluster.slurm.container and container_python by hand on a host of the job; what has to be "
    "loaded first belongs in cluster.slurm.setup",
    "mount the directory of --root inside at the same path (apptainer: --bind, enroot: --mount)",
    "install the packages of pyproject.toml in the image, for its container_python",
    "the directory of --root must be the same inside, and writable for you",
)


def check(folder: Path, task: int, slurm: Slurm) -> list[Check]:
    """``folder`` is the job's; ``slurm`` names a container."""
    command = [*interpreter(slurm, os.environ), "-P", "-c", _PROGRAM, str(folder), str(task)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [failed("container", f"did not end within {TIMEOUT_S:.0f} s", _ADVICE[0])]
    except OSError as error:
        return [failed("container", f"cannot start '{command[0]}': {error.strerror}", _ADVICE[0])]
    reached = sum(stage in done.stdout.splitlines() for stage in _STAGES)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        got = f"it {_STAGES[reached - 1]}; then" if reached else "does not start:"
        measured = f"{got} exit code {done.returncode}: {last[0]}"
        return [failed("container", measured, _ADVICE[reached])]
    return _seen_inside(folder, task, time.monotonic() - began)


def _seen_inside(folder: Path, task: int, took_s: float) -> list[Check]:
    path = folder / inside.result_name(task)
    try:
        values = documents.read(path)
    except FileNotFoundError:
        measured = "a file written inside is not visible on the host"
        return [failed("container", measured, _ADVICE[-1])]
    with documents.expecting(path):
        checks = [Check.from_json(check) for check in values["checks"]]
    measured = f"starts, sees the directory and has slurmrl; {seconds(took_s)}"
    named = [replace(check, name=f"{check.name} in container") for check in checks]
    return [ok("container", measured, took_s=took_s), *named]

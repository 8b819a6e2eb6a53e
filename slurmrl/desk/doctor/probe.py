"""The program that the short job runs on each of its hosts.

``python -P -m slurmrl.desk.doctor.probe FOLDER`` reads ``ask.json`` in the folder and writes
``result.<task>.json``. The program ends within two minutes, even if other hosts do not respond.

The program starts the workers' container once, with the workers' command. The stage that the
container reaches shows which part is missing. `checks_inside` runs in the container and writes its
results to ``inside.<task>.json``.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl import child, env
from slurmrl.config.schema.cluster import Slurm
from slurmrl.desk.doctor import (
    Check,
    directory,
    failed,
    guarded,
    machine,
    meeting,
    ok,
    server_checks,
)
from slurmrl.desk.doctor.directory import seconds
from slurmrl.fsio import atomic, calls, documents
from slurmrl.workers.agent.fork_environment import interpreter

DIRECTORY_ADVICE = "the compute nodes must mount the directory of --root, writable for you"
CONTAINER_TIMEOUT_S = 60.0
OUTPUT_BYTES = 2**20
_PROGRAM = """\
import os, sys
print("has python", flush=True)
os.listdir(sys.argv[1])
print("sees the folder", flush=True)
import slurmrl.config.load
from slurmrl.desk.doctor import probe
print("has slurmrl", flush=True)
probe.main_inside(sys.argv[1:])
"""
_STAGES = ("has python", "sees the folder", "has slurmrl")
_ADVICE = (
    "try cluster.slurm.container and container_python by hand on a host of the job; load required "
    "modules in cluster.slurm.setup",
    "mount --root in the container at the same path (apptainer: --bind, enroot: --mount)",
    "install slurmrl's packages (setup.cfg) in the image, for its container_python",
    "the directory of --root must be the same inside the container, and writable for you",
)
CUDA_LIBRARY = "libcuda.so.1"
"""Library of the GPU driver, which a container must get from the host."""


def result_name(task: int) -> str:
    return f"result.{task}.json"


def check_host(folder: Path, task: int, request: dict[str, Any]) -> list[Check]:
    """Run all checks of one host."""
    expected = int(request["gpus"])
    settings = Slurm.model_validate(request["slurm"])
    own = folder / f"own.{task}"
    own.mkdir(mode=0o700, exist_ok=True)
    checks = [
        *guarded("same directory", DIRECTORY_ADVICE, lambda: directory.content(folder, request)),
        *guarded("ownership", DIRECTORY_ADVICE, lambda: directory.owner(own)),
        *guarded("directory", DIRECTORY_ADVICE, lambda: directory.latency(own)),
        *machine.process_limits(),
        *guarded("gpus", machine.GPU_ADVICE, lambda: _gpus(expected)),
        machine.driver(expected > 0),
        *machine.processor(request["narrow"]),
        machine.python(),
        *(machine.packages(expected > 0) if settings.container is None else ()),
        *guarded("temporary space", "set TMPDIR", _temporary),
    ]
    if request["script"] is not None:
        checks += machine.slurm_in_jobs(Path(request["script"]))
    interface = request["interface"]
    place = meeting.ProbeHost(folder, str(request["token"]), task, int(request["hosts"]), interface)
    checks += guarded("interface", meeting.NETWORK_ADVICE, lambda: meeting.meet_hosts(place))
    if request["servers"] is not None and task == 0:  # the first rank sends requests to servers
        checks += server_checks.check_running(request["servers"])
    if settings.container is not None:  # Do this last: a container may start slowly.
        inside = partial(check_container, folder, task, settings)
        checks += guarded("container", DIRECTORY_ADVICE, inside)
    name = env.NODE_NAME.get() or socket.gethostname()
    return [check.at(name) for check in checks]


def _gpus(expected: int) -> Check:
    return machine.granted_gpus(expected, env.VISIBLE_DEVICES.get(), machine.seen_gpus())


def _temporary() -> Check:
    """Check the space for temporary files, because few libraries report a full file system."""
    folder = tempfile.gettempdir()
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    measured = f"{free / directory.GIB:.1f} GiB free in {folder}"
    if free < directory.LEAST_BYTES:
        advice = "set TMPDIR to another folder in cluster.slurm.setup"
        return failed("temporary space", measured, advice, free_bytes=float(free))
    return ok("temporary space", measured, free_bytes=float(free))


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    calls.set_private_umask()
    task = env.NODE_ID.get()
    request = documents.read(folder / directory.ASK)
    checks = check_host(folder, task, request)
    text = json.dumps({"checks": [check.to_json() for check in checks]})
    atomic.replace(folder / result_name(task), text.encode())
    return 0


def check_container(folder: Path, task: int, slurm: Slurm) -> list[Check]:
    """Check the container that ``slurm`` names; ``folder`` is the folder of the job."""
    command = [*interpreter(slurm, os.environ), "-P", "-c", _PROGRAM, str(folder), str(task)]
    began = time.monotonic()
    try:
        done = child.run(command, CONTAINER_TIMEOUT_S, kept_bytes=OUTPUT_BYTES)
    except OSError as error:
        return [failed("container", f"cannot start '{command[0]}': {error.strerror}", _ADVICE[0])]
    if done.code is None:
        return [failed("container", f"did not end within {CONTAINER_TIMEOUT_S:.0f} s", _ADVICE[0])]
    lines = done.output.decode(errors="replace").splitlines()
    reached = sum(stage in lines for stage in _STAGES)
    if done.code != 0:
        last = done.last_line or (lines or ["no output"])[-1]
        got = f"it {_STAGES[reached - 1]}; then" if reached else "does not start:"
        measured = f"{got} exit code {done.code}: {last}"
        return [failed("container", measured, _ADVICE[reached])]
    return _seen_inside(folder, task, time.monotonic() - began)


def _seen_inside(folder: Path, task: int, took_s: float) -> list[Check]:
    path = folder / inside_name(task)
    try:
        values = documents.read(path)
    except FileNotFoundError:
        measured = "a file written inside is not visible on the host"
        return [failed("container", measured, _ADVICE[-1])]
    with documents.expecting(path):
        checks = [Check.from_json(one) for one in values["checks"]]
    measured = f"starts, sees the directory and has slurmrl; {seconds(took_s)}"
    named = [replace(one, name=f"{one.name} in container") for one in checks]
    return [ok("container", measured, took_s=took_s), *named]


def inside_name(task: int) -> str:
    return f"inside.{task}.json"


def main_inside(arguments: Sequence[str]) -> None:
    """Run the checks inside a container; ``arguments`` are the job's folder and host number."""
    folder, task = Path(arguments[0]), int(arguments[1])
    calls.set_private_umask()
    checks = checks_inside(folder, documents.read(folder / directory.ASK))
    text = json.dumps({"checks": [one.to_json() for one in checks]})
    atomic.replace(folder / inside_name(task), text.encode())


def checks_inside(folder: Path, request: dict[str, Any]) -> list[Check]:
    gpus = int(request["gpus"]) > 0
    advice = "the directory of --root must be the same inside and outside of the container"
    return [
        *guarded("same directory", advice, lambda: directory.content(folder, request)),
        machine.python(),
        *machine.packages(gpus),
        *([_driver()] if gpus else []),
    ]


def _driver() -> Check:
    try:
        ctypes.CDLL(CUDA_LIBRARY)
    except OSError as error:
        advice = "let the container have the host's driver (apptainer: --nv)"
        return failed("gpu driver", str(error), advice)
    return ok("gpu driver", f"{CUDA_LIBRARY} can be loaded")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

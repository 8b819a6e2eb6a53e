"""The program that the short job runs on each of its hosts.

``python -P -m slurmrl.desk.doctor.probe FOLDER`` reads ``ask.json`` there and leaves
``result.<task>.json``. It ends within two minutes whatever the others do.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl import env
from slurmrl.config.schema.cluster import Slurm
from slurmrl.desk.doctor import (
    container,
    directory,
    disk,
    gpus,
    limits,
    meeting,
    servers,
    slurm,
    software,
)
from slurmrl.desk.doctor.check import Check, failed, guarded, ok
from slurmrl.fsio import atomic, documents, umask

DIRECTORY_ADVICE = "the compute nodes must mount the directory of --root, writable for you"


def result_name(task: int) -> str:
    return f"result.{task}.json"


def look(folder: Path, task: int, request: dict[str, Any]) -> list[Check]:
    """All checks of one host."""
    expected = int(request["gpus"])
    settings = Slurm.model_validate(request["slurm"])
    own = folder / f"own.{task}"
    own.mkdir(mode=0o700, exist_ok=True)
    checks = [
        *guarded("same directory", DIRECTORY_ADVICE, lambda: directory.content(folder, request)),
        *guarded("ownership", DIRECTORY_ADVICE, lambda: directory.owner(own)),
        *guarded("directory", DIRECTORY_ADVICE, lambda: directory.latency(own)),
        *limits.check(),
        *guarded("gpus", gpus.ADVICE, lambda: _gpus(expected)),
        software.driver(expected > 0),
        *software.processor(request["narrow"]),
        software.python(),
        *(software.packages(expected > 0) if settings.container is None else ()),
        *guarded("temporary space", "set TMPDIR", _temporary),
    ]
    if request["script"] is not None:
        checks += slurm.in_jobs(Path(request["script"]))
    interface = request["interface"]
    place = meeting.ProbeHost(folder, str(request["token"]), task, int(request["hosts"]), interface)
    checks += guarded("interface", meeting.NETWORK_ADVICE, lambda: meeting.check(place))
    if request["servers"] is not None and task == 0:  # that of the first rank, which asks them
        checks += servers.check_running(request["servers"])
    if settings.container is not None:  # at the end: the others do not wait for its start
        look_inside = partial(container.check, folder, task, settings)
        checks += guarded("container", DIRECTORY_ADVICE, look_inside)
    name = env.NODE_NAME.get() or socket.gethostname()
    return [check.at(name) for check in checks]


def _gpus(expected: int) -> Check:
    return gpus.check(expected, env.VISIBLE_DEVICES.get(), gpus.seen())


def _temporary() -> Check:
    """Space for libraries' temporary files; few of them report that it is full."""
    folder = tempfile.gettempdir()
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    measured = f"{free / disk.GIB:.1f} GiB free in {folder}"
    if free < disk.LEAST_BYTES:
        advice = "set TMPDIR to another folder in cluster.slurm.setup"
        return failed("temporary space", measured, advice, free_bytes=float(free))
    return ok("temporary space", measured, free_bytes=float(free))


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    umask.make_private()
    task = env.NODE_ID.get()
    request = documents.read(folder / directory.ASK)
    checks = look(folder, task, request)
    text = json.dumps({"checks": [check.to_json() for check in checks]})
    atomic.replace(folder / result_name(task), text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

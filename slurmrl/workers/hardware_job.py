"""The program of the job that measures hardware.

``python -P -m slurmrl.workers.hardware_job FOLDER`` runs on each host of the job. The program reads
``ask.json`` and starts a process for each rank of the host. Then it writes ``result.<task>.json``
with the measured points of all these ranks, or with the error of one rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from slurmrl import child, env
from slurmrl.config.schema.cluster import Slurm
from slurmrl.fsio import atomic, calls, documents
from slurmrl.run.channel.wakeups import fabric_address, interface_of
from slurmrl.workers.agent.fork_environment import interpreter

ASK: Final = "ask.json"
LIMIT_S: Final = 900.0
"""Maximum time of a rank."""
TIMEOUT: Final = timedelta(minutes=5)
"""Time-out of one collective."""
ECHO: Final = 76
"""Exit code of a rank whose error looks like a consequence of another rank's end."""
CONSEQUENCES: Final = (ECHO, None)
"""Exit codes that may be the consequence of another rank's failure."""
ECHO_S: Final = 10.0
"""Seconds to wait for another rank's exit code after one of `CONSEQUENCES`."""


def result_name(task: int) -> str:
    """Return the file name of a host's result."""
    return f"result.{task}.json"


def points_name(rank: int) -> str:
    """Return the file name of a rank's points."""
    return f"points.{rank}.json"


def measure_host(folder: Path, task: int, request: dict[str, Any]) -> dict[str, Any]:
    """Run the ranks of a host; return their points, or the error that explains the failure.

    After an error, other ranks may still run until this process ends.
    """
    local = int(request["ranks_per_host"])
    ranks = range(task * local, (task + 1) * local)
    found = {"host": env.NODE_NAME.get() or socket.gethostname()}
    seen = env.VISIBLE_DEVICES.get()
    devices = seen.split(",") if seen else [str(number) for number in range(local)]
    if request["gpus"] and len(devices) < local:
        words = f"the job has {len(devices)} GPUs ({seen}) for {local} ranks: set --ranks"
        return {**found, "error": words, "log": "", "echo": False}
    pool = ThreadPoolExecutor(local)
    runs = {pool.submit(_run, folder, request, devices, rank): rank for rank in ranks}
    failed = _failures(runs)
    if failed:
        rank, end = min(failed, key=lambda one: one[1].code in CONSEQUENCES)
        reason = end.last_line or "no error message"
        late = f"rank {rank} did not end within {LIMIT_S:.0f} s"
        words = late if end.code is None else f"rank {rank} ended with {end.code}: {reason}"
        return {**found, "error": words, "log": end.errors, "echo": end.code in CONSEQUENCES}
    points = [documents.read(folder / points_name(rank)) for rank in ranks]
    return {**found, "ranks": points}


def _failures(runs: Mapping[Future[child.ChildEnd], int]) -> list[tuple[int, child.ChildEnd]]:
    """Wait for the ranks. Return the failed ranks as soon as one rank explains the failure.

    Do not wait for the other ranks: they may wait for the failed rank for minutes.
    """
    left, failed = set(runs), list[tuple[int, child.ChildEnd]]()
    while left and all(end.code in CONSEQUENCES for _, end in failed):
        done, left = wait(left, ECHO_S if failed else None, FIRST_COMPLETED)
        if not done:
            break
        failed += [(runs[one], one.result()) for one in done if one.result().code != 0]
    return failed


def _run(folder: Path, request: dict[str, Any], devices: list[str], rank: int) -> child.ChildEnd:
    values = dict(os.environ)
    if request["gpus"]:
        values[env.VISIBLE_DEVICES.name] = devices[rank % int(request["ranks_per_host"])]
    values["OMP_NUM_THREADS"] = str(request["threads"])
    python = interpreter(Slurm.model_validate(request["slurm"]), values)
    command = [*python, "-P", "-m", "slurmrl.workers.hardware_job", str(folder), str(rank)]
    return child.run(command, LIMIT_S, env=values)


def measure_rank(folder: Path, rank: int, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure and return the points of one rank. Collective over all ranks."""
    import torch.distributed as dist

    from slurmrl.tensors.parallel import device
    from slurmrl.workers import distributed, hardware_measures
    from slurmrl.workers.hardware_sizes import MeasureSizes
    from slurmrl.workers.messages import Start

    local, hosts = int(request["ranks_per_host"]), int(request["hosts"])
    world = local * hosts
    accelerator = device.choose(int(request["gpus"]))
    sizes = MeasureSizes(**request["sizes"])
    interface = request["interface"]
    if interface is None:
        interface = interface_of(fabric_address(None, hosts))
    start = Start(world_size=world, interface=interface)
    store = distributed.join(start, rank, folder / "store", accelerator, TIMEOUT)
    try:
        measures = hardware_measures.Measures(sizes, accelerator, threads=int(request["threads"]))
        found: list[dict[str, Any]] = []
        for part in (measures.device, measures.products, measures.memory, measures.model):
            distributed.wait_for_all(store, rank, world, part.__name__)
            found += part()
        for ranks in _groups(rank, local, hosts):
            found += measures.collectives(ranks)
            if ranks.place == "host" or local == 1:
                found += measures.overlap(ranks)
                found += measures.sharded(ranks)
        if rank == 0:
            found += hardware_measures.directory(folder, sizes)
        distributed.wait_for_all(store, rank, world, "end")
        return found
    finally:
        dist.destroy_process_group()


def _groups(rank: int, local: int, hosts: int) -> Iterator[Any]:
    """Yield the group of this host's ranks, and the group that has one rank of each host."""
    import torch.distributed as dist

    from slurmrl.workers.hardware_measures import Ranks

    host, number = divmod(rank, local)
    for place, members in (
        ("host", [[one * local + each for each in range(local)] for one in range(hosts)]),
        ("hosts", [[one * local + each for one in range(hosts)] for each in range(local)]),
    ):
        size = len(members[0])
        if size == 1:
            continue
        groups = [dist.new_group(ranks) for ranks in members]
        mine, own = (host, number) if place == "host" else (number, host)
        peer = members[mine][(own + 1) % size]
        yield Ranks(own, size, groups[mine], place, peer)


def main(arguments: list[str]) -> int:
    """Run the program of a host, or of a rank if the arguments name one."""
    folder = Path(arguments[0])
    calls.set_private_umask()
    request = documents.read(folder / ASK)
    if len(arguments) == 1:
        task = env.NODE_ID.get()
        found = measure_host(folder, task, request)
        atomic.replace(folder / result_name(task), json.dumps(found).encode())
        if "error" in found:
            os._exit(1)  # The kernel kills ranks that still wait for the failed rank.
        return 0
    rank = int(arguments[1])
    try:
        points = measure_rank(folder, rank, request)
    except Exception as error:  # noqa: BLE001 - the process ends with it
        from slurmrl.workers.worker.orders import recognize

        traceback.print_exc()
        return ECHO if recognize(error).echo else 1
    atomic.replace(folder / points_name(rank), json.dumps({"points": points}).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

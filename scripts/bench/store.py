#!/usr/bin/env python3
"""Compare the name store with torch's TCPStore and FileStore.

scripts/bench/store.py [--directory DIR ...] [--clients 1 4 16 64] [--operations 200] [--rounds 5]

Every client is a process, and all clients start together. The stores take turns in each round. The
script prints microseconds per operation of one client: the median over the rounds of the median
over the clients. It also prints the median, minimum and maximum ratio to TCPStore in the same
round. Only the name store's add is durable (two fsyncs).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch.distributed import FileStore, TCPStore

from slurmrl.name_resolve.store import NameStore

FORK = get_context("fork")
VALUE = "x" * 64
TIMEOUT = timedelta(seconds=60)


class Client:
    """The functions of a store: ``add`` adds a key exclusively, ``get`` returns a value."""

    def __init__(self, add: Callable[[str, str], object], get: Callable[[str], object]) -> None:
        self.add = add
        self.get = get


Connect = Callable[[], Client]


def of_names(folder: Path) -> Client:
    store = NameStore(folder)
    return Client(store.add, store.get)


def of_tcp(port: int) -> Client:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    return Client(lambda key, value: store.compare_set(key, "", value), store.get)


def of_files(path: str) -> Client:
    store = FileStore(path)
    return Client(lambda key, value: store.compare_set(key, "", value), store.get)


def stores(folder: Path, port: int) -> dict[str, Connect]:
    return {
        "torch TCPStore": partial(of_tcp, port),
        "file": partial(of_names, folder),
        "torch FileStore": partial(of_files, str(folder / ".filestore")),
    }


def serve_client(connect: Connect, name: str, operations: int, barrier: Any, figures: Any) -> None:
    client = connect()
    barrier.wait()
    began = time.perf_counter()
    for number in range(operations):
        client.add(f"{name}/{number}", VALUE)
    add_s = time.perf_counter() - began
    barrier.wait()
    began = time.perf_counter()
    for number in range(operations):
        client.get(f"{name}/{number}")
    figures.put((add_s / operations * 1e6, (time.perf_counter() - began) / operations * 1e6))
    barrier.wait()


def measure(connect: Connect, folder: Path, clients: int, operations: int) -> tuple[float, float]:
    barrier, figures = FORK.Barrier(clients), FORK.SimpleQueue()
    processes = [
        FORK.Process(
            target=serve_client,
            args=(connect, f"{folder.name}/{rank}", operations, barrier, figures),
        )
        for rank in range(clients)
    ]
    for process in processes:
        process.start()
    adds, gets = zip(*(figures.get() for _ in processes), strict=True)
    for process in processes:
        process.join()
    return statistics.median(adds), statistics.median(gets)


def serve_tcp(ports: Any) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(server.port)
    time.sleep(3600)


Round = dict[str, tuple[float, float]]
"""Microseconds of an add and of a get, by kind of store."""


def one_round(directory: Path, clients: int, operations: int, port: int) -> Round:
    with tempfile.TemporaryDirectory(dir=directory) as name:
        folder = Path(name)
        return {
            kind: measure(connect, folder, clients, operations)
            for kind, connect in stores(folder, port).items()
        }


def show(directory: Path, clients: int, rounds: Sequence[Round]) -> None:
    for kind in rounds[0]:
        text = f"{directory!s:9} {clients:3} clients  {kind:16}"
        for index, operation in enumerate(("add", "get")):
            took = statistics.median(found[kind][index] for found in rounds)
            ratios = [found[kind][index] / found["torch TCPStore"][index] for found in rounds]
            text += f"  {operation} {took:9.1f} ({statistics.median(ratios):6.2f}, "
            text += f"{min(ratios):.2f} to {max(ratios):.2f})"
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", action="append", type=Path)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--operations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; us per operation (x TCPStore)")
    ports = FORK.SimpleQueue()
    tcp = FORK.Process(target=serve_tcp, args=(ports,), daemon=True)
    tcp.start()
    port = ports.get()
    for directory in options.directory or [Path("/dev/shm"), Path(tempfile.gettempdir())]:
        for clients in options.clients:
            rounds = [
                one_round(directory, clients, options.operations, port)
                for _ in range(options.rounds)
            ]
            show(directory, clients, rounds)


if __name__ == "__main__":
    main()

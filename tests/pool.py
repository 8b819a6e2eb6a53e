"""A pool of long-lived rank processes for tests of distributed code.

Importing torch takes seconds, so rank processes are started once and reused. Each job gets its
own process group (gloo, over a file store). Its function starts once all ranks have joined. A rank
whose peer fails sees its connections close and fails too. The pool replaces ranks that cannot join
or do not answer in time. A rank that succeeds keeps its connections until all have answered,
because a slower one may still be building a group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parent.parent
GRACE_S = 10.0
"""Seconds in which other ranks may answer after a rank has failed."""
DUMP_S = 5.0
"""Seconds for a rank to write its stack before it is killed."""

RELEASE = b"release"
"""Message of the parent to a rank after all ranks of its job have answered."""

CHILD = "import sys; from tests.pool import serve; serve(int(sys.argv[1]))"


class RankError(Exception):
    """A job failed on some ranks; the message holds their tracebacks."""


@dataclass(frozen=True)
class Job:
    reference: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    size: int
    store: str
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    value: Any = None
    error: str = ""

    def encoded(self) -> bytes:
        try:
            return pickle.dumps(self)
        except Exception:  # noqa: BLE001 - a value of any type: the parent raises it
            return pickle.dumps(Answer(error=traceback.format_exc()))


class RankProcess:
    """The parent's handle of a child process that executes jobs."""

    def __init__(self, directory: Path, number: int) -> None:
        self._stderr = directory / f"{number}.stderr"
        self.connection, child = Pipe()
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "error",
        }
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(child.fileno())],
                cwd=ROOT,
                env=environ,
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )
        child.close()

    def send(self, job: Job) -> None:
        self.connection.send_bytes(pickle.dumps(job))

    def answer(self) -> Answer:
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())  # noqa: S301
        except (EOFError, ConnectionResetError):
            self._process.wait()
            return Answer(error=f"exited with {self._process.returncode}\n{self.stderr()}")
        return answer

    def release(self) -> None:
        """Let the process leave the process group of its finished job."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The process has exited.
            self.connection.send_bytes(RELEASE)

    def stderr(self) -> str:
        return self._stderr.read_text()[-4000:]

    def stack(self) -> str:
        """Return the current code position of the process, for a message about a wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_S)
        return self.stderr()

    def end(self, *, kill: bool = False) -> None:
        self.connection.close()
        if kill:
            self._process.kill()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankPool:
    """``pool(2, "package.module:function", argument)`` runs a function on ranks 0 and 1."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: dict[int, RankProcess] = {}
        self._started = 0
        self._jobs = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.connection.close()
        for process in self._processes.values():
            process.end()
        self._directory.cleanup()

    def __call__(
        self, n: int, reference: str, *args: Any, deadline_s: float = 600.0, **kwargs: Any
    ) -> list[Any]:
        """Return the results of ``module:function`` on ranks 0..n-1 of a new process group.

        Raises RankError with the tracebacks of failed ranks, or TimeoutError with the ranks that
        did not answer and their code positions.
        """
        self._jobs += 1
        store = f"{self._directory.name}/{self._jobs}.store"
        for rank in range(n):
            self._process(rank).send(Job(reference, args, kwargs, rank, n, store, deadline_s))
        answers = self._collect(n, deadline_s)
        failed = {rank: answer.error for rank, answer in answers.items() if answer.error}
        missing = [rank for rank in range(n) if rank not in answers]
        late = "".join(f"\nrank {rank}:\n{self._processes[rank].stack()}" for rank in missing)
        for rank in answers:
            self._processes[rank].release()
        self._replace([*missing, *(rank for rank in failed if "exited with" in failed[rank][:12])])
        if failed:
            raise RankError("".join(f"\nrank {rank}: {text}" for rank, text in failed.items()))
        if missing:
            raise TimeoutError(f"waited {deadline_s:g} s for rank {missing} of {reference}{late}")
        return [answers[rank].value for rank in range(n)]

    def _process(self, rank: int) -> RankProcess:
        if rank not in self._processes:
            self._processes[rank] = RankProcess(Path(self._directory.name), self._started)
            self._started += 1
        return self._processes[rank]

    def _collect(self, n: int, deadline_s: float) -> dict[int, Answer]:
        ranks = {id(self._processes[rank].connection): rank for rank in range(n)}
        end = time.monotonic() + deadline_s
        answers: dict[int, Answer] = {}
        while len(answers) < n:
            open_ones = [self._processes[r].connection for r in ranks.values() if r not in answers]
            ready = wait(open_ones, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = ranks[id(connection)]
                answers[rank] = self._processes[rank].answer()
                if answers[rank].error:
                    end = min(end, time.monotonic() + GRACE_S)
        return answers

    def _replace(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._processes.pop(rank).end(kill=True)


def serve(descriptor: int) -> None:
    """Execute jobs in the child until the parent closes the connection."""
    import torch

    connection = Connection(descriptor)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())  # noqa: S301
            execute(job, connection)
        except EOFError:
            return


def execute(job: Job, connection: Connection) -> None:
    """Run the job and answer. Leave its process group immediately after a failure, otherwise when
    the parent releases this rank. Raises EOFError if the parent ends earlier.
    """
    gc.freeze()  # what is here now stays, so that only what the job makes is looked through
    answer = attempt(job)
    if answer.error:
        leave()
    connection.send_bytes(answer.encoded())
    del answer
    connection.recv_bytes()
    leave()


def attempt(job: Job) -> Answer:
    """Join the group and run the job's function in it.

    An error while joining ends the process. torch has counted the failed group already, so this
    rank and its peers would use different names for the next one.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.size),
        rank=job.rank,
        world_size=job.size,
        timeout=timedelta(seconds=job.timeout_s),
    )
    dist.barrier()
    try:
        module, _, function = job.reference.partition(":")
        answer = Answer(getattr(importlib.import_module(module), function)(*job.args, **job.kwargs))
    except Exception:  # noqa: BLE001 - a process boundary: the parent raises it
        return Answer(error=traceback.format_exc())
    return answer


def leave() -> None:
    import torch.distributed as dist

    with contextlib.suppress(AssertionError, ValueError):
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # Its keys hold meshes, which hold groups.
    gc.collect()  # engines are cycles that hold groups, each of which keeps threads awake

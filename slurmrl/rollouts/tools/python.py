"""Runs the policy's Python programs in sandboxes, as the reward `code` does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

from slurmrl.errors import UsageError
from slurmrl.rewards.code import Namespaces, check_isolation, check_limits, sandbox_program
from slurmrl.rewards.process_pool import ProcessPool, Unanswered
from slurmrl.rollouts.tools import Job

GRACE_S: Final = 10.0
"""Seconds that a sandbox may take to answer after the time limit of a program."""
MOST_OUTPUT_BYTES: Final = 64 << 10
CLOSING_S: Final = 5.0


class PythonTool:
    """Runs a program and returns its output. Not a security boundary (docs/rewards.md).

    :param timeout_s: seconds for a program.
    :param memory_mib: address space of each process of a program.
    :param files_mib: size of its private folder, and of a file.
    :param max_processes: processes and threads of a program.
    :param processes: sandboxes of a rank, each of which runs one program at a time.
    :param container: command that runs the sandbox in a container.
    :param python: interpreter of the programs. Default: this one; ``python3`` in a container.
    :param namespaces: isolate programs by Linux namespaces: ``auto`` where possible, ``required``
        or ``off``.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
        files_mib: int = 64,
        max_processes: int = 64,
        processes: int = 2,
        container: str | Sequence[str] = "",
        python: str = "",
        namespaces: Namespaces = "auto",
    ) -> None:
        check_limits(timeout_s=timeout_s, processes=processes)
        self._timeout_s, self._required = timeout_s, namespaces == "required"
        self._program = sandbox_program(
            container=container,
            python=python,
            memory_mib=memory_mib,
            files_mib=files_mib,
            max_processes=max_processes,
            namespaces=namespaces,
        )
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._size = processes
        self._threads: list[threading.Thread] = []

    async def __call__(self, code: str) -> str:
        """Run a Python program and return its output.

        Args:
            code: The program.

        Raises:
            UsageError: the program failed; the message is the last line of its errors.
        """  # `ToolSchemas` describes the tool with this text
        if not isinstance(code, str):
            raise UsageError("code must be a string")
        while len(self._threads) < self._size:
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()
        job = Job(partial(self._run, code))
        self._jobs.put(job)
        return str(await job.future)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSING_S)
        self._threads.clear()

    def _serve(self) -> None:
        """Run jobs with one sandbox, which dies with the thread that started it."""
        pool = ProcessPool(self._program, self._timeout_s + GRACE_S, 1)
        while (job := self._jobs.get()) is not None:
            job.run(pool)
        pool.close()

    def _run(self, code: str, pool: ProcessPool) -> str:
        if not pool.pids:
            check_isolation("tool 'python'", pool.start(), required=self._required)
        request = {
            "program": code,
            "cases": [{"kind": "script", "stdin": "", "most_bytes": MOST_OUTPUT_BYTES}],
            "all": True,
            "test_timeout_s": self._timeout_s,
            "timeout_s": self._timeout_s,
        }
        (verdict,) = pool.ask([request])
        if isinstance(verdict, Unanswered):
            raise UsageError(verdict.why)
        (result,) = verdict["results"]
        if "failed" in result:
            raise UsageError(result["failed"])
        return str(result["output"]).rstrip("\n")

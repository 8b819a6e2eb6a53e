"""The reward for programs that pass the tests of their rows, and the sandbox that runs programs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Literal, get_args

from slurmrl import log, package
from slurmrl.data.types import ABSENT, value_at
from slurmrl.errors import UnusableRowError, UsageError
from slurmrl.rewards.base import RewardFunction
from slurmrl.rewards.code_cases import KEYS, Case, cases_of, program_of
from slurmrl.rewards.process_pool import MOST_PROCESSES, PoolProgram, ProcessPool, Reply, Unanswered

logger = log.get(__name__)

GRACE_S = 10.0
"""Seconds that a sandbox may take to answer after the time limit of a program."""
MOST_RESULT_BYTES = 8 << 20
"""Maximum bytes of results in one reply. The JSON may be six times as long as the results."""
MOST_CASES = 1 << 30
LOADER = """\
import json, os
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 65536) or os._exit(0)
setup = json.loads(line)
space = {"__name__": "sandbox"}
exec(compile(setup["source"], "code_sandbox.py", "exec"), space)
space["main"](setup["settings"])
"""
"""Program that reads the sandbox's source from the first line of its input, and runs it."""
MOST_REPLY_BYTES = 64 << 20
Namespaces = Literal["auto", "required", "off"]
"""Whether Linux namespaces isolate programs; ``auto``: if possible."""
MISSING = {
    "network": "they can use the network",
    "files": "they can change the user's files",
    "processes": "nothing limits the number of their processes",
}
"""Consequence of each protection that a sandbox may lack."""


class CodeReward(RewardFunction):
    """Runs programs in sandboxes (docs/rewards.md). Not a security boundary.

    :param tests_key: the row's key for the tests; dots lead into objects (``a.b``).
        Default: the first of ``tests``, ``input_output``, ``test_list`` and ``test`` in the row.
    :param prefix_key: the row's key for a string that is put before each program, such as the
        beginning of the function that a model completes.
    :param score: ``all``: 1 if all tests pass; ``share``: the share of tests that pass.
    :param test_timeout_s: seconds for one test.
    :param timeout_s: seconds for all tests of a completion; the remaining tests then fail.
    :param batch_timeout_s: seconds after which all remaining completions of a call score 0 and
        count as ``reward_unjudged``.
    :param memory_mib: MiB of address space of each process of a program.
    :param files_mib: MiB of a program's private folder, and of each of its files.
    :param max_processes: maximum number of processes and threads of a program.
    :param processes: sandboxes that run at the same time. Default: one per CPU core of the rank, at
        most 8.
    :param container: command that runs the sandbox in a container:
        ``apptainer exec --containall image.sif``.
    :param python: interpreter of the programs. Default: this one; ``python3`` in a container.
    :param namespaces: isolate programs by Linux namespaces: ``auto`` where possible, ``required``
        or ``off``.
    """

    def __init__(
        self,
        *,
        tests_key: str | None = None,
        prefix_key: str | None = None,
        score: Literal["all", "share"] = "all",
        test_timeout_s: float = 10.0,
        timeout_s: float = 60.0,
        batch_timeout_s: float = 600.0,
        memory_mib: int = 1024,
        files_mib: int = 64,
        max_processes: int = 64,
        processes: int | None = None,
        container: str | Sequence[str] = "",
        python: str = "",
        namespaces: Namespaces = "auto",
    ) -> None:
        check_limits(
            test_timeout_s=test_timeout_s, timeout_s=timeout_s, batch_timeout_s=batch_timeout_s
        )
        check_choice("score", score, ("all", "share"))
        self._tests_key, self._prefix_key = tests_key, prefix_key
        self._share = score == "share"
        self._required = namespaces == "required"
        self._test_timeout_s, self._timeout_s = test_timeout_s, timeout_s
        self._batch_timeout_s = batch_timeout_s
        program = sandbox_program(
            container=container,
            python=python,
            memory_mib=memory_mib,
            files_mib=files_mib,
            max_processes=max_processes,
            namespaces=namespaces,
        )
        self._pool = ProcessPool(program, timeout_s + GRACE_S, processes)
        self._checked = False
        self._unscored = 0
        self._scored = 0

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """Score the completions. Raises UnusableRowError for a row with unusable tests."""
        self._check_protections()
        usable: dict[int, list[Case]] = {}  # completions of a prompt share a row object
        for index, row in enumerate(rows):
            if id(row) not in usable:
                usable[id(row)] = self._usable(row, index)
        programs = [
            self._prefix(row, index) + program_of(completions[index], usable[id(row)])
            for index, row in enumerate(rows)
        ]
        runs = [_Run(program, usable[id(row)]) for program, row in zip(programs, rows, strict=True)]
        deadline = time.monotonic() + self._batch_timeout_s
        if not self._share:  # most wrong programs fail the first test
            self._advance(runs, 1, deadline)
        self._advance(runs, MOST_CASES, deadline)
        self._scored = len(runs)
        self._unscored = sum(bool(run.unscored) for run in runs)
        for index, run in enumerate(runs):
            if run.unscored:
                message = "a program could not be scored and gets 0 (%s): %s"
                logger.warning(message, run.unscored, programs[index][:200])
        return [run.score(share=self._share) for run in runs]

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why each row cannot be scored: no tests, or tests in an unknown form."""
        problems = []
        for index, row in enumerate(rows):
            try:
                self._usable(row, index)
                self._prefix(row, index)
                problems.append("")
            except UnusableRowError as error:
                problems.append(str(error))
        return problems

    def stats(self) -> dict[str, tuple[float, float]]:
        return {"reward_unjudged": (float(self._unscored), float(self._scored))}

    def close(self) -> None:
        self._pool.close()

    def _advance(self, runs: Sequence[_Run], most: int, deadline: float) -> None:
        """Run up to ``most`` more tests of each program that may still pass."""
        requests, owners = [], []
        for run in runs:
            for cases in run.next_cases(most, share=self._share):
                owners.append((run, cases))
                requests.append(
                    {
                        "program": run.program,
                        "cases": [case.request() for case in cases],
                        "all": self._share,
                        "test_timeout_s": self._test_timeout_s,
                        "timeout_s": self._timeout_s,
                    }
                )
        if not requests:
            return
        left_s = max(deadline - time.monotonic(), 0.0)
        most_processes = min(self.cores, MOST_PROCESSES)
        replies = self._pool.ask(requests, most=most_processes, within_s=left_s)
        for (run, cases), reply in zip(owners, replies, strict=True):
            run.add(cases, reply)

    def _usable(self, row: Mapping[str, Any], index: int) -> list[Case]:
        keys = KEYS if self._tests_key is None else (self._tests_key,)
        key = next((key for key in keys if value_at(row, key) not in (ABSENT, None)), None)
        if key is None:
            where = " or ".join(repr(key) for key in keys)
            raise UnusableRowError(f"reward 'code' finds no tests in the row, under {where}", index)
        try:
            cases = cases_of(row, value_at(row, key))
        except UsageError as error:
            message = f"reward 'code' cannot use the tests in '{key}': {error}"
            raise UnusableRowError(message, index) from error
        if not cases:
            raise UnusableRowError(f"reward 'code': '{key}' has no tests", index)
        return cases

    def _prefix(self, row: Mapping[str, Any], index: int) -> str:
        if self._prefix_key is None:
            return ""
        text = value_at(row, self._prefix_key)
        if not isinstance(text, str):
            raise UnusableRowError(
                f"reward 'code': the row has no string '{self._prefix_key}'", index
            )
        return text

    def _check_protections(self) -> None:
        """Run `check_isolation` before the first call."""
        if self._checked:
            return
        self._checked = True
        check_isolation("reward 'code'", self._pool.start(), required=self._required)


class _Run:
    """A program and the results of its tests so far."""

    def __init__(self, program: str, cases: Sequence[Case]) -> None:
        self.program = program
        self.unscored = ""
        """Reason why the program could not be scored; empty if there is none."""
        self._cases = cases
        self._begun = 0
        self._passed = 0
        self._failed = False

    def next_cases(self, most: int, *, share: bool) -> list[list[Case]]:
        """Return the next tests, in groups whose results fit into one reply.

        A program that can no longer pass gets no more tests.
        """
        if self.unscored or (self._failed and not share):
            return []
        cases = self._cases[self._begun : self._begun + most]
        self._begun += len(cases)
        groups: list[list[Case]] = []
        size = 0
        for case in cases:
            if not groups or size + case.most_bytes > MOST_RESULT_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(case)
            size += case.most_bytes
        return groups

    def add(self, cases: Sequence[Case], reply: Reply | Unanswered) -> None:
        if isinstance(reply, Unanswered):
            self.unscored = reply.why
            return
        results = zip(cases, reply["results"], strict=False)  # the sandbox may have stopped early
        passed = sum(case.passed(result) for case, result in results)
        self._passed += passed
        self._failed = self._failed or passed < len(cases)

    def score(self, *, share: bool) -> float:
        if self.unscored:
            return 0.0
        return self._passed / len(self._cases) if share else float(not self._failed)


def sandbox_program(
    *,
    container: str | Sequence[str],
    python: str,
    memory_mib: int,
    files_mib: int,
    max_processes: int,
    namespaces: Namespaces,
) -> PoolProgram:
    """Return the program of a process that runs programs (see `CodeReward` for the settings).

    :raises UsageError: a limit or ``namespaces`` is not allowed.
    """
    check_limits(memory_mib=memory_mib, files_mib=files_mib, max_processes=max_processes)
    check_choice("namespaces", namespaces, get_args(Namespaces))
    prefix = shlex.split(container) if isinstance(container, str) else list(container)
    settings = {
        "memory_bytes": memory_mib << 20,
        "files_bytes": files_mib << 20,
        "most_processes": max_processes,
        "namespaces": namespaces != "off",
        "equality": package.read("rewards/code_equality.py").decode(),
    }
    interpreter = python or ("python3" if prefix else sys.executable)
    source = package.read("rewards/code_sandbox.py").decode()
    return PoolProgram(
        "the sandbox of programs",
        [*prefix, interpreter, "-I", "-c", LOADER],
        setup={"source": source, "settings": settings},
        most_reply_bytes=MOST_REPLY_BYTES,
    )


def check_limits(**limits: Any) -> None:
    """Check the limits of programs, given by option name.

    :raises UsageError: a limit is not a positive number.
    """
    for name, value in limits.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < inf:
            raise UsageError(
                f"{name} {value!r} is not allowed: limits of programs must be positive numbers"
            )


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise UsageError if the value of an option is not among the allowed values."""
    if value not in allowed:
        raise UsageError(f"{name} {value!r} is not allowed; allowed: {', '.join(allowed)}")


def check_isolation(user: str, facts: Mapping[str, Any], *, required: bool) -> None:
    """Log a warning if a sandbox reports in ``facts`` that a protection is missing on this host.

    :raises UsageError: a protection is missing, and isolation is ``required``.
    """
    have = facts.get("protections", {})
    missing = [text for name, text in MISSING.items() if not have.get(name)]
    if missing and required:
        raise UsageError(
            f"{user} cannot isolate programs here: {'; '.join(missing)}. Allow user "
            "namespaces, configure a container, or set namespaces: auto"
        )
    if missing:
        logger.warning("programs are not isolated here: %s", "; ".join(missing))

"""The pool of scoring processes: order, failed starts, and end. test_rewards_pooled.py covers
processes that hang or are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slurmrl.errors import EnvironmentFailure, WorkerDiedError
from slurmrl.rewards.process_pool import PoolProgram, ProcessPool, Unanswered
from tests.support.trials import alive

PROGRAM = """
import json, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("hang"):
        time.sleep(3600)
    print(json.dumps({"correct": request["x"] % 2 == 0}), flush=True)
"""

Make = Callable[..., ProcessPool]
T = TypeVar("T")


def verdicts(
    pool: ProcessPool, requests: list[dict[str, Any]], **limits: float
) -> list[bool | None]:
    return [
        None if isinstance(verdict, Unanswered) else verdict["correct"]
        for verdict in pool.ask(requests, **limits)  # type: ignore[arg-type]
    ]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    pools: list[ProcessPool] = []

    def build(
        processes: int | None = 1, timeout_s: float = 60.0, text: str = PROGRAM
    ) -> ProcessPool:
        program = tmp_path / "judge.py"
        program.write_text(text)
        pools.append(
            ProcessPool(
                PoolProgram("judge.py", [sys.executable, str(program)]), timeout_s, processes
            )
        )
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("processes", [1, 3])
def test_scoring_results_come_in_the_order_of_the_requests(make: Make, processes: int) -> None:
    pool = make(processes)
    wanted = [x % 2 == 0 for x in range(50)]
    assert verdicts(pool, [{"x": x} for x in range(50)]) == wanted
    assert verdicts(pool, [{"x": 1}]) == [False]


def test_long_requests_are_answered(make: Make) -> None:
    assert verdicts(make(), [{"x": 2, "text": "a" * 1_000_000}]) == [True]


def test_killed_idle_scoring_process_changes_no_result(make: Make) -> None:
    pool = make()
    assert verdicts(pool, [{"x": 2}]) == [True]
    os.kill(pool.pids[0], signal.SIGKILL)
    assert verdicts(pool, [{"x": 2}, {"x": 3}]) == [True, False]


def test_scoring_program_that_never_starts_is_an_error(make: Make) -> None:
    with pytest.raises(WorkerDiedError, match="failed to start three times"):
        make(text="raise SystemExit(1)").ask([{"x": 1}])


def test_missing_scoring_program_is_named() -> None:
    pool = ProcessPool(PoolProgram("the judge", ["/no/such/program"]), 1.0)
    with pytest.raises(EnvironmentFailure, match="cannot start the judge with '/no/such/program'"):
        pool.ask([{}])


def test_interrupted_scoring_call_leaves_no_result_for_the_next_call(make: Make) -> None:
    """The scoring process may still answer the old request, with the same index."""
    pool = make()
    with pytest.raises(TypeError):
        pool.ask([{"x": 2}, {"x": object()}], most=2)
    assert verdicts(pool, [{"x": 3}, {"x": 3}]) == [False, False]


def test_scoring_process_of_an_abandoned_call_is_stopped_at_once(make: Make) -> None:
    pool = make()
    pool.start()
    [pid] = pool.pids
    [verdict] = pool.ask([{"hang": True}], abandoned=lambda: True)
    assert isinstance(verdict, Unanswered)
    assert pool.pids == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_at_most_one_scoring_process_per_request_is_started(make: Make) -> None:
    pool = make(None)
    verdicts(pool, [{"x": 2}] * 3, most=8)
    assert len(pool.pids) == 3
    assert len(make(2).pids) == 0


def test_scoring_processes_end_when_the_pool_is_closed(make: Make) -> None:
    pool = make(2)
    pool.ask([{"x": x} for x in range(8)])
    pids = pool.pids
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


OWNER = """
import sys
from slurmrl.config.schema import RewardPool
from slurmrl.rewards.code import CodeReward
from slurmrl.rewards.weighted import PooledReward

kind = sys.argv[1]
if kind == "function":
    reward = PooledReward("sleeps:judge", {}, RewardPool(processes=1), cores=1)
    reward.score(["p"], ["x"], [{}], ["rows.jsonl:1"])
else:
    reward = CodeReward(processes=1, test_timeout_s=600, timeout_s=600, namespaces=kind)
    program = "import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(599)"
    reward(["p"], [program], [{"tests": [{"input": "", "output": ""}]}])
"""
SLEEPS = """
import time

def judge(prompts, completions, rows):
    time.sleep(598)
"""


@pytest.mark.parametrize(("kind", "processes"), [("function", 1), ("auto", 3)])
def test_scoring_processes_die_with_the_process_that_started_them(
    tmp_path: Path, kind: str, processes: int
) -> None:
    """A rank is killed while its scoring processes are busy."""
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", OWNER, kind]
    owner = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        until("the judges run", lambda: len(descendants(owner.pid)) >= processes)
        judges = descendants(owner.pid)
    finally:
        owner.kill()
        owner.wait()
    until("the judges have ended", lambda: not any(map(alive, judges)))


def until(what: str, check: Callable[[], T]) -> T:
    deadline = time.monotonic() + 60
    while not (value := check()):
        assert time.monotonic() < deadline, f"waited until {what}"
        time.sleep(0.05)
    return value


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [*map(int, children), *(deep for child in children for deep in descendants(int(child)))]

"""Custom rewards in separate processes: any failure affects only one completion."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import RewardPool
from slurmrl.errors import RewardError, UnreadableInputError, UsageError
from slurmrl.rewards import process_pool, weighted
from slurmrl.rewards.process_pool import PoolProcess, PoolProgram
from slurmrl.rewards.weighted import PooledReward
from tests.support.trials import alive, wait_until

MODULE = "tests.support.failing_rewards"
DEADLINE_S = 60.0

Make = Callable[..., PooledReward]


@pytest.fixture
def make() -> Iterator[Make]:
    rewards: list[PooledReward] = []

    def build(name: str = "score", options: dict[str, Any] | None = None, **limits: Any) -> Any:
        pool = RewardPool(**{"processes": 1, "timeout_s": DEADLINE_S, **limits})
        rewards.append(PooledReward(f"{MODULE}:{name}", options or {}, pool, cores=1))
        return rewards[-1]

    yield build
    for reward in rewards:
        reward.close()


def judge(reward: PooledReward, completions: list[str], **extras: Any) -> list[float | None]:
    places = [f"rows.jsonl:{index} (sample {index}@0)" for index in range(len(completions))]
    rows = [{"answer": "x"}] * len(completions)
    return reward.score(["p"] * len(completions), completions, rows, places, extras)


FAILURES = {
    "raise": r"KeyError: 'nothing' \(failing_rewards.py:",
    "exit": "SystemExit: 0",
    "nan": "a score must be a finite number",
    "text": "returned '1'",
    "several": "returned 2 scores for 1 completions",
    "recursion": "RecursionError",
    "die": r"its process ended \(exited with code 0\)",
    "segfault": r"its process ended \(SIGSEGV\)",
    "memory": "MemoryError",
    "close pipes": "its process ",
}


def test_failure_affects_only_its_own_completion(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighted, "MOST_LOGGED", 100)
    reward = make(memory_mib=2048, unjudged_score=-1.0)
    with caplog.at_level(logging.WARNING):
        scores = judge(reward, ["a", *FAILURES, "aaa"])
    assert scores == [1.0, *[-1.0] * len(FAILURES), 3.0]
    assert reward.stats() == {"reward_unjudged": (len(FAILURES), len(FAILURES) + 2.0)}
    for index, (failure, why) in enumerate(FAILURES.items()):
        message = caplog.records[index].getMessage()
        assert f"rows.jsonl:{index + 1} (sample {index + 1}@0)" in message
        assert f"completion '{failure}'" in message
        assert re.search(f": .*{why}.*; the completion gets the score -1$", message)


def test_log_shows_some_failures_and_counts_all(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        judge(make(), ["a", *["raise"] * 20])
    assert len(caplog.records) == 6
    assert "20 of 21 completions could not be scored and get no score" in caplog.text


def test_hanging_reward_ends_at_its_time_limit(make: Make) -> None:
    assert judge(make(timeout_s=3.0), ["spin", "aaa"]) == [None, 3.0]


def test_reward_output_does_not_disturb_the_protocol(make: Make) -> None:
    assert judge(make(), ["print", "read"]) == [5.0, 4.0]


def test_forked_reward_process_sends_no_answers(make: Make) -> None:
    """The forked process also returns from the reward, and would answer requests a second time."""
    completions = [*["split"] * 3, *("x" * length for length in range(1, 20))]
    assert judge(make(), completions) == [float(len(each)) for each in completions]


def test_leftover_processes_are_killed_without_delay(make: Make, tmp_path: Path) -> None:
    """They hold pipes of the scoring process open, ignore SIGTERM and lead sessions."""
    reward = make(options={"folder": str(tmp_path)}, timeout_s=3.0)
    assert judge(reward, ["fork", "hang", "leave"]) == [None, None, 5.0]
    reward.close()
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert pids
    wait_until(f"the end of {pids}", lambda: not any(map(alive, pids)))


def test_process_is_reaped_if_its_child_belongs_to_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reward may run a program with sudo, which slurmrl may not signal."""

    def send(*given: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    child = os.pidfd_open(os.getpid())
    monkeypatch.setattr(process_pool, "_descendants", lambda pid: iter([child]))
    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    process = PoolProcess(PoolProgram("the reward", ["sleep", "600"]))
    process.close()
    assert not alive(process.pid)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(child)


def test_request_whose_process_died_is_retried(make: Make, tmp_path: Path) -> None:
    assert judge(make("once", {"folder": str(tmp_path)}), ["a"]) == [1.0]


def test_batch_without_any_score_is_an_error(make: Make) -> None:
    """Then the cause is the reward, and not a completion. The message has one of the reasons."""
    reward = make()
    with pytest.raises(RewardError, match=r"any of 3 completions .* KeyError: 'nothing'"):
        judge(reward, ["raise"] * 3)


def test_reward_that_always_fails_on_single_completions_is_an_error(make: Make) -> None:
    """A call of one completion may fail, as in a small batch on many ranks."""
    reward = make()
    assert judge(reward, ["raise"]) == [None]
    judge(reward, ["a"])
    for _ in range(7):
        assert judge(reward, ["raise"]) == [None]
    with pytest.raises(RewardError, match="any of 8 completions in a row"):
        judge(reward, ["raise"])


def test_each_batch_has_its_own_time_limit(make: Make) -> None:
    """Hanging completions could take half an hour together."""
    reward = make(batch_timeout_s=3.0)
    assert judge(reward, ["a", *["sleep"] * 30]) == [1.0] + [None] * 30
    assert reward.stats()["reward_unjudged"] == (30.0, 31.0)
    assert judge(reward, ["a", "aa"]) == [1.0, 2.0], "the next batch is judged"


def test_async_functions_and_classes_are_supported(make: Make, tmp_path: Path) -> None:
    assert judge(make("asynchronous"), ["a"]) == [2.0]
    careful = make("Careful", {"folder": str(tmp_path)})
    assert judge(careful, ["a", "b"], step=7, siblings=[["a"], ["b"]]) == [7.0, 7.0]
    assert careful.stats() == {"careful": (4.0, 2.0), "reward_unjudged": (0.0, 2.0)}
    assert careful.check_rows([{"answer": "1"}, {}]) == ["", "it has no answer"]
    careful.close()
    assert (tmp_path / "closed").exists(), "close() is called"


def test_reward_options_reach_the_pool_unchanged(make: Make) -> None:
    """Covers an infinite value, which JSON cannot represent."""
    assert judge(make("bounded", {"bound": float("inf")}), ["a"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (f"{MODULE}:Broken", UsageError, "RuntimeError: no license"),
        (f"{MODULE}:scoer", UsageError, "did you mean 'score'"),
        (f"{MODULE}:unmakeable", UsageError, r"is called with \(prompts, completions, rows\)"),
        ("no_module_here:f", UnreadableInputError, "there is no module 'no_module_here'"),
    ],
)
def test_reward_that_cannot_be_created_is_rejected(
    name: str, kind: type[Exception], message: str
) -> None:
    reward = PooledReward(name, {}, RewardPool(processes=1), cores=1)
    with pytest.raises(kind, match=message):
        reward.check_rows([])

"""Whether another start makes sense, judged by what the ones before died of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmrl import keys
from slurmrl.checkpoint.manifest import write_manifest
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.state import fold
from slurmrl.history.writer import begin, end, resume
from slurmrl.name_resolve.memory import MemoryNameStore
from slurmrl.paths import RunPaths
from slurmrl.workers.master.start import Failure, give_up, hopeless, restore

MOST = 3


class Past:
    """Incarnations that failed, one after the other; then ours begins."""

    def __init__(self, paths: RunPaths) -> None:
        self.history = History(paths.history)
        self.names = MemoryNameStore()
        self.writer = begin(self.history, {})

    def fails(self, **failure: Any) -> None:
        """The present incarnation fails, and the next one begins."""
        if failure:
            self.names.add(keys.failure(self.writer.incarnation), json.dumps(failure))
        self.writer = begin(self.history, {})

    def raises(self, exception: str, *, rank: int = 0, step: int = 4, call: str = "gen") -> None:
        self.fails(
            rank=rank, step=step, call=call, exception=exception, traceback=f"at {exception}"
        )

    def commits(self, step: int = 2) -> None:
        name = f"step-{step:08d}.{self.writer.incarnation}"
        self.writer.append(Kind.COMMIT, {"step": step, "directory": name})

    def verdict(self) -> Failure | None:
        return hopeless(self.history.read(), self.names, MOST)


@pytest.fixture
def past(paths: RunPaths) -> Past:
    return Past(paths)


def test_first_start(past: Past) -> None:
    assert past.verdict() is None


def test_one_failure_is_not_enough(past: Past) -> None:
    past.raises("ValueError: a")
    assert past.verdict() is None


def test_same_exception_twice(past: Past) -> None:
    past.raises("ValueError: a")
    past.raises("ValueError: a")
    verdict = past.verdict()
    assert verdict is not None
    assert verdict.reason == "failed twice in the same way: rank 0, gen: ValueError: a"
    assert verdict.step == 4
    assert verdict.traceback == "at ValueError: a"


def test_which_rank_was_first_does_not_matter(past: Past) -> None:
    """A bug that all ranks share is reported by whichever is faster."""
    past.raises("ValueError: a", rank=1)
    past.raises("ValueError: a", rank=0)
    verdict = past.verdict()
    assert verdict is not None
    assert "rank 0, gen: ValueError: a" in verdict.reason


@pytest.mark.parametrize(
    "other", [{"exception": "ValueError: b"}, {"step": 5}, {"call": "reward_inf"}]
)
def test_another_exception_step_or_call(past: Past, other: dict[str, Any]) -> None:
    past.raises("ValueError: a")
    past.raises(**{"exception": "ValueError: a", **other})
    assert past.verdict() is None


def test_commit_between_begins_anew(past: Past) -> None:
    """Whoever still makes progress may meet the same exception again."""
    past.raises("ValueError: a")
    past.commits()
    past.raises("ValueError: a")
    assert past.verdict() is None


def test_commit_before_both_does_not_matter(past: Past) -> None:
    """The incarnation that made the last commit is the first of the two."""
    past.commits()
    past.raises("ValueError: a")
    assert past.verdict() is None
    past.raises("ValueError: a")
    assert past.verdict() is not None


def test_resume_begins_anew(past: Past) -> None:
    """The user may have mended it: the failures before do not count, the two after it do."""
    past.raises("ValueError: a")
    past.raises("ValueError: a")
    give_up(past.writer, Failure("failed twice", 4, ""))
    resume(past.history, {})
    past.writer = begin(past.history, {})
    assert past.verdict() is None
    past.raises("ValueError: a")
    assert past.verdict() is None
    past.raises("ValueError: a")
    assert past.verdict() is not None


def test_failure_before_a_resume_does_not_count(past: Past) -> None:
    """The same exception stands on both sides of the resume: once since then."""
    error = {"rank": 0, "step": 4, "call": "gen", "exception": "E: a", "traceback": "at E"}
    past.names.add(keys.failure(past.writer.incarnation), json.dumps(error))
    end(past.history, Kind.CANCELLED, {})
    resume(past.history, {})
    past.writer = begin(past.history, {})
    past.fails(**error)
    assert past.verdict() is None
    past.fails(**error)
    assert past.verdict() is not None


def test_sudden_deaths_at_one_step_are_no_bug(past: Past) -> None:
    """Killed processes leave no traceback; the machine may be better tomorrow."""
    for _ in range(2):
        past.fails(reason="rank 1 on n0 was ended by SIGKILL")
    assert past.verdict() is None


def test_too_many_starts_without_a_commit(past: Past) -> None:
    for _ in range(MOST - 1):
        past.fails(reason="rank 1 on n0 was ended by SIGKILL")
    assert past.verdict() is None
    past.fails(reason="rank 1 on n7 was ended by SIGKILL")
    verdict = past.verdict()
    assert verdict is not None
    assert verdict.reason == (
        f"{MOST} starts in a row without a new commit; the last one: "
        "rank 1 on n7 was ended by SIGKILL"
    )


def test_too_many_starts_without_a_word(past: Past) -> None:
    for _ in range(MOST):
        past.fails()
    verdict = past.verdict()
    assert verdict is not None
    assert "its processes ended without a word" in verdict.reason


def test_starts_before_the_last_commit_do_not_count(past: Past) -> None:
    for _ in range(MOST - 1):
        past.fails()
    past.commits()
    for _ in range(MOST):
        past.fails()
        assert past.verdict() is None
    past.fails()
    verdict = past.verdict()
    assert verdict is not None
    assert verdict.reason.startswith(f"{MOST} starts in a row")


def test_giving_up_ends_the_trial(past: Past) -> None:
    give_up(past.writer, Failure("it is broken", 3, "at line 7"))
    state = fold(past.history.read())
    assert state.end is not None
    assert state.end.kind is Kind.FAILED
    assert state.end.data == {"reason": "it is broken", "traceback": "at line 7"}


def test_restore_reads_what_the_last_commit_says(past: Past, paths: RunPaths) -> None:
    assert restore(paths, fold(past.history.read())) is None
    past.commits(step=2)
    directory = paths.checkpoint(2, 1)
    directory.mkdir()
    write_manifest(directory, step=2, files=[], state={"step": 2, "cursor": [0, 8]})
    found = restore(paths, fold(past.history.read()))
    assert found == {"step": 2, "cursor": [0, 8]}

"""The decision on another start, based on the causes of earlier ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmrl.errors import TrialEndedError
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import IncarnationWriter, begin, end, fold, resume
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import JobTag
from slurmrl.workers.master import futility
from slurmrl.workers.master.futility import futile_start

MOST = 3


class Past:
    """A sequence of ended incarnations, after which the next start is decided."""

    def __init__(self, paths: RunPaths) -> None:
        self.history = History(paths.history)
        self.names = NameStore(paths.names)
        self.job = "7.0.0"

    def begins(self) -> IncarnationWriter:
        return begin(self.history, {"job": self.job})

    def ends(self, *, warned: str = "", **failure: Any) -> IncarnationWriter:
        """Let an incarnation begin, and end with this failure."""
        writer = self.begins()
        if failure:
            self.names.add(keys.failure(writer.incarnation), json.dumps(failure))
        if warned:
            self.names.add(keys.warned(writer.incarnation), json.dumps({"cause": warned}))
        return writer

    def raises(
        self,
        exception: str,
        *,
        rank: int = 0,
        step: int = 4,
        call: str = "gen",
        cause: str = "exception",
        **more: Any,
    ) -> None:
        self.ends(
            rank=rank,
            step=step,
            call=call,
            exception=exception,
            traceback=f"at {exception}",
            cause=cause,
            **more,
        )

    def commits_and_raises(self, exception: str) -> None:
        """Raise the same error after a commit."""
        self.raises(exception)
        self.commits()

    def commits(self, step: int = 2) -> None:
        """Let the newest incarnation commit before its end."""
        incarnation = fold(self.history.read()).incarnation
        writer = IncarnationWriter(self.history, incarnation)
        name = f"step-{step:08d}.{incarnation}"
        writer.append(Kind.COMMIT, {"step": step, "directory": name})

    def verdict(self) -> dict[str, Any] | None:
        return futile_start(self.history.read(), self.names, self.job, MOST)


def futile(reason: str, traceback: str = "") -> dict[str, Any]:
    """Return the data of the FAILED record."""
    return {"reason": reason, "traceback": traceback}


@pytest.fixture
def past(paths: RunPaths) -> Past:
    return Past(paths)


def test_trial_is_not_ended_before_its_first_start(past: Past) -> None:
    assert past.verdict() is None


RAISED = {
    "rank": 0, "step": 4, "call": "gen", "exception": "ValueError: a", "traceback": "at a",
    "cause": "exception",
}  # fmt: skip
BROKEN = {**RAISED, "exception": "RuntimeError: Connection closed by peer", "cause": "connection"}
SIGKILL = {"reason": "rank 1 on n0 was ended by SIGKILL", "cause": "died"}
DAMAGED = {**RAISED, "damaged": "step-00000002.1"}


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([RAISED], id="one failure"),
        pytest.param([RAISED, {**RAISED, "exception": "ValueError: b"}], id="other exception"),
        pytest.param([RAISED, {**RAISED, "step": 5}], id="other step"),
        pytest.param([RAISED, {**RAISED, "call": "reward_inf"}], id="other call"),
        pytest.param([BROKEN] * 2, id="words of ranks that noticed the death of another one"),
        pytest.param([SIGKILL] * 2, id="the machine may be better tomorrow"),
        pytest.param([{"warned": "preemption"}] * 10, id="taken away"),
        pytest.param([{"warned": "interrupt"}] * 10, id="interrupted"),
        pytest.param([{"warned": "preemption", **SIGKILL}] * 10, id="grace of a preemption"),
        pytest.param([DAMAGED] * 10, id="the next start resumes from the commit before"),
        pytest.param([{"warned": "time_limit"}], id="one time limit"),
        pytest.param([{"warned": "preemption"}, {"warned": "time_limit"}], id="one of two"),
    ],
)
def test_recoverable_ends_allow_another_start(past: Past, ends: list[dict[str, Any]]) -> None:
    for one in ends:
        past.ends(**one)
        assert past.verdict() is None


def test_same_exception_twice_fails_the_trial(past: Past) -> None:
    past.raises("ValueError: a")
    past.raises("ValueError: a")
    assert past.verdict() == futile(
        "failed twice in the same way: rank 0, gen: ValueError: a", "at ValueError: a"
    )


@pytest.mark.parametrize("committed", [False, True])
def test_user_error_ends_the_trial_at_once(past: Past, committed: bool) -> None:
    text = "reward m:f returned nan"
    past.ends(rank=1, call="reward_inf", exception=text, cause="exception", final=True)
    if committed:
        past.commits()
    assert past.verdict() == futile(f"rank 1, reward_inf: {text}", "")
    end(past.history, Kind.FAILED, {})
    resume(past.history, {})
    assert past.verdict() is None, "it may have been mended"


def test_trial_fails_after_same_master_exception_twice(past: Past) -> None:
    for _ in range(2):
        past.ends(reason="master: KeyError: 'x'", traceback="at KeyError", cause="master")
    assert past.verdict() == futile(
        "failed twice in the same way: master: KeyError: 'x'", "at KeyError"
    )


def test_same_exception_on_another_rank_counts_as_repeated(past: Past) -> None:
    """If all ranks have the same bug, the fastest rank reports it."""
    past.raises("ValueError: a", rank=1)
    past.raises("ValueError: a", rank=0)
    verdict = past.verdict()
    assert verdict is not None
    assert "rank 0, gen: ValueError: a" in verdict["reason"]


def test_commit_between_two_failures_resets_the_count(past: Past) -> None:
    """A trial that makes progress may meet the same exception again."""
    past.raises("ValueError: a")
    past.commits_and_raises("ValueError: a")
    assert past.verdict() is None


def test_commit_before_two_failures_does_not_reset_the_count(past: Past) -> None:
    """The incarnation that made the last commit is the first of the two."""
    past.commits_and_raises("ValueError: a")
    assert past.verdict() is None
    past.raises("ValueError: a")
    assert past.verdict() is not None


def test_preemption_between_two_failures_does_not_reset_the_count(past: Past) -> None:
    past.raises("ValueError: a")
    past.ends(warned="preemption")
    past.raises("ValueError: a")
    assert past.verdict() is not None


def test_resume_resets_the_count(past: Past) -> None:
    """The user may have fixed the cause, so only failures after a resume count."""
    past.raises("ValueError: a")
    past.raises("ValueError: a")
    end(past.history, Kind.FAILED, {})
    resume(past.history, {})
    assert past.verdict() is None
    past.raises("ValueError: a")
    assert past.verdict() is None
    past.raises("ValueError: a")
    assert past.verdict() is not None


def test_too_many_starts_without_a_commit_fail_the_trial(past: Past) -> None:
    for _ in range(MOST - 1):
        past.ends(reason="rank 1 on n0 was ended by SIGKILL", cause="died")
    assert past.verdict() is None
    past.ends(reason="rank 1 on n7 was ended by SIGKILL", cause="died")
    verdict = past.verdict()
    assert verdict is not None
    assert verdict["reason"] == (
        f"{MOST} starts in a row without a new commit; the last start: "
        "rank 1 on n7 was ended by SIGKILL"
    )


def test_verdict_about_hangs_names_waiting_and_missing_ranks(past: Past) -> None:
    """The record that ends the trial explains its last hang. The comparison of two incarnations
    ignores this explanation, because its times differ.
    """
    silence = "rank 3 on n1 sent no heartbeat for 60 s and was killed"
    for number in range(MOST):
        writer = past.ends(rank=3, call="gen", reason=silence, cause="hung")
        text = f"ranks 0-2 have waited {number} s in gen for rank 3\nwhich is in gen"
        past.names.add(keys.hang(writer.incarnation), json.dumps({"text": text, "files": []}))
    verdict = past.verdict()
    assert verdict is not None
    assert verdict["reason"] == (
        f"{MOST} starts in a row without a new commit; the last start: rank 3, gen: {silence}; "
        f"ranks 0-2 have waited {MOST - 1} s in gen for rank 3"
    )
    job = JobTag(past.job)
    endings = [futility.read_ending(past.names, begun, job) for begun in past.history.read()]
    assert {(ending.what, ending.reason) for ending in endings} == {
        (f"gen: {silence}", f"rank 3, gen: {silence}")
    }


def test_verdict_after_too_many_starts_has_the_newest_traceback(past: Past) -> None:
    past.raises("ValueError: a")
    past.raises("ValueError: b")
    past.ends(reason="rank 1 on n7 was ended by SIGKILL", cause="died")
    verdict = past.verdict()
    assert verdict is not None
    assert verdict["traceback"] == "at ValueError: b"


def test_too_many_starts_without_a_report_fail_the_trial(past: Past) -> None:
    for _ in range(MOST):
        past.ends()
    verdict = past.verdict()
    assert verdict is not None
    assert "its processes ended without reporting a reason" in verdict["reason"]


def test_starts_before_the_last_commit_are_not_counted(past: Past) -> None:
    for _ in range(MOST):
        past.ends()
    past.commits()
    for _ in range(MOST):
        assert past.verdict() is None
        past.ends()
    verdict = past.verdict()
    assert verdict is not None
    assert verdict["reason"].startswith(f"{MOST} starts in a row")


def test_requeues_without_a_report_are_not_counted(past: Past) -> None:
    """After a preemption without grace time, only Slurm's restart count shows the requeue."""
    for restart in range(10):
        past.job = f"7.{restart}.0"
        past.ends()
    past.job = "7.10.0"
    assert past.verdict() is None


def test_trial_that_loses_many_hosts_fails(past: Past) -> None:
    """Otherwise, a trial that causes host failures would do so on the whole cluster."""
    for restart in range(futility.LOSSES * MOST):
        past.job = f"7.{restart}.0"
        assert past.verdict() is None
        past.ends()
    past.job = f"7.{futility.LOSSES * MOST}.0"
    verdict = past.verdict()
    assert verdict is not None
    assert "lost a host before their first commit" in verdict["reason"]


def test_rounds_of_one_job_are_counted(past: Past) -> None:
    for number in range(MOST):
        past.job = f"7.0.{number}"
        past.ends()
    past.job = f"7.0.{MOST}"
    assert past.verdict() is not None


def test_time_limit_reached_twice_fails_the_trial(past: Past) -> None:
    for _ in range(2):
        past.ends(warned="time_limit")
    verdict = futile_start(
        past.history.read(),
        past.names,
        past.job,
        MOST,
        lambda ending: f"incarnation {ending.incarnation} took long",
    )
    assert verdict == futile(
        "the time limit is too short: two jobs in a row reached it before their first commit; "
        "incarnation 2 took long",
        "",
    )


def test_time_limit_after_a_commit_allows_another_start(past: Past) -> None:
    """Most jobs end in this way."""
    past.ends(warned="time_limit")
    past.commits()
    past.ends(warned="time_limit")
    assert past.verdict() is None


def test_trial_ends_with_the_reason_of_the_verdict(past: Past) -> None:
    with pytest.raises(TrialEndedError, match="it is broken"):
        begin(past.history, {}, lambda records: {"reason": "it is broken", "traceback": "at 7"})
    state = fold(past.history.read())
    assert state.end is not None
    assert state.end.kind is Kind.FAILED
    assert state.end.data == {"reason": "it is broken", "traceback": "at 7"}


def test_verdict_is_repeated_if_another_writer_commits(past: Past) -> None:
    """Another writer commits between the decision and the end, so the decision is made again."""
    past.ends()
    looks: list[int] = []

    def verdict(records: list[Record]) -> dict[str, Any] | None:
        looks.append(len(records))
        if len(looks) > 1:
            return None
        past.commits()
        return {"reason": "hopeless"}

    assert begin(past.history, {}, verdict).incarnation == 2
    assert looks == [1, 2]


def test_hosts_lost_before_the_first_commit_are_not_counted(past: Past) -> None:
    """Each loss costs two starts: the other ranks see broken connections, and the next incarnation
    of the same job waits for the host until its lease has expired or Slurm ends the job.
    """
    for loss in range(MOST + 2):
        past.job = f"7.{loss}.0"
        past.raises("RuntimeError: Connection closed by peer", echo=True)
        if loss % 2:
            past.ends(cause="lost_host", reason="host n1 is lost", host="n1")
        else:
            past.begins()
        past.job = f"7.{loss + 1}.0"
        assert past.verdict() is None


def test_lost_host_is_not_counted_if_another_job_follows(past: Past) -> None:
    """The leader lock records that Slurm started the next element before the requeued one."""
    for number in range(MOST + 2):
        past.job = f"{7 + number}.0.0"
        past.begins()
        turn = {"start": f"{8 + number}.0", "element": "41_1", "host": "n0", "left": "put back"}
        value = json.dumps({**turn, "before": f"{7 + number}.0"})
        past.names.add(keys.leader_lock(number + 1), value)
    past.job = "99.0.0"
    assert past.verdict() is None


def test_broken_connections_without_a_lost_host_are_counted(past: Past) -> None:
    for _ in range(MOST):
        past.raises("RuntimeError: Connection closed by peer", cause="connection", echo=True)
    assert past.verdict() is not None


def gpu_fault(past: Past, host: str, *, certain: bool = False, step: int = 4) -> None:
    past.raises(
        "AcceleratorError: CUDA error", cause="gpu_fault", host=host, certain=certain, step=step
    )


def test_gpu_failures_on_different_hosts_are_not_counted(past: Past) -> None:
    """Each failed host was replaced."""
    for number in range(2 * MOST):
        gpu_fault(past, f"n{number}", certain=True)
        assert past.verdict() is None


@pytest.mark.parametrize("certain", [True, False])
def test_repeated_gpu_failure_without_a_replacement_host_is_counted(
    past: Past, certain: bool
) -> None:
    """Covers a machine without Slurm, and a job that got the same host again."""
    for step in range(MOST):
        gpu_fault(past, "n1", certain=certain, step=step)
        assert past.verdict() is None
    gpu_fault(past, "n1", certain=certain, step=MOST)
    verdict = past.verdict()
    assert verdict is not None
    assert "3 starts in a row without a new commit" in verdict["reason"]


def test_kernel_launch_failure_on_every_host_is_a_trial_failure(past: Past) -> None:
    """A bug in a kernel can cause it. Otherwise, one host after the other would be excluded."""
    for number in range(MOST):
        gpu_fault(past, f"n{number}")
        assert past.verdict() is None
    gpu_fault(past, f"n{MOST}")
    assert past.verdict() is not None


def test_trial_fails_after_the_maximum_of_lost_hosts(past: Past) -> None:
    for _ in range(futility.LOSSES * MOST):
        past.ends(cause="lost_host", reason="host n1 is lost", host="n1")
    verdict = past.verdict()
    assert verdict is not None
    assert "30 starts in a row lost a host before their first commit" in verdict["reason"]


def test_input_missing_in_two_consecutive_starts_ends_the_trial(past: Past) -> None:
    """In one start, a mount may have been missing briefly. A different missing file starts a new
    count.
    """
    for path in ("/data/a", "/data/b"):
        past.ends(cause="environment", reason=f"rank 0: {path} is not on n1", absent=path)
        assert past.verdict() is None
    past.ends(cause="environment", reason="rank 3: /data/b is not on n2", absent="/data/b")
    verdict = past.verdict()
    assert verdict is not None
    assert verdict["reason"].startswith("rank 3: /data/b is not on n2; two starts in a row")

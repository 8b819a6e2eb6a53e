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

    def ends(
        self, *, warned: str = "", job: str = "", commits: bool = False, **failure: Any
    ) -> IncarnationWriter:
        """Let an incarnation begin in a job (default: the one before), perhaps commit, and end
        with this failure.
        """
        self.job = job or self.job
        writer = self.begins()
        if failure:
            self.names.add(keys.failure(writer.incarnation), json.dumps(failure))
        if warned:
            self.names.add(keys.warned(writer.incarnation), json.dumps({"cause": warned}))
        if commits:
            self.commits()
        return writer

    def commits(self, step: int = 2) -> None:
        """Let the newest incarnation commit before its end."""
        incarnation = fold(self.history.read()).incarnation
        writer = IncarnationWriter(self.history, incarnation)
        name = f"step-{step:08d}.{incarnation}"
        writer.append(Kind.COMMIT, {"step": step, "directory": name})

    def verdict(self) -> dict[str, Any] | None:
        return futile_start(
            self.history.read(),
            self.names,
            self.job,
            MOST,
            lambda ending: f"incarnation {ending.incarnation} took long",
        )

    def reason(self) -> str:
        """Return why another start is futile, which it must be."""
        verdict = self.verdict()
        assert verdict is not None
        return str(verdict["reason"])


@pytest.fixture
def past(paths: RunPaths) -> Past:
    return Past(paths)


def test_trial_is_not_ended_before_its_first_start(past: Past) -> None:
    assert past.verdict() is None


RAISED = {
    "rank": 0, "step": 4, "call": "gen", "exception": "ValueError: a", "traceback": "at a",
    "cause": "exception",
}  # fmt: skip
OTHER = {**RAISED, "exception": "ValueError: b", "traceback": "at b"}
MASTER = {"reason": "master: KeyError: 'x'", "traceback": "at KeyError", "cause": "master"}
BROKEN = {**RAISED, "exception": "RuntimeError: Connection closed by peer", "cause": "connection"}
SIGKILL = {"reason": "rank 1 on n0 was ended by SIGKILL", "cause": "died"}
DAMAGED = {**RAISED, "damaged": "step-00000002.1"}
FAULT = {**RAISED, "exception": "AcceleratorError: CUDA error", "cause": "gpu_fault"}
CERTAIN = {**FAULT, "certain": True}
PREEMPTED = {"warned": "preemption"}
TIME_LIMIT = {"warned": "time_limit"}


def missing(path: str, place: str) -> dict[str, str]:
    return {"cause": "environment", "reason": f"{place}: {path} is missing", "absent": path}


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([RAISED], id="one failure"),
        pytest.param([RAISED, OTHER], id="other exception"),
        pytest.param([RAISED, {**RAISED, "step": 5}], id="other step"),
        pytest.param([RAISED, {**RAISED, "call": "reward_inf"}], id="other call"),
        pytest.param([RAISED, {**RAISED, "commits": True}], id="progress before the same one"),
        pytest.param([BROKEN] * 2, id="words of ranks that noticed the death of another one"),
        pytest.param([SIGKILL] * 2, id="the machine may be better tomorrow"),
        pytest.param([PREEMPTED] * 10, id="taken away"),
        pytest.param([{"warned": "interrupt"}] * 10, id="interrupted"),
        pytest.param([{**PREEMPTED, **SIGKILL}] * 10, id="grace of a preemption"),
        pytest.param(
            [{"job": f"7.{restart}.0"} for restart in range(10)],
            id="preemption without grace time: only Slurm's restart count shows it",
        ),
        pytest.param([DAMAGED] * 10, id="the next start resumes from the commit before"),
        pytest.param([TIME_LIMIT], id="one time limit"),
        pytest.param([PREEMPTED, TIME_LIMIT], id="one of two"),
        pytest.param([{**TIME_LIMIT, "commits": True}, TIME_LIMIT], id="most jobs end so"),
        pytest.param(
            [{**CERTAIN, "host": f"n{number}"} for number in range(2 * MOST)],
            id="each failed host was replaced",
        ),
    ],
)
def test_recoverable_ends_allow_another_start(past: Past, ends: list[dict[str, Any]]) -> None:
    for one in ends:
        past.ends(**one)
        assert past.verdict() is None


TWICE = "failed twice in the same way: "
TOO_MANY = f"{MOST} starts in a row without a new commit; the last start: "


@pytest.mark.parametrize(
    ("ends", "reason", "traceback"),
    [
        pytest.param([RAISED] * 2, f"{TWICE}rank 0, gen: ValueError: a", "at a", id="same twice"),
        pytest.param([MASTER] * 2, f"{TWICE}master: KeyError: 'x'", "at KeyError", id="master"),
        pytest.param(
            [{**RAISED, "rank": 1}, RAISED],
            f"{TWICE}rank 0, gen: ValueError: a",
            "at a",
            id="if all ranks have the same bug, the fastest one reports it",
        ),
        pytest.param(
            [{**RAISED, "commits": True}, RAISED],
            f"{TWICE}rank 0, gen: ValueError: a",
            "at a",
            id="the first of the two made the last commit",
        ),
        pytest.param(
            [RAISED, PREEMPTED, RAISED],
            f"{TWICE}rank 0, gen: ValueError: a",
            "at a",
            id="preempted between them",
        ),
        pytest.param(
            [SIGKILL, SIGKILL, {**SIGKILL, "reason": "rank 1 on n7 was ended by SIGKILL"}],
            f"{TOO_MANY}rank 1 on n7 was ended by SIGKILL",
            "",
            id="too many starts",
        ),
        pytest.param(
            [RAISED, OTHER, SIGKILL],
            f"{TOO_MANY}rank 1 on n0 was ended by SIGKILL",
            "at b",
            id="newest traceback",
        ),
        pytest.param(
            [{"job": f"7.0.{number}"} for number in range(MOST)],
            f"{TOO_MANY}its processes ended without reporting a reason",
            "",
            id="rounds of one job without a report",
        ),
        pytest.param(
            [{}, {}, {"commits": True}, {}, {}, {}],
            f"{TOO_MANY}its processes ended without reporting a reason",
            "",
            id="starts before the last commit do not count",
        ),
        pytest.param(
            [{**BROKEN, "echo": True}] * MOST,
            f"{TOO_MANY}rank 0, gen: RuntimeError: Connection closed by peer",
            "at a",
            id="broken connections without a lost host",
        ),
        pytest.param(
            [{**FAULT, "host": "n1", "step": step} for step in range(MOST + 1)],
            f"{TOO_MANY}rank 0, gen: AcceleratorError: CUDA error",
            "at a",
            id="GPU of a host that was not replaced",
        ),
        pytest.param(
            [{**CERTAIN, "host": "n1", "step": step} for step in range(MOST + 1)],
            f"{TOO_MANY}rank 0, gen: AcceleratorError: CUDA error",
            "at a",
            id="certainly broken GPU of a host that was not replaced",
        ),
        pytest.param(
            [{**FAULT, "host": f"n{number}"} for number in range(MOST + 1)],
            f"{TOO_MANY}rank 0, gen: AcceleratorError: CUDA error",
            "at a",
            id="a bug in a kernel may fail the GPUs of all hosts",
        ),
        pytest.param(
            [TIME_LIMIT] * 2,
            "the time limit is too short: two jobs in a row reached it before their first commit; "
            "incarnation 2 took long",
            "",
            id="time limit",
        ),
        pytest.param(
            [missing("/data/a", "rank 0"), missing("/data/b", "rank 0"), missing("/data/b", "n2")],
            "n2: /data/b is missing; two starts in a row did not find this input, although they "
            "could read its directory",
            "",
            id="same input missing twice: a mount may have been missing once",
        ),
    ],
)
def test_trial_fails_after_repeated_futile_ends(
    past: Past, ends: list[dict[str, Any]], reason: str, traceback: str
) -> None:
    for one in ends:
        assert past.verdict() is None
        past.ends(**one)
    assert past.verdict() == {"reason": reason, "traceback": traceback}


@pytest.mark.parametrize("committed", [False, True])
def test_user_error_ends_the_trial_at_once(past: Past, committed: bool) -> None:
    text = "reward m:f returned nan"
    past.ends(
        rank=1,
        call="reward_inf",
        exception=text,
        cause="exception",
        final=True,
        commits=committed,
    )
    assert past.reason() == f"rank 1, reward_inf: {text}"
    end(past.history, Kind.FAILED, {})
    resume(past.history, {})
    assert past.verdict() is None, "it may have been mended"


def test_resume_resets_the_count(past: Past) -> None:
    """The user may have fixed the cause, so only failures after a resume count."""
    past.ends(**RAISED)
    past.ends(**RAISED)
    end(past.history, Kind.FAILED, {})
    resume(past.history, {})
    assert past.verdict() is None
    past.ends(**RAISED)
    assert past.verdict() is None
    past.ends(**RAISED)
    assert past.verdict() is not None


def test_verdict_about_hangs_names_waiting_and_missing_ranks(past: Past) -> None:
    """The record that ends the trial explains its last hang. The comparison of two incarnations
    ignores this explanation, because its times differ.
    """
    silence = "rank 3 on n1 sent no heartbeat for 60 s and was killed"
    for number in range(MOST):
        writer = past.ends(rank=3, call="gen", reason=silence, cause="hung")
        text = f"ranks 0-2 have waited {number} s in gen for rank 3\nwhich is in gen"
        past.names.add(keys.hang(writer.incarnation), json.dumps({"text": text, "files": []}))
    assert past.reason() == (
        f"{MOST} starts in a row without a new commit; the last start: rank 3, gen: {silence}; "
        f"ranks 0-2 have waited {MOST - 1} s in gen for rank 3"
    )
    job = JobTag(past.job)
    endings = [futility.read_ending(past.names, begun, job) for begun in past.history.read()]
    assert {(ending.what, ending.reason) for ending in endings} == {
        (f"gen: {silence}", f"rank 3, gen: {silence}")
    }


def test_trial_that_loses_many_hosts_fails(past: Past) -> None:
    """Otherwise, a trial that causes host failures would do so on the whole cluster."""
    for restart in range(futility.LOSSES * MOST):
        past.job = f"7.{restart}.0"
        assert past.verdict() is None
        past.ends()
    past.job = f"7.{futility.LOSSES * MOST}.0"
    assert "lost a host before their first commit" in past.reason()


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
        past.ends(**BROKEN, echo=True)
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


def test_trial_fails_after_the_maximum_of_lost_hosts(past: Past) -> None:
    for _ in range(futility.LOSSES * MOST):
        past.ends(cause="lost_host", reason="host n1 is lost", host="n1")
    assert "30 starts in a row lost a host before their first commit" in past.reason()

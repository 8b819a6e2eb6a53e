"""What a link sees to: more links, its own requeue, the end of the chain. Slurm is scripted; the
real one is in tests/slurm."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from slurmrl.errors import SchedulerError, UsageError
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.writer import begin
from slurmrl.paths import RunPaths
from slurmrl.scheduler import elastic, extend, extensions, succession, upkeep
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.rows import QueueRow
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.succession import Link, TopUp, continue_after, end_chain, top_up
from slurmrl.scheduler.upkeep import Upkeep
from tests.scheduler_contract import request_of
from tests.support.trials import wait_until


class Slurm(SlurmClient):
    """A queue in memory: job -> (name, elements); element 0 of job 41 runs."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, tuple[str, list[int]]] = {}
        self.running: tuple[str, int] = ("41", 0)
        self.state = "RUNNING"
        self.options: list[tuple[str, ...]] = []
        self.inherited: list[Mapping[str, str] | None] = []
        self.done: list[str] = []
        self.array_size = "1001"
        self.refuse = ""
        self.tries = 0
        self.lose = False

    def settings(self) -> dict[str, str]:
        return {"MaxArraySize": self.array_size}

    def submit_limits(self, user: str) -> str:
        return ""

    def accounting(self, jobs: Iterable[str]) -> list[QueueRow] | None:
        return None

    def submit(
        self, script: Path, *options: str, inherited: Mapping[str, str] | None = None
    ) -> str:
        self.tries += 1
        if self.refuse:
            raise SchedulerError(self.refuse)
        text = script.read_text()
        said = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
        said |= dict(option.removeprefix("--").split("=", 1) for option in options)
        first, last = re.findall(r"\d+", said["array"].partition("%")[0])
        job = str(41 + len(self.jobs))
        self.jobs[job] = (said["job-name"], list(range(int(first), int(last) + 1)))
        self.options.append(options)
        self.inherited.append(inherited)
        if self.lose:
            raise SchedulerError("sbatch did not answer within 120 s")
        return job

    def queue(self, jobs: Iterable[str]) -> list[QueueRow]:
        return [row for row in self._rows() if row.job in set(jobs)]

    def queue_by_name(self, names: Iterable[str]) -> list[QueueRow]:
        return [row for row in self._rows() if row.name in set(names)]

    def cancel(self, elements: Iterable[str]) -> None:
        self.done += [f"cancel {element}" for element in elements]

    def requeue(self, element: str) -> None:
        self.done.append(f"requeue {element}")

    def _rows(self) -> list[QueueRow]:
        return [
            QueueRow(job, (e,), self.state if (job, e) == self.running else "PENDING", (), name, "")
            for job, (name, elements) in self.jobs.items()
            for e in elements
            if (job, e) >= self.running  # what came before has been forgotten
        ]


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def scheduler(slurm: Slurm) -> SlurmScheduler:
    return SlurmScheduler(slurm)


@pytest.fixture
def run(tmp_path: Path, scheduler: SlurmScheduler) -> RunPaths:
    request = request_of(tmp_path, "pass", links=3)
    scheduler.submit(request)
    request.run.submission_request(1).write_text("{}")
    return request.run


def link(run: RunPaths, index: int) -> Link:
    return Link(run, 1, "trainer", "41", index)


def commit(run: RunPaths, step: int) -> None:
    writer = begin(History(run.history), {"submission": 1, "job": "41.0.0"})
    writer.append(Kind.COMMIT, {"step": step, "directory": f"step-{step:08d}.{step}"})


def test_links_are_added_when_few_are_left_and_the_trial_commits(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    assert top_up(link(run, 0), scheduler) is TopUp.ENOUGH
    slurm.running = ("41", 1)
    assert top_up(link(run, 1), scheduler) is TopUp.NO_COMMIT
    commit(run, 1)
    assert top_up(link(run, 1), scheduler) == "42"
    name = slurm.jobs["41"][0]
    assert slurm.options[-1] == (
        "--array=3-5%1",
        f"--job-name={name}.1",
        "--dependency=afterany:41",
    )
    assert top_up(link(run, 1), scheduler) is TopUp.ENOUGH
    slurm.running = ("42", 5)
    last = Link(run, 1, "trainer", "42", 5)
    assert top_up(last, scheduler) is TopUp.NO_COMMIT
    commit(run, 2)
    assert top_up(last, scheduler) == "43"
    assert scheduler.recover(run, 1) == {"trainer": ("41", "42", "43")}


def test_commits_of_an_earlier_submission_do_not_count(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    writer = begin(History(run.history), {"submission": 0})
    writer.append(Kind.COMMIT, {"step": 1, "directory": "step-00000001.1"})
    begin(History(run.history), {"submission": 1})
    slurm.running = ("41", 2)
    assert top_up(link(run, 2), scheduler) is TopUp.NO_COMMIT


@pytest.mark.parametrize("mode", ["requeue", "none"])
def test_what_is_no_chain_gets_no_links(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, mode: str
) -> None:
    run.submission_request(1).write_text(json.dumps({"continue": mode}))
    slurm.running = ("41", 2)
    commit(run, 1)
    assert top_up(link(run, 2), scheduler) is TopUp.NO_CHAIN
    assert succession.continues(link(run, 2)) is Continue(mode)


def test_an_answer_that_was_lost_is_found_by_name(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.lose = True
    with pytest.raises(SchedulerError, match="did not answer"):
        scheduler.extend(run, 1, "trainer", by="41_0")
    slurm.lose = False
    assert scheduler.recover(run, 1) == {"trainer": ("41", "42")}
    assert scheduler.extend(run, 1, "trainer", by="41_1") == "42"
    assert list(slurm.jobs) == ["41", "42"]


def test_somebody_who_is_about_to_submit_is_waited_for(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """Their claim is younger than their job; ours would be one array too many."""
    theirs = extensions.Claim.of_this_process(index=1, first=3, count=3, by="x", records=0)
    extensions.take(run, 1, "trainer", theirs)
    script = run.submission_script(1, "trainer")

    def they_submit(pause_s: float) -> None:
        slurm.submit(script, "--array=3-5%1", f"--job-name={slurm.jobs['41'][0]}.1")

    extender = extend.Extender(slurm, run, 1, "trainer", sleep=they_submit)
    assert extender.extend(scheduler.query(scheduler.recover(run, 1)), by="y") == "42"
    assert list(slurm.jobs) == ["41", "42"]


def test_a_claim_that_stays_empty_is_void_in_the_end(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    theirs = extensions.Claim.of_this_process(index=1, first=3, count=3, by="x", records=0)
    extensions.take(run, 1, "trainer", theirs)
    times = iter([0.0, 1.0, extend.SETTLE_S + 1])
    extender = extend.Extender(
        slurm, run, 1, "trainer", sleep=lambda pause_s: None, clock=lambda: next(times)
    )
    assert extender.extend([], by="y") == "42"
    assert slurm.jobs["42"][1] == [6, 7, 8]


def test_array_indices_run_out_in_words(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.array_size = "5"
    scheduler.extend(run, 1, "trainer", by="41_0")
    assert slurm.jobs["42"][1] == [3, 4]
    with pytest.raises(UsageError, match="all 5 array indices"):
        scheduler.extend(run, 1, "trainer", by="41_1")


def test_the_end_cancels_every_array_after_this_link(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    scheduler.extend(run, 1, "trainer", by="41_0")
    slurm.running = ("41", 1)
    end_chain(link(run, 1), scheduler)
    assert slurm.done == ["cancel 41_[2]", "cancel 42_[3-5]"]


def test_a_link_says_what_follows(run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler) -> None:
    assert continue_after(link(run, 0), scheduler) == "41_1 follows, 2 left"
    slurm.running = ("41", 2)
    assert "slurmrl resume" in continue_after(link(run, 2), scheduler)
    run.submission_request(1).write_text('{"continue": "none"}')
    assert "continue: none" in continue_after(link(run, 2), scheduler)


def test_only_a_link_in_which_something_began_is_requeued(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.submission_request(1).write_text('{"continue": "requeue"}')
    monkeypatch.setenv("SLURM_JOB_ID", "44")
    assert "nothing began" in continue_after(link(run, 0), scheduler)
    begin(History(run.history), {"job": "44.0.0"})
    assert continue_after(link(run, 0), scheduler) == "41_0 was put back into the queue"
    assert slurm.done == ["requeue 41_0"]
    again = Link(run, 1, "trainer", "41", 0, restart=1)
    assert "nothing began" in continue_after(again, scheduler)


def test_a_link_that_its_user_cancels_does_not_come_back(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.submission_request(1).write_text('{"continue": "requeue"}')
    monkeypatch.setenv("SLURM_JOB_ID", "44")
    begin(History(run.history), {"job": "44.0.0"})
    slurm.state = "COMPLETING"
    assert "is not put back" in continue_after(link(run, 0), scheduler)
    assert slurm.done == []


def test_a_link_that_is_still_being_extended_is_not_extended_beside_that(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.running = ("41", 2)
    commit(run, 1)
    assert continue_after(link(run, 2), scheduler, extend=False).startswith("no link is left")
    assert slurm.tries == 1


def test_a_link_without_sbatch_breaks_nothing(
    run: RunPaths, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not known here" in continue_after(link(run, 0))
    end_chain(link(run, 0))
    monkeypatch.setattr(upkeep, "RETRY_S", 0.0)
    told: list[str] = []
    looks = Upkeep(link(run, 0), {}, told.append)
    looks.start()
    looks.stop()
    assert told == []
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch, slurm: Slurm) -> None:
    """Whoever makes a scheduler gets the scripted one, and nobody waits long."""
    monkeypatch.setattr(succession, "_scheduler", lambda: SlurmScheduler(slurm))
    for pause in ("RETRY_S", "COMMIT_S", "KEEP_S"):
        monkeypatch.setattr(upkeep, pause, 0.01)


@pytest.mark.usefixtures("_everywhere")
def test_a_running_link_asks_for_more_links_once_there_is_a_commit(
    run: RunPaths, slurm: Slurm
) -> None:
    slurm.running = ("41", 2)
    told: list[str] = []
    looks = Upkeep(link(run, 2), {}, told.append)
    looks.start()
    assert told == []
    commit(run, 1)
    wait_until("more links", lambda: told)
    looks.stop()
    assert told == ["42"]
    assert list(slurm.jobs) == ["41", "42"]


@pytest.mark.usefixtures("_everywhere")
def test_sbatch_that_is_refused_is_tried_a_few_times_and_when_the_link_ends(
    run: RunPaths, slurm: Slurm
) -> None:
    slurm.running = ("41", 2)
    commit(run, 1)
    slurm.refuse, slurm.tries = "sbatch: error: Access/permission denied", 0
    looks = Upkeep(link(run, 2), {}, pytest.fail)
    looks.start()
    wait_until("the last try", lambda: not any(thread.is_alive() for thread in looks._threads))
    assert slurm.tries == upkeep.TRIES
    assert "no link is left" in continue_after(link(run, 2))
    slurm.refuse = ""
    assert continue_after(link(run, 2)).endswith("follows, 3 left")
    assert slurm.jobs["42"][1] == [3, 4, 5], "numbers that were refused are used again"


@pytest.mark.usefixtures("_everywhere")
def test_an_elastic_group_is_looked_after_while_the_link_runs(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that does not answer for a while changes nothing."""
    kept: list[int] = []

    def keep(self: elastic.ElasticGroup, wanted: int) -> elastic.Change:
        kept.append(wanted)
        if len(kept) == 1:
            raise SchedulerError("squeue did not answer")
        return elastic.Change(submit=1)

    monkeypatch.setattr(elastic.ElasticGroup, "keep", keep)
    looks = Upkeep(link(run, 0), {"rollout": 3}, pytest.fail)
    looks.start()
    wait_until("the third look", lambda: len(kept) > 2)
    looks.stop()
    assert set(kept) == {3}


def test_links_that_are_added_inherit_what_the_first_ones_did(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set-up lines of a link have changed its PATH; those of the next do so again."""
    before = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/opt/module/bin:/usr/bin")
    scheduler.extend(run, 1, "trainer", by="41_0")
    inherited = slurm.inherited[-1]
    assert inherited is not None
    assert inherited["PATH"] == before

"""The master's side of rollout tasks, with scripted tasks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slurmrl.data.leases import Admission, SampleLedger
from slurmrl.data.ledger import LeasedItems, LedgerRecord
from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    ReportedError,
    SampleFileError,
)
from slurmrl.fsio import documents
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.documents import MOST_COUNT, wrong
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.sample_files import read_group
from slurmrl.run import keys
from slurmrl.run.channel import message_log
from slurmrl.run.events import EventWriter, read_all
from slurmrl.run.history.state import Lineage
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure, Identity
from slurmrl.scheduler.submission import set_wanted_tasks
from slurmrl.tensors.weights.format import VersionId
from slurmrl.workers.failure import publish_attempt
from slurmrl.workers.master import __main__
from slurmrl.workers.master.progress import STATE
from slurmrl.workers.master.rollout_tasks import LEAVE_S, RolloutTasks, TaskNumbers
from slurmrl.workers.master.task_attempts import (
    AttemptWakeups,
    RolloutAttempt,
    parse_name,
    rollouts_of,
)
from slurmrl.workers.master.task_leases import SILENT_S
from slurmrl.workers.rollout_messages import (
    Abort,
    Confirm,
    Leave,
    RolloutCounts,
    Unreadable,
)
from tests.support.replaced import replace as replace_by
from tests.support.scripted_task import ScriptedTask
from tests.unit.workers.conftest import Change

LOOK_S = 2.0
TTL_S = 60.0


def cut(path: Path, place: int) -> None:
    os.truncate(path, place % path.stat().st_size)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def remove(path: Path, place: int) -> None:
    path.unlink()


Damage = Callable[[Path, int], None]
DAMAGES: tuple[Damage, ...] = (cut, flip, remove)


def rows(items: Any) -> list[tuple[int, int]]:
    return [divmod(item, 10) for item in items]


class Bed:
    """The master's side in consecutive incarnations, with a separate clock."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        least: int = 1,
        allowed: int = MOST_COUNT,
        wakeups: AttemptWakeups | None = None,
        **bounds: int,
    ) -> None:
        make_private_directory(paths.rollouts)
        self.least, self.allowed = least, allowed
        self.wakeups = wakeups
        self.paths, self.now, self.step = paths, 0.0, 0
        self.admission = Admission(
            **{"max_staleness": 1, "batch_size": 2, "max_leased": 100, **bounds}
        )
        self.last_steps: dict[int, int | None] = {}
        self.incarnation = 0
        self.commit: tuple[str, int, dict[int, int | None]] = ("{}", 0, {})
        self.attempts: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Start the next incarnation from the last commit."""
        text, self.step, last_steps = self.commit
        self.incarnation += 1
        self.last_steps = {**last_steps, self.incarnation: None}
        state = json.loads(text)
        ledger = documents.from_json(LedgerRecord, state.get("ledger", {}), "a commit")
        ledger.check("a commit")
        lineage = Lineage(self.last_steps)
        self.ledger = SampleLedger(self.incarnation, lineage, ledger)
        self.tasks = RolloutTasks(
            self.paths,
            self.ledger,
            lineage,
            self.admission,
            self.incarnation,
            EventWriter(self.paths, f"master.{self.incarnation}"),
            rollouts_of(state.get("rollouts", {}), "a commit"),
            look_s=LOOK_S,
            lease_ttl_s=TTL_S,
            numbers=TaskNumbers(
                self.paths, planned=self.allowed, least=self.least, clock=lambda: self.now
            ),
            wakeups=self.wakeups,
            clock=lambda: self.now,
        )
        self.tasks.start(rows)

    def write_commit(self) -> None:
        state = {
            "ledger": documents.to_json(self.ledger.record()),
            "rollouts": documents.to_json(self.tasks.record()),
        }
        self.commit = json.dumps(state), self.step, {**self.last_steps, self.incarnation: self.step}
        self.tasks.committed()

    def look(self, *dead: str) -> None:
        """Read the tasks' messages. ``dead``: tasks whose leases have expired, if the master
        watches them.
        """
        self.now += LOOK_S
        self.tasks.look([one for one in dead if one in self.tasks.agents], self.step)

    def begin(self, task: int, version: str = "") -> ScriptedTask:
        """Let a task join. It gets its first leases if it has a version."""
        self.attempts[task] = self.attempts.get(task, -1) + 1
        one = ScriptedTask(self.paths, task, self.attempts[task])
        if version:
            one.hold(version)
        self.look()
        one.receive(self.incarnation)
        return one

    def train(self, *, dull: int | None = None, back: int = 0) -> list[int]:
        """Train a step and return its items, or none if there are too few. With ``dull``, a filter
        first drops this many items, and the last ``back`` of the others exceed the batch. Raises
        SampleFileError like the trainers.
        """
        filtered = dull is not None
        step, count = self.step + 1, self.admission.batch_size
        samples = self.tasks.take(step, count, filtered=filtered) or ()
        for sample in samples:
            group = read_group(self.paths.rollout_samples(*parse_name(sample.task)), sample)
            assert (group.item, group.versions) == (sample.item, sample.versions)
        self.ledger.drop([sample.item for sample in samples[: dull or 0]], "dull")
        good = samples[dull or 0 :]
        surplus = good[len(good) - back :]
        self.ledger.give_back([sample.item for sample in surplus])
        self.tasks.returned(step, surplus)
        items = [sample.item for sample in good[: len(good) - back]]
        if samples:
            self.step += 1
            self.ledger.train(items, self.step)
        return items

    def told(self) -> list[tuple[str, str, str]]:
        events = [one for one in read_all(self.paths) if one["kind"] == "rollout_task"]
        return [(one["task"], one.get("state", ""), one.get("reason", "")) for one in events]

    def files(self, task: ScriptedTask) -> set[str]:
        return {path.name for path in self.paths.rollout_samples(*task.place).iterdir()}


@pytest.fixture
def beds(paths: RunPaths) -> Callable[..., Bed]:
    return lambda **bounds: Bed(paths, **bounds)


# -- exactly once ---------------------------------------------------------------------------------


class Trial(RuleBasedStateMachine):
    """Tasks and masters in any order, and a list of the items that each step trained."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        paths = RunPaths.of(Path(self.folder.name), "someone", "exp", "1")
        for directory in paths.directories():
            make_private_directory(directory)
        self.bed = Bed(paths, max_leased=5)
        self.tasks: dict[int, ScriptedTask] = {}
        self.trained: list[list[int]] = []
        """Items by step."""
        self.committed = 0

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.folder.cleanup()

    def newest(self) -> str:
        return f"{self.bed.step}.{self.bed.incarnation}"

    @rule(task=st.integers(0, 2), holds=st.booleans())
    def begin(self, task: int, holds: bool) -> None:
        """Begin a task. An earlier attempt, if there is one, ended without a message."""
        self.tasks[task] = self.bed.begin(task, self.newest() if holds else "")

    @rule(task=st.integers(0, 2))
    def hold(self, task: int) -> None:
        if task in self.tasks:
            self.tasks[task].hold(self.newest())

    @rule(task=st.integers(0, 2), number=st.integers(1, 3), hears=st.booleans())
    def work(self, task: int, number: int, hears: bool) -> None:
        """Let a task work, also on requests of a previous master until it knows a newer one."""
        one = self.tasks.get(task)
        if one is None or not one.version:
            one = self.tasks[task] = self.bed.begin(task, self.newest())
        if hears:
            self.bed.look()
            one.receive(self.bed.incarnation)
        if one.open:
            one.finish(*sorted(one.open)[:number])

    @rule(task=st.integers(0, 2))
    def give_back(self, task: int) -> None:
        if (one := self.tasks.get(task)) is not None:
            one.give_back(*sorted(one.open)[:1])

    @rule(task=st.integers(0, 2))
    def leave(self, task: int) -> None:
        if (one := self.tasks.pop(task, None)) is not None:
            one.leave()

    @rule(task=st.integers(0, 2))
    def lose(self, task: int) -> None:
        self.tasks.pop(task, None)
        self.bed.look(f"rollout/{task}")

    @rule()
    def look(self) -> None:
        self.bed.look()

    @rule(data=st.data(), how=st.sampled_from(DAMAGES))
    def damage(self, data: st.DataObject, how: Damage) -> None:
        """Damage a file, perhaps after its check."""
        found = sorted(self.bed.paths.rollouts.rglob("*.samples"))
        whole = [path for path in found if path.stat().st_size]
        if whole:
            path = data.draw(st.sampled_from(whole))
            how(path, data.draw(st.integers(0, path.stat().st_size - 1)))

    @rule(dull=st.none() | st.integers(0, 2), back=st.integers(0, 1))
    def train(self, dull: int | None = None, back: int = 0) -> None:
        self.bed.look()
        before = self.bed.step
        try:
            items = self.bed.train(dull=dull, back=back)
        except SampleFileError:
            self.restart()
            return
        assert not {item for step in self.trained for item in step}.intersection(items)
        self.trained += [items] * (self.bed.step - before)

    @rule()
    def write_commit(self) -> None:
        self.bed.write_commit()
        self.committed = len(self.trained)

    @precondition(lambda self: self.tasks or self.trained)
    @rule()
    def restart(self) -> None:
        self.bed.restart()
        del self.trained[self.committed :]
        for one in self.tasks.values():
            if one.version:
                one.hold(self.newest())

    @invariant()
    def nothing_has_two_states(self) -> None:
        record = self.bed.ledger.record()
        record.check("the ledger")
        assert self.bed.ledger.trained == sum(map(len, self.trained))

    @invariant()
    def whoever_is_counted_on_has_a_lease_that_is_watched(self) -> None:
        """Check that every task with expected results has a watched lease, because only the lease
        shows that a task is gone.
        """
        counted = {(one.task, one.attempt) for one in self.bed.tasks.view().tasks if one.host}
        watched = {(one.label, one.attempt) for one in self.bed.tasks.agents.values()}
        assert counted == watched

    def finish(self) -> None:
        """Train or drop all open items in the end, so that none is lost."""
        end = self.bed.ledger.record().next
        for _ in range(60):
            if self.bed.ledger.settled >= end:
                break
            one = self.tasks.get(0) or self.bed.begin(0)
            self.tasks = {0: one}
            one.hold(self.newest())
            self.bed.look("rollout/1", "rollout/2")
            one.receive(self.bed.incarnation)
            if one.leaving:
                self.tasks = {}
                continue
            one.finish(*one.open) if one.open else None
            self.bed.look()
            self.train()
        assert self.bed.ledger.settled >= end
        trained = {item for step in self.trained for item in step if item < end}
        dropped = sum(self.bed.ledger.dropped.values())
        assert len(trained) <= end <= len(trained) + dropped


Trial.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTrial = Trial.TestCase


def test_surplus_groups_wait_for_the_next_step_and_count_once(
    beds: Callable[..., Bed],
) -> None:
    bed = beds(batch_size=1, max_staleness=2)
    task = bed.begin(0, "0.1")
    task.finish(*task.open)
    bed.look()
    assert bed.train(dull=1) == []
    assert bed.train(dull=0, back=1) == []
    assert bed.tasks.view().trained == {"0": 1}
    assert bed.tasks.metrics()["rollout/staleness_max"] == 0
    (waiting,) = {one.item for one in bed.ledger.finished} - {2}
    assert bed.tasks.take(3, 2) is None, "it is read again before it is taken"
    bed.look()
    assert bed.train() == [waiting] == [1]
    assert bed.tasks.view().trained == {"0": 1, "2": 1}


def test_group_too_stale_for_the_next_step_is_generated_again(
    beds: Callable[..., Bed],
) -> None:
    bed = beds(batch_size=1, max_staleness=0)
    task = bed.begin(0, "0.1")
    task.finish(*task.open)
    bed.look()
    assert bed.train(dull=0, back=1) == []
    task.hold("1.1")
    bed.look()
    task.receive(1)
    assert list(task.open) == [0]
    assert not bed.ledger.dropped


def test_filtered_step_does_not_overtake_the_longest_groups(beds: Callable[..., Bed]) -> None:
    """The step waits for groups that would be too stale later, as long as the previous step
    took.
    """
    bed = beds(batch_size=1, max_staleness=1)
    task = bed.begin(0, "0.1")
    assert list(task.open) == [0, 1]

    def overtake(step: int) -> list[int] | None:
        """Finish a group of the newest weights, and let a step take the available groups."""
        task.hold(f"{step - 1}.1")
        bed.look()
        task.receive(1)
        task.finish(max(task.open))
        bed.look()
        taken = bed.tasks.take(step, 1, filtered=True)
        return None if taken is None else [one.item for one in taken]

    task.finish(0)
    bed.look()
    assert bed.train(dull=0) == [0], "the next step can train the other one"
    assert overtake(2) is None
    assert (
        bed.tasks.waits_for() == "for unfinished groups that would be too stale for any later step"
    )
    task.finish(1)
    bed.look()
    taken = bed.tasks.take(2, 1, filtered=True)
    assert [one.item for one in taken or ()] == [1]
    bed.step = 2
    bed.ledger.train([1], 2)
    task.hold("2.1")
    bed.look()
    task.receive(1)
    slow = min(task.open)
    assert bed.train(dull=0) == [2]
    bed.now += 100.0
    assert overtake(4) is None
    bed.now += 99.0
    assert bed.tasks.take(4, 1, filtered=True) is None
    bed.now += 10.0
    assert [one.item for one in bed.tasks.take(4, 1, filtered=True) or ()] == [slow + 1]


# -- leases ---------------------------------------------------------------------------------------


def test_least_loaded_tasks_get_the_next_items(beds: Callable[..., Bed]) -> None:
    bed = beds(batch_size=4, max_leased=6)
    first = bed.begin(0, "0.1")
    assert sorted(first.open) == [0, 1, 2, 3, 4, 5], "alone it may have all"
    second = bed.begin(1, "0.1")
    assert not second.open
    first.finish(0, 1)
    bed.look()
    assert first.receive(1) == []
    assert [request for request in second.receive(1) if isinstance(request, LeasedItems)] == [
        LeasedItems(
            lease="1.2",
            holder=second.name,
            items=(6, 7),
            rows=((0, 6), (0, 7)),
            oldest="0.1",
        )
    ]
    first.finish(2, 3, 4, 5)
    bed.look()
    assert first.receive(1) == second.receive(1) == [], "as far ahead as the staleness allows"


def test_first_task_with_new_weights_leaves_items_for_the_others(
    beds: Callable[..., Bed],
) -> None:
    """The reserve lasts as long as the other tasks may need to load the weights."""
    bed = beds(batch_size=6, max_staleness=0)
    tasks = [bed.begin(0), bed.begin(1), bed.begin(2)]
    for task in tasks:
        task.hold("0.1")
    bed.look()
    for task in tasks:
        task.receive(1)
        assert len(task.open) == 2, "they got the weights at the same time"
        task.finish(*task.open)
    bed.look()
    bed.train()
    tasks[0].hold("1.1")
    bed.look()
    tasks[1].hold("1.1")
    bed.look()
    for task in tasks:
        task.receive(1)
    assert [len(task.open) for task in tasks] == [2, 2, 0]
    bed.now += 20.0
    bed.look()
    for task in tasks:
        task.receive(1)
    assert [len(task.open) for task in tasks] == [3, 3, 0], "the last one took too long"


def test_task_without_usable_weights_gets_no_items(beds: Callable[..., Bed]) -> None:
    bed = beds()
    bed.tasks.take(1, 2)
    assert bed.tasks.view().waits_for == "for a rollout task"
    task = bed.begin(0)
    assert (task.open, bed.tasks.waits_for()) == (
        {},
        "for a rollout task that holds usable weights",
    )
    task.hold("5.7")
    bed.look()
    assert task.receive(1) == [], "these led nowhere"
    task.hold("0.1")
    bed.look()
    task.receive(1)
    assert sorted(task.open) == [0, 1, 2, 3]
    task.finish(2)
    bed.look()
    assert bed.tasks.waits_for() == "for groups of rollout tasks: 1 of 2"


def test_weights_unreadable_for_tasks_are_reported_missing(beds: Callable[..., Bed]) -> None:
    bed = beds()
    bed.tasks.take(1, 2)
    assert not bed.tasks.lack_weights, "there is no task"
    task = bed.begin(0)
    assert bed.tasks.lack_weights
    task.say(Unreadable(version="0.1", reason="cut"), Unreadable(version="5.7", reason="cut"))
    bed.look()
    assert bed.tasks.unreadable == {VersionId(0, 1)}, "the other one is not of this incarnation"
    (told,) = [one for one in read_all(bed.paths) if one["kind"] == "weights_unreadable"]
    assert (told["task"], told["version"], told["reason"]) == ("rollout/0", "0.1", "cut")
    task.hold("0.1")
    bed.look()
    assert not bed.tasks.lack_weights


def test_items_of_a_lost_task_go_to_another_and_late_results_are_dropped(
    beds: Callable[..., Bed],
) -> None:
    bed = beds()
    first = bed.begin(7, "0.1")
    first.receive(1)
    second = bed.begin(8, "0.1")
    bed.look("rollout/7", "trainer/0")
    second.receive(1)
    assert sorted(second.open) == sorted(first.open) == [0, 1, 2, 3]
    assert first.receive(1) == [Leave(within_s=0.0)], "it may be alive"
    first.finish(0)
    second.finish(0)
    bed.look()
    (sample,) = bed.ledger.finished
    assert sample.task == "rollout.8.0"
    assert bed.told()[-1] == ("rollout/7", "lost", "its agent no longer renews its lease")
    assert bed.tasks.agents.keys() == {"rollout/8"}


def test_items_of_a_task_that_cannot_write_go_to_other_tasks(
    beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without staleness, the step waits only for these items.

    Tasks that write, and the only task, keep theirs.
    """
    bed = beds(max_staleness=0, batch_size=4)
    mute, other = bed.begin(0, "0.1"), bed.begin(1, "0.1")
    other.receive(1)
    assert sorted((*mute.open, *other.open)) == [0, 1, 2, 3]

    def wait(seconds: float, *speaking: ScriptedTask) -> None:
        for _ in range(round(seconds / LOOK_S)):
            for one in speaking:
                one.say(RolloutCounts(counts={"tokens": 1.0}))
            bed.look()
        for one in (mute, other):
            one.receive(1)

    kept = {**mute.open}
    wait(2 * SILENT_S, mute, other)
    wait(2 * SILENT_S)
    assert mute.open == kept, "there is nobody who could work for it"
    wait(LOOK_S, mute, other)
    bed.now += 10 * SILENT_S  # the master hung
    wait(SILENT_S - 2 * LOOK_S, other)
    assert mute.open == kept
    with monkeypatch.context() as outage:
        outage.setattr(RolloutAttempt, "read", unreadable)
        wait(2 * LOOK_S)
    wait(SILENT_S - 2 * LOOK_S, other)
    assert mute.open == kept
    wait(4 * LOOK_S, other)
    assert mute.open == {}
    assert sorted(other.open) == [0, 1, 2, 3]
    told = [one for one in read_all(bed.paths) if one["kind"] == "task_silent"]
    assert [(one["task"], one["items"]) for one in told] == [("rollout/0", len(kept))]
    mute.open = {**kept}
    mute.finish(*kept)
    other.finish(*other.open)
    bed.look()
    assert bed.ledger.rejected["late"] == len(kept)
    assert bed.train() == [0, 1, 2, 3]
    mute.hold("1.1")
    other.hold("1.1")
    wait(2 * LOOK_S)
    assert mute.open, "it has its share again"


def unreadable(self: RolloutAttempt) -> Any:
    raise EnvironmentFailure("the directory does not answer")


def test_new_attempt_frees_the_items_of_the_previous_attempt(
    beds: Callable[..., Bed],
) -> None:
    """The new attempt joins only after its workers have started. The items do not wait for that."""
    bed = beds()
    first, other = bed.begin(7, "0.1"), bed.begin(8, "0.1")
    first.finish(min(first.open))
    make_private_directory(bed.paths.rollout_task("rollout", 7, 1))
    bed.look()
    assert [one.item for one in bed.ledger.finished] == [0], "what it had said counts"
    bed.look()
    other.receive(1)
    assert sorted(other.open) == [1, 2, 3]
    assert bed.told()[-1] == ("rollout/7", "lost", "its task was started again")


@pytest.mark.parametrize("restarts", [False, True])
def test_attempt_may_join_long_after_it_began(
    beds: Callable[..., Bed], paths: RunPaths, restarts: bool
) -> None:
    """The status shows the attempt while its agent lives. If a job is preempted, the agent of an
    attempt may start hours after the attempt began.
    """
    bed = beds()
    for task in (7, 8):
        make_private_directory(paths.rollout_task("rollout", task, 0))
    lease = Lease(paths.lease("rollout", 8, 0))
    for _ in range(round(2 * TTL_S / LOOK_S)):
        lease.beat()
        bed.look()
        told = bed.tasks.view().tasks
    assert [one.task for one in told] == ["rollout/8"]
    bed.write_commit()
    bed.look()
    if restarts:
        bed.restart()
    joined = bed.begin(7, "0.1")
    assert sorted(joined.open) == [0, 1, 2, 3]


def test_replaced_attempt_is_ended_even_if_its_successor_left(beds: Callable[..., Bed]) -> None:
    """A new master reads the messages of both attempts at the same time, and only it can end the
    first attempt.
    """
    bed = beds()
    bed.begin(7, "0.1")
    bed.begin(7, "0.1").leave()
    bed.look()
    bed.restart()
    bed.look()
    assert bed.tasks.waits_for() == "for a rollout task"
    assert bed.tasks.view().lost == 0, "only what is leased in a commit can be lost again"
    bed.write_commit()
    bed.restart()
    bed.look()
    assert bed.tasks.view().tasks == ()


def test_leaving_task_returns_all_its_items(beds: Callable[..., Bed]) -> None:
    """This includes items that it has not read."""
    bed = beds()
    task = bed.begin(7, "0.1")
    bed.tasks.leave("rollout.7.0", 30.0)
    bed.look()
    assert task.receive(1) == [Leave(within_s=30.0)]
    task.open.pop(3)
    task.leave()
    bed.look()
    assert (bed.ledger.leased, bed.ledger.holders) == (0, [])
    assert bed.told()[-1] == ("rollout/7", "left", "preemption")
    view = bed.tasks.view()
    assert (view.given_back, view.lost, view.tasks) == (3, 1, ())


def test_retiring_task_gets_no_more_items(beds: Callable[..., Bed]) -> None:
    """Until its end, the task finishes its current items. Other tasks get the rest at once."""
    bed = beds(max_staleness=0, batch_size=4)
    retiring, other = bed.begin(0, "0.1"), bed.begin(1, "0.1")
    other.receive(1)
    begun, *waiting = sorted(retiring.open)
    retiring.give_back(*waiting)
    for _ in range(2):
        bed.look()
        assert retiring.receive(1) == []
        other.receive(1)
    assert sorted(other.open) == [item for item in range(4) if item != begun]
    assert [one.leaving for one in bed.tasks.view().tasks] == [True, False]
    retiring.finish(begun)
    other.finish(*other.open)
    bed.look()
    assert bed.train() == [0, 1, 2, 3]


def test_damaged_log_loses_only_its_task(beds: Callable[..., Bed], paths: RunPaths) -> None:
    bed = beds()
    task = bed.begin(7, "0.1")
    task.finish(0)
    with paths.rollout_results(*task.place).open("ab") as file:
        file.write(message_log.encode({"type": "unheard of"}))
    bed.look()
    (*_, (_, state, reason)) = bed.told()
    assert (state, "has 'unheard of' in 'type'" in reason) == ("lost", True)
    assert (bed.ledger.leased, len(bed.ledger.finished)) == (0, 1)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_replaced_log_loses_only_its_task(
    beds: Callable[..., Bed], paths: RunPaths, kind: str
) -> None:
    bed = beds(max_staleness=0, batch_size=4)
    task, other = bed.begin(7, "0.1"), bed.begin(8, "0.1")
    other.receive(1)
    task.finish(next(iter(task.open)))
    bed.look()
    replace_by(paths.rollout_requests(*task.place, 1), kind)
    bed.tasks.leave("rollout.7.0", 99.0)
    bed.look()
    replace_by(paths.rollout_results(*task.place), kind)
    bed.look()
    bed.look()
    assert [one.task for one in bed.tasks.view().tasks] == ["rollout/8"]
    (lost,) = [reason for *who, reason in bed.told() if who == ["rollout/7", "lost"]]
    assert "not a regular file" in lost
    other.receive(1)
    other.finish(*other.open)
    bed.look()
    assert len(bed.train()) == 4


# -- staleness ------------------------------------------------------------------------------------


def test_too_stale_groups_are_dropped_and_leases_withdrawn(beds: Callable[..., Bed]) -> None:
    bed = beds(max_staleness=1)
    slow, fast = bed.begin(0, "0.1"), bed.begin(1)
    old = sorted(slow.open)
    bed.tasks.leave("rollout.0.0", 99.0)
    slow.give_back(*old[2:])
    for step in range(1, 4):
        fast.hold(f"{step - 1}.1")
        bed.look()
        fast.receive(1)
        if step == 2:
            slow.finish(old[0])
        elif fast.open:
            fast.finish(*sorted(fast.open)[:2])
        bed.look()
        if step == 2:
            fast.finish(*sorted(fast.open))
            bed.look()
            bed.ledger.finish("none", bed.ledger.finished[0])
        bed.train()
    requests = slow.receive(1)
    assert Abort(lease="1.1", items=(old[1],)) in requests
    slow.open[old[1]] = "1.1"
    slow.finish(old[1])
    bed.look()
    metrics = bed.tasks.metrics()
    assert metrics["rollout/aborted"] == 1
    assert metrics["rollout/refused_late"] == 2
    assert metrics["rollout/staleness_max"] <= 1
    again = bed.tasks.metrics()
    assert not any(again.values())
    assert "rollout/staleness_mean" not in again


# -- restarts -------------------------------------------------------------------------------------


def test_new_master_confirms_valid_leases(beds: Callable[..., Bed]) -> None:
    """Results since the commit count, leases since the commit do not."""
    bed = beds(batch_size=4)
    task = bed.begin(0, "0.1")
    task.finish(0, 1)
    bed.look()
    bed.write_commit()
    task.finish(2)
    task.finish(3)
    bed.look()
    assert bed.train() == [0, 1, 2, 3]
    task.hold("1.1")
    bed.look()
    assert [one.lease for one in task.receive(1) if isinstance(one, LeasedItems)] == ["1.2"]
    bed.restart()
    bed.look()
    (confirm,) = task.receive(2)
    assert isinstance(confirm, Confirm)
    (held,) = confirm.leases
    assert (held.lease, held.oldest) == ("1.1", "0.1")
    assert held.items == (4, 5, 6, 7)
    assert held.rows == tuple((0, item) for item in held.items)
    assert set(task.open.values()) == {"1.1"}
    assert bed.train() == [0, 1, 2, 3]
    assert bed.tasks.agents["rollout/0"] == task.agent


def test_master_leases_no_items_before_it_knows_the_dataset(
    beds: Callable[..., Bed], paths: RunPaths
) -> None:
    bed = beds()
    bed.tasks = RolloutTasks(
        *(paths, bed.ledger, Lineage({1: None}), bed.admission, 1, EventWriter(paths, "master.1")),
        look_s=LOOK_S,
        lease_ttl_s=TTL_S,
        clock=lambda: bed.now,
    )
    task = bed.begin(0, "0.1")
    assert task.receive(1) == []
    bed.tasks.start(rows)
    bed.look()
    assert [type(one) for one in task.receive(1)] == [Confirm, LeasedItems]


@pytest.mark.parametrize(
    "attempts",
    [
        [{"name": "rollout.0.0"}] * 2,
        [{"name": "rollout"}],
        [{"name": "../rollout.0.0"}],
        [{"name": "rollout.0.0", "version": "new"}],
    ],
)
def test_invalid_attempt_record_is_corrupt(attempts: list[dict[str, Any]]) -> None:
    with pytest.raises(CorruptFileError):
        rollouts_of({"attempts": attempts}, "a commit")


def test_checkpoint_state_may_contain_attempts(beds: Callable[..., Bed]) -> None:
    """States of older versions, and of trials without tasks, contain none."""
    bed = beds()
    bed.begin(0, "0.1")
    bed.look()
    bed.write_commit()
    state = json.loads(bed.commit[0])
    (attempt,) = rollouts_of(state["rollouts"], "a commit").attempts
    assert (attempt.version, attempt.read.offset > 0) == ("0.1", True)
    assert wrong(state, STATE) is None
    assert wrong({"rollouts": None}, STATE) is None
    state["rollouts"]["attempts"] *= 2
    assert "in 'rollouts', expected attempts of rollout tasks" in str(wrong(state, STATE))


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_sample_is_generated_again(
    beds: Callable[..., Bed], paths: RunPaths, how: Damage
) -> None:
    """The other samples of its file are trained."""
    bed = beds()
    task = bed.begin(0, "0.1")
    task.finish(2, 1, 3)
    task.finish(0)
    lost, file = (0, 1) if how is remove else (3, 0)
    how(paths.rollout_samples(*task.place) / f"{file:08d}.samples", -1)
    bed.look()
    assert {one.item for one in bed.ledger.finished} == {0, 1, 2, 3} - {lost}
    (event,) = (one for one in read_all(paths) if one["kind"] == "samples_damaged")
    assert (event["task"], event["attempt"], event["item"]) == ("rollout/0", 0, lost)
    assert bed.tasks.metrics()["rollout/damaged"] == bed.tasks.view().damaged == 1
    assert lost not in bed.train()
    task.receive(1)
    assert task.open == {lost: "1.2"}, "a late answer of the first lease does not count"
    task.finish(lost)
    bed.look()
    assert lost in bed.train()


@pytest.mark.parametrize("how", DAMAGES)
def test_sample_damaged_after_its_check_fails_one_incarnation(
    beds: Callable[..., Bed], paths: RunPaths, how: Damage
) -> None:
    """The next incarnation checks the samples that the commit names before a step takes them."""
    bed = beds()
    task = bed.begin(0, "0.1")
    task.finish(0)
    task.finish(1)
    bed.look()
    bed.write_commit()
    how(paths.rollout_samples(*task.place) / "00000001.samples", -1)
    with pytest.raises(SampleFileError):
        bed.train()
    bed.restart()
    task.finish(2)
    assert bed.train() == [], "nothing was read yet"
    bed.look()
    task.receive(2)
    task.finish(1)
    bed.look()
    assert bed.train() == [0, 1]


# -- files ----------------------------------------------------------------------------------------


def test_sample_files_not_needed_by_a_commit_are_removed(
    beds: Callable[..., Bed], paths: RunPaths
) -> None:
    """Also covers the time after the end of their task, whose directory is removed last."""
    bed = beds()
    task = bed.begin(0, "0.1")
    for item in range(4):
        task.finish(item)
        bed.look()
    assert bed.train() == [0, 1]
    assert len(bed.files(task)) == 4, "the commit before the step needs them"
    bed.write_commit()
    bed.look()
    left = {sample.file for sample in bed.ledger.finished}
    assert bed.files(task) == left
    task.leave()
    bed.look()
    for _ in range(2):
        bed.write_commit()
        bed.look()
    assert bed.files(task) == left
    assert bed.train() == [2, 3]
    bed.write_commit()
    bed.look()
    assert not paths.rollout_task(*task.place).exists()
    bed.look()
    assert bed.tasks.record().attempts == ()


def test_surplus_tasks_get_the_message_leave(beds: Callable[..., Bed]) -> None:
    """The newest tasks leave first, after the time in which lost tasks would be known."""
    bed = beds()
    first, second, third = (bed.begin(task, "0.1") for task in range(3))
    set_wanted_tasks(bed.paths, "rollout", 1, MOST_COUNT)
    began = bed.now
    bed.look()
    while not (view := bed.tasks.view()).tasks[1].leaving:
        assert bed.now - began < 70
        bed.look()
    assert bed.now - began > 50
    assert (view.wanted, [one.leaving for one in view.tasks]) == (1, [False, True, True])
    leaves = [
        [one for one in heard.receive(1) if isinstance(one, Leave)] for heard in (second, third)
    ]
    assert [[one.within_s for one in each] for each in leaves] == [[LEAVE_S], [LEAVE_S]]
    assert not any(isinstance(one, Leave) for one in first.receive(1))
    set_wanted_tasks(bed.paths, "rollout", 0, MOST_COUNT)
    bed.look()
    assert bed.tasks.view().wanted == 0


MakeMaster: TypeAlias = Callable[[Settings, SampleLedger], RolloutTasks]


@pytest.fixture
def make_master(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> MakeMaster:
    """Return the rollout tasks that the master of a trial makes, without wake-ups."""
    monkeypatch.setattr(__main__, "fabric_wakeups", lambda *_: None)
    make_private_directory(paths.rollouts)

    def make(settings: Settings, ledger: SampleLedger) -> RolloutTasks:
        plan, lineage = make_plan(settings, scheduler="local"), Lineage({1: None})
        writer = EventWriter(paths, "master.1")
        return __main__._rollouts(paths, settings, plan, ledger, lineage, 1, None, writer)

    return make


@pytest.mark.parametrize(("place", "wanted"), [({}, 0), ({"gpus": "1"}, 1)])
def test_array_task_count_does_not_apply_in_the_trainers_job(
    paths: RunPaths,
    make_settings: Change,
    make_master: MakeMaster,
    place: dict[str, str],
    wanted: int,
) -> None:
    """A resumed trial may have them there instead (`rollout.gpus`)."""
    set_wanted_tasks(paths, "rollout", 0, 1)
    settings = make_settings(rollout={"tasks": {}, "backend": "native:d1", **place})
    tasks = make_master(settings, SampleLedger(1, Lineage({1: None})))
    tasks.look((), 0)
    assert tasks.view().wanted == wanted


@pytest.mark.parametrize(
    ("changes", "leased"),
    [
        ({"max_staleness": 0}, 4),
        ({"max_staleness": 2}, 12),
        ({"max_staleness": 2, "max_in_flight": 3}, 3),
        ({"min": 2}, 0),
    ],
)
def test_master_leases_items_according_to_the_settings(
    paths: RunPaths,
    make_settings: Change,
    make_master: MakeMaster,
    changes: dict[str, int],
    leased: int,
) -> None:
    """The test checks the items of the first task that joins, with batches of 4."""
    settings = make_settings(rollout={"tasks": {"max": 2, **changes}})
    ledger = SampleLedger(1, Lineage({1: None}))
    tasks = make_master(settings, ledger)
    task = ScriptedTask(paths, 0, 0)
    task.hold("0.1")
    tasks.start(rows)
    for _ in range(2):
        tasks.look((), 0)
    assert len(tasks.agents) == 1
    assert ledger.leased == leased
    task.receive(1)
    assert len(task.open) == leased


def test_first_task_gets_no_prompts_before_enough_tasks_joined(beds: Callable[..., Bed]) -> None:
    """With `min`, the master leases no items before this number of tasks has joined."""
    bed = beds(least=2)
    bed.begin(0, "0.1")
    assert bed.tasks.view().tasks[0].leased == 0
    assert bed.tasks.take(1, 2) is None
    assert bed.tasks.waits_for() == "for rollout tasks: 1 of at least 2"
    bed.begin(1, "0.1")
    leased = [one.leased for one in bed.tasks.view().tasks]
    assert leased[0] == leased[1] > 0


def fail(paths: RunPaths, task: int, attempt: int, host: str, exception: str) -> None:
    """Let an attempt at a task fail."""
    place = Identity("rollout", task, attempt, host, "50.0.0", f"50_{task}", 1)
    rank = Failure(cause=Cause.EXCEPTION, world=place.world, rank=0, exception=exception, host=host)
    names = NameStore(paths.names)
    claim = json.dumps(documents.to_json(place))
    names.add(keys.attempt("rollout", task, attempt), claim)
    publish_attempt(names, place, rank)


FOREIGN = "OwnershipError: /dev/shm/slurmrl-7 belongs to another user (uid {})"


def test_trial_fails_if_every_task_fails_in_the_same_way(beds: Callable[..., Bed]) -> None:
    bed = beds(allowed=2)
    bed.look()
    assert bed.tasks.take(1, 2) is None
    for number in range(3):
        fail(bed.paths, number, 0, f"r{number}", FOREIGN.format(number))
        bed.look()
    fail(bed.paths, 1, 1, "r0", FOREIGN.format(9))
    with pytest.raises(ReportedError, match=r"4 rollout tasks .* the last failure") as caught:
        bed.look()
    assert "rank 0: OwnershipError: /dev/shm/slurmrl-7" in str(caught.value)
    assert caught.value.failure.final


def test_trial_fails_if_tasks_keep_failing_on_the_only_host(
    beds: Callable[..., Bed],
) -> None:
    bed = beds(allowed=1)
    bed.look()
    assert bed.tasks.take(1, 2) is None
    for number in range(11):
        fail(bed.paths, number, 0, "r0", FOREIGN)
    bed.look()
    fail(bed.paths, 11, 0, "r0", FOREIGN)
    with pytest.raises(ReportedError, match=r"12 rollout tasks failed in the same way"):
        bed.look()


@pytest.mark.parametrize(
    "case", ["another works", "another host starts", "unlike", "earlier", "one host"]
)
def test_trial_continues_with_failed_tasks_if_others_may_work(
    beds: Callable[..., Bed], case: str
) -> None:
    bed = beds(allowed=1)
    if case == "earlier":  # the user has repaired it and resumed
        for number in range(1, 6):
            fail(bed.paths, number, 0, "r1", FOREIGN)
    bed.look()
    assert bed.tasks.take(1, 2) is None
    if case == "another works":
        bed.begin(7, "1.0")
    elif case == "another host starts":
        names = NameStore(bed.paths.names)
        claim = json.dumps(documents.to_json(bed.begin(7).agent))
        names.add(keys.attempt("rollout", 7, 0), claim)
    for number in range(1, 6 if case != "earlier" else 1):
        text = "".join(chr(97 + number) * 8) if case == "unlike" else FOREIGN
        fail(bed.paths, number, 0, "r1" if case == "one host" else f"r{number}", text)
        bed.look()
    bed.look()

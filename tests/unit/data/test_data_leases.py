"""The ledger of samples from rollout tasks: each item is trained at most once and never lost."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slurmrl.data.leases import (
    LATE,
    ROLLED_BACK,
    STALE,
    USED_STEPS,
    Admission,
    SampleLedger,
    oldest_step,
)
from slurmrl.data.ledger import LeasedItems, Ledger, LedgerRecord, StepRun, StoredGroup
from slurmrl.errors import CorruptFileError
from slurmrl.fsio import documents
from slurmrl.run.history.state import Lineage
from slurmrl.tensors.weights.format import VersionId

ALL_STEPS = Lineage({1: None})
HOLDERS = ("task-0.1", "task-1.1", "task-2.1")


def committed(ledger: Ledger) -> str:
    return json.dumps(documents.to_json(ledger.record()))


def read(text: str) -> LedgerRecord:
    record = documents.from_json(LedgerRecord, json.loads(text), "the ledger")
    record.check("the ledger")
    return record


def sample(item: int, *versions: str) -> StoredGroup:
    return StoredGroup(
        item=item,
        task="task-0.1",
        lease="1.1",
        file=f"{item}.samples",
        offset=7,
        length=9,
        checksum="xxh3_128:0",
        versions=versions,
    )


class Account(RuleBasedStateMachine):
    """The ledger, and a list with the state of each item that was taken: a tuple that begins with
    queued, leased, finished, in flight, trained or dropped.
    """

    BATCH = 2
    STALENESS = 1
    MOST_LEASED = 5
    ROUNDS = 2

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(
            max_staleness=self.STALENESS,
            batch_size=self.BATCH,
            max_leased=self.MOST_LEASED,
            filter_rounds=self.ROUNDS,
        )
        self.incarnation, self.step = 1, 0
        self.last_steps: dict[int, int | None] = {1: None}
        self.states: list[tuple[Any, ...]] = []
        self.leases: list[tuple[str, int]] = []
        """Every lease and item of it, also those that are over."""
        self.refused = Counter[str]()
        self.used: list[int] = []
        """Items that each step of the incarnation has trained or dropped."""
        self.ledger = SampleLedger(1, Lineage(self.last_steps))
        self.commit: tuple[Any, ...] = (committed(self.ledger), [], 0, dict(self.last_steps))

    def items(self, kind: str) -> list[int]:
        return [item for item, state in enumerate(self.states) if state[0] == kind]

    def in_flight(self) -> list[int]:
        return self.items("in flight")

    def ancestor(self, name: str) -> bool:
        step, by = map(int, name.split("."))
        last = self.last_steps.get(by, -1)
        return last is None or step <= last

    # -- tasks -------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6), holder=st.sampled_from(HOLDERS), lag=st.integers(0, 1))
    def lease(self, count: int, holder: str, lag: int) -> None:
        """Lease items. Weights may be published later than they are trained."""
        version = max(0, self.step - lag)
        leased, waiting = len(self.items("leased")), len(self.items("finished"))
        further = self.STALENESS + version - self.step
        lacking = self.BATCH - min(len(self.in_flight()), self.BATCH)
        ahead = lacking + further * self.expected(self.BATCH)
        room = max(0, min(self.MOST_LEASED, ahead - waiting) - leased)
        assert self.ledger.room(self.admission, version=version, step=self.step) == room
        count = min(count, room)
        queued = self.items("queued")
        fresh = range(len(self.states), len(self.states) + max(count - len(queued), 0))
        self.states += [("queued",) for _ in fresh]
        wanted = (*queued[:count], *fresh)
        found = self.ledger.lease(count, holder, "0.1")
        assert (found.holder, found.items) == (holder, wanted)
        assert found.lease not in {lease for lease, _ in self.leases}
        for item in wanted:
            self.leases.append((found.lease, item))
            self.states[item] = ("leased", found.lease, holder)

    @precondition(lambda self: self.items("leased"))
    @rule(least=st.integers(0, 2), age=st.sampled_from([0, 0, 1]))
    def finish_all(self, least: int, age: int) -> None:
        """Let tasks finish all their items, or all from one item on."""
        for item in self.items("leased")[least:]:
            self.finish(self.states[item][1], item, self.incarnation, [age])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ages=st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True))
    def finish_again(self, data: st.DataObject, ages: list[int]) -> None:
        """Record any result that a task may have written, again or for the first time."""
        lease, item = data.draw(st.sampled_from(self.leases))
        self.finish(lease, item, data.draw(st.integers(1, self.incarnation)), ages)

    def finish(self, lease: str, item: int, by: int, ages: list[int]) -> None:
        versions = [f"{max(0, self.step - age)}.{by}" for age in ages]
        versions = sorted(set(versions), key=VersionId.parse)
        held = self.states[item][:2] == ("leased", lease) if item < len(self.states) else False
        good = all(map(self.ancestor, versions))
        assert self.ledger.finish(lease, sample(item, *versions)) == (held and good)
        if held:
            self.states[item] = ("finished", *versions) if good else ("queued",)
        if not (held and good):
            self.refused[ROLLED_BACK if held else LATE] += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), what=st.sampled_from(["return", "redo", "lose", "commit", "restart"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        if what == "restart":
            self.restart()
        elif what == "commit":
            self.write_commit()
        elif what == "lose":
            self.lose(data.draw(st.sampled_from(HOLDERS)))
        else:
            lease, item = data.draw(st.sampled_from(self.leases))
            if what == "return":
                self.return_item(lease, item)
            else:
                self.redo(item)

    def return_item(self, lease: str, item: int) -> None:
        held = self.states[item][:2] == ("leased", lease) if item < len(self.states) else False
        assert self.ledger.return_items(lease, [item]) == [item] * held
        if held:
            self.states[item] = ("queued",)

    def redo(self, item: int) -> None:
        """Report a sample as unreadable, which perhaps no step needs."""
        waits = item in self.items("finished")
        versions = self.states[item][1:] if waits else ("0.1",)
        assert not self.ledger.redo(sample(item, *versions, "99.9"))
        assert self.ledger.redo(sample(item, *versions)) == waits
        if waits:
            self.states[item] = ("queued",)

    def lose(self, holder: str) -> None:
        lost = [item for item in self.items("leased") if self.states[item][2] == holder]
        assert self.ledger.lose(holder) == lost
        for item in lost:
            self.states[item] = ("queued",)

    # -- training ----------------------------------------------------------------------------

    def expected(self, count: int) -> int:
        fewest = min(self.used[-USED_STEPS:], default=self.BATCH)
        used = max(self.BATCH, min(fewest, self.ROUNDS * self.BATCH))
        return math.ceil(count * used / self.BATCH)

    @precondition(lambda self: len(self.items("finished")) >= self.BATCH and not self.in_flight())
    @rule(unread=st.just(set()) | st.sets(st.integers(0, 8)), filtered=st.booleans())
    def take(self, unread: set[int], filtered: bool) -> None:
        """Take items. Some of their samples may not be checked yet."""
        most = self.ledger.expected(self.BATCH, self.admission)
        assert most == self.expected(self.BATCH)
        sound = {one for one in self.ledger.finished if one.item not in unread}
        oldest = {
            item: min(int(name.split(".")[0]) for name in self.states[item][1:])
            for item in self.items("finished")
        }
        for item in [item for item, version in oldest.items() if self.step - version > 1]:
            del oldest[item]
            self.states[item] = ("dropped", STALE)
        ready = sorted(oldest.keys() - unread, key=lambda item: (oldest[item], item))
        last_chance = sum(oldest[item] == self.step - self.STALENESS for item in ready)
        count = max(most, last_chance) if filtered else self.BATCH
        wanted = ready[:count] if len(ready) >= self.BATCH else []
        taken = self.ledger.take_finished(
            self.BATCH,
            self.step + 1,
            self.STALENESS,
            most=most if filtered else None,
            sound=sound,
        )
        assert [one.item for one in taken] == wanted
        for one in taken:
            assert all(self.step - int(name.split(".")[0]) <= 1 for name in one.versions)
            assert one.versions == self.states[one.item][1:]
            self.states[one.item] = ("in flight", *one.versions)

    @precondition(lambda self: bool(self.in_flight()))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """Train items. A filter may drop some, and others may exceed the batch."""
        trained, used = [], 0
        for item in self.in_flight():
            end = data.draw(st.sampled_from(["trained", "trained", "filtered", "too many"]))
            if end == "trained":
                trained.append(item)
            elif end == "filtered":
                self.ledger.drop([item], end)
                self.states[item] = ("dropped", end)
                used += 1
            else:
                self.ledger.give_back([item])
                self.states[item] = ("finished", *self.states[item][1:])
        self.ledger.train(trained, self.step + 1)
        for item in trained:
            self.states[item] = ("trained", self.step + 1)
        self.used.append(used + len(trained))
        self.step += 1

    # -- restarts ----------------------------------------------------------------------------

    def write_commit(self) -> None:
        last = {**self.last_steps, self.incarnation: self.step}
        self.commit = committed(self.ledger), list(self.states), self.step, last

    def restart(self) -> None:
        text, states, self.step, last_steps = self.commit
        self.incarnation += 1
        self.last_steps = {**last_steps, self.incarnation: None}
        self.ledger = SampleLedger(self.incarnation, Lineage(self.last_steps), read(text))
        self.refused, self.used = Counter(), []
        self.states = list(states)
        for item, state in enumerate(self.states):
            if state[0] in ("finished", "in flight"):
                good = all(map(self.ancestor, state[1:]))
                self.states[item] = ("finished", *state[1:]) if good else ("queued",)
                self.refused[ROLLED_BACK] += not good

    # -- what holds --------------------------------------------------------------------------

    @invariant()
    def accounts_for_each_item_once(self) -> None:
        record = read(committed(self.ledger))
        assert record == self.ledger.record()
        assert record.next == len(self.states)
        assert record.in_flight == ()
        over = ("trained", "dropped")
        unsettled = [i for i, state in enumerate(self.states) if state[0] not in over]
        assert record.settled == self.ledger.settled == min([*unsettled, record.next])
        found: list[tuple[Any, ...]] = [("queued",)] * record.next
        for lease in record.leased:
            for item in lease.items:
                found[item] = ("leased", lease.lease, lease.holder)
        for one in record.samples:
            found[one.item] = ("finished", *one.versions)
        for steps in record.trained:
            found[steps.first : steps.stop] = [("trained", steps.step)] * (steps.stop - steps.first)
        for run in record.dropped:
            count = run.stop - run.first
            found[run.first : run.stop] = [("dropped", run.reason)] * count
        wanted = [("finished", *s[1:]) if s[0] == "in flight" else s for s in self.states]
        assert found[record.settled :] == wanted[record.settled :]
        drops = Counter(state[1] for state in self.states if state[0] == "dropped")
        assert Counter(self.ledger.dropped) == drops
        assert self.ledger.trained == len(self.items("trained"))
        assert self.ledger.leased == len(self.items("leased"))
        holders = {state[2] for state in self.states if state[0] == "leased"}
        assert self.ledger.holders == sorted(holders)
        assert self.ledger.rejected == self.refused


Account.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAccount = Account.TestCase
# -- admission ------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_rollouts_run_ahead_by_at_most_the_allowed_staleness(max_staleness: int) -> None:
    """Tasks that take as many items as allowed finish each step's samples with weights within the
    bound, and none is dropped. With staleness 0, a step begins when the previous one has ended.
    """
    admission = Admission(max_staleness=max_staleness, batch_size=4, max_leased=100)
    ledger = SampleLedger(1, ALL_STEPS)
    seen = set()
    for step in range(1, 20):
        room = ledger.room(admission, version=step - 1, step=step - 1)
        assert room == (4 if step > 1 else 4 * (max_staleness + 1))
        lease = ledger.lease(room, "task", "0.1")
        for item in lease.items:
            assert ledger.finish(lease.lease, sample(item, f"{step - 1}.1"))
        assert ledger.room(admission, version=step - 1, step=step - 1) == 0
        taken = ledger.take_finished(4, step, max_staleness)
        seen |= {step - 1 - int(one.versions[0].split(".")[0]) for one in taken}
        ledger.train([one.item for one in taken], step)
        assert ledger.trained == 4 * step
    assert max(seen) == max_staleness
    assert ledger.dropped == {}


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_more_items_are_generated_ahead_if_a_filter_drops_some(
    max_staleness: int, share: float
) -> None:
    """Steps filter candidates until a batch is accepted. This takes few rounds, because tasks
    generate most candidates during the previous step. Surplus accepted items wait for the next
    step. No item becomes stale, even if tasks are always ahead.
    """
    admission = Admission(
        max_staleness=max_staleness, batch_size=8, max_leased=None, filter_rounds=20
    )
    ledger = SampleLedger(1, ALL_STEPS)
    chance = Random(0)
    rounds = []

    def generate(version: int, step: int) -> None:
        room = ledger.room(admission, version=version, step=step)
        lease = ledger.lease(room, "task", "0.1")
        for item in lease.items:
            assert ledger.finish(lease.lease, sample(item, f"{version}.1"))

    for step in range(1, 60):
        accepted: list[int] = []
        rounds.append(0)
        while len(accepted) < 8:
            generate(step - 1, step - 1)
            missing = 8 - len(accepted)
            most = ledger.expected(missing, admission)
            taken = [o.item for o in ledger.take_finished(missing, step, max_staleness, most=most)]
            accepted += [item for item in taken if chance.random() < share]
            ledger.drop(set(taken) - set(accepted), "dull")
            rounds[-1] += 1
        ledger.give_back(accepted[8:])
        for one in [one for one in ledger.finished if one.item in accepted]:
            if oldest_step(one) < step - max_staleness:  # as the master does
                assert ledger.redo(one)
        generate(step - 1, step - 1)
        ledger.train(accepted[:8], step)
    assert ledger.trained == 8 * 59
    mean = sum(rounds[USED_STEPS:]) / len(rounds[USED_STEPS:])
    if max_staleness:
        assert mean < 3
    else:
        assert mean > 4
    assert ledger.dropped.keys() == {"dull"}


# -- what a commit holds --------------------------------------------------------------------------


def test_commit_holds_only_open_items() -> None:
    ledger = SampleLedger(1, ALL_STEPS)
    sizes = set()
    for step in range(1, 300):
        lease = ledger.lease(4, "task", "0.1")
        for item in lease.items:
            ledger.finish(lease.lease, sample(item, f"{step - 1}.1"))
        ledger.train([one.item for one in ledger.take_finished(4, step, 0)], step)
        sizes.add(len(committed(ledger)) - 2 * len(str(4 * step)))
    assert len(sizes) == 1


def test_trial_can_switch_rollout_tasks_on_and_off_at_any_commit() -> None:
    """Items of rollout tasks are queued again for a trial without them, and the other way round."""
    tasks = SampleLedger(1, ALL_STEPS)
    lease = tasks.lease(3, "task", "0.1")
    tasks.finish(lease.lease, sample(1, "0.1"))
    own = Ledger(read(committed(tasks)))
    assert own.take(4, 1) == [0, 1, 2, 3]
    tasks = SampleLedger(2, Lineage({2: None}), read(committed(own)))
    assert tasks.lease(5, "task", "0.1").items == (0, 1, 2, 3, 4)


GOOD = LedgerRecord(
    settled=10,
    next=20,
    trained=(StepRun(first=12, stop=14, step=3),),
    leased=(LeasedItems(lease="1.2", holder="task-0.1", items=(10, 15), oldest="2.1"),),
    samples=(sample(11, "2.1"), sample(16, "2.1", "3.1")),
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"samples": (sample(12, "2.1"),)}, "12 to 13 twice"),
        ({"samples": (sample(15, "2.1"),)}, "15 to 15 twice"),
        ({"samples": (sample(11, "2.1"), sample(11, "3.1"))}, "11 to 11 twice"),
        ({"samples": (sample(20, "2.1"),)}, "20 to 20 twice, or out of place"),
        ({"samples": (sample(11),)}, "'samples'"),
        ({"samples": (replace(sample(11, "2.1"), task=""),)}, r"without a task attempt: \[11\]"),
        ({"samples": (sample(11, "new"),)}, "'samples'"),
        ({"leased": GOOD.leased * 2}, "a lease twice"),
        ({"leased": (replace(GOOD.leased[0], items=(9,)),)}, "9 to 9 twice, or out of place"),
        ({"leased": (replace(GOOD.leased[0], items=(10, 10)),)}, "10 to 10 twice"),
    ],
)
def test_contradictory_lease_record_is_rejected(change: dict[str, Any], problem: str) -> None:
    """A trial that continued from it would train items twice or never."""
    assert read(json.dumps(documents.to_json(GOOD))) == GOOD
    wrong = replace(GOOD, **change)
    with pytest.raises(CorruptFileError, match=problem):
        read(json.dumps(documents.to_json(wrong)))


def test_record_without_rollout_tasks_has_only_its_own_keys() -> None:
    ledger = Ledger()
    ledger.take(2, 1)
    assert json.loads(committed(ledger)).keys() == {"next", "in_flight"}

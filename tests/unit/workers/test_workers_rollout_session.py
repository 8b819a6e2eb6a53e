"""Tests of the answers of a rollout task for any order of requests, results, incarnations and
failures.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slurmrl.data.ledger import LeasedItems
from slurmrl.rollouts.sample_files import SampleGroup
from slurmrl.tensors.weights.format import VersionId
from slurmrl.workers.rollout.session import Key, Session
from slurmrl.workers.rollout_messages import (
    Abort,
    Confirm,
    GaveBack,
    Leave,
)
from tests.support.sample_groups import small_group

MOST_BEGUN, MOST_UNWRITTEN = 3, 4
ANY = st.randoms(use_true_random=False)


def lease_of(keys: set[Key], oldest: int) -> tuple[LeasedItems, ...]:
    items: dict[str, tuple[int, ...]] = {}
    for lease, item in sorted(keys):
        items[lease] = *items.get(lease, ()), item
    return tuple(
        LeasedItems(
            lease=lease,
            holder="rollout.0.1",
            items=own,
            rows=tuple((0, item) for item in own),
            oldest=f"{oldest}.0",
        )
        for lease, own in items.items()
    )


class AnyOrder(RuleBasedStateMachine):
    """The state machine, and sets of wanted items, items in progress, and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(most_begun=MOST_BEGUN, most_unwritten=MOST_UNWRITTEN)
        self.incarnation, self.leases, self.held = 0, 0, -1
        self.confirmed = False
        self.now = 0.0
        self.deadline: float | None = None
        self.ever: dict[Key, int] = {}
        """All that was ever leased, with the oldest weights."""
        self.wanted: set[Key] = set()
        self.making: set[Key] = set()
        self.doomed: set[Key] = set()
        """Of these and of those that are judged, what nobody waits for any more."""
        self.judging: set[Key] = set()
        """Whose tokens are there."""
        self.ready: set[Key] = set()
        """Samples that are there, wanted without a break and not answered."""
        self.writing: list[SampleGroup] | None = None
        self.answers: Counter[Key] = Counter()

    @initialize()
    def begins(self) -> None:
        self.restarts(random=None)
        self.holds()

    # -- requests

    @rule()
    def serves(self) -> None:
        self.incarnation += 1
        self.confirmed = False
        self.session.serve(self.incarnation)
        self.session.serve(self.incarnation - 1)  # late: no change

    @rule(random=ANY)
    def restarts(self, random: Random | None) -> None:
        self.serves()
        self.confirms(random=random)

    @precondition(lambda self: not self.confirmed)
    @rule(random=ANY)
    def confirms(self, random: Random | None) -> None:
        self.names({key for key in sorted(self.ever) if random and random.random() < 0.6})

    def names(self, named: set[Key]) -> None:
        """Let the new master name the valid leases."""
        self.session.take(Confirm(leases=lease_of(named, 0)), self.now)
        self.confirmed, self.wanted = True, named
        self.ever |= dict.fromkeys(named, 0)
        self.doomed |= (self.making | self.judging) - named
        self.ready = (self.ready | self.written()) & named

    @precondition(lambda self: self.confirmed)
    @rule(count=st.integers(1, 3), oldest=st.sampled_from([0, 0, 0, 1, 4]))
    def asks(self, count: int, oldest: int) -> None:
        self.leases += 1
        keys = {(f"{self.incarnation}.{self.leases}", item) for item in range(count)}
        (request,) = lease_of(keys, oldest)
        self.session.take(request, self.now)
        self.ever |= dict.fromkeys(keys, oldest)
        self.wanted |= keys

    @precondition(lambda self: self.confirmed and self.wanted)
    @rule(random=ANY)
    def aborts(self, random: Random) -> None:
        lease, item = random.choice(sorted(self.wanted))
        self.session.take(Abort(lease=lease, items=(item,)), self.now)
        self.wanted.discard((lease, item))
        self.ready.discard((lease, item))
        self.doomed |= (self.making | self.judging) & {(lease, item)}

    @precondition(lambda self: self.held < 4)
    @rule()
    def holds(self) -> None:
        self.held += 1
        self.session.held = VersionId(self.held, 0)

    @rule(paused=st.booleans())
    def pauses(self, paused: bool) -> None:
        self.session.paused = paused

    @rule(within_s=st.integers(0, 5), asked=st.booleans(), rarely=st.integers(0, 7))
    def retires(self, within_s: int, asked: bool, rarely: int) -> None:
        if rarely:
            return
        if asked and self.confirmed:
            self.session.take(Leave(within_s=within_s), self.now)
        else:
            self.session.retire("preemption", within_s, self.now)
        until = self.now + within_s
        self.deadline = until if self.deadline is None else min(until, self.deadline)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.session.expire(self.now)
        if self.deadline is not None and self.deadline <= self.now:
            self.ready |= self.judging - self.doomed
            self.doomed |= self.making | self.judging

    def written(self) -> set[Key]:
        """Return the data to record next."""
        return {(group.lease, group.item) for group in self.writing or ()}

    # -- work

    @rule()
    def works(self) -> None:
        for key in self.session.aborted():
            self.doomed.remove(key)
            self.making.discard(key)
            self.judging.discard(key)
        assert not self.doomed
        begun = list(self.session.begin())
        if begun:
            assert self.confirmed
            assert not self.session.paused
            assert self.deadline is None
        for key in begun:
            assert key in self.wanted
            assert key not in self.making | self.judging | self.ready
            assert not self.answers[key]
            assert self.held >= self.ever[key]
            self.making.add(key)
        assert len(self.making) <= MOST_BEGUN
        assert self.session.idle == (not self.making)

    @precondition(lambda self: self.making)
    @rule(random=ANY)
    def draws(self, random: Random) -> None:
        """Sample the last token of an item. An unwanted item was already dropped."""
        lease, item = random.choice(sorted(self.making))
        self.making.discard((lease, item))
        self.session.sampled((lease, item), small_group(item, lease))
        self.judging.add((lease, item))

    @precondition(lambda self: self.judging)
    @rule(random=ANY)
    def finishes(self, random: Random) -> None:
        lease, item = random.choice(sorted(self.judging))
        self.judging.discard((lease, item))
        self.session.finish((lease, item), small_group(item, lease))
        if (lease, item) not in self.doomed:
            self.ready.add((lease, item))

    @precondition(lambda self: self.confirmed and self.writing is None)
    @rule(ends=st.just(True))
    def makes_and_records(self, ends: bool) -> None:
        self.works()
        for lease, item in sorted(self.making | self.judging):
            if (lease, item) in self.making:
                self.session.sampled((lease, item), small_group(item, lease))
            self.session.finish((lease, item), small_group(item, lease))
            self.ready.add((lease, item))
        self.making, self.judging = set(), set()
        self.begins_to_record()
        if ends:
            self.ends_to_record(fails=False)

    @precondition(lambda self: self.writing is None)
    @rule()
    def begins_to_record(self) -> None:
        groups = self.session.to_record()
        keys = {(group.lease, group.item) for group in groups}
        assert len(keys) == len(groups)
        assert keys == (self.ready if self.confirmed else set())
        assert keys <= self.wanted
        self.writing = groups

    @precondition(lambda self: self.writing is not None)
    @rule(fails=st.booleans())
    def ends_to_record(self, fails: bool) -> None:
        keys, self.writing = self.written(), None
        if fails:
            self.session.unrecorded()
            return
        self.session.recorded()
        self.answers.update(keys)
        self.ready -= keys

    @precondition(lambda self: self.confirmed and self.writing is None)
    @rule()
    def is_named_again_while_it_writes(self) -> None:
        """A master omits the leases whose samples are being written, and its successor
        names them.
        """
        self.asks(count=2, oldest=0)
        self.makes_and_records(ends=False)
        self.restarts(random=None)
        self.serves()
        self.names(self.written())

    @rule()
    def gives_back(self) -> None:
        for answer in self.session.to_give_back():
            assert isinstance(answer, GaveBack)
            assert self.deadline is not None
            keys = {(answer.lease, item) for item in answer.items}
            assert keys <= self.wanted
            assert not keys & self.ready
            self.answers.update(keys)

    @invariant()
    def nothing_is_answered_twice(self) -> None:
        assert all(count == 1 for count in self.answers.values())

    def teardown(self) -> None:
        """Check that every requested item is answered once in the end."""
        if not self.incarnation:
            return
        if not self.confirmed:
            self.confirms(random=None)
        if self.writing is not None:
            self.ends_to_record(fails=True)
        self.session.paused = False
        while self.held < 4:
            self.holds()
        for _ in range(len(self.ever) + 1):
            self.makes_and_records(ends=True)
            self.gives_back()
        assert {key for key in self.wanted if not self.answers[key]} == set()
        self.nothing_is_answered_twice()
        assert self.session.over == (self.deadline is not None)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_task_exits_at_its_deadline_without_lease_confirmation() -> None:
    """The task does not record samples whose leases may have expired."""
    session = Session(most_begun=1, most_unwritten=1)
    session.serve(1)
    session.held = VersionId(0, 0)
    session.take(Confirm(leases=lease_of({("1.1", 0), ("1.1", 1)}, 0)), 0.0)
    (key,) = session.begin()
    session.sampled(key, small_group(0, "1.1"))
    session.finish(key, small_group(0, "1.1"))
    session.serve(2)
    assert (session.to_record(), session.begin()) == ([], {})
    session.retire("warning", 5.0, 0.0)
    session.expire(4.9)
    assert not session.over
    session.expire(5.0)
    assert session.over
    assert session.to_give_back() == []

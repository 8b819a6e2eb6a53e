"""The ledger of a trial's data: in any order of events, each item is trained or dropped once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slurmrl.data.ledger import DropCount, DroppedRun, Ledger, LedgerRecord, StepRun
from slurmrl.errors import CorruptFileError
from slurmrl.fsio import documents
from slurmrl.fsio.documents import MOST_COUNT


def committed(ledger: Ledger) -> str:
    return json.dumps(documents.to_json(ledger.record()))


def read(text: str) -> LedgerRecord:
    record = documents.from_json(LedgerRecord, json.loads(text), "the ledger")
    record.check("the ledger")
    return record


class Account(RuleBasedStateMachine):
    """The ledger, and a list with the state of each item that was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.states: list[Any] = []
        self.step = 0
        self.commit = committed(self.ledger), list[Any]()

    def in_flight(self) -> list[int]:
        return [item for item, state in enumerate(self.states) if state[0] == "in flight"]

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        self.step += 1
        queued = [item for item, state in enumerate(self.states) if state == ("queued",)]
        fresh = range(len(self.states), len(self.states) + max(count - len(queued), 0))
        self.states += [("queued",) for _ in fresh]
        wanted = [*queued[:count], *fresh]
        assert self.ledger.take(count, self.step) == wanted
        for item in wanted:
            self.states[item] = ("in flight", self.step)

    @precondition(in_flight)
    @rule(data=st.data(), end=st.sampled_from(["trained", "dropped", "queued"]))
    def end(self, data: st.DataObject, end: str) -> None:
        items = data.draw(st.lists(st.sampled_from(self.in_flight()), unique=True))
        if end == "trained":
            self.ledger.train(items, self.step)
        elif end == "dropped":
            self.ledger.drop(items, f"reason {self.step % 3}")
        else:
            self.ledger.give_back(items)
        marks = {"trained": (self.step,), "dropped": (f"reason {self.step % 3}",), "queued": ()}
        for item in items:
            self.states[item] = (end, *marks[end])

    @rule()
    def write_commit(self) -> None:
        self.commit = committed(self.ledger), list(self.states)

    @rule()
    def restart(self) -> None:
        """Restart from the commit: later work is undone, and items in flight are queued again."""
        text, states = self.commit
        self.ledger = Ledger(read(text))
        self.states = [("queued",) if state[0] == "in flight" else state for state in states]

    @invariant()
    def accounts_for_each_item_once(self) -> None:
        record = read(committed(self.ledger))
        assert record == self.ledger.record()
        assert record.next == len(self.states)
        open_items = [i for i, s in enumerate(self.states) if s[0] in ("in flight", "queued")]
        assert record.settled == self.ledger.settled == min([*open_items, record.next])
        found: list[Any] = [("queued",)] * record.next
        for kind, runs in (("in flight", record.in_flight), ("trained", record.trained)):
            for run in runs:
                found[run.first : run.stop] = [(kind, run.step)] * (run.stop - run.first)
        for run in record.dropped:
            found[run.first : run.stop] = [("dropped", run.reason)] * (run.stop - run.first)
        assert found[record.settled :] == self.states[record.settled :]
        drops = Counter(s[1] for s in self.states if s[0] == "dropped")
        assert Counter(self.ledger.dropped) == drops
        before = Counter(s[1] for s in self.states[: record.settled] if s[0] == "dropped")
        assert {count.reason: count.items for count in record.dropped_before} == before


Account.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAccount = Account.TestCase


def test_commit_size_does_not_grow_with_the_trial() -> None:
    """A commit contains only open items, regardless of the number of trained and dropped items."""
    ledger = Ledger()
    sizes = set()
    for step in range(1, 400):
        items = ledger.take(8, step)
        ledger.drop(items[:1], "too long")
        ledger.train(items[1:], step)
        sizes.add(len(committed(ledger)) - len(str(ledger.record().next)) * 2)
    assert max(sizes) - min(sizes) <= 2
    assert ledger.dropped == {"too long": 399}


@pytest.mark.parametrize("end", ["train", "drop", "give_back"])
@pytest.mark.parametrize("items", [[0], [2], [1, 1], [1, 9]])
def test_ledger_item_can_be_ended_only_once(end: str, items: list[int]) -> None:
    ledger = Ledger()
    ledger.take(3, 1)
    ledger.train([0], 1)
    ledger.give_back([2])
    before = ledger.record()
    more = {"train": (1,), "drop": ("why",), "give_back": ()}[end]
    with pytest.raises(ValueError, match="must be in flight"):
        getattr(ledger, end)(items, *more)
    assert ledger.record() == before


GOOD = LedgerRecord(
    settled=10,
    next=20,
    in_flight=(StepRun(first=10, stop=12, step=4),),
    trained=(StepRun(first=13, stop=15, step=3),),
    dropped=(DroppedRun(first=15, stop=16, reason="too long"),),
    dropped_before=(DropCount(reason="too long", items=10),),
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"next": 9}, "'settled' 10 and 'next' 9"),
        ({"next": 11 + MOST_COUNT}, "items between them"),
        ({"trained": (StepRun(first=11, stop=15, step=3),)}, "11 to 14 twice"),
        ({"trained": (StepRun(first=9, stop=10, step=3),)}, "9 to 9 twice, or out of place"),
        ({"trained": (StepRun(first=18, stop=21, step=3),)}, "18 to 20 twice, or out of place"),
        ({"trained": (StepRun(first=14, stop=14, step=3),)}, "out of place"),
        ({"dropped_before": (DropCount(reason="", items=11),)}, "more dropped items than its 10"),
    ],
)
def test_contradictory_ledger_record_is_rejected(change: dict[str, Any], problem: str) -> None:
    """A trial that continued from it would train items twice or never."""
    assert read(json.dumps(documents.to_json(GOOD))) == GOOD
    wrong = replace(GOOD, **change)
    with pytest.raises(CorruptFileError, match=problem):
        read(json.dumps(documents.to_json(wrong)))


def test_ledger_rejects_more_items_than_a_commit_can_hold() -> None:
    ledger = Ledger(LedgerRecord(settled=0, next=1))
    with pytest.raises(ValueError, match=f"more than {MOST_COUNT} items"):
        ledger.take(MOST_COUNT + 1, 1)
    assert ledger.record().next == 1

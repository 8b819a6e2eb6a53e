"""All interleavings of two masters and three rollout tasks up to a number of actions: no item is
trained twice or lost.

The ledger, the lineage and the writers of the history are the real code; files exist only in the
model. A master leases an item, reads a result (any one, also repeatedly), loses a task, takes a
step's item, trains it, or commits. A new master may begin at any time. The old one continues, but
none of its commits is accepted. A task finishes an item that it was once given, with the weights
of any master. A killed process makes no more actions, so every kill is included. The checks do not
use the ledger: the weights of the model are the items that they were trained with, in order, and
the name of a sample's file contains the weights that made it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from slurmrl.data.leases import SampleLedger
from slurmrl.data.ledger import LedgerRecord, StoredGroup
from slurmrl.errors import SlotTakenError, StaleIncarnationError
from slurmrl.fsio import documents
from slurmrl.run.history.slots import Kind, Record
from slurmrl.run.history.state import IncarnationWriter, Lineage, begin

TASKS = ("a", "b", "c")
ITEMS = 2
MASTERS = 2
MOST_LEASES = 3
"""By one incarnation."""

EVERYTHING = Lineage(dict.fromkeys(range(MASTERS + 2)))
Weights = tuple[str, ...]
"""``<item>x<incarnation>`` for each step."""
Log = tuple[tuple[Kind, int, str], ...]


def committed(ledger: SampleLedger) -> str:
    return json.dumps(documents.to_json(ledger.record()))


@cache
def read(text: str) -> LedgerRecord:
    record = documents.from_json(LedgerRecord, json.loads(text), "the ledger")
    record.check("the ledger")
    return record


class MemoryHistory:
    def __init__(self, log: Log) -> None:
        self.log = log

    def read(self, *, at_least: int = 0) -> list[Record]:
        return [
            Record(slot, kind, by, 0.0, json.loads(data))
            for slot, (kind, by, data) in enumerate(self.log)
        ]

    def append(self, kind: Kind, incarnation: int, data: dict[str, Any], *, after: int) -> Record:
        if after + 1 != len(self.log):
            raise SlotTakenError(after + 1)
        self.log = (*self.log, (kind, incarnation, json.dumps(data)))
        return Record(after + 1, kind, incarnation, 0.0, data)


@dataclass(frozen=True)
class Master:
    incarnation: int
    weights: Weights
    in_flight: int | None
    """The item of the next step."""
    granted: int
    record: str
    queued: tuple[int, ...]
    """What it would lease next, of the items of the model."""
    ledger: SampleLedger = field(compare=False)
    """As the other fields say."""

    @property
    def version(self) -> str:
        return f"{len(self.weights)}.{self.incarnation}"

    def after(self, ledger: SampleLedger, **changes: Any) -> Master:
        queued = tuple(
            item for item in deepcopy(ledger).lease(ITEMS, "", "0.1").items if item < ITEMS
        )
        return replace(self, ledger=ledger, record=committed(ledger), queued=queued, **changes)


class Result(NamedTuple):
    lease: str
    task: str
    item: int
    version: str
    weights: Weights

    def sample(self) -> StoredGroup:
        file = f"{self.lease}." + "-".join(self.weights)
        return StoredGroup(
            item=self.item,
            task=self.task,
            lease=self.lease,
            file=file,
            offset=0,
            length=0,
            checksum="xxh3_128:0",
            versions=(self.version,),
        )


class State(NamedTuple):
    log: Log = ()
    checkpoints: tuple[tuple[str, str, Weights], ...] = ()
    """Directory, record, weights."""
    requests: frozenset[tuple[str, str, int]] = frozenset()
    """Task, lease, item."""
    results: frozenset[Result] = frozenset()
    masters: tuple[Master, ...] = ()
    """By incarnation. One that moves no more was killed."""


# -- what may happen next ---------------------------------------------------------------------


def successors(state: State, max_staleness: int) -> Iterator[State]:
    if len(state.masters) < MASTERS:
        yield begun(state)
    for number, master in enumerate(state.masters):
        for task in idle_tasks(state):
            if granted := lease(master, task):
                yield replaced(state, number, granted[0])._replace(
                    requests=state.requests | {granted[1]}
                )
        known = [deliver(master, result) for result in state.results]
        holders = [lose(master, task) for task in TASKS]
        for after in (*known, *holders, take(master, max_staleness), train(master, max_staleness)):
            if after is not None:
                yield replaced(state, number, after)
        if (commit := committing(state, master)) is not None:
            yield commit
    for request in state.requests:
        task, name, item = request
        for maker in state.masters:
            result = Result(name, task, item, maker.version, maker.weights)
            yield state._replace(
                requests=state.requests - {request}, results=state.results | {result}
            )


def replaced(state: State, number: int, master: Master) -> State:
    masters = (*state.masters[:number], master, *state.masters[number + 1 :])
    return state._replace(masters=masters)


def idle_tasks(state: State) -> Iterator[str]:
    """Return the tasks with work and one idle task, which represents all idle tasks."""
    used = {task for task, *_ in state.requests} | {result.task for result in state.results}
    for task in TASKS:
        yield task
        if task not in used:
            return


def begun(state: State) -> State:
    """Begin a new incarnation at the last commit."""
    history: Any = MemoryHistory(state.log)
    incarnation = begin(history, {}).incarnation
    _, text, weights = state.checkpoints[-1] if state.checkpoints else ("", "{}", ())
    ledger = SampleLedger(incarnation, Lineage.of(history.read()), read(text))
    master = Master(incarnation, weights, None, 0, "", (), ledger).after(ledger)
    return state._replace(log=history.log, masters=(*state.masters, master))


def committing(state: State, master: Master) -> State | None:
    if master.version in {directory for directory, *_ in state.checkpoints}:
        return None
    history: Any = MemoryHistory(state.log)
    data = {"step": len(master.weights), "directory": master.version}
    try:
        IncarnationWriter(history, master.incarnation).append(Kind.COMMIT, data)
    except StaleIncarnationError:
        return None
    made = (master.version, master.record, master.weights)
    return state._replace(log=history.log, checkpoints=(*state.checkpoints, made))


@cache
def lease(master: Master, task: str) -> tuple[Master, tuple[str, str, int]] | None:
    ledger = deepcopy(master.ledger)
    found = ledger.lease(1, task, "0.1")
    if master.granted == MOST_LEASES or found.items[0] >= ITEMS:
        return None
    return master.after(ledger, granted=master.granted + 1), (task, found.lease, found.items[0])


@cache
def deliver(master: Master, result: Result) -> Master:
    ledger = deepcopy(master.ledger)
    ledger.finish(result.lease, result.sample())
    return master.after(ledger)


@cache
def lose(master: Master, task: str) -> Master:
    ledger = deepcopy(master.ledger)
    ledger.lose(task)
    return master.after(ledger)


@cache
def take(master: Master, max_staleness: int) -> Master | None:
    if master.in_flight is not None:
        return None
    ledger = deepcopy(master.ledger)
    taken = ledger.take_finished(1, len(master.weights) + 1, max_staleness)
    for one in taken:
        made_with = tuple(filter(None, one.file.rpartition(".")[2].split("-")))
        assert made_with == master.weights[: len(made_with)], "a sample of what was rolled back"
        assert len(master.weights) - len(made_with) <= max_staleness, "a stale sample"
    return master.after(ledger, in_flight=taken[0].item if taken else None)


@cache
def train(master: Master, max_staleness: int) -> Master | None:
    if master.in_flight is None:
        return None
    ledger = deepcopy(master.ledger)
    ledger.train([master.in_flight], len(master.weights) + 1)
    weights = (*master.weights, f"{master.in_flight}x{master.incarnation}")
    return master.after(ledger, in_flight=None, weights=weights)


# -- what must hold ---------------------------------------------------------------------------


@cache
def check(text: str, weights: Weights, queued: tuple[int, ...]) -> None:
    """Check that this master and a successor train or drop each item once."""
    trained = [int(one.partition("x")[0]) for one in weights]
    assert len(set(trained)) == len(trained), f"an item is trained twice: {weights}"
    record = read(text)
    dropped = [item for run in record.dropped for item in range(run.first, run.stop)]
    before = sum(count.items for count in record.dropped_before)
    rest = [item for item in range(record.settled, record.next) if item not in (*trained, *dropped)]
    done = len(weights) + len(dropped) + before
    assert done + len(rest) == record.next, f"an item is lost: {text} {weights}"
    finished = {one.item for one in record.samples}
    leased = {item for one in record.leased for item in one.items}
    mine = {*rest, *range(record.next, ITEMS)} - finished - leased
    assert sorted(mine) == list(queued), f"other items are queued: {text} {queued}"
    ledger = SampleLedger(MASTERS + 1, EVERYTHING, record)
    for task in TASKS:
        ledger.lose(task)
    queued = ledger.lease(record.next - record.settled, "d", "0.1").items
    again = {item for item in queued if item < record.next}
    assert not again & finished, "an item is finished and queued"
    assert again | finished == set(rest), f"not the items that are left: {text} {weights}"


RUN: tuple[Callable[[State], bool], ...] = (
    lambda state: len(state.masters) == 1,
    lambda state: {task for task, *_ in state.requests} == {"a"},
    lambda state: {task for task, *_ in state.requests} == {"a", "b"},
    lambda state: {result.task for result in state.results} == {"a"},
    lambda state: '"samples"' in state.masters[0].record,
    lambda state: state.masters[0].in_flight == 0,
    lambda state: len(state.checkpoints) == 1,
    lambda state: state.masters[0].weights == ("0x1",),
    lambda state: {result.task for result in state.results} == {"a", "b"},
    lambda state: len(state.masters) == 2,
    lambda state: state.masters[1].in_flight == 0,
    lambda state: state.masters[1].weights == ("0x2",),
    lambda state: len(state.checkpoints) == 2,
)
"""What a run comes to, an action after the other. It is rolled back from step 1 to the commit of
step 0, in which item 0 is in flight and item 1 leased, and made with weights of step 1."""


def run(max_staleness: int) -> Iterator[State]:
    state = State()
    yield state
    for reached in RUN:
        state = next(after for after in successors(state, max_staleness) if reached(after))
        yield state


def explore(actions: int, max_staleness: int = 1) -> int:
    """Visit and count all states that a run can reach with this many more actions."""
    seen = set(run(max_staleness))
    level = set(seen)
    for _ in range(actions):
        found = {after for state in level for after in successors(state, max_staleness)}
        level = found - seen
        seen |= level
        for master in {master for state in level for master in state.masters}:
            check(master.record, master.weights, master.queued)
    return len(seen)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_no_item_is_trained_twice_or_lost(max_staleness: int) -> None:
    assert explore(5, max_staleness) > 10_000

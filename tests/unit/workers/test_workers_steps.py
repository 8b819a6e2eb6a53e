"""The master fills a batch with the items that a filter accepts, each of them trained once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from slurmrl.data.leases import Admission, SampleLedger
from slurmrl.data.ledger import StoredGroup
from slurmrl.plan.dataflow import Method, Refill
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.run.history.state import Lineage
from slurmrl.workers.master.progress import Progress
from slurmrl.workers.master.steps import StepRunner
from slurmrl.workers.messages import Done, LoadBatch, Order, RunCall

SIZE = 50
STORED = StoredGroup(
    item=0, task="rollout.0.0", lease="1.1", file="0.samples", offset=8, length=9,
    checksum="xxh3_128:0", versions=("0.1",),
)  # fmt: skip
ADMISSION = Admission(max_staleness=9, batch_size=4, max_leased=None, filter_rounds=10)
Verdict = Callable[[tuple[int, int], int], str]
"""(item, step) -> why it is dropped, or an empty text"""


class Ranks:
    """Two ranks that execute calls. One gives the filter's results for even positions of a batch,
    the other for odd ones.
    """

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._numbers = itertools.count()
        self._answers: dict[int, dict[int, Done]] = {}
        self._load = LoadBatch(step=0, items=())
        self.orders: list[Order] = []

    def post(self, *orders: Order) -> list[int]:
        numbers = [next(self._numbers) for _ in orders]
        for number, order in zip(numbers, orders, strict=True):
            self.orders.append(order)
            if isinstance(order, LoadBatch):
                self._load = order
            self._answers[number] = {rank: self._answer(rank, order) for rank in range(2)}
        return numbers

    def _answer(self, rank: int, order: Order) -> Done:
        values: dict[str, Any] = {}
        items = self._load.items[rank::2]
        if isinstance(order, RunCall) and order.name == "gen":
            values = {"stats": {"reward": (float(len(items)), float(len(items)))}}
            values["texts"] = ({"id": str(items[:1])},)
        elif isinstance(order, RunCall) and order.name == "filter":
            dropped: dict[str, list[int]] = {}
            for place, item in enumerate(self._load.items):
                if place % 2 == rank and (reason := self._verdict(item, order.step)):
                    dropped.setdefault(reason, []).append(place)
            values = {"dropped": {reason: tuple(found) for reason, found in dropped.items()}}
        elif isinstance(order, RunCall):
            values = {"stats": {"kl_sequence": (1.0, 1.0), "completions": (4.0, 1.0)}}
        return Done(rank=rank, seq=0, seconds=0.5, tokens=3 * len(items), **values)

    def wait_for(self, take: Callable[[], Any], what: Callable[[], str]) -> Any:
        """Wait for an event. The job ends during the third wait."""
        for _ in range(2):
            if (found := take()) is not None:
                return found
        return None

    def collect(self, number: int, what: str, timeout_s: float) -> dict[int, Done]:
        return self._answers.pop(number)

    def batches(self, *, candidates: bool) -> list[tuple[tuple[int, int], ...]]:
        loads = [order for order in self.orders if isinstance(order, LoadBatch)]
        return [load.items for load in loads if load.candidates == candidates]


@pytest.fixture
def run(
    make_settings: Any, plans: Callable[..., Plan], calls: Callable[..., CallPlan]
) -> Callable[..., tuple[StepRunner, Progress, Ranks]]:
    """Make a runner on ranks with this filter. Batches have four items."""
    graph = (
        calls("gen", method=Method.GENERATE),
        calls("filter", role=None, method=Method.FILTER),
        calls("train", method=Method.TRAIN_STEP),
    )

    def make(
        verdict: Verdict,
        state: dict[str, Any] | None = None,
        rollouts: Samples | None = None,
        **refill: Any,
    ) -> tuple[StepRunner, Progress, Ranks]:
        progress = Progress(make_settings(), state, rollouts.ledger if rollouts else None)
        progress.use_dataset(SIZE, "f1", {"": 7})
        progress.refill = Refill(**{"rounds": 10, **refill})
        ranks = Ranks(verdict)
        channel: Any = ranks
        plan = plans(per_host=2, calls=graph, evaluation_calls=())
        scores: Any = None
        tasks: Any = rollouts
        return StepRunner(channel, plan, progress, scores, 1.0, 1, tasks), progress, ranks

    return make


class Samples:
    """The items of rollout tasks, which finish one by one. ``most``: their total number."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._next = 0
        self.ledger = SampleLedger(1, Lineage({1: None}))
        self.back: list[StoredGroup] = []

    def take(
        self, step: int, count: int, *, filtered: bool = False
    ) -> Sequence[StoredGroup] | None:
        lacking = max(count - len(self.ledger.finished), 0)
        if self._left < lacking:
            return None
        self.finish(lacking)
        most = self.ledger.expected(count, ADMISSION) if filtered else None
        return self.ledger.take_finished(count, step, 9, most=most)

    def finish(self, count: int) -> None:
        self._left -= count
        lease = self.ledger.lease(count, "rollout.0.0", "0.1")
        for item in lease.items:
            self.ledger.finish(lease.lease, replace(STORED, item=item, lease=lease.lease))

    def returned(self, step: int, samples: Iterable[StoredGroup]) -> None:
        self.back += samples

    def waits_for(self) -> str:
        return "for groups"

    def metrics(self) -> dict[str, float]:
        return {"rollout/lost": 1.0}


def by_index(*indices: int) -> Verdict:
    return lambda item, step: "dull" if item[1] in indices else ""


def test_candidate_rounds_continue_until_the_batch_is_full(run: Callable[..., Any]) -> None:
    """The next step takes accepted items beyond the batch first."""
    runner, progress, ranks = run(lambda item, step: "")
    order = progress.items(range(SIZE))
    dull = by_index(*(order[number][1] for number in (0, 1, 3)))
    runner, progress, ranks = run(dull)
    executed = runner.train(1)
    assert ranks.batches(candidates=True) == [tuple(order[:4]), tuple(order[4:8])]
    trained = (order[2], order[4], order[5], order[6])
    assert ranks.batches(candidates=False) == [trained]
    assert [type(o).__name__ + getattr(o, "name", "") for o in ranks.orders] == [
        *("LoadBatch", "RunCallgen", "RunCallfilter") * 2,
        *("LoadBatch", "RunCalltrain"),
    ]
    counts = {
        name: executed.metrics[f"filter/{name}"] for name in ("rounds", "accepted", "surplus")
    }
    assert counts == {"rounds": 2, "accepted": 4, "surplus": 1}
    assert executed.metrics["reward"] == 1.0
    assert executed.metrics["time/gen"] == 1.0, "of both rounds"
    assert executed.metrics["tokens"] == 3 * 4, "of what is trained on"
    assert executed.texts == [{"id": str((order[0],))}, {"id": str((order[1],))}], "of the first"
    progress.advance(executed.metrics)
    assert dict(progress.ledger.dropped) == {"dull": 3}
    runner.train(2)
    assert ranks.batches(candidates=True)[2] == tuple(order[7:11])


@pytest.mark.parametrize("candidates", [None, 3, 9])
def test_interruptions_keep_each_item_trained_or_dropped_once(
    run: Callable[..., Any], candidates: int | None
) -> None:
    """Items and steps equal an uninterrupted run, even in the middle of epochs."""

    def verdict(item: tuple[int, int], step: int) -> str:
        return Random(f"{item} {step}").choice(("", "", "same", "long"))

    def steps(number: int, interrupt: Random | None) -> tuple[dict[int, Any], Counter[Any], Any]:
        runner, progress, ranks = run(verdict, candidates=candidates)
        trained: dict[int, Any] = {}
        state = json.loads(json.dumps(progress.state()))
        dropped: Counter[Any] = Counter()
        while progress.step < number:
            executed = runner.train(progress.step + 1)
            if interrupt is not None and interrupt.random() < 0.4:
                runner, progress, ranks = run(verdict, state, candidates=candidates)
                continue
            progress.advance(executed.metrics)
            trained[progress.step] = ranks.batches(candidates=False)[-1]
            state = json.loads(json.dumps(progress.state()))
            dropped = Counter(progress.ledger.dropped)
        return trained, dropped, state["ledger"]

    plain = steps(40, None)
    assert steps(40, Random(candidates)) == plain
    trained, dropped, ledger = plain
    items = [item for batch in trained.values() for item in batch]
    assert len(items) == len(set(items)) == 40 * 4
    assert max(epoch for epoch, _ in items) >= 3
    unfinished = ledger["next"] - ledger["settled"]
    assert len(items) + sum(dropped.values()) <= ledger["next"]
    assert ledger["next"] - len(items) - sum(dropped.values()) <= unfinished
    assert set(dropped) == {"same", "long"}


def test_rollout_groups_go_to_the_ranks_of_their_items(
    run: Callable[..., Any],
) -> None:
    """The groups fill the batch after the filter.

    If there are too few, the step ends with the job.
    """
    _, progress, _ = run(lambda item, step: "")
    order = progress.items(range(SIZE))
    rollouts = Samples(8)
    runner, progress, ranks = run(by_index(order[1][1]), rollouts=rollouts)
    executed = runner.train(1)
    first, second, last = [one for one in ranks.orders if isinstance(one, LoadBatch)]
    assert [sample.item for sample in first.samples] == [0, 1, 2, 3]
    assert first.items == tuple(order[:4])
    assert [sample.item for sample in second.samples] == [4]
    assert second.samples[0] == replace(STORED, item=4, lease="1.2")
    assert (last.items, last.samples) == ((order[0], *order[2:5]), ())
    assert executed.metrics["rollout/lost"] == 1.0
    assert executed.metrics["rollout/waited_s"] >= 0
    progress.advance(executed.metrics)
    assert runner.train(2) is None
    assert (progress.step, progress.ledger.trained) == (1, 4)
    assert (rollouts.ledger.settled, len(ranks.orders)) == (5, 8)


def test_surplus_groups_of_a_batch_wait_for_the_next_step(
    run: Callable[..., Any],
) -> None:
    """If a filter drops many groups, a step scores more at once and leaves the others to the next
    step.
    """
    _, progress, _ = run(lambda item, step: "")
    order = progress.items(range(3 * SIZE))
    rollouts = Samples(64)
    dull = {order[item] for item in range(8)}
    runner, progress, ranks = run(lambda item, step: "dull" * (item in dull), rollouts=rollouts)
    progress.advance(runner.train(1).metrics)
    assert ranks.batches(candidates=False) == [tuple(order[8:12])]
    rollouts.finish(20)
    executed = runner.train(2)
    progress.advance(executed.metrics)
    assert ranks.batches(candidates=True)[-1] == tuple(order[12:24])
    assert ranks.batches(candidates=False)[-1] == tuple(order[12:16])
    assert [one.item for one in rollouts.back] == list(range(16, 24))
    assert executed.metrics["filter/surplus"] == 8
    runner.train(3)
    assert ranks.batches(candidates=True)[-1] == tuple(order[16:20])


def test_candidate_rounds_are_limited_if_the_filter_drops_all(
    run: Callable[..., Any],
) -> None:
    rollouts = Samples(1000)
    runner, progress, ranks = run(lambda item, step: "dull", rollouts=rollouts)
    for step in range(1, 10):
        rollouts.finish(80 - len(rollouts.ledger.finished))
        progress.advance(runner.train(step).metrics)
        assert sum(map(len, ranks.batches(candidates=True))) <= 40 * step
    assert rollouts.ledger.expected(4, ADMISSION) == 40

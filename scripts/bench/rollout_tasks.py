#!/usr/bin/env python3
"""Measure the load of many rollout tasks on the master and the shared directory.

scripts/bench/rollout_tasks.py [--tasks 10 100 1000] [--trainers 64] [--steps 6] [--staleness 1]
    [--directory DIR]

Everything runs in one process, on real files and a simulated clock: the master's `RolloutTasks` and
ledger, and for each task the session, the result writer and the log reader of its worker. Engines
and training are pauses. A step has 2 items per task and trains for 45 s. A task makes 2 items at a
time, each in 30 s on average (exponential), so that the trainers wait for part of the time. Every
20 s a task fails without a message, and its next attempt begins 30 s later.

The script counts file system operations per simulated second, and CPU seconds of the master's
calls. CPU seconds divided by simulated seconds are the share of a core that the master needs.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import json
import os
import random
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spread import Spread

from slurmrl.backoff import Backoff
from slurmrl.data.leases import Admission, SampleLedger
from slurmrl.data.ledger import LedgerRecord, StoredGroup
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import SystemCalls
from slurmrl.rollouts.sample_files import read_group
from slurmrl.run.channel import message_log
from slurmrl.run.channel.message_log import LogReader
from slurmrl.run.events import EventWriter
from slurmrl.run.history.state import Lineage
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.tensors.weights.format import MANIFEST, VersionId, version_ids
from slurmrl.workers.master.rollout_tasks import RolloutTasks
from slurmrl.workers.master.task_attempts import parse_name, rollouts_of
from slurmrl.workers.master.worker_channel import REST_S
from slurmrl.workers.messages import CONTROL_LOG, LoadBatch
from slurmrl.workers.polling import PollIntervals
from slurmrl.workers.rollout.session import Key, ResultWriter, Session
from slurmrl.workers.rollout.task import TaskOptions
from slurmrl.workers.rollout_messages import REQUEST_LOG, Holds
from tests.support.sample_groups import small_group

ITEMS_PER_TASK, AT_A_TIME, ITEM_S = 2, 2, 30.0
TRAIN_S, TRAIN_LOOK_S = 45.0, 1.0
"""Seconds of training in a step, and seconds between the master's checks in this time."""
LOSS_EVERY_S, GONE_S = 20.0, 30.0
COMMIT_EVERY = 2
WARM_UP_STEPS = 2
HEARTBEAT_S = 2.0
KINDS = {
    "open": ("open",),
    "read": ("read", "pread"),
    "write": ("write", "pwrite"),
    "sync": ("fsync", "fsync_directory"),
    "close": ("close",),
    "list": ("listdir",),
    "change": ("link", "rename", "unlink", "mkdir", "chmod", "truncate"),
    "look up": ("stat", "lstat", "mode"),
}


class Operations:
    """Counts the operations of all `SystemCalls` by the process that causes them."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.who = ""
        for kind, names in KINDS.items():
            for name in names:
                setattr(SystemCalls, name, self._counted(kind, getattr(SystemCalls, name)))

    def _counted(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.counts[self.who, kind] += 1
            return call(*arguments, **named)

        return counted

    @contextmanager
    def by(self, who: str) -> Iterator[None]:
        before, self.who = self.who, who
        yield
        self.who = before

    def clear(self) -> None:
        self.counts.clear()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ledger(SampleLedger):
    """A ledger that records when the master learned of each sample."""

    clock: Callable[[], float]
    heard: dict[int, float]

    def finish(self, lease: str, sample: StoredGroup) -> bool:
        counts = super().finish(lease, sample)
        if counts:
            self.heard[sample.item] = self.clock()
        return counts


class Task:
    """One attempt: the real files and state machine of a worker, without an engine."""

    def __init__(self, bed: Bed, number: int, attempt: int) -> None:
        host = f"r{number}"
        agent = Identity("rollout", number, attempt, host, f"50.{attempt}.0", f"50_{number}", 1)
        place = "rollout", number, attempt
        self.number, self.attempt = number, attempt
        self.gone = False
        self._bed = bed
        self._results = ResultWriter(bed.paths, agent)
        self._requests = LogReader(bed.paths.rollout_requests(*place, 1))
        self._session = Session(most_begun=AT_A_TIME, most_unwritten=256)
        self._session.serve(1)
        self._polls = Backoff(*bed.task_poll_s, growth=1.1)
        self._gathers = False

    def poll(self) -> None:
        """Check for weights and requests, and begin as many items as there is room for."""
        if self.gone:
            return
        newest = version_ids(self._bed.paths.versions)[-1]
        if self._session.held is None or self._session.held < newest:
            atomic.list_names(self._bed.paths.versions / newest.name)
            self._session.held = newest
            self._results.record([Holds(version=newest.name)], [])
            self._polls.reset()
        for values in self._requests.read():
            self._session.take(REQUEST_LOG.from_json(values), self._bed.clock())
            self._polls.reset()
        self._session.aborted()
        self._begin()
        self._bed.at(self._polls.next_s(), self.poll)

    def _begin(self) -> None:
        for key in self._session.begin():
            after = self._bed.chance.expovariate(1 / ITEM_S)
            self._bed.at(after, functools.partial(self._finish, key, self._session.held))

    def _finish(self, key: Key, began_with: VersionId | None) -> None:
        if self.gone:
            return
        held = sorted({one for one in (began_with, self._session.held) if one is not None})
        lease, item = key
        group = small_group(item, lease)
        drawn_by = group.drawn_by.clip(max=len(held) - 1)
        versions = tuple(version.name for version in held)
        self._session.sampled(key, group)
        self._session.finish(key, replace(group, versions=versions, drawn_by=drawn_by))
        self._begin()
        if not self._gathers:
            self._gathers = True
            self._bed.at(TaskOptions().gather_s, self._record)

    def _record(self) -> None:
        self._gathers = False
        if self.gone:
            return
        groups = self._session.to_record()
        self._results.record([], groups)
        self._session.recorded()
        for group in groups:
            self._bed.recorded[group.lease, group.item] = self._bed.clock()
        self._bed.made[self.number] += len(groups)


class Bed:
    """A trial in simulated time."""

    def __init__(
        self, paths: RunPaths, operations: Operations, tasks: int, trainers: int, staleness: int
    ) -> None:
        self.paths, self.operations = paths, operations
        self.clock = Clock()
        self.chance = random.Random(1)
        intervals = PollIntervals.of(tasks + trainers, HEARTBEAT_S)
        self.task_poll_s = intervals.task_s, max(intervals.task_s, intervals.poll_s)
        self.look_s, self.poll_s = intervals.status_s, intervals.results_s
        self.admission = Admission(
            max_staleness=staleness,
            batch_size=ITEMS_PER_TASK * tasks,
            max_leased=(staleness + 1) * ITEMS_PER_TASK * tasks,
        )
        self.lineage = Lineage({1: None})
        self.ledger = Ledger(1, self.lineage)
        self.ledger.clock, self.ledger.heard = self.clock, {}
        self.tasks = self._master(self.ledger)
        self.step = 0
        self.recorded: dict[tuple[str, int], float] = {}
        self.made: Counter[int] = Counter()
        self.cpu_s: Counter[str] = Counter()
        self.longest_look_s = 0.0
        self.sizes: dict[str, int] = {}
        self.known_after: list[float] = []
        """Seconds from the record of a group until the master knew of the group."""
        self.taken_after: list[float] = []
        """Seconds from the record of the last group of a batch until its step began."""
        self.waited_s: list[float] = []
        self._taking_since = 0.0
        self._lost: set[str] = set()
        self._events: list[tuple[float, int, str, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.hosts = {number: Task(self, number, 0) for number in range(tasks)}
        for task in self.hosts.values():
            self.at(self.chance.random() * self.task_poll_s[0], task.poll)
        self._publish()
        self.at(LOSS_EVERY_S, self._lose, "")
        self.at(0.0, self._wait, "master")

    def _master(self, ledger: SampleLedger, known: Any = None) -> RolloutTasks:
        tasks = RolloutTasks(
            self.paths,
            ledger,
            self.lineage,
            self.admission,
            1 if known is None else 2,
            EventWriter(self.paths, "master.1"),
            known,
            look_s=self.look_s,
            lease_ttl_s=60.0,
            poll_s=self.poll_s,
            clock=self.clock,
        )
        tasks.start(lambda items: [(0, item) for item in items])
        return tasks

    def at(self, after_s: float, act: Callable[[], None], who: str = "tasks") -> None:
        when = self.clock.now + after_s
        heapq.heappush(self._events, (when, next(self._numbers), who, act))

    def run(self, steps: int) -> None:
        """Simulate until this number of steps is trained."""
        while self.step < steps:
            self.clock.now, _, who, act = heapq.heappop(self._events)
            with self.operations.by(who):
                act()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.cpu_s[what] += time.process_time() - began

    # -- the master ------------------------------------------------------------------------------

    def _look(self) -> None:
        before = self.cpu_s["look"]
        with self.timed("look"):
            self.tasks.look(self._lost, self.step)
        self.longest_look_s = max(self.longest_look_s, self.cpu_s["look"] - before)

    def _wait(self) -> None:
        """Take a batch, or check again later."""
        with self.timed("take"):
            samples = self.tasks.take(self.step + 1, self.admission.batch_size)
        if samples is None:
            self._look()
            self.at(REST_S, self._wait, "master")
            return
        now = self.clock()
        self.waited_s.append(now - self._taking_since)
        heard, recorded = self.ledger.heard, self.recorded
        self.known_after += [heard[one.item] - recorded[one.lease, one.item] for one in samples]
        self.taken_after.append(now - max(self.recorded[one.lease, one.item] for one in samples))
        self._train(samples)

    def _train(self, samples: Iterable[StoredGroup]) -> None:
        load = LoadBatch(
            step=self.step + 1,
            items=tuple((0, one.item) for one in samples),
            samples=tuple(samples),
        )
        with self.timed("post"):
            message = message_log.encode(CONTROL_LOG.to_json(load))
        self.sizes["batch"] = len(message)
        with self.timed("a reader of the batch"):
            CONTROL_LOG.from_json(message_log.decode(message)[0][0])
        with self.operations.by("trainers"):
            for one in samples:
                folder = self.paths.rollout_samples(*parse_name(one.task))
                read_group(folder, one)
        self.at(TRAIN_LOOK_S, functools.partial(self._training, self.clock() + TRAIN_S), "master")
        self._batch = [one.item for one in samples]

    def _training(self, until: float) -> None:
        self._look()
        if self.clock() < until:
            self.at(TRAIN_LOOK_S, functools.partial(self._training, until), "master")
            return
        self.step += 1
        self.ledger.train(self._batch, self.step)
        self._publish()
        if self.step % COMMIT_EVERY == 0:
            self._commit()
        self._tell()
        self._taking_since = self.clock()
        self.at(0.0, self._wait, "master")

    def _publish(self) -> None:
        """Publish the version of a step in the form that tasks check for."""
        folder = self.paths.versions / VersionId(self.step, 1).name
        atomic.make_private_directory(folder)
        atomic.replace(folder / MANIFEST, b"{}")

    def state(self) -> dict[str, Any]:
        return {
            "rollouts": documents.to_json(self.tasks.record()),
            "ledger": documents.to_json(self.ledger.record()),
        }

    def _commit(self) -> None:
        with self.timed("commit"):
            text = json.dumps(self.state())
            self.tasks.committed()
        self.sizes["commit"] = len(text)

    def _tell(self) -> None:
        with self.timed("status"):
            text = json.dumps(documents.to_json(self.tasks.view()))
            self.tasks.metrics()
        self.sizes["status"] = len(text)

    def restart(self) -> tuple[float, float]:
        """Return the CPU seconds in which a new master reads all logs, and its bytes of state."""
        state = json.loads(json.dumps(self.state()))
        tracemalloc.start()
        began = time.process_time()
        ledger = SampleLedger(
            2,
            Lineage({1: self.step, 2: None}),
            documents.from_json(LedgerRecord, state["ledger"], "a commit"),
        )
        tasks = self._master(ledger, rollouts_of(state["rollouts"], "a commit"))
        self.clock.now += 2 * self.look_s
        tasks.look((), self.step)
        cpu_s = time.process_time() - began
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return cpu_s, size

    # -- losses ----------------------------------------------------------------------------------

    def _lose(self) -> None:
        task = self.chance.choice([one for one in self.hosts.values() if not one.gone])
        task.gone = True
        self._lost.add(f"rollout/{task.number}")
        self.at(GONE_S, functools.partial(self._replace, task))
        self.at(LOSS_EVERY_S, self._lose, "")

    def _replace(self, task: Task) -> None:
        self._lost.discard(f"rollout/{task.number}")
        following = self.hosts[task.number] = Task(self, task.number, task.attempt + 1)
        following.poll()


def measure(folder: Path, operations: Operations, tasks: int, options: argparse.Namespace) -> None:
    trainers, steps = options.trainers, options.steps
    paths = RunPaths.of(folder, "someone", "bench", str(tasks))
    for directory in (*paths.directories(), paths.rollouts, paths.versions):
        atomic.make_private_directory(directory)
    bed = Bed(paths, operations, tasks, trainers, options.staleness)
    bed.run(WARM_UP_STEPS)
    began = bed.clock()
    for counted in (operations.counts, bed.cpu_s, bed.made):
        counted.clear()
    for values in (bed.known_after, bed.taken_after, bed.waited_s):
        values.clear()
    bed.longest_look_s = 0.0
    bed.run(WARM_UP_STEPS + steps)
    seconds = bed.clock() - began
    print(
        f"{tasks} tasks, {trainers} trainers: {seconds / steps:.0f} s a step, "
        f"{Spread.of(bed.waited_s).text('.1f')} of them waiting"
    )
    for who in ("master", "tasks", "trainers"):
        kinds = {kind: operations.counts[who, kind] / seconds for kind in KINDS}
        shown = ", ".join(f"{kind} {rate:.1f}" for kind, rate in kinds.items() if rate >= 0.05)
        print(f"  operations/s of {who}: {sum(kinds.values()):.0f} ({shown})")
    for what, cpu_s in bed.cpu_s.items():
        share = 100 * cpu_s / seconds
        print(f"  CPU of {what}: {1e3 * cpu_s / steps:.1f} ms a step, {share:.3f} %")
    print(f"  longest look: {1e3 * bed.longest_look_s:.1f} CPU ms")
    print(f"  recorded -> known, s: {Spread.of(bed.known_after).text()}")
    print(f"  last of a batch recorded -> taken, s: {Spread.of(bed.taken_after).text()}")
    print(f"  items per task: {Spread.of(bed.made[n] for n in range(tasks)).text('.0f')}")
    sizes = ", ".join(f"{what} {size / 1e3:.0f}" for what, size in bed.sizes.items())
    cpu_s, size = bed.restart()
    print(f"  kB: {sizes}")
    print(f"  a new master: {cpu_s:.2f} CPU s (traced), {size / 1e6:.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--tasks", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--trainers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--staleness", type=int, default=1)
    options = parser.parse_args()
    operations = Operations()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load {load:.1f}, {options.directory}; {options.staleness=}")
    for tasks in options.tasks:
        with tempfile.TemporaryDirectory(prefix="rollouts-", dir=options.directory) as name:
            measure(Path(name), operations, tasks, options)


if __name__ == "__main__":
    main()

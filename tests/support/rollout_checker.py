"""Check the steps of a trial with rollout tasks from its files, without code of the ledger.

See "Leases of samples" in docs/protocols.md. The surviving line consists of the steps that led to
the last commit, each with the incarnation that trained it. `problems` lists violations of rules:

- each step has one batch, and one line of metrics;
- no item is trained twice or lost: each commit of the line has each taken item as trained, dropped,
  leased, finished or queued;
- each trained sample is in the result log of its task, with the recorded bytes;
- no token was sampled by weights older than the bound, or by weights outside of the line.

With a filter, a step first has candidates. Its batch contains samples of some candidates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import xxhash

from tests.support.rollout_evidence import Message, history, messages, metrics, read_group


@dataclass(frozen=True)
class Version:
    """Weights after a step of an incarnation, written ``<step>.<incarnation>``."""

    step: int
    incarnation: int

    @staticmethod
    def parse(name: str) -> Version:
        step, incarnation = name.split(".")
        return Version(int(step), int(incarnation))


@dataclass(frozen=True)
class Span:
    """Steps of an incarnation. Its weights of step ``first - 1`` also count."""

    incarnation: int
    first: int
    last: int


@dataclass(frozen=True)
class Checker:
    """Checks a run directory, and the archive of files that the run has removed."""

    run: Path
    archive: Path
    batch_size: int
    max_staleness: int

    def problems(self) -> list[str]:
        """Return the violations in words; empty if there is none."""
        return [
            *self._steps(),
            *self._items(),
            *self._samples(),
            *self._commits(),
        ]

    @cached_property
    def line(self) -> list[Span]:
        """Return the surviving line, oldest steps first."""
        commits: dict[str, Version] = {}
        bases: dict[int, str | None] = {}
        newest: str | None = None
        for record in history(self.run):
            data = record["data"]
            if record["kind"] == "begin":
                bases[record["incarnation"]] = data["base"]
            elif record["kind"] == "commit":
                newest = data["directory"]
                commits[newest] = Version(data["step"], record["incarnation"])
            elif record["kind"] == "delete" and data["directory"] == newest:
                newest = None  # It was damaged. The next BEGIN names its base.
        spans: list[Span] = []
        while newest is not None:
            end = commits[newest]
            newest = bases[end.incarnation]
            start = commits[newest].step if newest is not None else 0
            spans.append(Span(end.incarnation, start + 1, end.step))
        return spans[::-1]

    @cached_property
    def batches(self) -> dict[int, Message]:
        """Return the batch of each step of the line."""
        return {message["step"]: message for span in self.line for message in self._loads(span)}

    def _loads(self, span: Span) -> list[Message]:
        """Return the batches of a span's steps, in the order in which its master posted them."""
        log = self.archive / "control" / f"{span.incarnation:08d}.master"
        loads: list[Message] = []
        judged: dict[tuple[int, int], Message] = {}
        """The sample of each candidate of a step, by its row."""
        for message in messages(log):
            if message["type"] != "load" or message.get("evaluation"):
                continue
            if not span.first <= message["step"] <= span.last:
                continue
            rows = list(map(tuple, message["items"]))
            if message.get("candidates"):
                judged.update(zip(rows, message["samples"], strict=True))
                continue
            if judged:
                message = {**message, "samples": [judged[row] for row in rows if row in judged]}
                judged = {}
            loads.append(message)
        return loads

    def _steps(self) -> Iterator[str]:
        for span in self.line:
            posted = Counter(load["step"] for load in self._loads(span))
            for step in range(span.first, span.last + 1):
                if posted[step] != 1:
                    whose = f"incarnation {span.incarnation}"
                    yield f"step {step} has {posted[step]} batches of {whose}"
        last = self.line[-1].last if self.line else 0
        told = [line["step"] for line in metrics(self.run) if line["step"] <= last]
        if told != list(range(1, last + 1)):
            yield f"the metrics have the steps {told}, expected 1 to {last}"

    def _items(self) -> Iterator[str]:
        trained: dict[int, int] = {}
        rows: dict[tuple[int, int], int] = {}
        for step, load in sorted(self.batches.items()):
            items = [sample["item"] for sample in load["samples"]]
            if len(items) != self.batch_size or len(load["items"]) != len(items):
                yield f"step {step} has {len(items)} items, expected {self.batch_size}"
            for item, (epoch, index) in zip(items, load["items"], strict=False):
                if (before := trained.setdefault(item, step)) != step or items.count(item) > 1:
                    yield f"item {item} is trained at the steps {before} and {step}"
                if (other := rows.setdefault((epoch, index), item)) != item:
                    yield f"row {index} of epoch {epoch} is item {other} and item {item}"

    # -- samples -----------------------------------------------------------------------------

    @cached_property
    def _recorded(self) -> dict[tuple[str, str, int], list[Message]]:
        """Return the groups in the result logs, by attempt, lease and item."""
        found: dict[tuple[str, str, int], list[Message]] = {}
        for log in self.archive.glob("rollouts/*/results"):
            for message in messages(log):
                for group in message.get("groups", ()):
                    key = log.parent.name, group["lease"], group["item"]
                    found.setdefault(key, []).append(group)
        return found

    def _samples(self) -> Iterator[str]:
        for step, load in sorted(self.batches.items()):
            for sample in load["samples"]:
                for problem in self._sample(step, sample):
                    yield f"item {sample['item']}, trained at step {step}, {problem}"

    def _sample(self, step: int, sample: Message) -> Iterator[str]:
        task = sample["task"]
        records = self._recorded.get((task, sample["lease"], sample["item"]), [])
        if {**sample} not in [{**record, "task": task} for record in records]:
            yield f"is not in the results of {task}"
        file = self.archive / "rollouts" / task / "samples" / sample["file"]
        if not file.exists():
            yield f"has no file {file.name} of {task} in the archive"
            return
        data = file.read_bytes()[sample["offset"] :][: sample["length"]]
        if f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}" != sample["checksum"]:
            yield f"has other bytes in {file.name} of {task} than those recorded"
            return
        group = read_group(data)
        if (group.item, group.lease) != (sample["item"], sample["lease"]):
            yield f"is item {group.item} of lease {group.lease} in {file.name} of {task}"
        for name in sorted({*group.tokens, *sample["versions"]}):
            yield from self._version(step, Version.parse(name))

    def _version(self, step: int, version: Version) -> Iterator[str]:
        """Return the problem of a token of these weights at a step of the line."""
        name = f"weights {version.step}.{version.incarnation}"
        if version.step > step - 1:
            yield f"has {name}, from after that step"
        if version.step < step - 1 - self.max_staleness:
            yield f"has {name}, too old for a staleness of {self.max_staleness}"
        if not any(
            span.incarnation == version.incarnation and span.first - 1 <= version.step <= span.last
            for span in self.line
        ):
            yield f"has {name}, which were rolled back"

    # -- commits -----------------------------------------------------------------------------

    def _commits(self) -> Iterator[str]:
        """Return the states of each item in the commits of the line."""
        found = []
        for span in self.line:
            for file in self.archive.glob(f"checkpoints/step-*.{span.incarnation}/state.json"):
                state = json.loads(file.read_bytes())
                if span.first <= state["step"] <= span.last:
                    found.append(Ledger.of(state))
        found.sort(key=lambda ledger: ledger.step)
        if self.line and (not found or found[-1].step != self.line[-1].last):
            yield f"the archive lacks the commit of step {self.line[-1].last}"
        for ledger in found:
            trained = {
                sample["item"]: step
                for step, load in self.batches.items()
                if step <= ledger.step
                for sample in load["samples"]
            }
            for problem in ledger.problems(trained):
                yield f"the commit of step {ledger.step} {problem}"
        for before, after in pairwise(found):
            if before.settled > after.settled or before.next > after.next:
                yield f"the commit of step {after.step} gives out items again"
            dropped = {item for item in before.dropped if item >= after.settled}
            if undone := sorted(dropped - after.dropped):
                yield f"the commit of step {after.step} has {undone} no more as dropped"


@dataclass(frozen=True)
class Ledger:
    """The ledger in a commit."""

    step: int
    settled: int
    next: int
    dropped_before: int
    trained: dict[int, int]
    dropped: set[int]
    leased: list[int]
    sampled: list[int]

    @staticmethod
    def of(state: Message) -> Ledger:
        told = state["ledger"]
        return Ledger(
            step=state["step"],
            settled=told.get("settled", 0),
            next=told.get("next", 0),
            dropped_before=sum(count["items"] for count in told.get("dropped_before", ())),
            trained={
                item: run["step"]
                for run in told.get("trained", ())
                for item in range(run["first"], run["stop"])
            },
            dropped={
                item for run in told.get("dropped", ()) for item in range(run["first"], run["stop"])
            },
            leased=[item for lease in told.get("leased", ()) for item in lease["items"]],
            sampled=[sample["item"] for sample in told.get("samples", ())],
        )

    def problems(self, trained: dict[int, int]) -> Iterator[str]:
        """Return contradictions to the items that the steps up to this one have trained."""
        lost = self.settled - self.dropped_before - sum(item < self.settled for item in trained)
        if lost > 0:
            yield f"lacks {lost} of the items before {self.settled}: neither trained nor dropped"
        if lost < 0:
            yield f"has {-lost} items before {self.settled} as dropped that were trained"
        known = {item: step for item, step in trained.items() if item >= self.settled}
        if known != self.trained:
            yield f"has {self.trained} as trained, but the steps have trained {known}"
        if beyond := [item for item in known if item >= self.next]:
            yield f"has trained {beyond}, which were not given out"
        open_ = Counter([*self.leased, *self.sampled, *self.dropped, *self.trained])
        if twice := sorted(item for item, count in open_.items() if count > 1):
            yield f"has {twice} in two states"
        if outside := sorted(item for item in open_ if not self.settled <= item < self.next):
            yield f"has {outside}, which it has settled or not given out"

"""Scenarios: weight versions are published and removed while hosts update their copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slurmrl.errors import WeightVersionError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.tensors.layout import Array
from slurmrl.tensors.weights.format import VersionId, read_manifest, version_ids
from slurmrl.tensors.weights.inventory import inventory, prune
from slurmrl.tensors.weights.local_copy import CopiedVersion, LocalCopy
from slurmrl.tensors.weights.writer import PartWriter, VersionBits, publish
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note
from tests.support.faulty import Faulty

STEPS = 4
NAMES = ("a", "b", "c")
BYTES = 64


def bits_of(version: VersionId, name: str) -> Array:
    """Return the bits of the previous version with one changed element."""
    bits = np.full(BYTES, version.incarnation * 10 + NAMES.index(name), np.uint8)
    bits[: version.step] = version.step
    return bits


def _versions(folder: Path) -> Path:
    return folder / "versions"


def trainers(folder: Path, me: int, note: Note, calls: SystemCalls = REAL) -> None:
    """Act as the next incarnation, with two ranks and the publisher. Every second version is whole,
    and one whole version is kept.
    """
    versions = _versions(folder)
    incarnation = max((one.incarnation for one in version_ids(versions)), default=0) + 1
    note(event="began", incarnation=incarnation)
    base: VersionId | None = None
    for step in range(1, STEPS + 1):
        version = VersionId(step, incarnation)
        against = base if step % 2 == 0 else None
        parts = []
        for rank in range(2):
            bits = None if against is None else _bits(against, rank)
            own = versions / version.name
            with PartWriter(own, rank, bits, calls=calls) as writer:
                for name in NAMES[rank::2]:
                    writer.add(name, "bfloat16", (BYTES // 2,), bits_of(version, name))
                parts.append(writer.finish())
        publish(versions / version.name, parts, version, against, calls=calls)
        note(event="published", name=version.name)
        prune(versions, 1, calls=calls)
        base = version


def host(folder: Path, me: int, note: Note) -> None:
    """Act as a process of a rollout host. All processes share one copy."""
    copy = LocalCopy(folder / "copy", _versions(folder))
    least = VersionId(0, 0)
    for _ in range(3):
        try:
            found = copy.advance()
        except WeightVersionError:
            note(event="nothing")
            continue
        try:
            problem = _problem(found)
        except WeightVersionError:  # Another process has updated it.
            note(event="moved on")
            continue
        if problem is not None or found.id < least:
            note(event="wrong", name=found.id.name, problem=problem)
        note(event="held", name=found.id.name)
        least = found.id


def _problem(found: CopiedVersion) -> str | None:
    file = found.open()
    if set(file.specs) != set(NAMES):
        return f"tensors {sorted(file.specs)}"
    wrong = [
        name
        for name in NAMES
        if not np.array_equal(file.flat(name).view(np.uint8), bits_of(found.id, name))
    ]
    return f"bits of {wrong}" if wrong else None


def _published_before(folder: Path) -> None:
    trainers(folder, 0, lambda **event: None, Faulty())


def _nothing(folder: Path) -> None:
    _versions(folder).mkdir()


def _check(folder: Path, events: list[Event]) -> None:
    """Check that versions stay readable, and that no host has wrong bits."""
    versions = _versions(folder)
    for event in events:
        if event["event"] == "wrong":
            raise ViolationError(f"a host held wrong weights: {event}")
    states = {one.version: one for one in inventory(versions, verify=True)}
    broken = [one for one in states.values() if one.state == "broken"]
    if broken:
        raise ViolationError(f"a version is broken: {broken}")
    told = [VersionId.parse(e["name"]) for e in events if e["event"] == "published"]
    newest = max(told, default=VersionId(0, 0))
    whole = [
        one for one in version_ids(versions) if _is_whole(versions, one, states[one.name].state)
    ]
    if told and newest.name not in states and not any(newest < one for one in whole):
        raise ViolationError(f"{newest} was published and is gone")
    if not whole:
        return
    found = LocalCopy(folder / "copy", versions).advance()
    if found.id < newest or _problem(found) is not None:
        raise ViolationError(f"a host gets {found.id} after {newest}: {_problem(found)}")
    left = {path.name for path in (folder / "copy").iterdir()} - {"lock", "state.json"}
    if left != {found.folder.name}:
        raise ViolationError(f"left over beside {found.folder.name}: {left}")
    prune(versions, 1)
    if any(one.name.startswith("removed-") for one in versions.iterdir()):
        raise ViolationError("a removal was never completed")


def _is_whole(versions: Path, version: VersionId, state: str) -> bool:
    return state == "complete" and read_manifest(versions / version.name).base is None


SCENARIOS = (
    Scenario("weights", _nothing, (trainers, host, host), _check, trainers),
    Scenario("weights-copy", _published_before, (host, host, trainers), _check, host),
)


def _bits(version: VersionId, rank: int) -> VersionBits:
    return VersionBits(version, {name: bits_of(version, name) for name in NAMES[rank::2]})

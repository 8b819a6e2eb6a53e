"""Client caches may be stale for seconds to a minute. Invariants hold, and only latency grows.
docs/protocols.md quotes the latencies that these tests measure in the model.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurmrl.errors import NameExistsError, NameNotFoundError, StaleIncarnationError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import SystemCalls
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import IncarnationWriter, begin, fold
from slurmrl.run.lease import Lease, LeaseObserver, read_counter
from tests.support.disk import Directory, Disk
from tests.support.faulty import Clock
from tests.support.stale import StaleCalls

CACHES_S = (5.0, 30.0, 60.0)
POLL_S = 0.1


class World:
    """A disk, a clock, and clients with their own caches."""

    def __init__(self, cache_s: float, clients: int) -> None:
        self.disk = Disk()
        self.root = self.disk.root / "root"
        self.disk.top.entries["root"] = Directory()
        self.clock = Clock()
        self.clients = [StaleCalls(self.disk, self.clock, cache_s) for _ in range(clients)]


@pytest.mark.parametrize("cache_s", CACHES_S)
@pytest.mark.parametrize("seed", range(10))
def test_stale_caches_allow_one_winner_per_name_and_no_partial_value(
    cache_s: float, seed: int
) -> None:
    world, chance = World(cache_s, 4), random.Random(seed)
    stores = [NameStore(world.root, calls=calls) for calls in world.clients]
    winners: Counter[str] = Counter()
    values: dict[str, str] = {}
    for _ in range(200):
        world.clock.advance(chance.choice([0.0, 0.01, 1.0, 7.0]))
        client, key = chance.randrange(4), f"k{chance.randrange(10)}"
        if chance.random() < 0.5:
            with suppress(NameExistsError):
                stores[client].add(key, f"{key} {client}")
                winners[key] += 1
                values[key] = f"{key} {client}"
        else:
            with suppress(NameNotFoundError):
                assert stores[client].get(key) == values[key]
    assert set(winners.values()) == {1}
    world.clock.advance(cache_s)
    assert stores[0].get_subtree("") == [values[key] for key in sorted(values)]


@pytest.mark.parametrize("cache_s", CACHES_S)
@pytest.mark.parametrize("seed", range(10))
def test_stale_caches_keep_one_history_that_fences_old_masters(cache_s: float, seed: int) -> None:
    world, chance = World(cache_s, 4), random.Random(seed)
    histories = [History(world.root, calls=calls) for calls in world.clients]
    writers: list[IncarnationWriter | None] = [None] * 4
    won: list[tuple[Kind, int]] = []
    for number in range(60):
        world.clock.advance(chance.choice([0.0, 0.01, 1.0, 20.0]))
        client = chance.randrange(4)
        writer = writers[client]
        if writer is None or chance.random() < 0.1:
            writers[client] = begin(histories[client], {})
            won.append((Kind.BEGIN, writers[client].incarnation))
            continue
        try:
            writer.append(Kind.COMMIT, {"step": number, "directory": f"step-{number}"})
            won.append((Kind.COMMIT, writer.incarnation))
        except StaleIncarnationError:
            writers[client] = None
    world.clock.advance(cache_s)
    records = History(world.root, calls=world.clients[0]).read()
    assert [(record.kind, record.incarnation) for record in records] == won
    fold(records)


@pytest.mark.parametrize("cache_s", CACHES_S)
@pytest.mark.parametrize("seed", range(10))
def test_logs_are_read_completely_and_in_order_with_stale_caches(cache_s: float, seed: int) -> None:
    world, chance = World(cache_s, 3), random.Random(seed)
    readers = [LogReader(world.root / "log", calls=calls) for calls in world.clients[1:]]
    seen: list[list[int]] = [[], []]
    for number, reader in enumerate(readers):
        seen[number] += [message["n"] for message in reader.read()]  # a negative entry
    writer = LogWriter(world.root / "log", calls=world.clients[0], segment_bytes=400)
    for number in range(50):
        writer.append({"n": number, "padding": "p" * chance.randrange(100)})
        world.clock.advance(chance.choice([0.0, 0.1, 3.0]))
        reader = chance.randrange(2)
        seen[reader] += [message["n"] for message in readers[reader].read()]
        assert seen[reader] == list(range(len(seen[reader])))
    for number, reader in enumerate(readers):
        for _ in range(40):  # a segment, and the entry of the next one, may both be hidden
            world.clock.advance(cache_s)
            seen[number] += [message["n"] for message in reader.read()]
        assert seen[number] == list(range(50))


@pytest.mark.parametrize("cache_s", [5.0, 30.0])
def test_holder_stays_alive_if_caches_are_shorter_than_the_ttl(cache_s: float) -> None:
    world = World(cache_s, 2)
    lease = Lease(world.root / "lease", calls=world.clients[0])
    watching = LeaseObserver(world.root / "lease", 60.0, world.clock, calls=world.clients[1])
    oldest = 0.0
    for _ in range(500):
        lease.beat()
        world.clock.advance(2.0)
        view = watching.observe()
        assert view.alive
        oldest = max(oldest, view.age_s)
    assert oldest <= cache_s + 2.0


def visible(world: World, cause: Callable[[], object], seen: Callable[[], bool]) -> float:
    """Return the seconds from an acknowledged change until a polling reader sees it."""
    assert not seen()
    cause()
    began = world.clock()
    while not seen():
        world.clock.advance(POLL_S)
        assert world.clock() - began < 600, "never seen"
    return world.clock() - began


def latencies(cache_s: float) -> dict[str, float]:
    world = World(cache_s, 2)
    ours, theirs = world.clients
    store, other = (NameStore(world.root, calls=calls) for calls in (ours, theirs))
    history = History(world.root, calls=theirs)
    reader, lease = LogReader(world.root / "log", calls=theirs), Lease(world.root / "l", calls=ours)
    found = {
        "new name": visible(world, lambda: store.add("a", "1"), lambda: _has(other, "a", "1")),
        "replaced name": visible(
            world, lambda: store.add("a", "2", replace=True), lambda: _has(other, "a", "2")
        ),
        "history": visible(
            world,
            lambda: begin(History(world.root, calls=ours), {}),
            lambda: bool(history.read()),
        ),
        "lease": visible(
            world, lease.beat, lambda: read_counter(world.root / "l", calls=theirs) == 1
        ),
    }
    logs: list[LogWriter] = []
    found["new log"] = visible(
        world,
        lambda: logs.append(LogWriter(world.root / "log", calls=ours)) or logs[0].append({}),
        lambda: bool(reader.read()),
    )
    found["grown log"] = visible(world, lambda: logs[0].append({}), lambda: bool(reader.read()))
    return found


def _has(store: NameStore, key: str, value: str) -> bool:
    try:
        return store.get(key) == value
    except NameNotFoundError:
        return False


@pytest.mark.parametrize("cache_s", CACHES_S)
def test_stale_caches_only_increase_latency(
    cache_s: float, record_property: Callable[[str, object], None]
) -> None:
    for what, seconds in latencies(cache_s).items():
        record_property(f"{what}, caches of {cache_s:g} s", round(seconds, 1))
        print(f"caches of {cache_s:g} s: {what} visible after {seconds:.1f} s")
        assert seconds <= 2 * cache_s + POLL_S


# -- two real mounts -----------------------------------------------------------------------------

MOUNT_CACHE_S = 5


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Mount one folder twice by bindfs, with caches of five seconds."""
    unmount = shutil.which("fusermount3") or shutil.which("fusermount")
    if shutil.which("bindfs") is None or unmount is None or not Path("/dev/fuse").exists():
        pytest.skip("needs bindfs, fusermount and /dev/fuse")
    source, made = tmp_path / "source", []
    source.mkdir()
    caches = ",".join(f"{kind}_timeout={MOUNT_CACHE_S}" for kind in ("attr", "entry", "negative"))
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            command = ["bindfs", "-o", caches, str(source), str(tmp_path / name)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                pytest.skip(f"bindfs cannot mount here: {done.stderr.strip()}")
            made.append(tmp_path / name)
        yield made[0], made[1]
    finally:
        for mounted in made:
            subprocess.run([unmount, "-u", str(mounted)], timeout=60, check=False)


def _seen(what: Callable[[], bool], record: Callable[[str, object], None], name: str) -> None:
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < 120, f"{name}: never seen"
        time.sleep(0.05)
    record(f"bindfs, caches of {MOUNT_CACHE_S} s: {name}", round(time.monotonic() - began, 2))
    print(f"bindfs: {name} visible after {time.monotonic() - began:.2f} s")


@pytest.mark.long
def test_protocols_work_on_two_mounts(
    mounts: tuple[Path, Path], record_property: Callable[[str, object], None]
) -> None:
    ours, theirs = mounts
    one, two = begin(History(ours), {}), History(theirs)
    _seen(lambda: len(two.read()) == 1, record_property, "history")
    reader = LogReader(theirs / "log")
    assert reader.read() == []
    writer = LogWriter(ours / "log")
    for number in range(3):
        writer.append({"n": number})
        seen: list[int] = []
        _seen(
            lambda s=seen: bool(s.extend(m["n"] for m in reader.read()) or s),
            record_property,
            f"log message {number}",
        )
        assert seen == [number]
    assert not _has(NameStore(theirs), "a", "1")
    NameStore(ours).add("a", "1")
    with pytest.raises(NameExistsError):
        NameStore(theirs).add("a", "2")
    _seen(lambda: _has(NameStore(theirs), "a", "1"), record_property, "name")
    begin(History(theirs), {})
    with pytest.raises(StaleIncarnationError):
        one.append(Kind.COMMIT, {"step": 1, "directory": "step-1"})
    assert [record.kind for record in History(ours).read()] == [Kind.BEGIN, Kind.BEGIN]


@pytest.mark.long
def test_exclusive_create_has_one_winner_on_two_mounts(mounts: tuple[Path, Path]) -> None:
    chance, calls = random.Random(0), SystemCalls()
    for number in range(100):
        order = [0, 1]
        chance.shuffle(order)
        won = [
            atomic.exclusive_create(
                mounts[side] / f"slot-{number}", f"{side}".encode(), calls=calls
            )
            for side in order
        ]
        assert won == [True, False]

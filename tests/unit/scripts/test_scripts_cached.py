"""The cache of programs and environments that tests and CI build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.trials import wait_until

CACHED = Path(__file__).parents[3] / "scripts" / "cached"
FILL = "echo made >> {log}; while [ -e {hold} ]; do sleep 0.02; done; cp source {folder}/copy"


class Cache:
    """A caller's folder with a source, and a separate cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log, self.hold = folder / "log", folder / "hold"
        self.environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        (folder / "source").write_text("one")

    def start(self, *options: str, fill: str = FILL) -> subprocess.Popen[str]:
        script = fill.format(log=self.log, hold=self.hold, folder="$1")
        command = [sys.executable, str(CACHED), "thing", "--of", "source", *options]
        return subprocess.Popen(
            [*command, "--", "bash", "-c", script, "fill", "{}"],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, *options: str, fill: str = FILL) -> Path:
        said, errors = self.start(*options, fill=fill).communicate(timeout=120)
        assert not errors, errors
        return Path(said.strip())

    def times_made(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def entries(self) -> list[str]:
        names = (path.name for path in (self.folder / "cache" / "slurmrl" / "made").iterdir())
        return sorted(name for name in names if not name.endswith(".lock"))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def test_cached_result_is_rebuilt_only_after_a_change(cache: Cache) -> None:
    first = cache.ask("--with", "compiler 1")
    assert (first / "copy").read_text() == "one"
    assert cache.ask("--with", "compiler 1") == first
    assert cache.times_made() == 1
    assert cache.ask("--with", "compiler 2") != first
    (cache.folder / "source").write_text("two")
    changed = cache.ask("--with", "compiler 1")
    assert (changed / "copy").read_text() == "two"
    other = cache.ask("--with", "compiler 1", fill=FILL + "; true")
    assert len({first, changed, other}) == 3
    assert cache.times_made() == 4


def test_find_option_prints_the_path_without_a_build(cache: Cache) -> None:
    """The command prints the path that the folder has or will have."""
    found = cache.ask("--find")
    assert cache.times_made() == 0
    assert not found.exists()
    assert cache.ask() == cache.ask("--find") == found
    assert cache.times_made() == 1


def test_killed_build_is_not_mistaken_for_complete(cache: Cache) -> None:
    cache.hold.touch()
    killed = cache.start()
    wait_until("the first maker", lambda: cache.times_made() == 1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert [name.startswith(".thing-") for name in cache.entries()] == [True]
    cache.hold.unlink()
    made = cache.ask()
    assert (made / "copy").read_text() == "one"
    assert cache.entries() == [made.name]


def test_only_one_of_many_callers_builds(cache: Cache) -> None:
    cache.hold.touch()
    callers = [cache.start() for _ in range(4)]
    wait_until("the maker", lambda: cache.times_made() == 1)
    cache.hold.unlink()
    said = {caller.communicate(timeout=120)[0] for caller in callers}
    assert len(said) == 1
    assert cache.times_made() == 1


def test_failed_build_is_reported_and_not_cached(cache: Cache) -> None:
    failing = cache.start(fill="touch {folder}/half; echo no such flag >&2; exit 4")
    said, errors = failing.communicate(timeout=120)
    assert (failing.returncode, said) == (3, "")
    assert errors == "no such flag\ncached: thing: bash failed with status 4\n"
    assert cache.entries() == []
    assert (cache.ask() / "copy").exists()
    missing = cache.start("--of", "gone")
    assert "--of gone: there is no such file" in missing.communicate(timeout=120)[1]


def test_cache_writable_by_others_is_not_used(cache: Cache) -> None:
    made = cache.ask()
    made.parent.chmod(0o777)
    refused = cache.start()
    assert "nobody else may write to it" in refused.communicate(timeout=120)[1]
    assert refused.returncode == 3


def test_entries_unused_for_a_month_are_removed_with_the_next_change(cache: Cache) -> None:
    old, recent = cache.ask(), cache.ask("--with", "recent")
    then = time.time() - 40 * 24 * 3600
    os.utime(old, (then, then))
    new = cache.ask("--with", "new")
    assert cache.entries() == sorted([recent.name, new.name])

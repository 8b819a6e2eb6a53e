"""Private folders in this host's memory."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.rollouts.generation import process
from slurmrl.rollouts.generation.process import HostFolder, remove_unused

HOLDER = """
import sys, time
from pathlib import Path
from slurmrl.rollouts.generation.process import HostFolder
folder = HostFolder(Path(sys.argv[1]))
(folder.path / "weights").write_text("0" * 1000)
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("start", [HostFolder, remove_unused])
def test_leftovers_of_a_killed_process_are_removed_by_the_next(
    tmp_path: Path, start: Callable[[Path], HostFolder | None]
) -> None:
    """A folder stays while its process lives."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        own = HostFolder(tmp_path)
        remove_unused(tmp_path)
        assert held.is_dir()
        assert {path.stat().st_mode & 0o777 for path in (held, own.path, own.path.parent)} == {
            0o700
        }
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    other = start(tmp_path)
    assert not held.exists()
    assert own.path.is_dir()
    own.close()
    if other is not None:
        other.close()
    assert not own.path.exists()


def test_directories_are_made_and_removed_only_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HostFolder(tmp_path).close()
    (parent,) = tmp_path.iterdir()
    left = parent / "left"
    left.mkdir()
    with ThreadPoolExecutor() as pool, (parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(process, "LOCK_S", 0.0)
        remove_unused(tmp_path)
        with pytest.raises(EnvironmentFailure, match="unavailable"):
            HostFolder(tmp_path)
        monkeypatch.setattr(process, "LOCK_S", 60.0)
        removal = pool.submit(remove_unused, tmp_path)
        made = pool.submit(HostFolder, tmp_path)
        assert not wait([removal, made], timeout=0.2).done
        assert left.exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        removal.result(timeout=60)
        made.result(timeout=60).close()
    assert not left.exists()


def test_directory_removed_by_its_process_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HostFolder(tmp_path).close()
    (parent,) = tmp_path.iterdir()
    closing = parent / "closing"
    closing.mkdir()
    open_descriptor = os.open

    def open_late(path: Path, *arguments: int) -> int:
        if path == closing:
            closing.rmdir()
        return open_descriptor(path, *arguments)

    monkeypatch.setattr(os, "open", open_late)
    HostFolder(tmp_path).close()


def _foreign(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, os.getuid() + 1, -1)


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("take", [_foreign, _open_to_all, _link, Path.touch])
def test_host_directory_gets_another_name_if_its_name_is_taken(
    tmp_path: Path, take: Callable[[Path], None]
) -> None:
    """The next processes use the same one, and clean it up."""
    if take is _foreign and os.getuid() != 0:
        pytest.skip("only root may give a folder away")
    known = tmp_path / f"slurmrl-{os.getuid()}"
    take(known)
    first = HostFolder(tmp_path)
    second = HostFolder(tmp_path)
    assert first.path.parent == second.path.parent
    assert first.path.parent.name.startswith(f"{known.name}.")
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    os.close(second._descriptor)  # as after a kill of its process
    remove_unused(tmp_path)
    assert not second.path.exists()
    assert first.path.is_dir()
    first.close()


def test_host_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    """Covers user 10, whose folder name is a prefix of user 100's."""
    (tmp_path / f"slurmrl-{os.getuid()}0").mkdir(mode=0o700)
    made = HostFolder(tmp_path)
    assert made.path.parent == tmp_path / f"slurmrl-{os.getuid()}"
    made.close()

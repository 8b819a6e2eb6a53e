"""Private folders in this host's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.engines.rollout.host_folder import HostFolder, remove_unused
from slurmrl.errors import OwnershipError

HOLDER = """
import sys, time
from pathlib import Path
from slurmrl.engines.rollout.host_folder import HostFolder
folder = HostFolder(Path(sys.argv[1]))
(folder.path / "weights").write_text("0" * 1000)
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("start", [HostFolder, remove_unused])
def test_a_killed_process_leaves_nothing_that_the_next_one_does_not_remove(
    tmp_path: Path, start: Callable[[Path], HostFolder | None]
) -> None:
    """A folder stays while its process lives. After a kill it goes with the next start, or once its
    parent cleans up."""
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


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"slurmrl-{os.getuid()}").mkdir(mode=0o755)
    (tmp_path / f"slurmrl-{os.getuid()}").chmod(0o755)
    with pytest.raises(OwnershipError, match="mode 0700"):
        HostFolder(tmp_path)

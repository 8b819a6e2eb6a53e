"""Private test beds: with accounting, or with a network for each node."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTBED = Path(__file__).parents[2] / "scripts" / "slurm-testbed"
TIMEOUT_S = 400.0


def run_bed(*arguments: str) -> None:
    """Run `command`, which must succeed."""
    done = command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def started(*options: str, needs: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the directory of a started bed without setting SLURM_CONF. Skip the test if the bed
    fails with one of the reasons in ``needs``.
    """
    # pytest's own folders have names too long for munge's socket.
    with tempfile.TemporaryDirectory(prefix="slurm-bed-") as directory:
        done = command("up", "--dir", directory, *options)
        said = (done.stdout + done.stderr).strip()
        if done.returncode != 0 and any(reason in said for reason in needs):
            pytest.skip(said)
        assert done.returncode == 0, said
        try:
            yield Path(directory)
        finally:
            run_bed("down", "--dir", directory)


@contextmanager
def bed(*options: str, needs: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a started bed, with SLURM_CONF set to its configuration."""
    with started(*options, needs=needs) as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", f"{directory}/slurm.conf")
        yield directory


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the test bed's command."""
    return subprocess.run(
        [sys.executable, str(TESTBED), *arguments],
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

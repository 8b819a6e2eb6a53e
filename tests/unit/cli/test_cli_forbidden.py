"""Commands on files of a run directory that may not be read, as an ordinary user meets them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trials import REPOSITORY

AS_USERS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""Runs a command without root's right to read everything."""


def test_unreadable_file_gives_one_message(tmp_path: Path) -> None:
    as_user = AS_USERS if os.geteuid() == 0 else ()
    if as_user and not shutil.which("setpriv"):
        pytest.skip("root cannot give up its rights without setpriv")
    command = [*as_user, sys.executable, "-m", "tests.support.forbidden", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr

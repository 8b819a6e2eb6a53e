"""Triton's kernels run by its interpreter: their tests, in a process that finds Triton.

CPU builds of torch come without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rotation import rotating

TRITON = "SLURMRL_TRITON"
"""Names a folder in which Triton is installed; .ci/run makes one."""


@pytest.mark.long
@pytest.mark.parametrize("name", rotating("test_ops_fused.py", "test_ops_paged_kernels.py"))
def test_fused_kernels_are_correct_in_the_triton_interpreter(name: str) -> None:
    folder = os.environ.get(TRITON)
    if folder is None:
        pytest.skip(f"{TRITON} is unset")
    found = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n0", "-rs", "-p", "no:cacheprovider"),
            Path(__file__).with_name(name),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout

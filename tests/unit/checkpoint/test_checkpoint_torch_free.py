"""Modules that the login node and the master import never load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "slurmrl.tensors.layout",
    "slurmrl.tensors.layout",
    "slurmrl.tensors.checkpoint.manifest",
    "slurmrl.tensors.checkpoint.shards",
    "slurmrl.tensors.checkpoint.export",
    "slurmrl.engines",
    "slurmrl.tensors.parallel",
)


@pytest.mark.parametrize("module", MODULES)
def test_importing_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Tests of messages without megatron-core, and of configurations that planning rejects."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from slurmrl.engines import ENGINES
from slurmrl.errors import UsageError


def test_missing_package_is_reported_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "megatron.core" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(UsageError, match=r"needs megatron-core: pip install megatron-core=="):
        ENGINES.load("megatron")("actor")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported() -> None:
    code = "from slurmrl.engines.megatron import require; require()"
    run = subprocess.run(  # a process without the GPU that tests emulate
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "the megatron engine needs a GPU" in run.stderr.splitlines()[-1]

"""How a process is set up before its first computation."""

from __future__ import annotations

import ctypes

import pytest
import torch

from slurmrl.parallel import device


@pytest.mark.parametrize(
    ("deterministic", "of_user", "in_force"),
    [(True, None, b":4096:8"), (True, ":16:8", b":16:8"), (False, None, None)],
)
def test_deterministic_runs_give_cublas_the_workspace_that_torch_demands(
    deterministic: bool,
    of_user: str | None,
    in_force: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise `deterministic: true` fails on a GPU at its first matrix product. torch reads the
    variable by C's getenv."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", of_user or "")
    if of_user is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cpu = device.Accelerator(torch.device("cpu"), "gloo")
    device.set_up(cpu, threads=1, deterministic=deterministic)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"CUBLAS_WORKSPACE_CONFIG") == in_force

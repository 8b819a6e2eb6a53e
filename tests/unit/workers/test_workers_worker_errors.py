"""Classification of a rank's exceptions: consequences of another rank's end, lack of memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slurmrl.workers.worker.serve import recognise

GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:4242"
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Connection reset by peer"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        dist.DistNetworkError("The client socket has timed out after 60000ms"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
    ],
)
def test_echoes(error: Exception) -> None:
    assert recognise(error) == {"echo": True}


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_out_of_memory(error: Exception) -> None:
    assert recognise(error) == {"oom": True}


@pytest.mark.parametrize(
    "error",
    [ValueError("Connection closed by peer"), RuntimeError("shapes differ"), SystemExit(0)],
)
def test_others_stand_for_themselves(error: BaseException) -> None:
    assert recognise(error) == {}


def test_what_an_exception_was_raised_from_counts() -> None:
    error = LookupError("no batch")
    error.__cause__ = RuntimeError(GLOO)
    assert recognise(error) == {"echo": True}

"""What kind of failure an exception in a rank is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

ECHOES = (ConnectionError, dist.DistError)
ECHO_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|gloo/transport|socket timeout"
    r"|remote process exited|timed out waiting|nccl (communicator|error)|timeout\(ms\)",
    re.IGNORECASE,
)
"""What torch.distributed, gloo and NCCL say where another rank is gone or does not take part."""


def recognise(error: BaseException) -> dict[str, Any]:
    """``echo``: it looks like the end of another rank, which tells more than this. ``oom``: there
    was no memory left. Both only where they hold."""
    chain = list(_chain(error))
    echo = any(isinstance(one, ECHOES) or _says_echo(one) for one in chain)
    oom = any(isinstance(one, MemoryError | torch.OutOfMemoryError) for one in chain)
    return {**({"echo": True} if echo else {}), **({"oom": True} if oom else {})}


def _says_echo(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and ECHO_TEXTS.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__

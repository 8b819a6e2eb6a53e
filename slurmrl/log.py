"""Logging of slurmrl's processes to standard error: time, process, level, message."""

from __future__ import annotations

import logging
import sys


def configure(who: str, level: int = logging.INFO) -> None:
    """Set up the root logger of the process ``who``, for example ``trainer/0 rank 3``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{who}] %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def get(name: str) -> logging.Logger:
    return logging.getLogger(name)


def flush() -> None:
    """Flush all buffers, before a process exits without the usual clean-up."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()

"""Checks inside a container; they write their results to a file in the job's folder."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmrl.desk.doctor import directory, software
from slurmrl.desk.doctor.check import Check, failed, guarded, ok
from slurmrl.fsio import atomic, documents, umask

CUDA_LIBRARY = "libcuda.so.1"
"""The driver's, which comes from the host."""


def result_name(task: int) -> str:
    return f"inside.{task}.json"


def main(arguments: Sequence[str]) -> None:
    """``arguments``: the job's folder and the number of the host."""
    folder, task = Path(arguments[0]), int(arguments[1])
    umask.make_private()
    checks = look(folder, documents.read(folder / directory.ASK))
    text = json.dumps({"checks": [one.to_json() for one in checks]})
    atomic.replace(folder / result_name(task), text.encode())


def look(folder: Path, request: dict[str, Any]) -> list[Check]:
    gpus = int(request["gpus"]) > 0
    advice = "the directory of --root must be the same inside and outside"
    return [
        *guarded("same directory", advice, lambda: directory.content(folder, request)),
        software.python(),
        *software.packages(gpus),
        *([_driver()] if gpus else []),
    ]


def _driver() -> Check:
    try:
        ctypes.CDLL(CUDA_LIBRARY)
    except OSError as error:
        advice = "let the container have the host's driver (apptainer: --nv)"
        return failed("gpu driver", str(error), advice)
    return ok("gpu driver", f"{CUDA_LIBRARY} can be loaded")

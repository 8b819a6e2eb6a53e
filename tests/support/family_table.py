"""Runs of the checks of families, each in its own process, and their kept results."""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tests.support import family_checks, picture_checks
from tests.support.families import families
from tests.support.picture_checks import picture_families
from tests.support.rotation import commit, share
from tests.support.trials import REPOSITORY

KEPT: Final = REPOSITORY / "scripts" / "models.json"
LOGS: Final = REPOSITORY / "build" / "models"
"""Tracebacks of the checks, a file for each family."""
PACKAGES: Final = ("torch", "transformers", "peft", "megatron-core")
SERVERS: Final = {"sglang": "SGLANG_PYTHON", "vllm": "VLLM_PYTHON"}
COLUMNS: Final = (*picture_checks.ALL, "t2", "megatron", "builtin")
TEXT, IMAGES = "families", "images"
"""Keys of the kept results: of families that read only text, and of families that read images."""
LIMIT_S: Final = 1800.0
"""Time limit of all checks of a family. The start of a server takes up to half of it."""
TENTHS: Final = 10
WITHOUT_TRIALS: Final = ("load", "logits", "generation", "megatron", "builtin")
"""Columns that take seconds, because they start no trial."""

FORK_SERVER: Final = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload([picture_checks.__name__])  # Import modules once.

Results = dict[str, dict[str, str]]
"""Results by family and column: empty if the check holds, else the reason."""


def all_families() -> list[str]:
    """Return every family of the two tables: first the families that read only text."""
    return [*families(), *picture_families()]


def asked_of(family: str, columns: Sequence[str]) -> list[str]:
    """Return the columns among ``columns`` that the table of a family has."""
    images = family in picture_families()
    own = picture_checks.columns_of(family) if images else columns
    return [column for column in columns if column in own]


def checked(family: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the result of each column of a family."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"family-{family}-") as folder:
        output = Path(folder) / "output"
        asked = {
            "family": family,
            "folder": folder,
            "columns": list(columns),
            "servers": {kind: os.environ.get(name, "") for kind, name in SERVERS.items()},
            "output": str(output),
            "errors": str(LOGS / f"{family}.log"),
        }
        checks = picture_checks if family in picture_families() else family_checks
        process = FORK_SERVER.Process(target=checks.main, args=(asked,))
        process.start()
        process.join(LIMIT_S)
        ended = f"the process of the checks ended with status {process.exitcode}"
        if process.exitcode is None:
            ended = f"the checks took over {LIMIT_S:.0f} s"
            process.kill()
            process.join()
        end_processes(folder)
        found: dict[str, str] = {}
        for line in output.read_text().splitlines() if output.exists() else ():
            found |= json.loads(line)
    return {column: found.get(column, ended) for column in columns}


def end_processes(folder: str) -> None:
    """Kill the processes of trials in a folder that a failed check may have left."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and folder in (entry / "cmdline").read_bytes().decode():
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, UnicodeDecodeError):
            continue  # The process has ended or is not ours.


def kept() -> dict[str, Any]:
    """Return the kept results with their versions and date."""
    if not KEPT.exists():
        return {"versions": {}, "date": "", IMAGES: {}, TEXT: {}}
    found: dict[str, Any] = json.loads(KEPT.read_text())
    return found


def kept_results() -> Results:
    """Return the kept results of all families."""
    found = kept()
    return {**found[TEXT], **found[IMAGES]}


def keep(results: Results) -> None:
    """Merge results into the kept results."""
    merged = kept_results()
    for family, columns in results.items():
        merged[family] = {**merged.get(family, {}), **columns}
    now = datetime.datetime.now(datetime.UTC)
    state = {
        "versions": {name: version(name) for name in PACKAGES},
        "date": now.date().isoformat(),
        IMAGES: {name: merged[name] for name in picture_families() if name in merged},
        TEXT: {name: merged[name] for name in sorted(merged.keys() - set(picture_families()))},
    }
    new = KEPT.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n")
    new.replace(KEPT)


def differences(results: Results, wanted: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each check that holds in only one of the two results."""
    return [
        f"{family} {column}: {reason or 'yes'}; kept: {before[column] or 'yes'}"
        for family, columns in results.items()
        if (before := wanted.get(family)) is not None
        for column, reason in columns.items()
        if column in before and bool(reason) != bool(before[column])
    ]


def run(chosen: argparse.Namespace) -> int:
    """Run ``scripts/models``. Return its exit code."""
    names = chosen.families or (
        share(all_families(), TENTHS, commit()) if chosen.tenth else all_families()
    )
    if unknown := sorted(set(names) - set(all_families())):
        print(f"models: transformers has no family {', '.join(unknown)}", file=sys.stderr)
        return 2
    more = tuple(SERVERS) if chosen.servers else ()
    columns = chosen.columns or [*COLUMNS, *more]
    if unknown := sorted(set(columns) - {*COLUMNS, *SERVERS}):
        print(f"models: there is no column {', '.join(unknown)}", file=sys.stderr)
        return 2
    unset = [
        SERVERS[column] for column in columns if not os.environ.get(SERVERS.get(column, "_"), "_")
    ]
    if unset:
        print(f"models: set {', '.join(unset)} (scripts/test-engines)", file=sys.stderr)
        return 2
    installed, before = {name: version(name) for name in PACKAGES}, kept()
    print(f"{len(names)} families with {installed}", flush=True)
    stay = set(kept_results()) - set(names) or columns != list(COLUMNS)
    if not chosen.check and before["versions"] not in ({}, installed) and stay:
        print(f"models: kept results have {before['versions']}: run all", file=sys.stderr)
        return 2
    results: Results = {}
    with ThreadPoolExecutor(chosen.jobs) as pool:
        found_of = pool.map(lambda one: checked(one, asked_of(one, columns)), names)
        for name, found in zip(names, found_of, strict=True):
            results[name] = found
            print(line(name, found), flush=True)
            if not chosen.check:
                keep({name: found})
    wrong = differences(results, kept_results()) if chosen.check else []
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


def line(family: str, found: Mapping[str, str]) -> str:
    """Return a line about one family: its columns, and the reason of each failed check."""
    held = [column for column, reason in found.items() if not reason]
    lost = [f"  no {column}: {reason}" for column, reason in found.items() if reason]
    return "\n".join([f"{family}: {' '.join(held)}", *lost])

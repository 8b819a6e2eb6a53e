"""What the model sees of a configuration's data, read in a child process. Torch-free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl.config.load import dump
from slurmrl.errors import ConfigError, Problem, RunFailedError, UsageError
from slurmrl.plan.settings import Settings
from slurmrl.submission.checks.run import Code, environment

CHILD = "slurmrl.submission.data_child"


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """Adjacent tokens of a sequence that are all targets, or all context."""

    text: str
    tokens: int
    target: bool


@dataclass(frozen=True, kw_only=True)
class DataSample:
    """One row as the model sees it."""

    source: str
    """Dotted key of the section."""
    where: str
    id: str
    sequences: tuple[tuple[TextRun, ...], ...]


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """What a source holds."""

    source: str
    path: str
    rows: int
    """Usable rows."""
    left_out: int
    """Rows above the length limits."""
    tokens: int
    targets: int
    """Tokens that are trained on."""
    longest: int
    """Tokens of the longest sequence."""
    equal_pairs: int
    """Pairs whose chosen and rejected answers are the same tokens."""
    remarks: tuple[str, ...] = ()
    """Traps in the data (`data.remarks`)."""


class DataReport:
    """Asks a child process about the data of a configuration. ``problems`` are those found while
    iterating.

    Methods raise UsageError for a configuration without a tokenizer, RunFailedError if the child
    fails.
    """

    def __init__(self, settings: Settings, code: Code) -> None:
        """``code`` has the user's own types."""
        self._code = code
        if settings.config.actor.tokenizer is None:
            raise UsageError("actor.tokenizer: the data cannot be tokenised without a tokenizer")
        self._settings = settings
        self._problems: list[Problem] = []

    def samples(self, rows: int) -> Iterator[DataSample]:
        """The first usable rows of each source."""
        for line in self._ask(rows):
            sequences = tuple(tuple(TextRun(**run) for run in runs) for runs in line["sequences"])
            yield DataSample(
                source=line["source"], where=line["where"], id=line["id"], sequences=sequences
            )

    def counts(self) -> Iterator[DataCounts]:
        """Read and tokenise all rows of each source."""
        for line in self._ask(0):
            counts = {**line["counts"], "remarks": tuple(line["counts"]["remarks"])}
            yield DataCounts(source=line["source"], path=line["path"], **counts)

    def finish(self) -> None:
        """:raises ConfigError: rows or settings that cannot be used."""
        if self._problems:
            raise ConfigError(tuple(self._problems))

    def _ask(self, rows: int) -> Iterator[dict[str, Any]]:
        """The child's lines, without problems."""
        with tempfile.TemporaryDirectory(prefix="slurmrl-data-") as name:
            folder = Path(name)
            (folder / "config.yaml").write_text(dump(self._settings.config), encoding="utf-8")
            arguments = [str(folder / "config.yaml"), str(rows), str(os.getpid())]
            with subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, *arguments],
                env=environment(folder, self._code, {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            ) as child:
                assert child.stdout is not None
                for text in child.stdout:
                    yield from self._understood(json.loads(text))
            if child.returncode:
                raise RunFailedError(
                    f"reading the data failed, see above (exit code {child.returncode})"
                )

    def _understood(self, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "error" in line:
            raise UsageError(line["error"])
        if "problems" not in line:
            yield line
            return
        for where, key, message in line["problems"]:
            if not where:  # a setting's
                key = f"{line['source']}.{key}" if key else line["source"]
                where = self._settings.source.where(tuple(key.split(".")))
            self._problems.append(Problem(where, key, message))

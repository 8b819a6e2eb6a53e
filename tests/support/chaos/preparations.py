"""Scenario: the first ranks of successive incarnations prepare the data of a trial. Older ranks may
still be alive.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurmrl.config.schema import Dataset
from slurmrl.data import preparation, prepared
from slurmrl.data.prepared import PreparedRows
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.run.paths import RunPaths
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note

ROWS = [("a", "11+2="), ("b", "3="), ("c", "99+999="), ("d", "4+5=")]
LONGEST = 6
EXPECTED = [(name, text.encode()) for name, text in ROWS if len(text) <= LONGEST]
LAST = 99


class Characters:
    """A tokenizer: a token is a character."""

    eos_token_id, bos_token_id = 0, None

    def __init__(self, folder: Path) -> None:
        self.name_or_path = str(folder)

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(128)}

    def __call__(self, texts: str | list[str], **_: Any) -> Any:
        return SimpleNamespace(input_ids=[list(text.encode()) for text in texts])


def _config(folder: Path) -> Dataset:
    return Dataset(
        type="prompt", path=str(folder / "rows" / "rows.jsonl"), max_prompt_tokens=LONGEST
    )


def _setup(folder: Path) -> None:
    (folder / "rows").mkdir()
    rows = [{"id": name, "prompt": text} for name, text in ROWS]
    (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _prepare(folder: Path, incarnation: int) -> Path:
    data, tokenizer = RunPaths(folder).data, Characters(folder / "rows")
    config = _config(folder)
    prepared.BUFFER_BYTES = 64  # type: ignore[misc] # several writes
    directory = preparation.prepare(data, incarnation, config, tokenizer, str)  # type: ignore[arg-type]
    preparation.sweep(data, incarnation, [directory])
    return directory


def _check_rows(directory: Path) -> None:
    with closing(PreparedRows(directory)) as rows:
        found = [rows.read(index) for index in range(len(rows))]
    if [(row.name, bytes(row.tokens.tolist())) for row in found] != EXPECTED:
        raise ViolationError(f"{directory.name} has other rows: {found}")


def maker(folder: Path, me: int, note: Note) -> None:
    """Act as the first rank of incarnation ``me`` + 1."""
    incarnation = me + 1
    note(event="began", incarnation=incarnation)
    try:
        _check_rows(_prepare(folder, incarnation))
    except (EnvironmentFailure, CorruptFileError) as error:
        note(event="failed", incarnation=incarnation, error=str(error))
    else:
        note(event="ready", incarnation=incarnation)


def _check(folder: Path, events: list[Event]) -> None:
    begun = 0
    for event in events:
        if event["event"] == "began":
            begun = max(begun, event["incarnation"])
        if event["event"] == "failed" and event["incarnation"] >= begun:
            raise ViolationError(f"the newest incarnation failed: {event}")
    _check_rows(_prepare(folder, LAST))
    left = sorted(path.name for path in RunPaths(folder).data.iterdir())
    if len(left) != 1:
        raise ViolationError(f"never cleaned up: {left}")


SCENARIOS = (Scenario("preparation", _setup, (maker, maker), _check, maker),)

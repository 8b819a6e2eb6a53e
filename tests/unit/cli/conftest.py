"""Commands in this process, and what they print."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from slurmrl.cli.main import main


class Output(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Command:
    """Runs command lines of ``slurmrl``, which must end with an exit code (None: any)."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int | None = 0) -> Output:
        """Return what the command prints."""
        self._capsys.readouterr()
        found = main(words)
        output = Output(found, *self._capsys.readouterr())
        assert code is None or found == code, output
        return output

    def json(self, *words: str, code: int | None = 0) -> Any:
        return json.loads(self(*words, "--json", code=code).out)

    def rejected(self, *words: str) -> str:
        """Return the message about wrong usage."""
        return self(*words, code=2).err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)

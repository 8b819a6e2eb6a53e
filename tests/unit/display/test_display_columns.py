from __future__ import annotations

import pytest

from slurmrl.display import terminal

ROWS = [("A", "WORDS"), ("long cell", "one two three four five six seven eight nine ten")]


def test_a_pipe_gets_whole_lines() -> None:
    assert terminal.table(ROWS) == ["A          WORDS", f"long cell  {ROWS[1][1]}"]


def test_the_last_column_hangs() -> None:
    assert terminal.table(ROWS, 40) == [
        "A          WORDS",
        "long cell  one two three four five six",
        "           seven eight nine ten",
    ]


def test_a_narrow_column_continues_below() -> None:
    assert terminal.table(ROWS, 36) == [
        "A          WORDS",
        "long cell",
        "    one two three four five six",
        "    seven eight nine ten",
    ]


def test_long_words_stay_whole() -> None:
    path = "/a/path/that/nobody/wants/to/see/cut/into/pieces"
    assert terminal.hanging("run  ", f"is in {path}", 40) == ["run  is in", f"     {path}"]


@pytest.mark.parametrize("width", [None, 10])
def test_nothing_behind_the_head(width: int | None) -> None:
    assert terminal.hanging("head  ", "", width) == ["head"]


def test_a_pipe_has_no_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.width() is None

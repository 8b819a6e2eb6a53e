from __future__ import annotations

import pytest

from slurmrl.display import terminal

ROWS = [("A", "WORDS"), ("long cell", "one two three four five six seven eight nine ten")]


def test_lines_for_a_pipe_are_not_wrapped() -> None:
    assert terminal.table(ROWS) == ["A          WORDS", f"long cell  {ROWS[1][1]}"]


def test_last_column_wraps_with_a_hanging_indent() -> None:
    assert terminal.table(ROWS, 40) == [
        "A          WORDS",
        "long cell  one two three four five six",
        "           seven eight nine ten",
    ]


def test_narrow_column_continues_on_the_next_line() -> None:
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
def test_column_head_without_text_is_printed_without_trailing_spaces(width: int | None) -> None:
    assert terminal.hanging("head  ", "", width) == ["head"]


def test_pipe_has_no_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.width() is None

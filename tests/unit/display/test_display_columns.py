"""Columns and sparklines."""

from __future__ import annotations

import pytest

from slurmrl.display import terminal
from slurmrl.display.terminal import sparkline

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


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0.0, 7.0], 10, "▁█"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 10, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 0.0, 7.0, 7.0, 7.0, 7.0], 2, "▁█"),
        ([2.0, 2.0, 2.0], 2, "▅▅"),
        ([-3.0], 10, "▅"),
    ],
)
def test_sparkline_has_one_bar_per_value_or_range(
    values: list[float], width: int, bars: str
) -> None:
    assert sparkline(values, width) == bars

"""JSONL files and templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.data.records import listed, read_records
from slurmrl.errors import ConfigError, EnvironmentFailure, Problem


def write(folder: Path, text: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_have_ids_and_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "a", "x": 1}\n\n{"id": 7}\n')
    records = read_records(path, "id")
    assert records.ids == ("a", "7")
    assert records.numbers == (1, 3)
    assert records.rows[0] == {"id": "a", "x": 1}


def test_line_number_is_the_id_of_rows_without_ids(tmp_path: Path) -> None:
    assert read_records(write(tmp_path, '{"x": 1}\n{"x": 2}\n'), "id").ids == ("1", "2")


def test_a_text_may_hold_unicode_line_separators(tmp_path: Path) -> None:
    assert len(read_records(write(tmp_path, '{"x": "a\u2028b\x85c"}\n'), "id").rows) == 1


def test_all_wrong_lines_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "a"}\n{"id": "a"}\n{"x": 1}\nnot json\n[1]\n')
    with pytest.raises(ConfigError) as caught:
        read_records(path, "id")
    found = {
        (problem.where.rpartition(":")[2], problem.message) for problem in caught.value.problems
    }
    assert ("2", "'a' is already the id of line 1") in found
    assert ("3", "missing here, though other rows have it") in found
    assert ("5", "must be a JSON object") in found
    assert any(line == "4" and text.startswith("not JSON") for line, text in found)


@pytest.mark.parametrize("value", ["1.5", "true", "[1]", "{}", '"\\ud800"'])
def test_row_id_is_a_string_or_an_integer(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_records(write(tmp_path, f'{{"id": "a"}}\n{{"id": {value}}}\n'), "id")
    (problem,) = caught.value.problems
    assert (problem.where.rpartition(":")[2], problem.key) == ("2", "id")


def test_too_deeply_nested_lines_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: not JSON: nested too deeply"):
        read_records(write(tmp_path, "[" * 200_000 + "\n"), "id")


def test_empty_or_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        read_records(write(tmp_path, "\n"), "id")
    with pytest.raises(EnvironmentFailure, match="cannot read dataset"):
        read_records(tmp_path / "absent.jsonl", "id")


def test_reported_problems_come_from_the_first_lines(tmp_path: Path) -> None:
    """A file with millions of wrong lines is described by the first ones, in order."""
    path = write(tmp_path, '{"id": "a"}\n' + '{"x": 1}\n' * 30 + '{"id": "a"}\n' * 30)
    with pytest.raises(ConfigError) as caught:
        read_records(path, "id")
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:2"
    assert "(in 20 or more rows, also in line 3, line 4, line 5)" in problem.message


@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        (3, ["missing"] * 3),
        (7, ["missing (in 7 rows, also in line 2, line 3, line 4)"]),
        (50, ["missing (in 20 or more rows, also in line 2, line 3, line 4)"]),
    ],
)
def test_rows_with_the_same_problem_become_one_problem(rows: int, messages: list[str]) -> None:
    found = listed(
        [Problem(f"rows.jsonl:{row}", "answer", "missing") for row in range(1, rows + 1)]
    )
    assert [problem.message for problem in found] == messages
    assert found[0].where == "rows.jsonl:1"


def test_different_problems_are_listed_separately_in_row_order() -> None:
    given = [Problem(f"a.parquet, row {row}", "x", f"is {row % 2}") for row in range(8)]
    found = listed(given)
    assert [problem.where for problem in found] == ["a.parquet, row 0", "a.parquet, row 1"]
    assert "in 4 rows, also in a.parquet, row 2, a.parquet, row 4" in found[0].message


def test_equal_mistakes_in_different_values_are_one_problem() -> None:
    problems = [
        Problem(f"rows.jsonl:{n}", "", f'answer: is a number ({n}): write "{n}"') for n in range(5)
    ]
    (one,) = listed(problems)
    rows = "(in 5 rows, also in line 1, line 2, line 3)"
    assert (one.where, one.message) == (
        "rows.jsonl:0",
        f'answer: is a number (0): write "0" {rows}',
    )

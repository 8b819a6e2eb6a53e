"""JSONL files and templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.data.records import read_records
from slurmrl.data.template import fill
from slurmrl.errors import ConfigError, EnvironmentFailure


def write(folder: Path, text: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_ids_and_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, '{"id": "a", "x": 1}\n\n{"id": 7}\n')
    records = read_records(path, "id")
    assert records.ids == ("a", "7")
    assert records.lines == (1, 3)
    assert records.rows[0] == {"id": "a", "x": 1}


def test_without_ids_the_line_number_is_the_id(tmp_path: Path) -> None:
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
    assert ("2", "'a' is the id of line 1 too") in found
    assert ("3", "missing here, though other lines have it") in found
    assert ("5", "must be a JSON object") in found
    assert any(line == "4" and text.startswith("not JSON") for line, text in found)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        read_records(write(tmp_path, "\n"), "id")
    with pytest.raises(EnvironmentFailure, match="cannot read dataset"):
        read_records(tmp_path / "absent.jsonl", "id")


def test_the_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    one = read_records(write(tmp_path, '{"x": 1}\n'), "id").fingerprint
    assert read_records(write(tmp_path, '{"x": 1}\n'), "id").fingerprint == one
    assert read_records(write(tmp_path, '{"x": 2}\n'), "id").fingerprint != one


def test_templates_fill_in_keys_and_leave_other_braces() -> None:
    row = {"question": "1+1?", "hint": "small {prompt}"}
    names = {"prompt": "question", "answer": "answer"}
    text = fill(r"Q: {prompt} ({hint}) \boxed{} {unknown} {answer}", row, names)
    assert text == r"Q: 1+1? (small {prompt}) \boxed{} {unknown} {answer}"

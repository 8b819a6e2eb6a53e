"""Files that are not JSON lines give one message that names their format."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Dataset
from slurmrl.data.records import read_records
from slurmrl.data.rows import DatasetRows
from slurmrl.data.source_files import no_dataset
from slurmrl.errors import ConfigError

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(3)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)
PRETTY = "\n".join(json.dumps(row, indent=2) for row in ROWS)
TWICE = '{"id": 1, "b": {"a": 1, "c": 2, "a": 1}}'
COMMAS = "".join(f"{json.dumps({'prompt': 'x' * length})},\n" for length in range(5))
TABLE = 'prompt,answer\n"1+1=, or so","2\n3"\n1+2=,3\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", TABLE, ":1: is a table with commas"),
        ("rows.csv", f"\ufeff{TABLE}", ":1: is a table with commas"),
        ("rows.csv", "prompt\n1+1=\n", ":1: is a table with commas"),
        ("rows.tsv", TABLE.replace(",", "\t"), ":1: is a table with tabs"),
        ("rows.txt", "a;b;c\n1;2;3\n", ":1: is a table with semicolons"),
        ("rows.json", PRETTY, ":1: begins with an object on several lines"),
        ("rows.json", json.dumps({"data": ROWS}, indent=1), ":1: begins with an object on several"),
        ("rows.jsonl", "<!DOCTYPE html>\n<p>404</p>\n", ":1: is HTML or XML"),
        (
            "rows.jsonl",
            "version https://git-lfs.github.com/spec/v1\noid x\n",
            ":1: is a pointer of",
        ),
        ("rows.jsonl", LINES + "\0" * 5000, ":4: contains NUL bytes"),
        ("rows.jsonl", LINES[:50] + "\0" * 500 + "\n" + LINES, ":2: contains NUL bytes"),
        ("rows.json", json.dumps(ROWS, indent=1)[:60] + "\0" * 500, ":7: contains NUL bytes"),
        (
            "rows.jsonl",
            LINES[:-9],
            ":3: not JSON: .*; the file ends in this row, so the file may be incomplete",
        ),
        (
            "rows.json",
            json.dumps(ROWS)[:-1],
            "or ']', found the end of the file, which may be incomplete",
        ),
        ("rows.json", f"[{json.dumps(ROWS[0])},\n]", ":2: not JSON: ',' before ']'; remove the"),
        ("rows.jsonl", f"{json.dumps(ROWS[0])},\n", ":1: not JSON: .* a comma follows the object"),
        (
            "rows.jsonl",
            '[{"role": "user"}]\n[{}]\n',
            ":2: .* each line has a list, but a row is an",
        ),
        ("rows.jsonl", f"{ROWS[0]}\n", ":1: not JSON: .* Python printed this object"),
        ("rows.jsonl", LINES.replace("\n", "\r"), ":1: not JSON: .* only carriage returns"),
        ("rows.jsonl", TWICE, ":1: an object has the key 'a' twice; remove one of them"),
        ("rows.json", f"[{TWICE}]", ":1: in the row that begins here: an object has the key 'a' t"),
        ("rows.jsonl", '{"b": [-Infinity]}', ":1: -Infinity is not a JSON value; write null"),
        ("rows.jsonl", '{"b": -1e400}', ":1: the number -1e400 is too large; at most 1.79e308 is"),
        ("rows.jsonl", f'{{"b": {"1" * 400}.0}}', "1111… of 402 characters is too large; at most"),
        ("rows.json", '[{"b": 2e308}]', "begins here: the number 2e308 is too large; at most 1.79"),
        ("rows.json", '[{"b": Infinity}]', ":1: in the row that begins here: Infinity is not a"),
        ("rows.jsonl", COMMAS, ":1: .* a comma follows the object; .*in 5 rows, also in"),
        ("rows.yaml", "- prompt: 1+1\n  answer: 2\n", ":1: begins with '- prompt: 1\\+1', but a"),
        ("rows.txt", "1+1\n", ":1: begins with '1\\+1', but a dataset has a JSON object on each"),
    ],
)
def test_file_of_another_format_is_one_problem(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        read_records(path, "id")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_named_even_without_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES.encode(encoding))
    named = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(ConfigError, match=rf"is {named} text; .* \(iconv -f {named}"):
        read_records(path, "id")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", LINES),
        ("rows.jsonl", LINES.replace("\n", "\r\n")),
        ("rows.jsonl", f"\ufeff{LINES}"),
        ("rows.jsonl", json.dumps(ROWS)),
        ("rows.jsonl", json.dumps(ROWS, indent=1)),
        ("rows.jsonl", LINES[:-1]),
    ],
)
def test_rows_are_read_with_any_file_name_and_line_ends(
    tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode())
    assert list(read_records(path, "id").rows) == ROWS


@pytest.mark.parametrize(
    "content", ["no, it is\n", "no, it is: {\n", 'x\n{"a": 1, "b": 2}\n', "\xa0\n"]
)
def test_mistake_in_first_row_is_not_reported_as_another_format(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content + LINES)
    with pytest.raises(ConfigError) as caught:
        read_records(path, "id")
    (problem,) = caught.value.problems
    assert problem.message.startswith("not JSON: Expecting value in column 1")


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        ([{"data": ROWS}], "; if the rows are in the list 'data', run jq -c '.data[]' FILE"),
        ([{"version": "1.1", "data": ROWS}], "in the list 'data', run jq -c '.data[]' FILE"),
        ([{"data": ROWS}, {"data": ROWS}], "; allowed: data"),
        ([{"messages": [{"role": "user", "content": "1+1="}]}], "; allowed: messages"),
    ],
)
def test_message_about_a_single_json_object_explains_the_remedy(
    tmp_path: Path, rows: list[dict[str, Any]], remedy: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(ConfigError) as caught:
        DatasetRows(Dataset.model_validate({"type": "prompt", "path": str(path)}))
    (problem,) = caught.value.problems
    assert problem.key == "prompt_key"
    assert remedy in problem.message
    assert ("jq" in problem.message) is ("jq" in remedy)


def test_suggested_command_converts_a_table(tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text(f"\ufeff{TABLE}")
    with pytest.raises(ConfigError) as caught:
        read_records(tmp_path / "FILE", "id")
    (program,) = re.findall(r'python3 -c "(.*)"', caught.value.problems[0].message)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    (tmp_path / "ROWS.jsonl").write_bytes(done.stdout)
    rows = read_records(tmp_path / "ROWS.jsonl", "id").rows
    assert rows[0] == {"prompt": "1+1=, or so", "answer": "2\n3"}


@pytest.mark.parametrize(("key", "named"), [("id", "'id'"), ("uid", "'uid'"), ("a.b", "'a.b'")])
def test_ids_that_are_all_null_are_one_problem(tmp_path: Path, key: str, named: str) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"id": None, "uid": None, "a": {"b": None}}
    path.write_text(f"{json.dumps(row)}\n" * 30)
    with pytest.raises(ConfigError) as caught:
        read_records(path, key)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("", "id_key")
    assert problem.message.startswith(f"{named} is null in all rows of {path} that have it")


def test_message_about_a_directory_names_a_file_to_choose(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(LINES)
    assert no_dataset(tmp_path).endswith(
        "; name one of its files, such as b.jsonl, or several as sources"
    )
    (tmp_path / "a.parquet").write_bytes(b"")
    assert not no_dataset(tmp_path)

"""Files of rows: JSON arrays, Parquet, and folders that Hugging Face `datasets` has saved."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from slurmrl.config.schema import Dataset
from slurmrl.data import source_files, sources
from slurmrl.data.records import RecordReader, read_records
from slurmrl.data.sources import open_source
from slurmrl.errors import ConfigError, EnvironmentFailure
from tests.support.chaos.preparations import Characters
from tests.support.datasets import prepared, write_rows

ROWS = [{"id": "a", "x": 1, "n": {"m": ["é"]}}, {"id": "b", "x": 2, "n": {"m": []}}]


def write_arrow(folder: Path, rows: Sequence[Mapping[str, Any]], split: str = "train") -> Path:
    """Write a folder as ``Dataset.save_to_disk`` does."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    table = pyarrow.Table.from_pylist(list(rows))
    with ipc.new_stream(str(folder / name), table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": name}], "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def write(folder: Path, kind: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=1)
    elif kind == "folder":
        write_arrow(path, rows)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        write_rows(folder, *rows)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_every_format_gives_the_same_rows_and_changes_with_content(
    tmp_path: Path, kind: str
) -> None:
    """The fingerprint of the rows depends on the files, so nothing is tokenized twice."""
    path = write(tmp_path, kind, ROWS)
    reader = RecordReader(path, "id")
    assert [record.row for record in reader] == ROWS
    reader.finish()
    assert reader.share == 1
    files = open_source(path).files
    before = reader.source.fingerprint()
    assert before == source_files.fingerprint_of(files, lambda share: None)
    (tmp_path / "other").mkdir()
    changed = write(tmp_path / "other", kind, [ROWS[0], {**ROWS[1], "x": 3}])
    assert source_files.fingerprint_of(open_source(changed).files, lambda share: None) != before


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_only_the_first_rows_of_a_large_file_are_read(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, [{"x": "y" * 50}] * 9)
    found = read_records(path, "id", most_bytes=200)
    assert 2 < len(found.rows) < 6
    assert not found.whole
    assert read_records(path, "id", most_bytes=5000).whole


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("jsonl", ("rows.jsonl:2", "already the id of line 1")),
        ("json", ("rows.json:11", "already the id of line 2")),
        ("parquet", ("rows.parquet, row 2", "already the id of rows.parquet, row 1")),
    ],
)
def test_problem_names_the_place_of_the_row(
    tmp_path: Path, kind: str, places: tuple[str, str]
) -> None:
    path = write(tmp_path, kind, [ROWS[0], ROWS[0]])
    with pytest.raises(ConfigError) as caught:
        read_records(path, "id")
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path}/{places[0]}"
    assert places[1] in problem.message


def test_array_is_parsed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are the same for every position at which a read stops, even inside a character."""
    rows = [{"text": 'é"\\\n \u20ac' * 3, "list": [1.5, None, True, {"a": []}]}, {}, {"n": -12}]
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(rows, indent=2).encode() + b" \n ")
    for size in range(1, 40):
        monkeypatch.setattr(sources, "READ_BYTES", size)
        assert [row.row for row in open_source(path).rows()] == rows
    path.write_text("[ ]")
    assert list(open_source(path).rows()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"a": 1},\n{"a": }]', r"rows\.json:3: not JSON: Expecting value"),
        ('[\n{"a": 1}\n{"a": 2}]', r"rows\.json:3: not JSON: expected ',' or '\]', found '{'"),
        ('[{"a": 1},\n', r"rows\.json:2: not JSON: Expecting value"),
        ('[{"a": "x', r"rows\.json:1: not JSON: Unterminated string"),
        ('[{"a": 1}', r"rows\.json:1: not JSON: expected ',' or '\]', found the end of the file"),
        ('[{"a": 1}]\n\n{"a": 2}', r"rows\.json:3: '{' after the end of the array"),
        ('[{"a": 1},\n3, "x"]', r"rows\.json:2: must be a JSON object\n.*json:2: must be a JSON"),
        ('[{"a": "\udcff"}]', r"rows\.json:1: not UTF-8 text"),
        ("[" * 99_999, r"rows\.json:1: not JSON: nested too deeply"),
    ],
)
def test_damaged_array_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_records(path, "id")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_fifo_and_device_are_rejected_without_waiting(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(ConfigError, match=f"{name}: is not a regular file"):
            open_source(path)


TEXT = '{"prompt": "é", "answer": "e"}\n' * 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", gzip.compress(TEXT.encode()), r"jsonl: is compressed with gzip; decompress"),
        ("rows.jsonl.gz", gzip.compress(TEXT.encode()), r"gz: is compressed with gzip"),
        ("rows.json", lzma.compress(TEXT.encode()), r"json: is compressed with xz"),
        ("rows.jsonl", TEXT.encode("utf-16"), r"jsonl: is UTF-16 text; convert it to UTF-8"),
        ("rows.jsonl", TEXT.encode("latin1"), r"jsonl:1: not UTF-8 text \(byte 0xe9: .* iconv -f"),
        ("rows.json", f"[{TEXT}".encode("latin1"), r"json:1: not UTF-8 text after this line \(by"),
    ],
    ids=["gzip", "gz", "xz", "utf16", "latin1", "latin1-array"],  # gzip writes the time
)
def test_binary_file_is_one_problem_with_advice(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_records(path, "id")
    assert len(caught.value.problems) == 1


def test_columns_are_converted_to_json(tmp_path: Path) -> None:
    """Dates become ISO texts, and NaN null; bytes and infinity have no JSON form."""
    path = write(tmp_path, "parquet", [{"day": date(2026, 1, 2), "x": 1.5}])
    assert read_records(path, "id").rows == ({"day": "2026-01-02", "x": 1.5},)
    for kind in ("parquet", "jsonl"):
        path = write(tmp_path, kind, [{"x": [float("nan"), 1.0]}])
        assert read_records(path, "id").rows == ({"x": [None, 1.0]},)
    path = write(tmp_path, "parquet", [{"x": float("inf")}])
    with pytest.raises(ConfigError, match=r"parquet, row 1: Infinity is not a JSON value"):
        read_records(path, "id")
    path = write(tmp_path, "parquet", [{"image": b"\xff"}])
    with pytest.raises(ConfigError, match=r"parquet, row 1: holds a value of type bytes"):
        read_records(path, "id")


def test_column_that_pyarrow_cannot_read_is_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(path: Path) -> Any:
        raise pyarrow.ArrowNotImplementedError("nested data")

    monkeypatch.setattr("slurmrl.data.sources._batches", reject)
    with pytest.raises(ConfigError, match=r"row 1: pyarrow cannot read it: nested data; save"):
        read_records(write(tmp_path, "parquet", ROWS), "id")


@pytest.mark.parametrize(
    ("table", "where", "message"),
    [
        (pyarrow.table([[1, 2], [3, 4]], names=["a", "a"]), 1, "several columns have the name 'a'"),
        (pyarrow.table({"a": pyarrow.array([0, 2**40], "timestamp[s]")}), 2, "date value out of"),
        (
            pyarrow.table({"a": pyarrow.array([b"x", b"\xff"]).view("string")}),
            2,
            "can't decode byte",
        ),
    ],
)
def test_table_without_a_python_form_is_one_problem(
    tmp_path: Path, table: Any, where: int, message: str
) -> None:
    """pyarrow would return only the last of two columns with one name."""
    parquet.write_table(table, path := tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=rf"parquet, row {where}: .*{message}.*; save the rows"):
        read_records(path, "id")


def test_arrow_rows_have_no_null_keys_of_other_rows(tmp_path: Path) -> None:
    """Nulls with a meaning are kept: in all other places, and in lists."""

    def row(name: str, own: str) -> dict[str, Any]:
        function = {"name": name, "parameters": {"properties": {own: {"enum": ["x", None]}}}}
        call = {"id": None, "function": {"name": name, "arguments": {own: "1"}}}
        older = {"name": name, "arguments": {own: "1"}}
        said = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": older}
        tool = {"type": "function", "function": function}
        return {"messages": [said], "deep": {"tools": [tool]}, "meta": {"a": None, own: "1"}}

    rows = [row("add", "a"), row("find", "b")]
    path = write(tmp_path, "parquet", rows)
    (first, second) = read_records(path, "id").rows
    for found, expected in ((first, rows[0]), (second, rows[1])):
        assert found["deep"] == expected["deep"]
        (call,) = found["messages"][0]["tool_calls"]
        assert call["function"] == expected["messages"][0]["tool_calls"][0]["function"]
        assert found["messages"][0]["function_call"] == expected["messages"][0]["function_call"]
        assert found["messages"][0]["content"] is None
        assert found["meta"].keys() == {"a", "b"}
    for schema in ("input_schema", "inputSchema"):
        plain = [{"name": "f", schema: {own: "x"}} for own in ("a", "b")]
        path = write(tmp_path, "parquet", [{"tools": [tool]} for tool in plain])
        rows = [*read_records(path, "id").rows]
        assert [found["tools"] for found in rows] == [[tool] for tool in plain]


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"rows\.parquet: not a complete parquet file"):
        read_records(path, "id")
    path.write_bytes(b"\xff\xff\xff\xff\x10\0\0\0" * 8)
    with pytest.raises(ConfigError, match=r"rows\.parquet: not a complete parquet file"):
        read_records(path, "id")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(ConfigError, match=r"rows\.parquet: is a pointer of Git LFS"):
        read_records(path, "id")
    for name in ("none.parquet", "none.json"):
        with pytest.raises(EnvironmentFailure, match="cannot read dataset"):
            read_records(tmp_path / name, "id")


@pytest.mark.parametrize(
    "name", ["", "train-00000-of-00001", "train-00000-of-00001-a09b74b3", "a_train-0"]
)
def test_one_split_of_a_directory_is_read(tmp_path: Path, name: str) -> None:
    """Datasets of the Hub with an older form have fingerprints in the names of their files."""
    if not name:
        for split, row in zip(("train", "test"), ROWS, strict=True):
            write_arrow(tmp_path / "data" / split, [row], split)
        (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    else:
        (tmp_path / "data").mkdir()
        for each, row in zip((name, name.replace("train", "test")), ROWS, strict=True):
            table = pyarrow.Table.from_pylist([row])
            parquet.write_table(table, tmp_path / "data" / f"{each}.parquet")
    assert read_records(tmp_path / "data", "id", "test").ids == ("b",)
    with pytest.raises(ConfigError, match=r"split: is required: .* has the splits t"):
        read_records(tmp_path / "data", "id")
    with pytest.raises(ConfigError, match=r"split: 'tset' is not allowed; did you mean 'test'"):
        read_records(tmp_path / "data", "id", "tset")


def test_saved_dataset_with_indices_is_rejected(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "data", ROWS)
    state = json.loads((folder / "state.json").read_text())
    indices = {"_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state | indices))
    with pytest.raises(ConfigError, match="selects or orders their rows: save it again"):
        read_records(folder, "id")


@pytest.mark.parametrize(
    ("names", "split", "read"),
    [
        (["code", "unit-test-tasks"], None, ["code", "unit-test-tasks"]),
        (["code", "unit-test"], None, ["code", "unit-test"]),
        (["self-eval_test", "self-eval_train"], "train", ["self-eval_train"]),
        (
            ["a_test_v2", "a_train-0-a09b74b3", "b_train"],
            "train",
            ["a_train-0-a09b74b3", "b_train"],
        ),
        (["code", "train"], "train", ["train"]),
    ],
)
def test_split_is_found_only_at_the_end_of_paired_names(
    tmp_path: Path, names: list[str], split: str | None, read: list[str]
) -> None:
    for name in names:
        rows = [{"id": name, "prompt": "1+1="}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    assert list(read_records(tmp_path, "id", split).ids) == read


def test_single_file_with_a_word_of_splits_has_no_splits(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([ROWS[0]])
    parquet.write_table(table, tmp_path / "dev_docs.parquet")
    with pytest.raises(ConfigError, match=r"split: 'train' is not allowed; .* has no splits"):
        read_records(tmp_path, "id", "train")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00002"], r"lacks train-00001-of-00002\.parquet; copy what"),
        (["train-00001-of-00003"], r"lacks train-00000-of-00003\.parquet and 1 more; copy what"),
        (
            ["train-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"],
            r"two versions of train \(-of-00001 and -of-00002\); remove one version",
        ),
        (["train-00000-of-00001-a0", "train-00000-of-00001-b1"], r"two versions of train \(-of-"),
        (
            ["train-00000-of-00002-a0", "train-00001-of-00002-a0", "train-00001-of-00002-b1"],
            r"two versions of train \(-of-00002 and -of-00002\)",
        ),
        (
            ["train-00000-of-00002", "train-00001-of-00002", "train-00001-of-00002-b1"],
            r"two versions of train \(-of-00002 and -of-00002\)",
        ),
        (["train-00001-of-00002", "train-00002-of-00002"], ""),
        (["train-00000-of-00001", "part-00000-of-00001"], ""),
    ],
)
def test_incomplete_set_of_numbered_files_is_rejected(
    tmp_path: Path, names: list[str], message: str
) -> None:
    for name in [*names, "test-00000-of-00009"]:  # no other split matters
        rows = [{"id": name, "prompt": "1+1="}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    if message:
        with pytest.raises(ConfigError, match=message):
            read_records(tmp_path, "id", "train")
    else:
        assert read_records(tmp_path, "id", "train").ids[0] == names[0]


def test_files_of_a_directory_are_read_in_order(tmp_path: Path) -> None:
    for number, row in enumerate(ROWS):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"part-{number}.parquet")
    records = read_records(tmp_path, "id")
    assert records.ids == ("a", "b")
    assert records.where(2) == f"{tmp_path}/part-1.parquet, row 1"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"it is a folder without dataset_dict\.json"):
        read_records(tmp_path / "empty", "id")
    with pytest.raises(ConfigError, match="is a single file, which has no splits"):
        read_records(write(tmp_path, "jsonl", ROWS), "id", "train")


def test_nested_keys_and_their_values_reach_the_reward_untouched(tmp_path: Path) -> None:
    row = {
        "meta": {"id": 7},
        "turns": [{"text": "1+1="}],
        "a.b": "!",
        "reward_model": {"ground_truth": "2", "points": 0.25},
    }
    config = Dataset(
        type="prompt",
        path=str(write(tmp_path, "jsonl", [row])),
        prompt_template="{turns.0.text}{a.b}",
        answer_key="reward_model.ground_truth",
        id_key="meta.id",
    )
    sample = prepared(config, Characters(tmp_path), tmp_path / "data").sample([(0, 0)])
    assert sample.ids == ("7@0",)
    assert bytes(sample.tensor("prompt_ids").tolist()) == b"1+1=!"
    assert sample.metadata["answer"] == ["2"]
    assert sample.metadata["row"] == [{**row, "answer": "2"}]


def test_misspelled_nested_key_is_a_problem_of_the_setting(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"prompt": "x", "reward_model": {"ground_truth": "2"}}])
    config = Dataset(type="prompt", path=str(path), answer_key="reward_model.ground_thruth")
    with pytest.raises(ConfigError, match=r"did you mean 'reward_model\.ground_truth'\?"):
        prepared(config, Characters(tmp_path), tmp_path / "data")


def test_fingerprints_in_commits_of_earlier_versions_stay_valid(tmp_path: Path) -> None:
    """A new setting changes the fingerprint of a dataset only where it is set."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "prompt": "1+1=", "answer": "2"}\n')
    plain = Dataset(type="prompt", path=str(path))
    assert (
        prepared(plain, Characters(tmp_path), tmp_path / "data").fingerprint
        == "d4c808dc1e97a6312ed10395a65ef2ce"
    )
    other = plain.model_copy(update={"split": "x"})
    assert other.rules() == {**plain.rules(), "split": "x"}

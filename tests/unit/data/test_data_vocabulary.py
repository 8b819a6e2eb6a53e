from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.data.tokenizer import load_tokenizer, make_tokenizer
from slurmrl.errors import UsageError


def rows(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_tokenizer_is_trained_on_the_chosen_keys(tmp_path: Path) -> None:
    file = rows(tmp_path, *['{"prompt": "hello hello", "answer": "world 12", "id": "zzzz"}'] * 9)
    output = tmp_path / "tokenizer"
    make_tokenizer([file], ["prompt", "answer"], 300, output)
    tokenizer = load_tokenizer(output)
    assert len(tokenizer("hello").input_ids) == len(tokenizer("world").input_ids) == 1
    assert len(tokenizer("12").input_ids) == 2  # each digit is one
    assert len(tokenizer("zzzz").input_ids) == 4  # its key was not named
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "tokenizer"}
    with pytest.raises(UsageError, match="exists: choose another folder with --output"):
        make_tokenizer([file], ["prompt"], 300, output)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"answer": "b"}', r"rows.jsonl:2: prompt: has no such key; keys: answer"),
        ('{"prompt": 3}', r"rows.jsonl:2: prompt: is not a string"),
        ("[]", r"rows.jsonl:2: must be a JSON object"),
        ("{", r"rows.jsonl:2: "),
    ],
)
def test_row_without_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = rows(tmp_path, '{"prompt": "a"}', line)
    with pytest.raises(UsageError, match=message):
        make_tokenizer([file], ["prompt"], 300, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()
    assert len(list(tmp_path.iterdir())) == 1

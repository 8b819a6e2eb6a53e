"""The first row decides whether a chat template applies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Dataset
from slurmrl.data.records import has_messages

ASKED = [{"role": "user", "content": "1+2="}]
SAID = [{"role": "assistant", "content": "3"}]
WRONG = [{"role": "assistant", "content": "4"}]
PAIRS = {"chosen": [*ASKED, *SAID], "rejected": [*ASKED, *WRONG]}


@pytest.mark.parametrize(
    ("settings", "row", "expected"),
    [
        ({"type": "prompt"}, {"prompt": ASKED}, True),
        ({"type": "prompt"}, {"prompt": "1+2=", "answer": SAID}, False),
        ({"type": "prompt", "prompt_key": "data.turns"}, {"data": {"turns": ASKED}}, True),
        ({"type": "prompt", "prompt_template": "{q}"}, {"q": "1+2=", "prompt": ASKED}, False),
        ({"type": "prompt_answer"}, {"prompt": "1+2=", "answer": SAID}, True),
        ({"type": "prompt_answer"}, {"prompt": ASKED, "answer": "3"}, True),
        ({"type": "preference"}, PAIRS, True),
        ({"type": "preference"}, {"prompt": "1+2=", "chosen": SAID, "rejected": WRONG}, True),
        ({"type": "preference"}, {"prompt": "a", "chosen": [SAID], "rejected": [WRONG]}, True),
        (
            {"type": "preference"},
            {"prompt": "a", "pos_answers": [SAID], "neg_answers": [WRONG]},
            True,
        ),
        ({"type": "preference"}, {"prompt": "a", "chosen": ["3"], "rejected": ["4"]}, False),
        ({"type": "kto"}, {"prompt": ASKED, "answer": "3", "label": True}, True),
        ({"type": "kto"}, {"prompt": "1+2=", "answer": "3", "label": True}, False),
    ],
)
def test_messages_are_found_under_the_keys_of_each_dataset_type(
    tmp_path: Path, settings: dict[str, Any], row: dict[str, Any], expected: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n")
    assert has_messages(Dataset(path=str(path), **settings)) is expected


def test_messages_are_found_in_parquet_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([PAIRS]), path)
    assert has_messages(Dataset(type="preference", path=str(path))) is True


def test_messages_are_not_found_if_the_path_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "absent", "."):
        assert has_messages(Dataset(type="prompt", path=str(tmp_path / name))) is None

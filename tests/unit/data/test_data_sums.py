"""The files of the sums example are current, and only the right answer gets the reward."""

from __future__ import annotations

import json
import re
from pathlib import Path
from runpy import run_path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "sums"
final_number = run_path(str(FOLDER / "rewards.py"))["final_number"]


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_sums_files_equal_the_output_of_their_program(tmp_path: Path) -> None:
    run_path(str(FOLDER / "make_data.py"))["write"](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "heldout.jsonl"}
    for path in tmp_path.iterdir():
        assert (FOLDER / path.name).read_bytes() == path.read_bytes(), path


def test_held_out_sums_are_not_trained_on_in_either_order() -> None:
    asked = {}
    for name in ("train.jsonl", "heldout.jsonl"):
        numbers = [tuple(map(int, re.findall(r"\d+", row["prompt"]))) for row in read(name)]
        assert [str(sum(pair)) for pair in numbers] == [row["answer"] for row in read(name)]
        assert all(len(pair) == 2 and min(pair) >= 10 and sum(pair) < 100 for pair in numbers)
        asked[name] = {frozenset(pair) for pair in numbers}
        assert len(asked[name]) == len(numbers)
    assert not asked["train.jsonl"] & asked["heldout.jsonl"]


@pytest.mark.parametrize(
    ("completion", "finished", "score"),
    [
        ("54", True, 1.0),
        ("54.", True, 1.0),
        ("54 \n", True, 1.0),
        ("21 + 33 = 54", True, 1.0),
        ("The sum of 21 and 33 is 54.", True, 1.0),
        ("54", False, 0.0),
        ("To solve 21 + 33, we can", True, 0.0),
        ("21 + 33", True, 0.0),
        ("21 + 33 =", True, 0.0),
        ("54 or 55", True, 0.0),
        ("54, I think", True, 0.0),
        ("154", True, 0.0),
        ("-54", True, 0.0),
        ("1.54", True, 0.0),
        ("1,54", True, 0.0),
        ("54.0", True, 0.0),
        ("054", True, 0.0),
        ("²54", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_only_the_final_answer_is_rewarded(completion: str, finished: bool, score: float) -> None:
    assert final_number([""], [completion], [{"answer": "54"}], finished=[finished]) == [score]


def test_completion_that_restates_the_question_gets_no_reward() -> None:
    for row in read("heldout.jsonl"):
        texts = [row["prompt"], row["prompt"].partition("?")[0], row["prompt"][8:15]]
        rows = [row] * len(texts)
        assert final_number(texts, texts, rows, finished=[True] * len(texts)) == [0.0] * len(texts)

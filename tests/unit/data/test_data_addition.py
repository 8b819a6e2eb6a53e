"""The addition example's files are current, and its held-out problems are held out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from slurmrl.data.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[3] / "examples" / "addition"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("addition_maker", FOLDER / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_the_files_are_what_the_script_makes(maker: ModuleType, tmp_path: Path) -> None:
    maker.write(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 9
    for path in made:
        assert (FOLDER / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_no_held_out_sum_is_trained_on_in_either_order() -> None:
    train, held_out = (
        [tuple(map(int, row["prompt"].rstrip("=").split("+"))) for row in read(name)]
        for name in ("train.jsonl", "heldout.jsonl")
    )
    assert len(held_out) == 512
    assert not {(min(pair), max(pair)) for pair in held_out} & {
        (min(pair), max(pair)) for pair in train
    }
    every = {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert set(train) | set(held_out) == every


def test_answers_are_sums_written_backwards() -> None:
    for row in read("train.jsonl") + read("heldout.jsonl"):
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["answer"][::-1]) == int(a) + int(b)


def test_every_text_is_one_token_a_symbol() -> None:
    tokenizer = load_tokenizer(FOLDER / "tokenizer")
    assert len(tokenizer) == 16
    for row in read("heldout.jsonl"):
        text = row["prompt"] + row["answer"]
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_pairs_and_labels_tell_right_answers_from_wrong_ones() -> None:
    trained, held_out = read("pairs.jsonl"), read("heldout_pairs.jsonl")
    assert {row["id"] for row in trained} < {row["id"] for row in read("train.jsonl")}
    assert [row["id"] for row in held_out] == [row["id"] for row in read("heldout.jsonl")]
    labelled = [(row["prompt"], row["answer"], row["label"]) for row in read("labels.jsonl")]
    for row in trained + held_out:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["chosen"][::-1]) == int(a) + int(b)
        assert len(row["rejected"]) == len(row["chosen"])
        assert row["rejected"] != row["chosen"]
    assert labelled == [
        (row["prompt"], row[key], key == "chosen")
        for row in trained
        for key in ("chosen", "rejected")
    ]


def test_conversations_go_on_with_their_sums() -> None:
    for name in ("chat.jsonl", "heldout_chat.jsonl"):
        for line in (FOLDER / name).read_text().splitlines():
            question, answer, more, final = (
                message["content"] for message in json.loads(line)["messages"]
            )
            a, b = question.rstrip("=").split("+")
            assert int(answer[::-1]) == int(a) + int(b)
            assert int(final[::-1]) == int(a) + int(b) + int(more.strip("+="))

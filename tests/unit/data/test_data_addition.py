"""The addition example's files are current, and training has no held-out problem."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "addition"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load("make_data")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"addition_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_data_files_equal_the_output_of_their_script(maker: ModuleType, tmp_path: Path) -> None:
    maker.write(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 8
    for path in made:
        assert (FOLDER / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_held_out_sums_are_not_in_training_data_in_either_order() -> None:
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


def test_scored_answers_become_pairs_and_labels(tmp_path: Path) -> None:
    def row(name: str, *answers: tuple[str, float | None, bool]) -> dict[str, Any]:
        keys = ("text", "reward", "finished")
        given = [dict(zip(keys, answer, strict=True)) for answer in answers]
        return {"id": name, "prompt": f"{name}?", "completions": given}

    rows = [
        row("a", ("cut", 0.0, False), ("no", 0.5, True), ("yes", 1.0, True), ("also", 1.0, True)),
        row("b", ("yes", 1.0, True), ("unknown", None, True)),
        row("c", ("no", 0.0, True), ("cut", 1.0, False)),
    ]
    results, pairs, labels = (tmp_path / name for name in ("results", "pairs", "labels"))
    results.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    judged = load("judged")
    assert judged.write(results, pairs, labels) == 1
    assert json.loads(pairs.read_text()) == {
        "id": "a", "prompt": "a?", "chosen": "yes", "rejected": "no",
    }  # fmt: skip
    assert [json.loads(line) for line in labels.read_text().splitlines()] == [
        {"id": "a chosen", "prompt": "a?", "answer": "yes", "label": True},
        {"id": "a rejected", "prompt": "a?", "answer": "no", "label": False},
    ]
    del rows[1]["completions"][0]["reward"]
    results.write_text(json.dumps(rows[1]))
    with pytest.raises(SystemExit, match="b has no reward"):
        judged.write(results, pairs, labels)

"""The data of the tool and code examples are current, and training has no held-out problem."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["tools", "code"])
def test_data_files_equal_output_of_their_script(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name / "make_data.py"
    spec = importlib.util.spec_from_file_location(f"{name}_maker", path)
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.write(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 5
    for file in made:
        assert (EXAMPLES / name / file).read_bytes() == (tmp_path / file).read_bytes(), file


@pytest.mark.parametrize(("name", "start"), [("tools", "conversations"), ("code", "programs")])
def test_held_out_problems_are_not_trained_on(name: str, start: str) -> None:
    def prompts(file: str) -> set[str]:
        rows = map(json.loads, (EXAMPLES / name / f"{file}.jsonl").read_text().splitlines())
        return {
            (row.get("messages") or [{"content": row.get("prompt")}])[0]["content"] for row in rows
        }

    held_out = prompts("heldout")
    assert len(held_out) == 256
    assert not held_out & (prompts("train") | prompts(start))

"""The data of the example with a tool are current, and its held-out problems are held out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "examples" / "tools"


def test_the_files_are_what_the_script_makes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("tools_maker", FOLDER / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.write(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 5
    for path in made:
        assert (FOLDER / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_no_held_out_problem_is_trained_on() -> None:
    def prompts(name: str) -> set[str]:
        rows = map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines())
        return {
            (row.get("messages") or [{"content": row.get("prompt")}])[0]["content"] for row in rows
        }

    held_out = prompts("heldout")
    assert len(held_out) == 256
    assert not held_out & (prompts("train") | prompts("conversations"))

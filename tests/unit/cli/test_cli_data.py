"""``slurmrl data``: real tokenizers in real child processes."""

from __future__ import annotations

import json
from pathlib import Path

from slurmrl.config.load import load
from tests.unit.cli.conftest import Command

EXAMPLE = Path(__file__).parents[3] / "examples" / "sft.yaml"
HELD_OUT = EXAMPLE.parent / "addition" / "heldout.jsonl"


def test_data_samples_show_trained_tokens(command: Command, tmp_path: Path) -> None:
    """Each source's first rows, with special tokens and the targets marked."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "2+2=", "answer": "4"}\n')
    values = load(EXAMPLE).values
    values["dataset"] = {"type": "prompt_answer", "sources": {"mine": {"path": path.name}}}
    values["actor"]["tokenizer"] = str(EXAMPLE.parent / "addition" / "tokenizer")
    values["evaluation"]["dataset"]["path"] = str(HELD_OUT)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(values))
    out = command("data", "show", str(config), "--rows", "1").lines
    assert out[:3] == [f"{path}:1  id 1", "1+2=⟦3<eos>⟧", "6 tokens, 2 of them trained on"]
    assert out[4].startswith(f"{HELD_OUT}:1")
    assert "⟦" not in out[5]


def test_data_check_names_wrong_lines_and_counts_good_rows(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": 5, "answer": "4"}\nnot json\n')
    overrides = [f"dataset.path={path}", "--json"]
    _, out, err = command("data", "check", str(EXAMPLE), *overrides, code=2)
    assert f"{path}:3: not JSON: " in err
    assert f"{path}:2: prompt: must be a string, but is a number (5)" in err
    counts, error = map(json.loads, out.splitlines())
    assert error["exit_code"] == 2
    assert counts["source"] == "evaluation.dataset"
    assert (counts["rows"], counts["left_out"], counts["longest"]) == (512, 0, 6)


def test_data_check_counts_pairs_of_equal_answers(command: Command, tmp_path: Path) -> None:
    """Also covers several pairs on a line."""
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "1+2=", "chosen": "3", "rejected": "3"},
        {"prompt": "1+2=", "chosen": ["3", "3"], "rejected": ["4", "3"]},
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    example = EXAMPLE.parent / "dpo.yaml"
    tokenizer = f"actor.tokenizer={HELD_OUT.parent / 'tokenizer'}"
    overrides = [f"dataset.path={path}", "evaluation=", tokenizer]
    said = command("data", "check", str(example), *overrides).err
    assert "warning: dataset: 2 pairs have equal chosen and rejected" in said


def test_data_check_warns_if_prompts_lack_the_tools(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    example = EXAMPLE.parent / "grpo_tools.yaml"
    tokenizer = f"actor.tokenizer={HELD_OUT.parent / 'tokenizer'}"
    overrides = [f"dataset.path={path}", "evaluation=", "actor.path=", tokenizer]
    said = command("data", "check", str(example), *overrides).err
    assert "warning: dataset: none of the first 1 prompts names" in said

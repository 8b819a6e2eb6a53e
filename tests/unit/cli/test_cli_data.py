"""``slurmrl data``: real tokenizers in real child processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.config.load import load

EXAMPLE = Path(__file__).parents[3] / "examples" / "sft.yaml"
HELD_OUT = EXAMPLE.parent / "addition" / "heldout.jsonl"


def test_data_samples_show_trained_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each source's first rows, with special tokens and the targets marked."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "2+2=", "answer": "4"}\n')
    values = load(EXAMPLE).values
    values["dataset"] = {"type": "prompt_answer", "sources": {"mine": {"path": path.name}}}
    values["actor"]["tokenizer"] = str(EXAMPLE.parent / "addition" / "tokenizer")
    values["evaluation"]["dataset"]["path"] = str(HELD_OUT)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(values))
    assert main(["data", "show", str(config), "--rows", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [f"{path}:1  id 1", "1+2=⟦3<eos>⟧", "6 tokens, 2 of them trained on"]
    assert out[4].startswith(f"{HELD_OUT}:1")
    assert "⟦" not in out[5]


def test_data_check_names_wrong_lines_and_counts_good_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": 5, "answer": "4"}\nnot json\n')
    overrides = [f"dataset.path={path}", "--json"]
    assert main(["data", "check", str(EXAMPLE), *overrides]) == 2
    out, err = capsys.readouterr()
    assert f"{path}:3: not JSON: " in err
    assert f"{path}:2: prompt: must be a string, but is a number (5)" in err
    counts, error = map(json.loads, out.splitlines())
    assert error["exit_code"] == 2
    assert counts["source"] == "evaluation.dataset"
    assert (counts["rows"], counts["left_out"], counts["longest"]) == (512, 0, 6)


def test_data_check_counts_pairs_of_equal_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert main(["data", "check", str(example), *overrides]) == 0
    assert "warning: dataset: 2 pairs have equal chosen and rejected" in capsys.readouterr().err


def test_data_check_warns_if_prompts_lack_the_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    example = EXAMPLE.parent / "grpo_tools.yaml"
    tokenizer = f"actor.tokenizer={HELD_OUT.parent / 'tokenizer'}"
    overrides = [f"dataset.path={path}", "evaluation=", "actor.path=", tokenizer]
    assert main(["data", "check", str(example), *overrides]) == 0
    assert "warning: dataset: none of the first 1 prompts names" in capsys.readouterr().err

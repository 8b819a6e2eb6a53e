"""Tests that the plan's memory on CPUs uses the lengths of the rows of the data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Dataset
from slurmrl.data import records
from slurmrl.data.records import MARKS, TEMPLATE_TOKENS, longest_row
from slurmrl.display import terminal
from slurmrl.plan.build import make_plan
from slurmrl.plan.estimates.call_costs import PROCESS
from slurmrl.plan.plan_document import document
from slurmrl.plan.plan_values import figures, report
from slurmrl.plan.settings import Settings, load_settings
from tests.fake_runs import write_config

H, INNER, LAYERS, VOCABULARY, POSITIONS = 64, 128, 30, 64, 8192
BATCH, RANKS = 16, 2
ROW = '{"prompt": "1+1=", "answer": "2"}\n'
TEMPLATES = len("{prompt}{answer}")
SIZES = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
}


def settings_of(folder: Path, *overrides: str) -> Settings:
    (folder / "rows.jsonl").write_text(ROW)
    usual = [f"actor.architecture.{name}={size}" for name, size in SIZES.items()]
    usual += [f"dataset.path={folder / 'rows.jsonl'}", f"algorithm.batch_size={BATCH}"]
    usual += [f"actor.backend=fsdp:d{RANKS}", "cluster.gpus_per_worker=0", "actor.dtype=float32"]
    return load_settings(write_config(folder), [*usual, *overrides], root=folder / "runs")


def reported(settings: Settings) -> dict[str, Any]:
    return report(settings, make_plan(settings, scheduler="local"))


def kept_bytes(tokens: int) -> int:
    """Return the activations of a layer, computed by hand, and three hidden states at the end."""
    return (LAYERS * (4 * H + 2 * H + 2 * H + 2 * INNER) + 3 * H) * tokens * 4


def test_cpu_memory_uses_row_lengths_of_the_data(tmp_path: Path) -> None:
    """The estimate is right up to the memory that the backward pass adds for one layer. A full
    micro-batch would have 16,384 tokens.
    """
    settings = settings_of(tmp_path)
    found = reported(settings)
    row = len(ROW) - 1 + TEMPLATES + MARKS
    tokens = BATCH // RANKS * row
    memory = found["models"]["actor"]["memory"]
    assert found["memory"]["longest_row"] == row
    assert kept_bytes(tokens) * 0.9 < memory["activations_bytes"] < kept_bytes(tokens) * 1.2
    assert memory["activations_bytes"] < kept_bytes(16384) / 30
    assert found["memory"]["bytes"] == memory["together_bytes"] + PROCESS
    planned = make_plan(settings, scheduler="local")
    assert figures(settings, planned)["memory"]["bytes"] == found["memory"]["bytes"]
    shown = terminal.as_text(document(found))
    assert f"with the rows of the data: at most {row} tokens in a sequence" in shown


def test_memory_uses_configured_limits_if_rows_are_longer(tmp_path: Path) -> None:
    found = reported(settings_of(tmp_path, "dataset.max_tokens=5"))
    assert found["memory"]["longest_row"] is None
    tokens = BATCH // RANKS * 5
    assert found["models"]["actor"]["memory"]["activations_bytes"] < kept_bytes(tokens) * 1.5


def test_gpu_memory_uses_configured_limits(tmp_path: Path) -> None:
    """The limit decides if a layout is rejected."""
    settings = settings_of(tmp_path, "cluster.gpus_per_worker=1")
    found = report(settings, make_plan(settings, scheduler="slurm"))
    assert found["memory"]["longest_row"] is None
    assert found["models"]["actor"]["memory"]["activations_bytes"] > kept_bytes(16384) * 0.9


@pytest.mark.parametrize(
    ("rows", "changes", "size"),
    [
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "aaaa", "answer": "b"}\n', {}, 33),
        ('[{"prompt": "a", "answer": "b"}]', {}, 30),
        ('{"prompt": "é", "answer": "b"}\n', {}, 31),
        ('{"prompt": "a", "answer": "b"}\n', {"prompt_template": "{prompt} {prompt}"}, 2 * 30 + 9),
        ('{"prompt": "a", "answer": "b"}\n', {"chat_template": True}, 30 + TEMPLATE_TOKENS - MARKS),
    ],
)
def test_row_length_is_bounded_by_its_bytes(
    tmp_path: Path, rows: str, changes: dict[str, Any], size: int
) -> None:
    file = tmp_path / "rows.json"
    file.write_text(rows)
    dataset = Dataset(type="prompt_answer", path=str(file), **changes)
    assert longest_row(dataset) == size + TEMPLATES + MARKS


def test_unknown_rows_give_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(path: Path, **changes: Any) -> int | None:
        return longest_row(Dataset(type="prompt", path=str(path), **changes))

    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "large.jsonl").write_text(json.dumps({"prompt": "a" * 2**20}) + "\n")
    for name in ("fifo.jsonl", "empty.jsonl", "absent.jsonl"):
        assert bound(tmp_path / name) is None
    assert bound(tmp_path / "large.jsonl") == len('{"prompt": ""}') + 2**20 + TEMPLATES + MARKS
    monkeypatch.setattr(records, "MOST_BYTES", 2**20)
    assert bound(tmp_path / "large.jsonl") is None
    sources = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("large", "absent")}
    assert longest_row(Dataset(type="prompt", sources=sources)) is None  # type: ignore[arg-type]

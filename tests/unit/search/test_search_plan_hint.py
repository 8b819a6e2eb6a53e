"""``slurmrl plan`` suggests a layout only if it is much faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main

TEXT = """\
experiment: hinted
total_steps: 100
algorithm: {name: sft, batch_size: 64}
actor:
  backend: BACKEND
  dtype: bfloat16
  architecture: {model_type: llama, vocab_size: 32000, hidden_size: 2048, intermediate_size: 5632,
    num_hidden_layers: 16, num_attention_heads: 16, num_key_value_heads: 8,
    max_position_embeddings: 8192}
dataset: {type: prompt_answer, path: train.jsonl, max_tokens: 2048}
cluster: {workers_per_host: 8, slurm: {gpu_type: h100}}
"""


@pytest.mark.parametrize(("backend", "hinted"), [("fsdp:t8", True), ("fsdp:d8", False)])
def test_plan_names_a_much_faster_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, hinted: bool
) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(TEXT.replace("BACKEND", backend))
    main(["plan", str(path), "--scheduler", "slurm", "--json"])
    made = json.loads(capsys.readouterr().out)
    if not hinted:
        assert "faster_layout" not in made
        return
    first, second, source, error = made["faster_layout"]
    assert first.startswith(f"fsdp:d8 instead of {backend} (actor): ")
    assert "slurmrl search prints all settings" in second
    assert "hardware profile h100" in source
    assert "median" in error

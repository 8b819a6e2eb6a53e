"""TRL's results of all cases, computed in a process of TRL's environment (scripts/test-trl)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from tests.pool import RankPool
from tests.trl.cases import CASES, END, FRESH, STALE, VOCABULARY, Values, batches

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": END,
}
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Reference:
    """TRL's results. ``folder`` has the models, the batches, and the gradients of each case."""

    folder: Path
    losses: dict[str, float]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("trl")
    model = save(Qwen2ForCausalLM(Qwen2Config(**SIZES)), folder / "model", 1)
    save(Qwen2ForCausalLM(Qwen2Config(**SIZES)), folder / "ref", 2)
    judge = Qwen2Config(**SIZES, num_labels=1)
    save(Qwen2ForSequenceClassification(judge), folder / "reward", 3)
    made = batches()
    made[FRESH] = with_old(made[FRESH], model)
    made[STALE] = with_old(made[STALE], model, noise=0.3)
    (folder / "batches.json").write_text(json.dumps(made))
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in CASES]))
    return Reference(folder, compute(folder))


def save(model: Any, folder: Path, seed: int) -> Any:
    """Set random values, because some parameters begin with zeros or ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * draw + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def with_old(rows: list[Values], model: Any, noise: float = 0.0) -> list[Values]:
    """Return the rows with the log-probabilities of their completions under the old policy: the
    model's, plus ``noise``.
    """
    generator = torch.Generator().manual_seed(4)

    def old(prompt: list[int], answer: list[int]) -> list[float]:
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logp = logits.double().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        drawn = noise * torch.randn(len(answer), generator=generator, dtype=torch.float64)
        return [float(x) for x in (logp + drawn).clamp(max=0.0)]

    return [
        {**row, "old": [old(row["prompt"], answer) for answer in row["completions"]]}
        for row in rows
    ]


def compute(folder: Path) -> dict[str, float]:
    python = os.environ.get("TRL_PYTHON")
    if not python:
        pytest.skip("no environment of TRL: scripts/test-trl makes one and runs these tests")
    script = Path(__file__).parent / "reference.py"
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [python, str(script), str(folder)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"reference.py failed:\n{done.stderr[-4000:]}", pytrace=False)
    losses: dict[str, float] = json.loads((folder / "losses.json").read_text())
    return losses

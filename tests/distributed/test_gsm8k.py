"""Real data: SFT and PPO on GSM8K, with a worker killed on the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.held import NO_LIMIT, Hold
from tests.support.trials import REPOSITORY, Site, kill_one

DATA = Path(os.environ.get("GSM8K_DIR") or REPOSITORY.parent / "shared" / "data" / "gsm8k")
EXAMPLES = REPOSITORY / "examples"

pytestmark = [
    pytest.mark.soak,  # test_learning.py learns, and test_local_kills.py kills workers
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (DATA / "train.jsonl").is_file(),
        reason=f"GSM8K's train.jsonl and test.jsonl are not in {DATA} (set GSM8K_DIR)",
    ),
]


def submit(site: Site, example: str, *overrides: str, wait: bool) -> None:
    data = (f"dataset.path={DATA}/train.jsonl", f"evaluation.dataset.path={DATA}/test.jsonl")
    how = ("--scheduler", "local", "--wait" if wait else "--detach")
    site.slurmrl("submit", str(EXAMPLES / example), *data, *overrides, *how, timeout_s=1500)


def test_ppo_after_sft_finishes_despite_a_kill(tmp_path: Path) -> None:
    site = Site(tmp_path)
    tokenizer = tmp_path / "tokenizer"
    keys = ("--key", "question", "--key", "answer", "--vocabulary", "1024")
    site.slurmrl("train-tokenizer", str(DATA / "train.jsonl"), *keys, "--output", str(tokenizer))
    submit(
        site,
        "gsm8k_sft.yaml",
        f"actor.tokenizer={tokenizer}",
        "actor.architecture.vocab_size=1024",
        "actor.architecture.hidden_size=128",
        "actor.architecture.intermediate_size=344",
        "actor.optimizer.lr=3e-3",
        "evaluation.samples=16",
        "total_steps=200",
        "stop_when=loss <= 4.5",
        wait=True,
    )
    losses = [line["loss"] for line in site.metrics("gsm8k-sft/1") if "loss" in line]
    assert losses[-1] <= losses[0] * 2 / 3
    assert len(losses) < 200

    hold = Hold(site)
    hold.allow(2)
    held = {**hold.reward("gsm8k-ppo/1"), "weight": 0}
    submit(
        site,
        "gsm8k_ppo.yaml",
        f"reward={json.dumps({'parts': {'held': held, 'math': {'name': 'math'}}})}",
        "total_steps=4",
        "algorithm.batch_size=16",
        "rollout.max_new_tokens=48",
        "evaluation.samples=8",
        "checkpoint.every_steps=1",
        wait=False,
    )
    site.wait_for_step("gsm8k-ppo/1", 2, timeout_s=600)
    kill_one(site.paths("gsm8k-ppo/1").run, "worker", 1)
    hold.allow(NO_LIMIT)
    ended = site.wait_for_end("gsm8k-ppo/1", timeout_s=900)
    assert (ended["state"], ended["step"], ended["incarnation"]) == ("COMPLETED", 4, 2)
    steps = [line["step"] for line in site.metrics("gsm8k-ppo/1")]
    assert steps == list(range(5)), "each step once"

"""A trial that trains adapters of a model of transformers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.desk.report.report_data import read_samples
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.test_local_hf_tasks import HYBRID
from tests.support.rollout_trials import config_of, hurry, of_group, site_in
from tests.support.rotation import HF_TRIALS, in_turn
from tests.support.trials import Site, wait_until

LORA = {"rank": 3, "alpha": 6}


def begin(
    site: Site, source: Path, trial: str, tasks: dict[str, Any] | None, *arguments: str
) -> None:
    config = config_of(trial, tasks)
    config["total_steps"] = 4
    start = {"architecture": None, "path": str(source), "implementation": "hf", "lora": LORA}
    config["actor"] |= {**start, "optimizer": {"lr": 1e-2}}
    if tasks is not None:
        config["rollout"]["backend"] = "native:t2"
    path = site.write(f"{trial}.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", *arguments)


@in_turn(2, HF_TRIALS)
def test_adapters_are_trained_merged_by_tasks_and_exported(tmp_path: Path) -> None:
    """A killed trial with rollout tasks equals a trial whose trainers generate.

    Tasks merge each version of adapters with the model folder. Both forms of export give equal
    outputs, and adapters are never merged with another folder.
    """
    site, source = site_in(tmp_path, {}, pause_s=0.6), tmp_path / "source"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**HYBRID)).save_pretrained(source)
    begin(site, source, "tasks", {"max": 1, "max_staleness": 0}, "--detach")
    site.wait_for_step("grpo/tasks", 2)
    os.kill(of_group(site, "grpo/tasks", "worker", "trainer")[0], signal.SIGKILL)
    wait_until("the next incarnation", lambda: site.status("grpo/tasks")["incarnation"] == 2)
    hurry(site)
    assert site.wait_for_end("grpo/tasks")["state"] == "COMPLETED"
    begin(site, source, "alone", None, "--wait")
    texts, rewards = [], []
    for trial in ("grpo/tasks", "grpo/alone"):
        rows = read_samples(site.paths(trial).samples).rows
        texts.append(sorted((row["step"], row["prompt"], row["completion"]) for row in rows))
        rewards.append([line[name] for line in site.metrics(trial) for name in ("reward", "kl")])
    assert texts[0] == texts[1]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-3)

    last = sorted(site.paths("grpo/alone").checkpoints.iterdir())[-1]
    names = [name for name, _ in RoleCheckpoint(last, "actor").weights()]
    assert len(names) == 2 * 15
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)

    merged, adapter = Path(site.status("grpo/alone")["export"]), tmp_path / "adapter"
    site.slurmrl("export", "grpo/alone", "--form", "adapter", "--out", str(adapter))
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 3
    base = AutoModelForCausalLM.from_pretrained(source)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
        with adapted.disable_adapter():
            assert (adapted(ids).logits - expected).abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    file = source / "model.safetensors"
    weights = file.read_bytes()
    file.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    said = site.slurmrl("export", "grpo/alone", "--out", str(tmp_path / "other"), code=2).stderr
    assert f"the weights in {source} have changed since the adapters were trained" in said

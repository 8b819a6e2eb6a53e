"""A trial that trains adapters: its reference, checkpoints, restarts, moves and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.support.rotation import ADAPTERS, in_turn
from tests.support.trials import ARCHITECTURE, Site, ppo_config


def config_of(source: Path) -> dict[str, Any]:
    """Return settings of PPO on two ranks with adapters of actor and critic. Two tensor ranks
    generate with the actor's merged weights.
    """
    rollout = {"max_new_tokens": 4, "backend": "native:t2"}
    config = ppo_config(trial="lora", total_steps=2, rollout=rollout)
    lora = {"rank": 3, "alpha": 6}
    start = {"architecture": None, "path": str(source), "lora": lora}
    optimizer = {"lr": 1e-2}
    return {
        **{name: value for name, value in config.items() if name != "evaluation"},
        "actor": {**config["actor"], **start, "optimizer": optimizer},
        "critic": {"lora": lora, "optimizer": optimizer},
        "transfer": {"verify": "always"},
    }


@pytest.mark.long
@in_turn(0, ADAPTERS)
def test_adapters_are_trained_committed_resharded_and_exported(tmp_path: Path) -> None:
    """The reference is the actor without adapters, so the KL is zero at first.

    The trial resumes from its adapters. Both exports give equal outputs, and adapters are never
    merged with another base model.
    """
    site = Site(tmp_path)
    source = tmp_path / "source"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
    model.save_pretrained(source)
    file = site.write("lora.yaml", config_of(source))
    site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
    site.slurmrl("resume", "ppo/lora", "total_steps=3", "--wait")
    kl = [step["kl"] for step in site.metrics("ppo/lora")]
    assert abs(kl[0]) < 1e-5
    assert min(map(abs, kl[1:])) > 1e-4

    assert site.outcome("ppo/lora")["metrics"][-1]["step"] == 3
    checkpoints = site.paths("ppo/lora").checkpoints
    last = sorted(checkpoints.iterdir())[-1]
    names = [name for name, _ in RoleCheckpoint(last, "actor").weights()]
    assert len(names) == 2 * 7 * ARCHITECTURE["num_hidden_layers"]
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)

    merged = Path(site.status("ppo/lora")["export"])
    adapter = tmp_path / "adapter"
    site.slurmrl("export", "ppo/lora", "--form", "adapter", "--out", str(adapter))
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 3
    assert any(values.any() for values in load_file(adapter / "adapter_model.safetensors").values())
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
    for role in ("actor", "critic"):
        merge = ("export", "ppo/lora", "--role", role, "--out", str(tmp_path / role))
        said = site.slurmrl(*merge, code=2).stderr
        assert f"the weights in {source} have changed since the adapters were trained" in said
        assert not (tmp_path / role).exists()
    file.write_bytes(weights)
    site.slurmrl(*merge)

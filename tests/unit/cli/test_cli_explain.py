from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slurmrl.cli.main import main


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 2
    return capsys.readouterr().err


def test_explain_shows_facts_and_example_of_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "critic.optimizer.lr")
    assert text.startswith("critic.optimizer.lr: number ≥ 0\n\nLearning rate")
    assert "\nDefault:    1e-05\n" in text
    assert "Example:\n  critic:\n    optimizer:\n      lr: " in text
    assert "Default:    the value in cluster.slurm\n" in explained(capsys, "rollout.slurm.time")
    assert "Default:    the cluster's default\n" in explained(capsys, "cluster.slurm.time")
    assert "\nUnit:       seconds\n" in explained(capsys, "cluster.heartbeat_s")


def test_explain_lists_keys_of_section(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "models.judge.optimizer").splitlines()
    keys = lines[lines.index("Keys:") + 1 :]
    assert len(keys) == 11
    assert keys[1].split() == ["lr", "<number>", "Learning", "rate", "after", "warm-up."]


def test_explain_lists_sections_and_algorithms_without_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = explained(capsys)
    for word in ("  rollout ", "  seed <integer>", "  distill "):
        assert word in text
    assert len(json.loads(explained(capsys, "--json"))) > 20


def test_explain_shows_default_of_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0.1; 0.04 for grpo" in explained(capsys, "algorithm.kl.coef").replace(
        "\n" + " " * 12, " "
    )
    assert "\nDefault:    0.04\n" in explained(capsys, "algorithm.kl.coef", "--algorithm", "grpo")
    assert "\nDefault:    16\n" in explained(capsys, "rollout.n", "--algorithm", "dapo")


def test_explain_shows_each_meaning_of_shared_key(capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(explained(capsys, "algorithm.beta", "--json"))
    assert [entry["algorithms"] for entry in entries] == [["dpo"], ["kto"]]
    assert entries[0]["default"] == "0.1"
    (size,) = json.loads(explained(capsys, "algorithm.batch_size", "--json"))
    assert size["required"]
    assert {"sft", "grpo", "evaluate"} <= set(size["algorithms"])


def test_explain_names_nearest_keys_for_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'optimizer'?" in rejected(capsys, "actor.optimiser.lr")
    assert "did you mean actor.optimizer.lr or" in rejected(capsys, "lr")
    assert "did you mean algorithm.clip_ratio or" in rejected(capsys, "algorithm.clip")
    assert "did you mean 'coef'?" in rejected(capsys, "algorithm.kl.coeff")
    assert "'seed' (integer) has no keys" in rejected(capsys, "seed.x")
    assert "allowed: cispo" in rejected(capsys, "algorithm", "--algorithm", "grp")
    assert "rollout.n" in rejected(capsys, "seed", "--algorithm", "grpo")


def test_explain_imports_no_torch() -> None:
    code = (
        "import sys; from slurmrl.cli.main import main; main(['explain', 'algorithm.beta']); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

from __future__ import annotations

import subprocess
import sys

from tests.unit.cli.conftest import Command


def test_explain_shows_facts_and_example_of_key(command: Command) -> None:
    text = command("explain", "critic.optimizer.lr").out
    assert text.startswith("critic.optimizer.lr: number ≥ 0\n\nLearning rate")
    assert "\nDefault:    1e-05\n" in text
    assert "Example:\n  critic:\n    optimizer:\n      lr: " in text
    assert (
        "Default:    the value in cluster.slurm\n" in command("explain", "rollout.slurm.time").out
    )
    assert "Default:    the cluster's default\n" in command("explain", "cluster.slurm.time").out
    assert "\nUnit:       seconds\n" in command("explain", "cluster.heartbeat_s").out
    assert "\nUnit:       frames per second\n" in command("explain", "dataset.video_fps").out
    assert command("explain", "actor.lora.rslora").out.endswith("rslora: true\n")
    assert command("explain", "actor.").out == command("explain", "actor").out


def test_explain_lists_keys_of_section(command: Command) -> None:
    lines = command("explain", "models.judge.optimizer").lines
    keys = lines[lines.index("Keys:") + 1 :]
    assert len(keys) == 11
    assert keys[1].split() == ["lr", "<number>", "Learning", "rate", "after", "warm-up."]


def test_explain_lists_sections_and_algorithms_without_key(
    command: Command,
) -> None:
    text = command("explain").out
    for word in ("  rollout ", "  seed <integer>", "  distill "):
        assert word in text
    assert len(command.json("explain")) > 20


def test_explain_shows_default_of_preset(command: Command) -> None:
    assert "0.1; 0.04 for grpo" in command("explain", "algorithm.kl.coef").out.replace(
        "\n" + " " * 12, " "
    )
    assert (
        "\nDefault:    0.04\n" in command("explain", "algorithm.kl.coef", "--algorithm", "grpo").out
    )
    assert "\nDefault:    16\n" in command("explain", "rollout.n", "--algorithm", "dapo").out


def test_explain_shows_each_meaning_of_shared_key(command: Command) -> None:
    entries = command.json("explain", "algorithm.beta")
    assert [entry["algorithms"] for entry in entries] == [["dpo"], ["kto"]]
    assert entries[0]["default"] == "0.1"
    (size,) = command.json("explain", "algorithm.batch_size")
    assert size["required"]
    assert {"sft", "grpo", "evaluate"} <= set(size["algorithms"])


def test_explain_names_nearest_keys_for_unknown_key(command: Command) -> None:
    assert "did you mean 'optimizer'?" in command.rejected("explain", "actor.optimiser.lr")
    assert "did you mean actor.optimizer.lr or" in command.rejected("explain", "lr")
    assert "did you mean algorithm.clip_ratio or" in command.rejected("explain", "algorithm.clip")
    assert "did you mean 'coef'?" in command.rejected("explain", "algorithm.kl.coeff")
    assert "the reference lists no keys of 'seed' (integer)" in command.rejected(
        "explain", "seed.x"
    )
    assert "allowed: cispo" in command.rejected("explain", "algorithm", "--algorithm", "grp")
    assert "rollout.n" in command.rejected("explain", "seed", "--algorithm", "grpo")


def test_explain_imports_no_torch() -> None:
    code = (
        "import sys; from slurmrl.cli.main import main; main(['explain', 'algorithm.beta']); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

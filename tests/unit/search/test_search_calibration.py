"""``slurmrl search --calibrate``: lengths and seconds of a trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.config.load import dump
from slurmrl.env import user_name
from slurmrl.fsio import atomic
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import load_settings
from slurmrl.run.paths import RunPaths
from tests.unit.search.test_search_layouts import TEXT


@pytest.fixture(autouse=True)
def _no_site_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMRL_PROFILE", "none")


def trial(folder: Path, **metrics: float) -> Path:
    """Write a trial that has made one step; return its configuration."""
    path = folder / "ppo.yaml"
    path.write_text(TEXT)
    settings = load_settings(path, root=folder, scheduler="slurm", planning=True)
    paths = RunPaths(folder / user_name() / "big" / "1")
    atomic.make_private_directory(paths.run)
    atomic.make_private_directory(paths.history)
    paths.identity.write_text(json.dumps({"uuid": "1"}))
    paths.config.write_text(dump(settings.config))
    paths.plan.write_text(make_plan(settings, scheduler="slurm").to_json())
    paths.metrics.write_text(json.dumps({"step": 1, **metrics}) + "\n")
    return path


def search(path: Path, *words: str) -> int:
    return main(["search", str(path), "--gpus", "8", "--root", str(path.parent), *words])


def test_calibration_uses_lengths_and_seconds_of_the_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"time/actor_gen": 20.0, "time/actor_train": 10.0}
    path = trial(tmp_path, tokens=64 * 400, prompt_length=100, response_length=300, **seconds)
    assert search(path, "--calibrate", "big/1") == 0
    shown = capsys.readouterr().out
    assert "mean lengths: prompts 100 tokens, completions 300 tokens" in shown
    line = next(line for line in shown.splitlines() if line.startswith("big/1: "))
    assert line.startswith("big/1: 30 s of calls were measured, ")
    predicted = float(line.split("measured, ")[1].split()[0])
    ratios = [float(part.split()[-1]) for part in line.split("predicted: ")[1].split(", ")]
    assert sum(s / r for s, r in zip((20, 10), ratios, strict=True)) == pytest.approx(
        predicted, rel=0.02
    )
    assert search(path, "--calibrate", "big/1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["calibration"] == line
    assert search(path, "--prompt-tokens", "100", "--response-tokens", "300") == 0
    assert capsys.readouterr().out.splitlines()[:8] == shown.splitlines()[:8], "the same answers"


def test_calibration_uses_the_hardware_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial has no GPUs, and no profile of its processors."""
    metrics = {"time/actor_gen": 20.0, "time/actor_train": 10.0}
    path = trial(tmp_path, tokens=64 * 400, prompt_length=100, response_length=300, **metrics)
    run = tmp_path / user_name() / "big" / "1"
    settings = load_settings(
        path,
        ("cluster.gpus_per_worker=0", "cluster.slurm.gpu_type=null"),
        root=tmp_path,
        scheduler="slurm",
        planning=True,
    )
    RunPaths(run).config.write_text(dump(settings.config))
    profile = tmp_path / "cpu.yaml"
    profile.write_text("hardware: cpu\nmeasured: {flops_per_s: 4e10, float32_flops_per_s: 5e10}\n")
    words = ("cluster.gpus_per_worker=0", "cluster.slurm.gpu_type=null")
    hardware = f"cluster.hardware={profile}"
    assert search(path, *words, hardware, "--calibrate", "big/1") == 0
    assert "big/1: 30 s of calls were measured, " in capsys.readouterr().out


def test_trial_without_lengths_or_with_other_options_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trial(tmp_path, loss=1.0)
    assert search(path, "--calibrate", "big/1") == 2
    assert "no step of the trial has lengths" in capsys.readouterr().err
    assert search(path, "--calibrate", "big/1", "--prompt-tokens", "5") == 2
    assert "--calibrate excludes" in capsys.readouterr().err
    assert search(path, "--calibrate", "big/2") == 2

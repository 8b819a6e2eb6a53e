"""The report's predicted seconds of calls, for the lengths that the trial had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import dump
from slurmrl.desk.report.collecting import call_times, predicted_calls
from slurmrl.fsio import atomic
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import load_settings
from slurmrl.run.paths import RunPaths

EXAMPLES = Path(__file__).parents[3] / "examples"
PROFILE = "hardware: cpu\nmeasured: {float32_flops_per_s: 5e10, bytes_per_s: 2e10}\n"


@pytest.fixture(autouse=True)
def _no_site_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMRL_PROFILE", "none")


def trial(folder: Path, example: str, *overrides: str) -> RunPaths:
    """Write the files of a trial's plan."""
    path = EXAMPLES / f"{example}.yaml"
    given = ("cluster.gpus_per_worker=0", *overrides)
    settings = load_settings(path, given, root=folder, scheduler="local", planning=True)
    paths = RunPaths(folder / "run")
    atomic.make_private_directory(paths.run)
    paths.config.write_text(dump(settings.config))
    paths.plan.write_text(make_plan(settings, scheduler="local").to_json())
    return paths


def lines(**values: float) -> list[dict[str, Any]]:
    return [{"step": 1, "time/actor_train": 0.5, **values}]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.yaml"
    path.write_text(PROFILE)
    return path


def test_predictions_use_the_lengths_of_the_trial(tmp_path: Path, profile: Path) -> None:
    paths = trial(tmp_path, "sft", f"cluster.hardware={profile}")
    mean, short, source = predicted_calls(paths, lines(tokens=256 * 4))
    _, long, _ = predicted_calls(paths, lines(tokens=256 * 8))
    assert mean == (4, 0)
    assert list(short) == ["actor_train"]
    assert 1.5 * short["actor_train"] < long["actor_train"] < 2.5 * short["actor_train"]
    assert "2 numbers measured" in source
    (call,) = call_times(lines(tokens=256 * 4), [{"name": "actor_train"}], {}, short)
    assert (call.seconds, call.predicted_s) == (0.5, short["actor_train"])


def test_generation_is_predicted_for_the_mean_completion(tmp_path: Path, profile: Path) -> None:
    paths = trial(tmp_path, "grpo", f"cluster.hardware={profile}")
    found = [
        predicted_calls(paths, lines(tokens=1000, prompt_length=6, response_length=length))[1]
        for length in (2, 4)
    ]
    assert {"actor_gen", "ref_inf", "actor_train"} <= set(found[0])
    assert all(found[1][name] > seconds for name, seconds in found[0].items())


def test_generation_by_tasks_is_not_compared_with_the_time_to_read_samples(
    tmp_path: Path, profile: Path
) -> None:
    paths = trial(tmp_path, "grpo_async", f"cluster.hardware={profile}")
    given = lines(tokens=1000, prompt_length=6, response_length=4)
    assert "actor_train" in predicted_calls(paths, given)[1]
    assert "actor_gen" not in predicted_calls(paths, given)[1]


def test_report_names_missing_inputs_of_predictions(tmp_path: Path, profile: Path) -> None:
    paths = trial(tmp_path, "sft")
    assert predicted_calls(paths, lines(tokens=256))[1:] == (
        {},
        "the hardware is unknown (slurmrl profile-cluster measures it)",
    )
    paths = trial(tmp_path, "sft", f"cluster.hardware={profile}")
    reason = "no step of the trial has lengths of sequences"
    assert predicted_calls(paths, lines()) == (None, {}, reason)
    profile.write_text("hardware: cpu\nmeasured: {link: -1}\n")
    _, found, reason = predicted_calls(paths, lines(tokens=100))
    assert (found, "measured.link: -1" in reason) == ({}, True)
    paths.config.unlink()
    assert predicted_calls(paths, lines(tokens=100))[1] == {}

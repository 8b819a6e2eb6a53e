"""``slurmrl eval`` of an evaluation with suites."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slurmrl.config.load import dump
from slurmrl.desk.evaluating import evaluation_of
from slurmrl.desk.proposal import propose
from slurmrl.run.history.slots import Kind
from slurmrl.run.paths import RunPaths
from tests.fake_runs import FakeRun
from tests.support.trials import ADDITION, ARCHITECTURE
from tests.unit.cli.conftest import Command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(ARCHITECTURE))
    dataset = {"type": "prompt", "path": str(ADDITION / "heldout.jsonl")}
    suites = {"one": {"dataset": dataset, "n": 2}, "two": {"dataset": dataset}}
    config = {
        "experiment": "add",
        "algorithm": {"name": "grpo", "batch_size": 8},
        "actor": {"path": "absent", "tokenizer": str(ADDITION / "tokenizer")},
        "rollout": {"max_new_tokens": 8},
        "reward": {"name": "exact_match"},
        "dataset": dataset,
        "evaluation": {"every_steps": 5, "suites": suites},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def evaluate(file: Path, *more: str) -> list[str]:
    """Return the words of a command."""
    model = str(file.parent / "model")
    chosen = ["--checkpoint", model, "--root", str(file.parent / "runs"), "--scheduler", "slurm"]
    return ["eval", str(file), *chosen, "--no-check", *more]


def test_each_suite_is_a_trial_with_its_own_name(command: Command, file: Path) -> None:
    shown = [json.loads(line) for line in command(*evaluate(file, "--dry-run", "--json")).lines]
    name = f"{file.parent.name}-model"
    wanted = [f"add-eval/{name}-{suite}"[:73] for suite in ("one", "two")]
    assert [one["trial"] for one in shown] == wanted
    only = command.json(*evaluate(file, "--dry-run", "--suite", "two"))
    assert only["trial"] == wanted[1]


def test_eval_of_overridden_experiment_lies_next_to_its_training(
    command: Command, file: Path
) -> None:
    """The results are then found by trials of ``slurmrl submit CONFIG experiment=other``."""
    words = evaluate(file, "--dry-run", "--suite", "two", "experiment=other")
    trial = command.json(*words)["trial"]
    assert trial.split("/")[0] == RunPaths.of(file.parent, "me", "other", "1").evaluated().name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trial=mine",), "trial=NAME needs --suite"),
        (("--suite", "tow"), "--suite tow: no such suite; did you mean 'two'"),
    ],
)
def test_meaningless_evaluations_are_rejected_before_any_job(
    command: Command, file: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in command(*evaluate(file, *arguments), code=2).err
    assert not (file.parent / "runs").exists()


def test_eval_of_another_model_with_a_used_name_suggests_a_new_name(
    command: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial has the last two names of a model's path."""
    monkeypatch.setattr("slurmrl.desk.trial_code.is_this_code", lambda _: True)
    models = [file.parent / first / "step" / "model" for first in ("a", "b")]
    for model in models:
        shutil.copytree(file.parent / "model", model)
    root = file.parent / "runs"
    derive = evaluation_of(str(models[0]), root, "two")
    before = propose(file, (), root=str(root), scheduler="slurm", derive=derive)
    run = FakeRun(root, experiment="add-eval", trial="step-model-two")
    run.paths.config.write_text(dump(before.settings.config))
    run.begin()
    run.commit(1)
    run.end(Kind.CANCELLED)

    def of(model: Path, *more: str) -> list[str]:
        where = ["--root", str(root), "--scheduler", "slurm", "--dry-run", "--no-check"]
        return ["eval", str(file), "--checkpoint", str(model), *where, *more]

    command(*of(models[0]))
    error = command(*of(models[1]), code=2).err
    assert "add-eval/step-model-two already evaluates another model:" in error
    assert f"actor.path: '{models[0]}' in the trial, '{models[1]}' now" in error
    added = error.rpartition("add to the command: ")[2].split()
    assert added == ["--suite", "two", "trial=step-model-two-2"]
    command(*of(models[1], *added))
    assert (
        "exists with another configuration: submit it with --new, or undo:"
        in command(*of(models[0], "rollout.n=3", "--suite", "two"), code=2).err
    )

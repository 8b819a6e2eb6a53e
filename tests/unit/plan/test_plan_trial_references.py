"""Models given as references to trials: exports and checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmrl.config.load import dump
from slurmrl.desk.evaluating import EvaluatedModel, find_checkpoint
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, UsageError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.shapes import parameter_shapes
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import verify
from slurmrl.workers.master.exporting import pin_to_evaluate
from slurmrl.workers.worker.setup import verify_pinned
from tests.fake_runs import FakeRun
from tests.support.committed import CommittedTrial
from tests.support.trials import ADDITION, ARCHITECTURE
from tests.unit.plan.conftest import write_model

CONFIG = {
    "experiment": "judged",
    "algorithm": {"name": "evaluate", "batch_size": 8},
    "rollout": {"max_new_tokens": 6},
    "reward": {"name": "exact_match"},
    "dataset": {"type": "prompt", "path": "rows.jsonl"},
}
PPO = ("algorithm={name: ppo, batch_size: 8}", "total_steps=3", "dataset.shuffle=true")


class Judge:
    """A trial that evaluates the models of ``sft/1`` at steps 4, 8 and 12."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = CommittedTrial(root, architecture=ARCHITECTURE)
        shapes = parameter_shapes(ModelConfig.from_hf(ARCHITECTURE), "lm")
        for step in (4, 8, 12):
            weights = {name: np.full(shape, step, "<f4") for name, shape in shapes.items()}
            self.source.commit(step, weights)
        self.file = root / "judged.yaml"
        self.file.write_text(json.dumps(CONFIG))

    @property
    def exports(self) -> Path:
        return self.source.paths.exports

    def load(self, path: str, *more: str, **options: Any) -> Settings:
        return load_settings(self.file, [f"actor.path={path}", *more], root=self.root, **options)

    def problem(self, path: str, *more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            self.load(path, *more)
        [problem] = caught.value.problems
        assert problem.key in ("actor.path", "teacher.path")
        return problem.message


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return Judge(tmp_path)


def contents(root: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize(("text", "step"), [("@8", 8), ("@last", 12)])
def test_frozen_model_is_read_from_the_checkpoint_itself(
    judge: Judge, text: str, step: int
) -> None:
    """The plan copies no files and reads only this role, even after the run has deleted the
    files.
    """
    before = contents(judge.root)
    planned = judge.load(f"trial:sft/1{text}", planning=True)
    assert planned.missing == ()
    assert planned.config.actor.architecture == ARCHITECTURE
    assert planned.config.actor.tokenizer == str(ADDITION / "tokenizer")
    assert make_plan(planned, scheduler="local").models["actor"]
    assert contents(judge.root) == before
    config = judge.load(f"trial:sft/1{text}").config
    folder = judge.exports / f"step-{step:08d}.1-checkpoint"
    assert config.actor.path == config.actor.tokenizer == str(folder)
    checkpoint = judge.source.paths.checkpoint(step, 1)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == ["actor.0.safetensors", "actor.1.safetensors"]
    assert all(os.path.samefile(folder / name, checkpoint / name) for name in shards)
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}
    made = contents(judge.root)
    assert judge.load(f"trial:sft/1{text}").config == config
    assert contents(judge.root) == made, "it is made once"
    judge.source.delete(step)
    verify(folder)
    assert judge.load(f"trial:sft/1@{step}").config == config, "also for the next trial"
    assert len(list(judge.exports.iterdir())) == 1, "nothing is exported"


def test_existing_export_of_the_step_is_preferred(judge: Judge) -> None:
    for name in ("step-00000008", "step-00000012", ".tmp.step-00000099"):
        write_model(judge.exports / name)
    for text, step in (("", 12), ("@8", 8), ("@last", 12)):
        assert judge.load(f"trial:sft/1{text}").config.actor.path == str(
            judge.exports / f"step-{step:08d}"
        )


def test_trial_keeps_its_referenced_checkpoint_after_a_commit(judge: Judge) -> None:
    """The same command continues the trial while the other trial continues."""
    config = judge.load("trial:sft/1@last").config
    run = FakeRun(judge.root, "judged")
    run.paths.config.write_text(dump(config))
    shapes = parameter_shapes(ModelConfig.from_hf(ARCHITECTURE), "lm")
    weights = {name: np.zeros(shape, "<f4") for name, shape in shapes.items()}
    judge.source.commit(16, weights)
    newest = str(judge.exports / "step-00000016.1-checkpoint")
    assert judge.load("trial:sft/1@last").config.actor.path == newest
    run.begin()
    run.commit(1)
    assert judge.load("trial:sft/1@last").config.actor.path == config.actor.path
    assert judge.load("trial:sft/1@last", "trial=2").config.actor.path == newest
    assert judge.load("trial:sft/1@16").config.actor.path == newest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("@9", "neither an export nor a checkpoint of step 9 (exports: none; checkpoints: 4, 8, 1"),
        ("", "; or take its newest checkpoint: trial:sft/1@last"),
        ("@newest", "expected trial:EXPERIMENT/TRIAL, with @STEP for a step or @last"),
        ("@", "expected trial:EXPERIMENT/TRIAL"),
    ],
)
def test_missing_trial_checkpoint_or_role_is_explained(judge: Judge, text: str, words: str) -> None:
    assert words in judge.problem(f"trial:sft/1{text}")


def test_reference_to_a_trial_without_checkpoints_suggests_submit(judge: Judge) -> None:
    message = judge.problem("trial:other/1@last")
    assert "other/1 has no checkpoint yet; first submit it: slurmrl submit <the conf" in message


@pytest.mark.parametrize(
    ("own", "trial", "which"),
    [
        ("", "1", ""),
        ("", "teacher", " trial=teacher"),
        ("trial: a", "a", ""),
        ("trial: a", "1", " trial=1"),
    ],
)
def test_suggested_command_creates_the_missing_trial(
    judge: Judge, own: str, trial: str, which: str
) -> None:
    """The default of the experiment's configuration may be another trial."""
    file = judge.root / "teacher.yaml"
    file.write_text(f"experiment: other\n{own}\n")
    (judge.root / "broken.yaml").write_text("experiment: other\n  x: [")
    for at in ("", "@last"):
        assert f"slurmrl submit {file}{which};" in f"{judge.problem(f'trial:other/{trial}{at}')};"


def test_trained_model_starts_from_an_export(judge: Judge) -> None:
    """Frozen models may be checkpoints, and so may all models of a trial without steps."""
    for text in ("@8", "@last"):
        message = judge.problem(f"trial:sft/1{text}", *PPO)
        step = 8 if text == "@8" else 12
        assert f"export the checkpoint first: slurmrl export sft/1 --step {step}" in message
    assert not list(judge.exports.iterdir())
    write_model(judge.exports / "step-00000004")
    start = "trial:sft/1@4"
    config = judge.load(start, *PPO, "ref.path=trial:sft/1@8").config
    assert config.ref is not None
    assert config.ref.path == str(judge.exports / "step-00000008.1-checkpoint")
    held_out = f"evaluation.dataset={{type: prompt, path: {judge.root / 'rows.jsonl'}}}"
    config = judge.load("trial:sft/1@12", *PPO[:1], "total_steps=0", held_out).config
    assert config.actor.path == str(judge.exports / "step-00000012.1-checkpoint")


def test_checkpoint_deleted_during_linking_leaves_no_files(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the newest checkpoint is deleted, another one is chosen. If a requested step is deleted,
    there is a message. No files remain.
    """
    link = SystemCalls.link
    gone: list[int] = [12]

    def linked(self: SystemCalls, source: Path, target: Path) -> None:
        if gone and source.parent.name == f"step-{gone[0]:08d}.1":
            judge.source.delete(gone.pop())
        link(self, source, target)

    monkeypatch.setattr(SystemCalls, "link", linked)
    folder = judge.exports / "step-00000008.1-checkpoint"
    with pytest.raises(ConfigError, match="no checkpoint of step 12; available: 4, 8"):
        judge.load("trial:sft/1@12")
    assert list(judge.exports.iterdir()) == []
    gone.append(8)
    judge.load("trial:sft/1@4")
    assert not folder.exists()
    judge.load("trial:sft/1@4")


def test_newest_checkpoint_is_chosen_again_after_a_deletion(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmrl.plan import trial_references

    commits = trial_references._commits
    monkeypatch.setattr(
        trial_references, "_commits", lambda paths: _deleting(commits, paths, judge)
    )
    config = judge.load("trial:sft/1@last").config
    assert config.actor.path == str(judge.exports / "step-00000008.1-checkpoint")


def _deleting(commits: Callable[[RunPaths], Any], paths: RunPaths, judge: Judge) -> Any:
    found = commits(paths)
    if found and found[-1].step == 12:
        judge.source.delete(12)
    return found


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_checkpoint_is_rejected(judge: Judge, damage: str) -> None:
    file = judge.source.paths.checkpoint(8, 1) / "actor.1.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, 100)
    message = judge.problem("trial:sft/1@8")
    assert "'trial:sft/1@8' cannot be used: checkpoint " in message
    assert "actor.1.safetensors" in message
    assert "choose another checkpoint with @STEP (available: 4, 12)" in message
    assert list(judge.exports.iterdir()) == []


def test_evaluated_checkpoint_has_its_own_directory(judge: Judge) -> None:
    """The files remain when their trial deletes the checkpoint. The evaluating trial has the name
    that `slurmrl eval` would give it.
    """
    paths = judge.source.paths
    commit = fold(History(paths.history).read()).commits[1]
    pin_to_evaluate(paths, commit)
    pin_to_evaluate(paths, commit)
    judge.source.delete(8)
    folder = paths.checkpoint_to_evaluate(commit.directory)
    found = find_checkpoint(str(folder), judge.root)
    assert found == EvaluatedModel(str(folder), "sft-1-step-8")
    verify_pinned(judge.load(str(folder)), 0, 1, lambda _: None)
    assert list(judge.exports.iterdir()) == []


def test_ranks_verify_a_referenced_checkpoint_before_loading(judge: Judge) -> None:
    """A file of the right size with other bytes ends the trial with a message."""
    settings = judge.load("trial:sft/1@8")
    waited: list[str] = []
    verify_pinned(settings, 0, 1, waited.append)
    folder = Path(str(settings.config.actor.path))
    assert waited == [f"{folder} verified"]
    with (folder / "actor.0.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    with pytest.raises(UsageError, match=r"actor\.0\.safetensors has another checksum; choose"):
        verify_pinned(settings, 0, 1, waited.append)


def test_trial_without_a_trained_model_has_no_checkpoint(judge: Judge) -> None:
    run = FakeRun(judge.root, "judged", "7")
    config = judge.load("trial:sft/1@8", "trial=7")
    run.paths.config.write_text(dump(config.config))
    run.paths.plan.write_text(make_plan(config, scheduler="local").to_json())
    run.begin()
    run.commit(1)
    assert "trains no model" in judge.problem("trial:judged/7@last")
    assert RunPaths.of(judge.root, user_name(), "judged", "7") == run.paths

"""The evaluation of a checkpoint with the settings of a training configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import load
from slurmrl.desk.evaluating import choose_suites, evaluation_of, find_checkpoint
from slurmrl.errors import ConfigError, UsageError
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import Settings, load_settings
from tests.support.committed import CommittedTrial
from tests.support.trials import ARCHITECTURE

PROMPTS = {"type": "prompt", "path": "rows.jsonl"}
GRPO = {
    "experiment": "add",
    "trial": "7",
    "total_steps": 60,
    "stop_when": "reward > 0.9",
    "algorithm": {"name": "grpo", "batch_size": 8, "n_minibatches": 4},
    "actor": {
        "path": "trial:sft/1",
        "backend": "fsdp:d2",
        "ema": 0.9,
        "optimizer": {"lr": 1e-3},
        "lora": {"rank": 2},
    },
    "ref": {"path": "trial:sft/1"},
    "rollout": {
        "n": 8,
        "max_new_tokens": 6,
        "top_k": 20,
        "top_p": 0.9,
        "temperature": 0.7,
        "replay_experts": True,
        "tasks": {},
    },
    "reward": {"name": "exact_match"},
    "dataset": {"type": "prompt", "path": "training.jsonl"},
    "evaluation": {
        "dataset": {**PROMPTS, "max_prompt_tokens": 9},
        "samples": 1,
        "n": 2,
        "greedy": False,
        "pass_score": 0.5,
        "every_steps": 10,
    },
    "checkpoint": {"every_steps": 10},
}


class Trained:
    """``sft/1`` with checkpoints of the steps 4 and 8."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trial = CommittedTrial(root, architecture=ARCHITECTURE)
        for step in (4, 8):
            self._trial.commit(step, {})
        self.file = root / "training.yaml"

    def write(self, values: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(values))

    def evaluation(self, checkpoint: str, *overrides: str, suite: str = "") -> Settings:
        derive = evaluation_of(checkpoint, self.root, suite)
        return load_settings(self.file, overrides, root=self.root, planning=True, derive=derive)


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


def test_derived_evaluation_keeps_evaluation_settings_without_training(trained: Trained) -> None:
    trained.write(GRPO)
    named = load(trained.file, (), evaluation_of("sft/1@4", trained.root)).values
    assert (named["actor"]["path"], named["trial"]) == ("trial:sft/1@4", "sft-1-step-4")
    settings = trained.evaluation("sft/1", "rollout.n=4")
    config = settings.config
    assert (config.experiment, config.trial) == ("add-eval", "sft-1-step-8")
    assert config.algorithm["name"] == "evaluate"
    assert (config.algorithm["batch_size"], config.algorithm["pass_score"]) == (8, 0.5)
    rollout = config.rollout
    assert (rollout.n, rollout.max_new_tokens) == (4, 6)  # the override applies to the evaluation
    assert (rollout.temperature, rollout.top_k, rollout.top_p) == (1.0, None, 1.0)
    assert (rollout.replay_experts, rollout.tasks) == (False, None)
    assert config.dataset.path == str(trained.root / "rows.jsonl")
    assert config.dataset.max_prompt_tokens == 9
    assert config.actor.backend == "fsdp:d2"
    assert config.actor.lora is None
    assert config.actor.ema is None
    assert config.evaluation is None
    assert config.total_steps is None
    assert config.stop_when is None
    assert set(make_plan(settings, scheduler="local").models) == {"actor"}


def test_evaluation_problems_have_their_lines_in_the_file(trained: Trained) -> None:
    lines = json.dumps({**GRPO, "evaluation": {"dataset": {**PROMPTS, "typo": 1}}}, indent=1)
    trained.file.write_text(lines)
    with pytest.raises(ConfigError) as caught:
        trained.evaluation("sft/1")
    line = 1 + next(at for at, text in enumerate(lines.split("\n")) if "typo" in text)
    assert [(one.where, one.key) for one in caught.value.problems] == [
        (f"{trained.file}:{line}", "dataset.typo")
    ]


def test_invalid_or_missing_evaluation_section_is_reported(trained: Trained) -> None:
    trained.write({**{k: v for k, v in GRPO.items() if k != "experiment"}, "rollout": 5})
    with pytest.raises(ConfigError) as caught:
        trained.evaluation("sft/1")
    assert {problem.key for problem in caught.value.problems} >= {"experiment", "rollout"}


def test_evaluate_configuration_changes_only_the_model(trained: Trained) -> None:
    trained.write(
        {
            "experiment": "judged",
            "algorithm": {"name": "evaluate", "batch_size": 4},
            "rollout": {"n": 3, "top_p": 0.9, "max_new_tokens": 6},
            "reward": {"name": "exact_match"},
            "dataset": PROMPTS,
        }
    )
    config = trained.evaluation("trial:sft/1@4").config
    assert (config.experiment, config.trial) == ("judged-eval", "sft-1-step-4")
    assert (config.rollout.n, config.rollout.top_p) == (3, 0.9)


SUITES = {
    "n": 2,
    "pass_score": 0.5,
    "suites": {
        "easy": {"dataset": PROMPTS},
        "hard": {
            "dataset": {**PROMPTS, "max_prompt_tokens": 5},
            "reward": {"name": "math"},
            "n": 4,
            "pass_score": 1.0,
            "max_new_tokens": 9,
        },
        "loss": {"dataset": {"type": "prompt_answer", "path": "rows.jsonl"}},
    },
}


@pytest.mark.parametrize("trains", [True, False])
def test_each_suite_is_a_trial_with_its_dataset_reward_and_sampling(
    trained: Trained, *, trains: bool
) -> None:
    """Also covers a configuration of algorithm `evaluate`, which needs no dataset."""
    values: dict[str, Any] = {**GRPO, "evaluation": SUITES}
    if not trains:
        judged = {"algorithm": {"name": "evaluate", "batch_size": 4}}
        judged["rollout"] = {"n": 1, "max_new_tokens": 6}
        values = {"experiment": "add", "reward": GRPO["reward"], **judged, "evaluation": SUITES}
    trained.write(values)
    assert choose_suites(trained.file, ()) == ["easy", "hard", "loss"]
    easy, hard = (trained.evaluation("sft/1", suite=suite).config for suite in ("easy", "hard"))
    assert (easy.experiment, easy.trial) == ("add-eval", "sft-1-step-8-easy")
    assert (easy.rollout.n, easy.algorithm["pass_score"]) == (2, 0.5)
    assert easy.reward is not None
    assert easy.reward.title == "exact_match"
    assert (hard.trial, hard.dataset.max_prompt_tokens) == ("sft-1-step-8-hard", 5)
    assert (hard.rollout.n, hard.rollout.max_new_tokens) == (4, 9)
    assert hard.algorithm["pass_score"] == 1.0
    assert hard.reward is not None
    assert hard.reward.title == "math"
    assert hard.evaluation is None
    loss = load(trained.file, (), evaluation_of("sft/1", trained.root, "loss")).values
    assert (loss["algorithm"]["measure"], "reward" in loss) == ("likelihood", False)


def test_evaluations_in_tasks_have_their_own_layout_and_jobs(trained: Trained) -> None:
    """Rollout tasks and the hosts of the trainers are left out."""
    tasks = {"backend": "fsdp:d1", "slurm": {"partition": "spare", "qos": ""}}
    evaluation = {"dataset": PROMPTS, "tasks": tasks}
    cluster = {
        "hosts": 3,
        "workers_per_host": 4,
        "slurm": {"partition": "gpu", "account": "us", "qos": "high"},
    }
    rollout = {"backend": "native:d4", "max_new_tokens": 6, "tasks": {"max": 4}}
    changes = {"evaluation": evaluation, "cluster": cluster, "rollout": rollout}
    trained.write({**GRPO, **changes})
    config = trained.evaluation("sft/1").config
    assert (config.actor.backend, config.cluster.hosts) == ("fsdp:d1", None)
    slurm = config.cluster.slurm
    assert (slurm.partition, slurm.account, slurm.qos) == ("spare", "us", None)
    assert (config.rollout.backend, config.rollout.max_new_tokens) == ("", 6)


@pytest.mark.parametrize(
    ("rollout", "tasks", "backend"),
    [
        ({"backend": "sglang:d2", "python": "/bin/sh", "server_start_s": 9, "tasks": {}}, None, ""),
        ({"backend": "native:d2", "gpus": "2-3"}, {"backend": "fsdp:d1"}, ""),
        ({"backend": "sglang", "servers": ["http://node:1"], "server_silence_s": 9}, {}, ""),
        ({"backend": "native:d2", "gpus": "2-3"}, {}, "native:d2"),
        ({"backend": "sglang", "servers": ["http://node:1"]}, None, "sglang:d1"),
    ],
)
def test_evaluation_generates_with_the_actor_if_the_engine_does_not_fit(
    trained: Trained, rollout: dict[str, Any], tasks: dict[str, Any] | None, backend: str
) -> None:
    """Covers rollout tasks, another layout, and running servers with the trainers' weights."""
    evaluation = {"dataset": PROMPTS, "tasks": tasks}
    trained.write({**GRPO, "evaluation": evaluation, "rollout": {"max_new_tokens": 6, **rollout}})
    assert trained.evaluation("sft/1").config.rollout.backend == backend


def test_unknown_suites_are_rejected(trained: Trained) -> None:
    trained.write({**GRPO, "evaluation": SUITES})
    assert choose_suites(trained.file, ["hard", "hard"]) == ["hard"]
    with pytest.raises(UsageError, match="--suite hrad: no such suite; did you mean 'hard'"):
        choose_suites(trained.file, ["hrad"])
    trained.write(GRPO)
    assert choose_suites(trained.file, ()) == [""]
    with pytest.raises(UsageError, match=r"has no evaluation\.suites"):
        choose_suites(trained.file, ["hard"])


@pytest.mark.parametrize(
    ("algorithm", "dataset", "measure"),
    [
        ("sft", "prompt_answer", "likelihood"),
        ("reward_model", "preference", "preferences"),
        ("my_algorithm.py:Mine", "preference", "preferences"),
    ],
)
def test_dataset_type_determines_the_measure(
    trained: Trained, algorithm: str, dataset: str, measure: str
) -> None:
    evaluation = {"dataset": {"type": dataset, "path": "rows.jsonl"}}
    section = {"name": algorithm, "batch_size": 8}
    trained.write({**GRPO, "algorithm": section, "evaluation": evaluation})
    source = load(trained.file, (), evaluation_of("sft/1", trained.root))
    assert source.values["algorithm"] == {"name": "evaluate", "measure": measure, "batch_size": 8}
    assert "rollout" not in source.values
    assert "reward" not in source.values


@pytest.mark.parametrize(
    ("algorithm", "kind", "key", "message"),
    [
        ("grpo", None, "evaluation", "is required to evaluate a model of algorithm grpo"),
        ("grpo", "kto", "evaluation.dataset.type", "'kto' cannot be evaluated by"),
        ("dpo", "preference", "evaluation.dataset.type", "allowed: prompt, prompt_answer, messa"),
    ],
)
def test_trials_that_cannot_be_evaluated_are_rejected(
    trained: Trained, algorithm: str, kind: str | None, key: str, message: str
) -> None:
    """The model of DPO has no scalar head, whose scores `evaluate` compares."""
    evaluation = kind and {"dataset": {"type": kind, "path": "rows.jsonl"}}
    section = {"name": algorithm, "batch_size": 8}
    trained.write({**GRPO, "algorithm": section, "evaluation": evaluation})
    with pytest.raises(ConfigError) as caught:
        trained.evaluation("sft/1")
    assert [(one.key, message in one.message) for one in caught.value.problems] == [(key, True)]


def test_model_path_is_evaluated_under_its_own_name(tmp_path: Path) -> None:
    """The evaluating trial is named after the model, so that the same command finds it again."""
    folder = tmp_path / "qwen 3" / "model..final"
    folder.mkdir(parents=True)
    found = find_checkpoint(str(folder), tmp_path)
    assert (found.path, found.name) == (str(folder), "qwen-3-model-final")
    assert find_checkpoint("hf://org/name@main", tmp_path).name == "org-name-main"
    with pytest.raises(UsageError, match="no such folder"):
        find_checkpoint("./absent", tmp_path)
    with pytest.raises(UsageError, match="expected trial:EXPERIMENT/TRIAL"):
        find_checkpoint("sft", tmp_path)


def test_evaluations_of_trials_with_long_names_have_different_names(tmp_path: Path) -> None:
    common = "c" * 57
    names = {find_checkpoint(f"ev/lr{n}e-3-{common}@2", tmp_path).name for n in (1, 3)}
    assert len(names) == 2
    assert {(len(name), name[9:]) for name in names} == {(64, f"{'c' * 48}-step-2")}

"""The configurations of ``slurmrl init``: each can be planned, and its reward scores its data."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from slurmrl.desk import initial_files
from slurmrl.desk.initial_files import STARTERS
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.plan.algorithms import ALGORITHMS
from slurmrl.plan.settings import load_settings

TOKENIZER = Path(__file__).parents[3] / "examples/addition/tokenizer"
MODEL = (
    "{path: null, backend: 'fsdp:d1', tokenizer: %s, architecture: {model_type: qwen2, "
    "vocab_size: 16, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 1, num_key_value_heads: 1, max_position_embeddings: 512}}"
)
LOCAL = (f"actor={MODEL % TOKENIZER}", "dataset.chat_template=false")
"""In place of a model of the hub, which tests do not ask for."""


@pytest.mark.parametrize("kind", list(STARTERS))
def test_every_starter_can_be_planned(kind: str, tmp_path: Path) -> None:
    made = initial_files.starter_files(kind, tmp_path / "my-run.2.yaml")
    written = initial_files.write_files(made, force=False)
    assert {path.name for path in written} - {"my_run_2_reward.py"} == {
        "my-run.2.yaml",
        "my-run.2.jsonl",
    }
    assert "@" not in "".join(made.values())
    more = [f"teacher={MODEL % TOKENIZER}"] if kind == "distill" else []
    more.append("evaluation.dataset.chat_template=false")
    settings = load_settings(written[0], [*LOCAL, *more], scheduler="local", planning=True)
    assert settings.missing == ()
    assert settings.config.algorithm["name"] == kind
    assert (settings.config.experiment, settings.config.trial) == ("my-run.2", "1")


def test_every_training_algorithm_has_a_starter() -> None:
    assert set(ALGORITHMS) - set(STARTERS) == {"generate", "evaluate"}


def test_starter_reward_scores_its_data(tmp_path: Path) -> None:
    made = initial_files.starter_files("grpo", tmp_path / "grpo.yaml")
    initial_files.write_files(made, force=False)
    spec = importlib.util.spec_from_file_location("own", tmp_path / "grpo_reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    answers = [f"{row['prompt']} It is {row['answer']}." for row in rows]
    assert module.score([], answers, rows) == [1.0] * 16
    assert module.score([], ["no idea", answers[0]], [rows[0], rows[1]]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "experiment", "module"),
    [("a b.yaml", "a-b", "a_b_reward"), ("7.yml", "7", "reward_7"), ("é.yaml", "sft", "reward__")],
)
def test_file_names_follow_from_the_output_name(
    tmp_path: Path, name: str, experiment: str, module: str
) -> None:
    made = initial_files.starter_files("ppo", tmp_path / name)
    expected = experiment if experiment != "sft" else "ppo"
    assert f"experiment: {expected}\n" in made[tmp_path / name]
    assert tmp_path / f"{module}.py" in made


def test_unusable_init_requests_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'grpo'"):
        initial_files.starter_files("gprpo", tmp_path / "a.yaml")
    with pytest.raises(UsageError, match=r"ends with .yaml"):
        initial_files.starter_files("grpo", tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a #b", "a: b", "- a", "a\nseed: 3", "{a}", "a  b"])
def test_name_that_yaml_would_change_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its name may have letters"):
        initial_files.starter_files("sft", tmp_path / f"{name}.yaml")


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    made = initial_files.starter_files("grpo", tmp_path / "grpo.yaml")
    mine = tmp_path / "grpo.jsonl"
    mine.write_text("mine")
    with pytest.raises(UsageError, match=r"grpo.jsonl exists: --force"):
        initial_files.write_files(made, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["grpo.jsonl"]
    assert mine.read_text() == "mine"
    assert initial_files.write_files(made, force=True) == list(made)
    assert mine.read_text() != "mine"
    assert initial_files.write_files(made, force=False) == []  # they are there
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}


def test_output_that_is_no_file_is_rejected(tmp_path: Path) -> None:
    made = initial_files.starter_files("grpo", tmp_path / "grpo.yaml")
    (tmp_path / "grpo.jsonl").mkdir()
    with pytest.raises(UsageError, match="is not a file"):
        initial_files.write_files(made, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["grpo.jsonl"]


def test_configuration_is_written_last_and_init_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = initial_files.starter_files("grpo", tmp_path / "grpo.yaml")
    create = initial_files.atomic.exclusive_create

    def full(path: Path, data: bytes) -> bool:
        if path.suffix == ".jsonl":
            raise EnvironmentFailure("No space left on device")
        return create(path, data)

    monkeypatch.setattr(initial_files.atomic, "exclusive_create", full)
    with pytest.raises(EnvironmentFailure):
        initial_files.write_files(made, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["grpo_reward.py"]
    monkeypatch.undo()
    assert [path.suffix for path in initial_files.write_files(made, force=False)] == [
        ".yaml",
        ".jsonl",
    ]

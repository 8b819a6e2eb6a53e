from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.allocation.legacy_spellings import HostShape
from slurmrl.config.load import dump
from slurmrl.errors import AllocationError, ConfigError, Problem
from slurmrl.plan import inherited_settings
from slurmrl.plan.plan_values import in_force
from slurmrl.plan.settings import load_run_settings, load_settings
from slurmrl.run.paths import RunPaths
from tests.unit.plan.conftest import PPO, Load


def problems(load: Load, *overrides: str, **options: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **options)
    return list(caught.value.problems)


def test_valid_configuration_is_resolved(load_ppo: Load, folder: Path) -> None:
    settings = load_ppo()
    config = settings.config
    assert config.root == str(folder / "runs")
    assert config.actor.path == str(folder / "model")
    assert config.actor.tokenizer == str(folder / "model")
    assert config.dataset.path == str(folder / "train.jsonl")
    assert settings.algorithm.batch_size == 64
    assert config.algorithm["clip_ratio"] == 0.2


def test_critic_and_reference_inherit_unset_fields_from_the_actor(load_ppo: Load) -> None:
    config = load_ppo(
        "actor.dtype=bfloat16",
        "actor.max_tokens_per_microbatch=100",
        "actor.optimizer.lr=0.5",
        "critic.optimizer.lr=0.25",
        "critic.dtype=float32",
        "actor.transformer_engine=false",
        "ref.optimizer.name=sgd",  # of no use, since it is not trained
        "ref.optimizer.betas=[0.5,0.5]",
    ).config
    assert config.critic is not None
    assert config.ref is not None
    for model in (config.critic, config.ref):
        assert model.path == config.actor.path
        assert model.tokenizer == config.actor.tokenizer
        assert model.backend == "fsdp:d2"
        assert model.max_tokens_per_microbatch == 100
        assert model.transformer_engine is False
    assert (config.critic.dtype, config.ref.dtype) == ("float32", "bfloat16")
    assert config.critic.optimizer.lr == 0.25
    assert config.ref.optimizer.lr == 1e-5


def test_critic_with_its_own_weights_keeps_them(load_ppo: Load, folder: Path) -> None:
    (folder / "model").rename(folder / "other")
    (folder / "model").symlink_to("other")
    config = load_ppo("critic.path=" + str(folder / "other")).config
    assert config.critic is not None
    assert config.critic.path == str(folder / "other")


def test_run_directory_gives_the_same_settings(load_ppo: Load, folder: Path) -> None:
    settings = load_ppo("algorithm.clip_ratio=0.3", "critic.optimizer.lr=3e-4")
    paths = RunPaths(folder / "run")
    paths.run.mkdir()
    paths.config.write_text(dump(settings.config))
    again = load_run_settings(paths)
    assert again.config == settings.config
    assert again.algorithm == settings.algorithm


def test_problems_of_all_kinds_are_reported_together(load_ppo: Load, folder: Path) -> None:
    text = (folder / "ppo.yaml").read_text() + "sed: 3\n"
    found = problems(
        load_ppo,
        "seed=-1",
        "algorithm.clip=1",
        "algorithm.batch_size=63",
        "actor.backend=fsdp:d2,",
        "dataset.path=/no/where",
        "evaluation.samples=0",
        text=text,
    )
    assert sorted((problem.key, problem.where) for problem in found) == [
        ("actor.backend", "command line"),
        ("algorithm.clip", "command line"),
        ("dataset.path", "command line"),
        ("evaluation.samples", "command line"),
        ("sed", f"{folder / 'ppo.yaml'}:19"),
        ("seed", "command line"),
    ]


def test_missing_actor_weights_are_reported_at_the_actor(load_ppo: Load, folder: Path) -> None:
    text = (folder / "ppo.yaml").read_text().replace("  path: model\n", "")
    found = problems(load_ppo, text=text)
    assert [(problem.key, problem.where) for problem in found] == [
        ("actor", f"{folder / 'ppo.yaml'}:6"),
        ("actor.tokenizer", f"{folder / 'ppo.yaml'}:6"),
    ]


def test_unreadable_model_directory_is_rejected_with_the_reason(
    load_ppo: Load, folder: Path
) -> None:
    config = folder / "model" / "config.json"
    config.write_text('{"model_type": "gpt9"}')
    assert "gpt9" in problems(load_ppo)[0].message
    config.write_text('{"model_type": "mixtral", "output_router_logits": true}')
    [problem] = problems(load_ppo, "actor.implementation=hf")
    assert "does not compute the load-balancing loss of output_router_logits" in problem.message
    config.write_text("{")
    assert "is not JSON" in problems(load_ppo)[0].message
    config.unlink()
    assert "config.json cannot be read" in problems(load_ppo)[0].message


def test_loading_settings_imports_no_torch(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from slurmrl.plan.settings import load_settings\n"
        "from slurmrl.plan.build import make_plan\n"
        f"make_plan(load_settings(Path({str(folder / 'ppo.yaml')!r})), scheduler='slurm')\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_error_of_an_allocation_mode_comes_from_the_closer_grammar() -> None:
    """This holds for any words in the string."""
    with pytest.raises(AllocationError) as caught:
        inherited_settings.read("fsdp:d2z at character 99", HostShape(1, 8))
    assert caught.value.position == 7
    assert caught.value.reason == "expected a dimension of fsdp: d, t, c"


def test_greedy_rollout_is_rejected_for_group_advantages(load_ppo: Load) -> None:
    """Several greedy completions are rejected even if a preset sets their number."""
    with pytest.raises(ConfigError, match=r"rollout\.n: 1 is not allowed with algorithm"):
        load_ppo("algorithm.name=grpo", "rollout.greedy=true")


def test_plan_lists_each_setting_once_under_its_source(load_ppo: Load) -> None:
    """The plan lists every setting once, under the configuration, the preset or the defaults."""
    settings = load_ppo("algorithm.name=grpo", "algorithm.kl.coef=0.1", "algorithm.clip_ratio=0.3")
    shown = in_force(settings)
    assert shown["name"] == "grpo"
    assert shown["configuration"] == {"batch_size": 64, "clip_ratio": 0.3, "kl.coef": 0.1}
    assert (
        shown["preset"].items()
        >= {"advantage": "group", "kl.where": "loss", "rollout.n": 8}.items()
    )
    assert shown["default"].items() >= {"n_epochs": 1, "kl.kind": "fixed"}.items()
    keys = [key for source in ("configuration", "preset", "default") for key in shown[source]]
    assert len(keys) == len(set(keys))


def test_root_with_a_colon_is_rejected(folder: Path) -> None:
    (folder / "ppo.yaml").write_text(PPO)
    with pytest.raises(ConfigError, match="separates the entries of PYTHONPATH"):
        load_settings(folder / "ppo.yaml", root=folder / "a:b" / "runs")


def test_path_that_is_not_utf8_is_rejected(folder: Path) -> None:
    """Neither a script nor the trial's configuration could contain the path."""
    odd = folder / os.fsdecode(b"\xff")
    odd.mkdir()
    (folder / "ppo.yaml").write_text(PPO)
    with pytest.raises(ConfigError, match=r"root: .* is not UTF-8,"):
        load_settings(folder / "ppo.yaml", root=odd / "runs")
    (odd / "ppo.yaml").write_text(PPO)
    with pytest.raises(ConfigError, match=r"'.*udcff.*' is not UTF-8 text: rename the folder"):
        load_settings(odd / "ppo.yaml", root=folder / "runs")


def test_wrong_data_path_is_reported_with_file_kind_or_similar_name(
    load_ppo: Load, folder: Path
) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("gone.jsonl")
    (folder / "loop").symlink_to("loop")
    said = {}
    for name in ("pipe", "link", "loop", "trian.jsonl", "elsewhere/train.jsonl", "other.jsonl"):
        with pytest.raises(ConfigError) as caught:
            load_ppo(f"dataset.path={folder / name}")
        (problem,) = caught.value.problems
        said[name] = problem.message.partition("is not allowed: ")[2]
    assert said == {
        "pipe": "it is not a regular file",
        "link": "it is a broken link to gone.jsonl",
        "loop": "it is a broken link to loop",
        "trian.jsonl": "there is no such file or folder; did you mean train.jsonl?",
        "elsewhere/train.jsonl": "there is no such file or folder",
        "other.jsonl": "there is no such file or folder",
    }


def test_missing_data_is_reported_if_its_directory_is_unreadable(
    load_ppo: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_names = os.listdir

    def reject(path: Path) -> list[str]:
        if path == folder:
            raise PermissionError
        return list_names(path)

    monkeypatch.setattr(os, "listdir", reject)
    (problem,) = problems(load_ppo, f"dataset.path={folder / 'trian.jsonl'}")
    assert problem.message.endswith("is not allowed: there is no such file or folder")

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.config.load import load
from slurmrl.config.source import COMMAND_LINE, Source


def laid_over(tmp_path: Path, *overrides: str) -> Source:
    path = tmp_path / "a.yaml"
    path.write_text("seed: 1\nactor:\n  optimizer: {lr: 1, eps: 2}\nref:\n")
    return load(path, overrides)


def test_override_values_are_read_as_yaml(tmp_path: Path) -> None:
    source = laid_over(
        tmp_path,
        "seed=7",
        "actor.optimizer.lr=3e-4",
        "actor.optimizer.betas=[0.9, 0.99]",
        "ref.backend=fsdp:d2",
        "cluster.slurm.time=1:00:00",
        "stop_when=eval/reward >= 0.4",
        "trial='1'",
        "actor.dtype=",
    )
    assert not source.problems
    assert source.values == {
        "seed": 7,
        "actor": {"optimizer": {"lr": 3e-4, "eps": 2, "betas": [0.9, 0.99]}},
        "ref": {"backend": "fsdp:d2"},
        "cluster": {"slurm": {"time": "1:00:00"}},
        "stop_when": "eval/reward >= 0.4",
        "trial": "1",
    }


def test_strings_are_read_as_yaml_only_if_quoted_or_null(tmp_path: Path) -> None:
    source = laid_over(
        tmp_path,
        "trial=007",
        "experiment=no",
        "cluster.slurm.account=1e3",
        "cluster.slurm.partition=null",
        "cluster.slurm.qos='1'",
        "total_steps=010",
    )
    assert source.values["trial"] == "007"
    assert source.values["experiment"] == "no"
    slurm = {"account": "1e3", "partition": None, "qos": "1"}
    assert source.values["cluster"]["slurm"] == slurm
    assert source.values["total_steps"] == 10


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{question}", "{question}"),
        ("Q: {question} A:", "Q: {question} A:"),
        ("# {question}", "# {question}"),
        ("{question} # sums", "{question} # sums"),
        ("&q {question}\n", "&q {question}\n"),
        ("'{question}'", "{question}"),
        ("'a' or 'b'", "'a' or 'b'"),
        ("1_000", "1_000"),
        ("~", None),
    ],
)
def test_override_of_a_string_setting_is_a_string(
    tmp_path: Path, text: str, value: str | None
) -> None:
    source = laid_over(tmp_path, f"dataset.system_prompt={text}")
    assert not source.problems
    assert source.values["dataset"] == {"system_prompt": value}


def test_errors_name_the_command_line_or_the_file_of_a_setting(tmp_path: Path) -> None:
    source = laid_over(tmp_path, "actor.optimizer.lr=2")
    assert source.where(("actor", "optimizer", "lr")) == COMMAND_LINE
    assert source.where(("actor", "optimizer", "eps")) == f"{tmp_path / 'a.yaml'}:3"


def test_the_last_override_of_a_key_wins(tmp_path: Path) -> None:
    assert laid_over(tmp_path, "seed=2", "seed=3").values["seed"] == 3


def test_overridden_section_replaces_the_section_of_the_file(tmp_path: Path) -> None:
    source = laid_over(tmp_path, "actor.optimizer={eps: 5}")
    assert source.values["actor"] == {"optimizer": {"eps": 5}}
    assert source.where(("actor", "optimizer", "lr")) == COMMAND_LINE


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("seed", "", "expected dotted.key=value"),
        ("=3", "", "expected dotted.key=value"),
        ("a..b=3", "", "expected dotted.key=value"),
        ("--seed=3", "", "expected dotted.key=value"),
        ("seed.x=3", "seed.x", "not a section"),
        ("seed=[1", "seed", "not valid YAML"),
        ("actor={a: 1, a: 2}", "actor.a", "duplicate key"),
    ],
)
def test_invalid_override_is_a_problem_of_the_command_line(
    tmp_path: Path, override: str, key: str, message: str
) -> None:
    [problem] = laid_over(tmp_path, override).problems
    assert (problem.where, problem.key) == (COMMAND_LINE, key)
    assert message in problem.message

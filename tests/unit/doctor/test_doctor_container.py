"""Checks of a container with the real job and command line. Only the container program is a
stand-in, which shows a part of the machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurmrl.config.schema.cluster import Slurm
from slurmrl.desk.doctor import Check, State, probe
from slurmrl.desk.doctor.examine import Examination, examine
from tests.fake_runs import write_config

CONTAINER = """\
#!{python}
import os, shutil, sys
words = sys.argv[3:]
{what}
environ = {{name: os.environ[name] for name in ("PATH", "HOME")}}
os.execvpe(words[0], words, environ)
"""
NOTHING_BOUND = "words = [word.replace('{root}', '/not there') for word in words]"
A_COPY_BOUND = """
shutil.copytree('{root}', '{root} inside')
words = [word.replace('{root}', '{root} inside') for word in words]
"""


def look(folder: Path, what: str = "", python: str = sys.executable) -> dict[str, Check]:
    """Return the checks, by name, of a job on this machine with workers in a container."""
    root = folder / "runs"
    program = folder / "my programs" / "apptainer"
    program.parent.mkdir()
    text = CONTAINER.format(python=sys.executable, what=what.format(root=root))
    program.write_text(text)
    program.chmod(0o700)
    words = f"'{program}' exec image.sif"
    settings = (f'cluster.slurm.container="{words}"', f"cluster.slurm.container_python={python}")
    asked = Examination(write_config(folder), settings, root, root, "local", True, 60.0)
    checks = examine(asked, lambda text: None)
    return {one.name: one for one in checks if "container" in one.name}


def test_usable_container_passes_all_checks(tmp_path: Path) -> None:
    found = look(tmp_path)
    names = ["container", *(f"{name} in container" for name in ("same directory", "python"))]
    assert list(found) == [*names, "packages in container"]
    assert {one.state for one in found.values()} == {State.OK}
    assert found["container"].values["took_s"] > 0
    assert sys.executable in found["python in container"].measured


@pytest.mark.parametrize(
    ("what", "python", "measured", "advice"),
    [
        ("sys.exit('FATAL: no image.sif')", sys.executable, "1: FATAL: no image.sif", "by hand"),
        ("", "/not/python", "does not start: exit code 127: env", "by hand"),
        (NOTHING_BOUND, sys.executable, "it has python; then exit code 1: FileNotFound", "--bind"),
        ("words.insert(-5, '-S')", sys.executable, "No module named", "packages (setup.cfg)"),
        (A_COPY_BOUND, sys.executable, "is not visible on the host", "the same inside"),
    ],
    ids=["image", "python", "directory", "packages", "another directory"],
)
def test_missing_parts_of_a_container_are_named(
    tmp_path: Path, what: str, python: str, measured: str, advice: str
) -> None:
    (check,) = look(tmp_path, what, python).values()
    assert check.state is State.FAILED
    assert measured in check.measured
    assert advice in check.advice


def test_missing_container_program_is_reported(tmp_path: Path) -> None:
    slurm = Slurm(container=f"{tmp_path}/apptainer exec image.sif")
    (check,) = probe.check_container(tmp_path, 0, slurm)
    assert check.state is State.FAILED
    assert check.measured == f"cannot start '{tmp_path}/apptainer': No such file or directory"


def test_hanging_container_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CONTAINER_TIMEOUT_S", 0.2)
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    (check,) = probe.check_container(tmp_path, 0, Slurm(container=str(program)))
    assert check.state is State.FAILED
    assert "did not end within" in check.measured


@pytest.mark.parametrize(
    ("library", "state"), [("libc.so.6", State.OK), ("libnot-there.so", State.FAILED)]
)
def test_missing_driver_in_the_container_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, state: State
) -> None:
    monkeypatch.setattr(probe, "CUDA_LIBRARY", library)
    found = {one.name: one for one in probe.checks_inside(tmp_path, {"gpus": 1, "content": ""})}
    assert found["gpu driver"].state is state
    assert "gpu driver" not in {one.name for one in probe.checks_inside(tmp_path, {"gpus": 0})}
    assert found["same directory"].state is State.FAILED
    assert os.listdir(tmp_path) == []

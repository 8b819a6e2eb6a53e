"""``scripts/setup``: the build of torch that it installs, with a pip that only records."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[3]
DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
HERE = "cuda" if any(map(os.path.exists, DRIVERS)) else "cpu"
"""The build that a set-up on this machine chooses by itself."""
BUILDS = {"cpu": "cpu", "cuda": "13.0", "cu126": "12.6"}
PYTHON = """#!/bin/sh
cd "{folder}"
case "$*" in
*torch==*)
    if [ -e killed ]; then kill -9 $PPID; exit 1; fi
    while [ -e slow ]; do /bin/sleep 0.01; done ;;
esac
case "$*" in
"-c import pip") ;;
*torch==={version}) cp pypi torch ;;
*torch=={version}+cpu) [ ! -e no-cpu ] && echo "{version} cpu" >torch ;;
*torch=={version}+cu126) echo "{version} 12.6" >torch ;;
*torch=={version}) cp pypi torch ;;
"-") cat torch 2>/dev/null ;;
esac
"""


class SetUp:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        for name in ("scripts/setup", "constraints.txt", "setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        lines = (folder / "constraints.txt").read_text().splitlines()
        self.version = next(line for line in lines if line.startswith("torch==")).split("==")[1]
        (folder / "pypi").write_text(f"{self.version} 13.0\n")
        python = folder / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.format(folder=folder, version=self.version))
        python.chmod(0o700)

    def run(
        self, *arguments: str, code: int = 0, variable: str = "", path: str = os.environ["PATH"]
    ) -> str:
        done = subprocess.run(
            ["bash", str(self.folder / "scripts" / "setup"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "SLURMRL_TORCH": variable, "PATH": path},
        )
        assert done.returncode == code, done.stderr
        return done.stderr

    @property
    def torch(self) -> str:
        version, build = (self.folder / "torch").read_text().split()
        assert version == self.version
        return build


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    return SetUp(tmp_path)


def test_later_setup_without_choice_keeps_the_earlier_choice(set_up: SetUp) -> None:
    """A user chooses CUDA on a login node; scripts/run there calls scripts/setup without a flag."""
    set_up.run("--torch", "cuda")
    assert set_up.torch == BUILDS["cuda"]
    assert set_up.run() == ""  # complete already
    (set_up.folder / "setup.cfg").write_text("# another version\n")
    assert "installing" in set_up.run()
    assert set_up.torch == BUILDS["cuda"]


@pytest.mark.parametrize(("before", "build"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cu126")])
def test_chosen_torch_build_replaces_another(set_up: SetUp, before: str, build: str) -> None:
    set_up.run("--torch", before)
    set_up.run(variable=build)
    assert set_up.torch == BUILDS[build]
    assert set_up.run() == ""


def test_setup_keeps_the_torch_choice_after_a_kill(set_up: SetUp) -> None:
    """Also covers a kill before anything was installed."""
    chosen = "cuda" if HERE == "cpu" else "cpu"
    (set_up.folder / "killed").touch()
    set_up.run(f"--torch={chosen}", code=-signal.SIGKILL)
    (set_up.folder / "killed").unlink()
    assert "installing" in set_up.run()
    assert set_up.torch == BUILDS[chosen]


def test_setup_prints_progress_regularly(set_up: SetUp) -> None:
    """Without a terminal, pip prints nothing. In this test, time passes at once."""
    tools = set_up.folder / "tools"
    tools.mkdir()
    (tools / "sleep").write_text(
        f'#!/bin/sh\ncd "{set_up.folder}"\necho >>slept\n[ $(wc -l <slept) -lt 40 ] || rm -f slow\n'
    )
    (tools / "sleep").chmod(0o700)
    (set_up.folder / "slow").touch()
    said = set_up.run("--torch", "cuda", path=f"{tools}:{os.environ['PATH']}")
    assert "still installing torch" in said


@pytest.mark.parametrize(
    ("versions", "refused"),
    [((3, 10), True), ((3, 15), True), ((3, 11), False), ((3, 14), False)],
)
def test_python_without_wheels_is_rejected(
    set_up: SetUp, tmp_path: Path, versions: tuple[int, int], refused: bool
) -> None:
    """The versions equal the versions that the package allows and that scripts/make-wheels
    covers.
    """
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 16))):
        program = f"import sys; sys.version_info = {versions}; exec(sys.argv[1])"
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$2"\n')
        (folder / name).chmod(0o700)
    said = set_up.run(code=3 if refused else 0, path=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert ("Python 3.11 to 3.14 is needed" in said) == refused
    allowed = configparser.ConfigParser()
    allowed.read(ROOT / "setup.cfg")
    version = ".".join(map(str, versions))
    assert SpecifierSet(allowed["options"]["python_requires"]).contains(version) != refused
    assert (f'"{version}"' in (ROOT / "scripts" / "make-wheels").read_text()) != refused


def test_driver_decides_the_default_build_and_cpu_build_is_announced(set_up: SetUp) -> None:
    said = set_up.run()
    assert set_up.torch == BUILDS[HERE]
    assert ("scripts/setup --torch cuda" in said) == (HERE == "cpu")


def test_installed_cuda_build_is_kept(set_up: SetUp) -> None:
    """Covers an installation by hand, and one by an earlier scripts/setup without a choice."""
    (set_up.folder / "torch").write_text(f"{set_up.version} 12.6\n")
    set_up.run()
    assert set_up.torch == "12.6"


def test_unavailable_cuda_build_is_an_error(set_up: SetUp) -> None:
    """A CPU build from an index without CUDA builds must not count as a CUDA build."""
    (set_up.folder / "pypi").write_text(f"{set_up.version} cpu\n")
    assert "pip installed" in set_up.run("--torch", "cuda", code=3)
    assert "installing" in set_up.run("--torch", "cpu")


@pytest.mark.parametrize("wrong", [("--torch", "rocm"), ("--torch",), ("cuda",)])
def test_unknown_setup_choice_is_rejected(set_up: SetUp, wrong: tuple[str, ...]) -> None:
    assert "torch" in set_up.run(*wrong, code=3)
    assert not (set_up.folder / "torch").exists()

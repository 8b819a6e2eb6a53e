"""Tests of the wheels that scripts/make-wheels collects for a machine with torch but no package
index.
"""

from __future__ import annotations

import configparser
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MAKE_WHEELS = ROOT / "scripts" / "make-wheels"
MB = 1_000_000
LARGE = ("transformers", "numpy")
BROUGHT = {"pydantic": ("pydantic_core", 2), "transformers": ("tokenizers", 3)}
"""What a package needs, and its megabytes."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(MAKE_WHEELS.parent))
    return runpy.run_path(str(MAKE_WHEELS))


@pytest.fixture
def gather(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the script's function with a local index: transformers has 10 MB, numpy 8 MB for each
    Python, and other packages almost nothing.
    """

    def download(wanted: list[str], python: str, folder: Path) -> None:
        def wheel(name: str, tag: str, megabytes: float) -> None:
            (folder / f"{name}-1.0-{tag}-any.whl").write_bytes(bytes(int(megabytes * MB)))

        for name in map(script["name_of"], wanted):
            if name == "numpy":
                wheel("numpy", python, 8)
            else:
                wheel(name.replace("-", "_"), "py3", 10 if name == "transformers" else 0.001)
            if name in BROUGHT:
                wheel(BROUGHT[name][0], "py3", BROUGHT[name][1])
            if name == "transformers":
                wheel("numpy", python, 8)
            wheel("sympy", "py3", 6)

    monkeypatch.setitem(script["gather"].__globals__, "download", download)
    return script["gather"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("pythons", "limit_mb", "left_out", "numpys"),
    [
        (["3.11", "3.12", "3.13"], 40, [], 3),
        (["3.11", "3.12", "3.13"], 35, ["numpy"], 0),
        (["3.12"], 35, [], 1),
        (["3.12"], 14, ["transformers"], 1),
        (["3.12"], 9, ["transformers", "numpy"], 0),
    ],
)
def test_large_packages_are_left_out_without_disk_space(
    gather: Callable[..., Any],
    pythons: list[str],
    limit_mb: int,
    left_out: list[str],
    numpys: int,
    tmp_path: Path,
) -> None:
    """Dependencies of torch are never included. transformers is left out before numpy."""
    found = gather(pythons, limit_mb * MB, tmp_path)
    names = [file.name.partition("-")[0] for file in tmp_path.iterdir()]
    assert [line.partition(">")[0] for line in found] == left_out
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= limit_mb * MB
    assert names.count("numpy") == numpys
    assert ("tokenizers" in names) == ("transformers" in names) == ("transformers" not in left_out)
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    needed = {re.split("[<>=]", line)[0] for line in parser["options"]["install_requires"].split()}
    small = {name.replace("-", "_") for name in needed - {"torch", *LARGE}}
    assert {"pip", "pydantic_core", "pytest", "xxhash", *small} <= set(names)
    assert not {"torch", "sympy"} & set(names)


def test_wheels_match_the_constraints_for_each_python(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder has no source archives, which the other machine could not build."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    script["gather"](["3.11", "3.13"], MB, tmp_path)
    versions = {word for command in commands for word in command if "--python-version" in word}
    assert versions == {"--python-version=3.11", "--python-version=3.13"}
    for command in commands:
        assert command[command.index("-c") + 1] == str(ROOT / "constraints.txt")
        assert "--only-binary=:all:" in command


def test_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("only copy")
    done = subprocess.run(
        [sys.executable, MAKE_WHEELS, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"{tmp_path} holds other files than wheels" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "only copy"

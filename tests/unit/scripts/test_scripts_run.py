"""scripts/run trains the pretrained model, or another model if its package is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.real_model import smollm2
from tests.support.rotation import in_turn

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


def test_package_with_a_wrong_hash_is_rejected(tmp_path: Path) -> None:
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


def run_script(folder: Path, *arguments: str, **variables: str) -> str:
    """Return the output of scripts/run in a folder, followed by its errors."""
    subprocess.run([ROOT / "scripts" / "setup"], check=True)  # pip may need its index for this
    done = subprocess.run(
        [ROOT / "scripts" / "run", *arguments],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
@in_turn(0, 2)
def test_small_model_trains_from_scratch_without_the_package(tmp_path: Path) -> None:
    few = ("total_steps=2", "stop_when=null", "evaluation.samples=8")
    without = {**WITHOUT_INDEX, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = run_script(tmp_path, *few, **without)
    for words in (
        "make_model: pip could not install the packages in",
        "The pretrained model is not available here",
        "addition-ppo/1: COMPLETED at step 2 of 2",
        "completions before and after",
        "exported model",
    ):
        assert words in said, said
    assert "addition-ppo/2: COMPLETED at step 2 of 2" in run_script(tmp_path, *few, **without)


@pytest.mark.long
@in_turn(1, 2)
def test_pretrained_model_learns_sums_and_answers_in_transformers(tmp_path: Path) -> None:
    """The answers of the export, which transformers computes, equal those of the evaluation."""
    try:
        smollm2()
    except subprocess.CalledProcessError:
        pytest.skip("the package with the pretrained model could not be installed")
    few = ("total_steps=10", "actor.optimizer.schedule=constant", "cluster.threads_per_worker=1")
    said = run_script(tmp_path, *few)
    (folder,) = tmp_path.glob("runs/*/sums-lora/1")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, after = (line["eval/reward"] for line in metrics if "eval/reward" in line)
    assert before < 0.2
    assert after > 0.5
    shown = {}
    for line in said.splitlines():
        if found := re.fullmatch(r'    (\d+\+\d+)@0  ".*" \([01]\)  ->  (".*") \([01]\)', line):
            shown[found[1]] = json.loads(found[2]).strip()
    assert len(shown) == 3, said
    for asked, answer in shown.items():
        question = f"What is {asked.replace('+', ' + ')}? Answer with the number only."
        assert f"{question}  {answer}\n" in said, said

"""The examples' plans, as files. To write them again: SLURMRL_WRITE_GOLDEN=1 and run this test."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurmrl.display import terminal
from slurmrl.plan.build import make_plan
from slurmrl.plan.plan_document import document
from slurmrl.plan.plan_values import report
from slurmrl.plan.settings import load_settings

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"


def check(path: Path, found: str) -> None:
    if os.environ.get("SLURMRL_WRITE_GOLDEN"):
        path.write_text(found)
    assert path.read_text() == found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_plan_of_each_example_equals_the_recorded_plan(example: Path, tmp_path: Path) -> None:
    """The plans are for two GPUs of a Slurm cluster. Files that this machine lacks are left out."""
    settings = load_settings(
        example, ["cluster.gpus_per_worker=1"], root=tmp_path / "runs", planning=True
    )
    shown = report(settings, make_plan(settings, scheduler="slurm"))
    shown["missing"] = []
    check(GOLDEN / f"{example.stem}.json", json.dumps(shown, indent=1) + "\n")
    check(GOLDEN / f"{example.stem}.txt", terminal.as_text(document(shown)) + "\n")

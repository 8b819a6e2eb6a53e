"""Tests of the files of trained ranks: a checkpoint, and the folder of its export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from slurmrl.models.shapes import file_form
from slurmrl.tensors.checkpoint.export import export
from slurmrl.tensors.checkpoint.manifest import write_manifest
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import Setup
from tests.pool import RankPool


def train(ranks: RankPool, setup: Setup, folder: Path) -> None:
    """Train one step on two ranks, and save a checkpoint in ``folder``."""
    results = ranks(2, "tests.distributed.engines.cases:train", setup, save=folder)
    files: Sequence[Any] = [file for _, saved in results for file in saved]
    write_manifest(folder, step=1, files=files, state={})


def train_and_export(
    ranks: RankPool, setup: Setup, folder: Path, implementation: str
) -> tuple[Path, PreTrainedModel]:
    """Return the export after one step, and the model that transformers loads from it without
    missing or unexpected tensors.
    """
    train(ranks, setup, folder)
    values, storage = file_form(setup.model["architecture"], implementation, "lm")
    weights = RoleCheckpoint(folder, "actor")
    target = export(weights, values, folder / "export", generation={}, storage=storage)
    loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return target, loaded

"""Trials with commits of given weights, in the form that two ranks write, without processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slurmrl.config.load import dump
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import load_settings
from slurmrl.run.history.slots import Kind
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import write_manifest
from slurmrl.tensors.checkpoint.shards import RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import SavedFile, TensorEntry
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec, chunk
from tests.fake_runs import FakeRun
from tests.support.trials import ADDITION

Weights = Mapping[str, np.ndarray[Any, Any]]
RANKS = 2


class CommittedTrial:
    """Make the trial ``sft/1`` below ``root``, whose actor has the settings ``actor``."""

    def __init__(self, root: Path, *, trial: str = "1", **actor: Any) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.run = FakeRun(root, "sft", trial)
        self.run.submission()
        self.run.begin()
        rows = root / "rows.jsonl"
        rows.write_text('{"id": "1", "prompt": "1+1=", "answer": "2"}\n')
        values = {
            "experiment": "sft",
            "trial": trial,
            "total_steps": 60,
            "algorithm": {"name": "sft", "batch_size": 8},
            "actor": {"tokenizer": str(ADDITION / "tokenizer"), **actor},
            "dataset": {"type": "prompt_answer", "path": str(rows)},
        }
        file = root / f"sft-{trial}.yaml"
        file.write_text(json.dumps(values))
        settings = load_settings(file, root=root)
        self.paths.config.write_text(dump(settings.config))
        self.paths.plan.write_text(make_plan(settings, scheduler="local").to_json())

    @property
    def paths(self) -> RunPaths:
        return self.run.paths

    def commit(self, step: int, weights: Weights, *, frozen: str | None = None) -> Path:
        """Commit weights with zero moments. ``frozen``: the fingerprint of the base model."""
        directory = self.paths.checkpoint(step, 1)
        directory.mkdir()
        files = [*write(directory, "actor", weights, frozen), *write(directory, "critic", weights)]
        state = {"step": step, "stop_token_ids": [1]}
        write_manifest(directory, step=step, files=files, state=state)
        self.run.commit(step)
        return directory

    def delete(self, step: int) -> None:
        """Delete a commit as a run does: first from the history, then its files."""
        directory = self.paths.checkpoint(step, 1)
        self.run.append(Kind.DELETE, step=step, directory=directory.name)
        shutil.rmtree(directory)


def write(
    directory: Path, role: str, weights: Weights, frozen: str | None = None
) -> list[SavedFile]:
    """Write the files of a role. Each has a part of the rows of every tensor."""
    values = {**weights, **{f"exp_avg/{name}": np.zeros_like(weights[name]) for name in weights}}
    tensors = {name: TensorSpec(each.shape, str(each.dtype)) for name, each in values.items()}
    rows: list[list[Shard]] = [[] for _ in range(RANKS)]
    parts: list[list[TensorEntry]] = [[] for _ in range(RANKS)]
    for name, spec in tensors.items():
        for rank in range(RANKS):
            box = chunk(spec.shape, RANKS, rank) if spec.shape else Box((), ())
            if box.count and (spec.shape or not rank):
                part = values[name][box.slices].copy()
                rows[rank].append(Shard.contiguous(name, box))
                entry = TensorEntry(name, TensorSpec(box.size, spec.dtype), lambda v=part: v)
                parts[rank].append(entry)
    layout = Layout.of(tensors, rows)
    saved: list[SavedFile] = []
    for rank, entries in enumerate(parts):
        header = ShardHeader(role, rank, RANKS, 4)
        saved += RoleSnapshot(header, tuple(entries), layout, frozen).write(directory)
    return saved

"""Writing the trained actor in Hugging Face form from a committed checkpoint. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path

from slurmrl.checkpoint.export import export
from slurmrl.config.schema import Config
from slurmrl.history.state import Commit
from slurmrl.models.config import ModelConfig
from slurmrl.paths import RunPaths

ROLE = "actor"


def model_config(config: Config) -> ModelConfig:
    """The actor's architecture: given in the configuration, or by the folder it started from."""
    actor = config.actor
    if actor.architecture is not None:
        return ModelConfig.from_hf(actor.architecture)
    assert actor.path is not None, "checked at submission"
    return ModelConfig.from_hf(json.loads((Path(actor.path) / "config.json").read_text()))


def export_actor(paths: RunPaths, config: Config, commit: Commit) -> Path:
    """The folder ``export/step-<s>`` of a commit, loadable by transformers."""
    return export(
        paths.checkpoints / commit.directory,
        ROLE,
        model_config(config).to_hf(),
        paths.export(commit.step),
        tokenizer=Path(config.actor.tokenizer) if config.actor.tokenizer else None,
    )

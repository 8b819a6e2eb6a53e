"""The schemas of an episode's tools in the configuration of a new trial, so that chat templates
describe the tools to the policy. Torch-free: a child process makes the schemas, see `tools_child`.

The configuration keeps them, so that the prompts of a trial never change.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from slurmrl import log
from slurmrl.config.load import dump
from slurmrl.config.schema import Config
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.source import KeyPath, dotted
from slurmrl.plan.settings import Settings
from slurmrl.submission.checks.finding import CONFIG
from slurmrl.submission.checks.run import TIMEOUT_S, Code, empty, environment, job_variables

logger = log.get(__name__)

CHILD: Final = "slurmrl.submission.tools_child"
MADE: Final = "tools.json"
"""The child's answer: schemas by the dotted key of a dataset."""


def described(settings: Settings, code: Code, begun: Config | None = None) -> Settings:
    """Return the settings with schemas for each dataset of `undescribed`. ``begun`` is the
    configuration of a trial that continues, which keeps its schemas, or has none. The file of a
    trial stays as it is."""
    config = settings.config
    if settings.source.resolved or not undescribed(config):
        return settings
    if begun is None:
        made = _made(settings, code)
    else:
        made = {dotted(key): dataset.tools for key, dataset in begun.datasets().items()}
    wanted = {key: made.get(dotted(key)) for key in undescribed(config)}

    def with_tools(key: KeyPath, dataset: DatasetConfig) -> DatasetConfig:
        if (tools := wanted.get(key)) is None:
            return dataset
        return dataset.model_copy(update={"tools": tuple(tools)})

    return dataclasses.replace(settings, config=config.with_datasets(with_tools))


def undescribed(config: Config) -> Mapping[KeyPath, DatasetConfig]:
    """Return the datasets whose prompts may describe the episode's tools and that leave this to the
    default."""
    if not config.rollout.episode.describes_tools or config.actor.tokenizer is None:
        return {}
    return {
        key: dataset
        for key, dataset in config.datasets().items()
        if dataset.kind == "prompt" and dataset.is_chat and dataset.tools is None
    }


def _made(settings: Settings, code: Code) -> dict[str, Any]:
    """Ask a child, because transformers imports torch to make schemas."""
    with tempfile.TemporaryDirectory(prefix="slurmrl-tools-") as name:
        folder = Path(name)
        (folder / CONFIG).write_text(dump(settings.config), encoding="utf-8")
        output = folder / "output"
        try:
            with output.open("wb") as stream:
                subprocess.run(
                    [sys.executable, "-P", "-m", CHILD, str(folder), str(os.getpid())],
                    env=environment(folder, code, job_variables(settings)),
                    cwd=empty(folder),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    timeout=TIMEOUT_S,
                    check=True,
                )
        except subprocess.TimeoutExpired:
            reason = f"making their schemas took longer than {TIMEOUT_S:g} s"
        except subprocess.CalledProcessError as error:
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            reason = lines[-1] if lines else f"exit code {error.returncode}"
        else:
            made: dict[str, Any] = json.loads((folder / MADE).read_text(encoding="utf-8"))
            return made
    logger.warning("prompts do not describe the tools of rollout.episode.tools: %s", reason)
    return {}

"""The process that makes the schemas of an episode's tools.

``python -m slurmrl.submission.tools_child FOLDER PARENT`` reads ``config.yaml`` in FOLDER and
writes ``tools.json`` there: the schemas for each dataset whose chat template writes tools.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config, Dataset
from slurmrl.config.source import dotted
from slurmrl.data.chat import ChatTemplate
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import ConfigError
from slurmrl.rollouts.tools.schemas import ToolSchemas
from slurmrl.submission.checks.finding import CONFIG
from slurmrl.submission.described_tools import MADE, undescribed
from slurmrl.workers import process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(folder: Path, parent: int) -> None:
    process.die_with(parent)
    made = schemas_by_dataset(load_resolved(folder / CONFIG))
    (folder / MADE).write_text(json.dumps(made), encoding="utf-8")


def schemas_by_dataset(config: Config) -> dict[str, list[dict[str, Any]]]:
    """Return the schemas for each dataset of `undescribed` by its dotted key."""
    assert config.actor.tokenizer is not None, "checked before"
    tokenizer = load_tokenizer(Path(config.actor.tokenizer))
    schemas = ToolSchemas(config.rollout.episode).schemas
    return {
        dotted(key): schemas
        for key, dataset in undescribed(config).items()
        if schemas and _writes(dataset, tokenizer, schemas)
    }


def _writes(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]
) -> bool:
    """Whether a dataset's chat template describes the tools, whatever the source of a row."""
    with suppress(ConfigError):  # there is no template, which another check reports
        parts = dataset.parts.values()
        return all(ChatTemplate(part, tokenizer).writes(schemas) for part in parts)
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

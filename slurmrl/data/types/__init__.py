"""The types of dataset: which keys a row has, and the sequences of tokens that it becomes.

A new type is a class in a file of its own (`base.RowType`), a line below, one in
``graph/call.py`` (the keys of its samples) and one in the schema. Torch-free.
"""

from __future__ import annotations

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.types.base import RowType
from slurmrl.registry import Registry

ROW_TYPES = Registry(
    "dataset type",
    {
        "prompt": "slurmrl.data.types.prompt:Prompts",
        "prompt_answer": "slurmrl.data.types.prompt_answer:PromptAnswers",
        "messages": "slurmrl.data.types.messages:Conversations",
        "preference": "slurmrl.data.types.preference:Preferences",
        "kto": "slurmrl.data.types.kto:LabelledAnswers",
    },
)


def row_type(config: DatasetConfig) -> RowType:
    """The type that a configuration names."""
    made: RowType = ROW_TYPES.load(config.type)(config)
    return made

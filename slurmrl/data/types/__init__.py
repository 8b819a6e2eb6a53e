"""The types of dataset: which keys a row has, and the sequences of tokens that it becomes.

A new type is a class in a new file (`row_type.RowType`), a line below, one in
``plan/dataflow.py`` (the keys of its samples) and one in the schema. Torch-free.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.types.row_type import Row, RowType
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.registry import Registry, import_own

ROW_TYPES = Registry(
    "dataset type",
    {
        "prompt": "slurmrl.data.types.prompt:Prompts",
        "prompt_answer": "slurmrl.data.types.prompt:PromptAnswers",
        "messages": "slurmrl.data.types.prompt:Conversations",
        "preference": "slurmrl.data.types.preference:Preferences",
        "kto": "slurmrl.data.types.preference:LabelledAnswers",
    },
)


def type_of_rows(config: DatasetConfig) -> RowType:
    """The type that a configuration names.

    :raises UsageError: a user's class that cannot be used.
    :raises UnreadableInputError: its module cannot be imported.
    """
    base: type[RowType] = ROW_TYPES.load(config.kind)
    if config.like is None:
        return base(config)
    own = import_own("dataset type", config.type)
    if not (isinstance(own, type) and issubclass(own, base)):
        where = f"{base.__module__}.{base.__name__}"
        raise UsageError(
            f"dataset type '{config.type}' must be a subclass of {where} (like: {config.like})"
        )
    return own(config)


def own_convert(kind: RowType) -> Callable[[Row], Row] | None:
    """Function that converts the rows of the file, if the type is a user's own code."""
    return None if type(kind).convert is RowType.convert else kind.convert


def own_source(config: DatasetConfig) -> bytes:
    """The file with the class of a user's own type; b"" for a built-in type.

    Raises as `type_of_rows`.
    """
    if config.like is None:
        return b""
    path = inspect.getsourcefile(import_own("dataset type", config.type))
    return inputs.read(Path(path)) if path else b""

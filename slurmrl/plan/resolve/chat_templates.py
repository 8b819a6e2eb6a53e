"""Datasets whose configuration leaves the chat template to the rows: messages use one, text does
not. The decision is part of the resolved configuration, so a trial keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from slurmrl.config.schema import Config, Dataset
from slurmrl.config.source import KeyPath, Source
from slurmrl.errors import Problem
from slurmrl.registry import resolve

HAS_MESSAGES: Final = "slurmrl.data.records:has_messages"
"""What reads a row. It is in a layer above the plan, so it is resolved by name."""


def decided(config: Config, source: Source) -> tuple[Config, list[Problem]]:
    """The configuration with a decision for each dataset whose first row can be read, and the
    problems of datasets whose sources differ."""
    has_messages: Callable[[Dataset], bool | None] = resolve(HAS_MESSAGES)
    problems: list[Problem] = []

    def with_decision(key: KeyPath, dataset: Dataset) -> Dataset:
        if dataset.chat_template is not None:
            return dataset
        if dataset.like is not None or dataset.kind == "messages":
            return dataset.model_copy(update={"chat_template": False})
        found = {name: has_messages(part) for name, part in dataset.parts.items()}
        chats = [name for name, answer in found.items() if answer]
        texts = [name for name, answer in found.items() if answer is False]
        if chats and texts:
            message = (
                f"is required: source '{chats[0]}' has messages and '{texts[0]}' has text; true "
                "makes each text a message of the user"
            )
            problems.append(source.problem((*key, "chat_template"), message))
        if not chats and not texts:
            return dataset
        return dataset.model_copy(update={"chat_template": bool(chats)})

    return config.with_datasets(with_decision), problems

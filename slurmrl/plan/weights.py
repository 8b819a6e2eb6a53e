"""Checks of what the models start from: folders, architectures, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Model
from slurmrl.errors import Problem
from slurmrl.plan.draft import Draft
from slurmrl.plan.engines import ENGINES
from slurmrl.registry import resolve


def weights(draft: Draft) -> Iterator[Problem]:
    """Each role has weights to start from, and an engine that can run them."""
    actor = draft.config.actor
    for role, model in draft.models():
        inherited = (model.path, model.architecture) == (actor.path, actor.architecture)
        if role == "actor" or not inherited:
            yield from _of_role(draft, role, model)


def _of_role(draft: Draft, role: str, model: Model) -> Iterator[Problem]:
    if model.architecture is not None:
        message = _refusal(draft, role, model.architecture, strict=True)
        if message:
            yield draft.problem((role, "architecture"), message)
    elif model.path is not None:
        message = _folder(draft, role, Path(model.path))
        if message:
            yield draft.problem((role, "path"), f"'{model.path}' is not allowed: {message}")
    elif not draft.writes(role, "path") and not draft.writes(role, "architecture"):
        yield draft.problem((role,), "a path or an architecture is required")


def _folder(draft: Draft, role: str, folder: Path) -> str | None:
    """What is wrong with a folder in Hugging Face form."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        return f"its config.json cannot be read: {error.strerror}"
    except ValueError as error:
        return f"its config.json is not JSON: {error}"
    return _refusal(draft, role, values, strict=False)


def _refusal(draft: Draft, role: str, values: Mapping[str, Any], *, strict: bool) -> str | None:
    """Why the role's engine cannot run an architecture."""
    allocation = draft.allocations().get(role)
    rules = ENGINES.get(allocation.backend) if allocation else None
    if rules is None:
        return None
    try:
        resolve(rules.architectures).from_hf(values, strict=strict)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def tokenizer(draft: Draft) -> Iterator[Problem]:
    """All models read the same tokens: the actor's tokenizer is the run's."""
    folder = draft.config.actor.tokenizer
    if folder is None:
        if not draft.writes("actor", "tokenizer") and not draft.writes("actor", "path"):
            message = "is required: a new architecture brings no tokenizer with it"
            yield draft.problem(("actor", "tokenizer"), message)
    elif not Path(folder).is_dir() and draft.writes("actor", "tokenizer"):
        message = f"'{folder}' is not allowed: there is no such folder"
        yield draft.problem(("actor", "tokenizer"), message)

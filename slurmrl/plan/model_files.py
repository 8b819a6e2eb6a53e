"""The JSON files of a role's model folder, and the tokens that end a completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from slurmrl.config.schema import Config, Model
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
EOS: Final = "eos_token_id"
SCORE_AT: Final = "slurmrl_score_at"
"""Key of a reward model's config.json: the token at which it was trained to be read."""
TURN_END: Final = "turn_end"
"""The end of the answer's turn. Without the key: the end of the whole rendered conversation, which
some chat templates put a newline after."""


def config_values(model: Model) -> dict[str, Any]:
    """The ``config.json`` object of a role: its ``architecture``, or the file of its folder.

    Raises UsageError.
    """
    if model.architecture is not None:
        return model.architecture
    if model.path is None:
        return {}
    return inputs.read_json(Path(model.path) / CONFIG)


def generation_values(model: Model) -> dict[str, Any]:
    """The ``generation_config.json`` object of a role's folder; empty where it has none.

    Raises UsageError.
    """
    if model.path is None:
        return {}
    folder = Path(model.path)
    names = inputs.list_names(folder)
    if CONFIG not in names:
        raise inputs.missing(folder / CONFIG, f"{folder} has no {CONFIG}")
    return inputs.read_json(folder / GENERATION_CONFIG) if GENERATION_CONFIG in names else {}


def stop_tokens(config: Config, ends: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the tokens that end a completion of the actor.

    They are each ``eos_token_id`` of its ``generation_config.json`` and ``config.json``, the
    ``ends`` of the tokenizer and the chat templates (`data.chat.stop_ids`), and
    ``rollout.stop_token_ids``. Ids beyond the vocabulary, which some files have, are left out.

    Raises UsageError for an ``eos_token_id`` that is neither a number nor a list of numbers.
    """
    values = config_values(config.actor)
    text = text_config(values)
    found = [
        *_eos(generation_values(config.actor), GENERATION_CONFIG),
        *_eos(values, CONFIG),
        *_eos(text, CONFIG),
        *ends,
        *config.rollout.stop_token_ids,
    ]
    size = vocabulary(values)
    valid = (token for token in found if token >= 0 and (not size or token < size))
    return tuple(dict.fromkeys(valid))


def scored_at_turn_end(model: Model) -> bool:
    """Whether a reward model is read at the end of the answer's turn. Raises UsageError."""
    return config_values(model).get(SCORE_AT) == TURN_END


def vocabulary(values: Mapping[str, Any]) -> int | None:
    """Rows of the embedding of a ``config.json`` object; None where it is not stated."""
    for section in (values, text_config(values)):
        size = section.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part in the ``config.json`` of a multimodal model.

    Return the whole object for all others.
    """
    text = values.get("text_config")
    return text if isinstance(text, Mapping) else values


def _eos(values: Mapping[str, Any], file: str) -> list[int]:
    stated = values.get(EOS)
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in listed):
        raise UsageError(f"{file}: {EOS} is {stated!r}, must be a token id or a list of them")
    return listed

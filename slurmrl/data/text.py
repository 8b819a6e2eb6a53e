"""Check that a value in a line of a dataset is a text. Torch-free."""

from __future__ import annotations

import json
from typing import Any

SHOWN = 60
"""Characters of a wrong value that are shown."""


def wrong_text(value: Any) -> str:
    """Why a value is not a text; "" if it is. Other values are never converted to strings: their
    Python form (``None``, ``True``, ``[{'role': …``) is not what the user meant."""
    if not isinstance(value, str):
        return f"must be a string, but is {kind_of(value)}{_advice(value)}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        return f"is not valid text: {half} at character {error.start + 1} is half of a character"
    return ""


def kind_of(value: Any) -> str:
    """``a number (42)``"""
    if value is None:
        return "null"
    if _is_messages(value):
        return "a list of messages"
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
    }
    text = json.dumps(value)
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"{kinds.get(type(value), 'an object')} ({shown})"


def _advice(value: Any) -> str:
    if _is_messages(value):
        return (
            ": set dataset.chat_template to true (it is false, or left out and the first row is "
            "text), or write the rendered text into the line"
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f': write "{json.dumps(value)}"'
    return ""


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and "role" in message for message in value)
    )

"""Texts made from a dataset row. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FIELD = re.compile(r"\{(\w+)\}")


def fill(template: str, row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """``{name}`` replaced by the row's text under that key, where ``names`` may say which key a
    name stands for. Braces around anything else stay as they are (``\\boxed{}``)."""

    def text(match: re.Match[str]) -> str:
        name = match.group(1)
        key = names.get(name, name)
        return str(row[key]) if key in row else match.group(0)

    return FIELD.sub(text, template)

"""The longest row of a dataset, counted without a tokenizer. Torch-free."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Final

from slurmrl.config.schema import Dataset
from slurmrl.data.sources import open_source
from slurmrl.errors import SlurmrlError
from slurmrl.fsio import inputs

MOST_BYTES: Final = 16 * 2**20
"""Bytes of rows that are read: about a tenth of a second."""
TEMPLATE_TOKENS: Final = 128
"""Most tokens that a chat template adds to a conversation without tools, such as its own system
prompt."""
MARKS: Final = 2
"""Tokens that a tokenizer adds before and after a text."""
FIELD: Final = re.compile(r"\{([^{}]*)\}")


def longest_row(dataset: Dataset) -> int | None:
    """Return a bound on the tokens of the longest row: a text has no more tokens than bytes, and no
    more bytes than it has as JSON.

    Return None if the rows are not known: files that are larger than `MOST_BYTES` or cannot be
    read, and rows that a user's own type makes.
    """
    sizes = [_longest_of(part) for part in dataset.parts.values()]
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


def _longest_of(part: Dataset) -> int | None:
    if part.like is not None:
        return None
    path = Path(part.path)
    try:
        if not path.is_dir():
            inputs.check_file(path)
        source = open_source(path, part.split, most_bytes=MOST_BYTES)
        longest = max((len(row.raw) for row in source.rows()), default=0)
    except SlurmrlError:
        return None  # the check of the data reports it
    return longest * _repeats(part) + _added(part) if source.whole and longest else None


def _repeats(part: Dataset) -> int:
    """How often the templates insert the same value of a row at most."""
    named = Counter(FIELD.findall(part.prompt_template) + FIELD.findall(part.answer_template))
    return max(named.values(), default=1)


def _added(part: Dataset) -> int:
    """A bound on the tokens that templates add to the values of a row."""
    texts = [part.prompt_template, part.answer_template, part.system_prompt or ""]
    texts += [json.dumps(tool) for tool in part.tools or ()]
    size = sum(len(text.encode()) for text in texts)
    return size + (TEMPLATE_TOKENS if part.is_chat else MARKS)

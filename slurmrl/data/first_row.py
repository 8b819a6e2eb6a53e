"""Whether a dataset has messages or text: its first row decides. Torch-free."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.sources import open_source
from slurmrl.data.types import row_type
from slurmrl.errors import SlurmrlError

MOST_ROWS: Final = 100
"""Maximum number of rows to read in search of a JSON object."""


def has_messages(config: DatasetConfig) -> bool | None:
    """Return whether the first row of a source has messages under the keys of its type; None if no
    row can be read, which other checks report."""
    path = Path(config.path)
    if not (path.is_file() or path.is_dir()):
        return None
    try:
        with closing(open_source(path, config.split).rows()) as rows:
            read = (each.row for each in islice(rows, MOST_ROWS))
            first = next((row for row in read if row is not None), None)
    except SlurmrlError:
        return None
    return None if first is None else row_type(config).holds_messages(first)

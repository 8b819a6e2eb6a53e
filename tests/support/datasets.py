"""Files of rows, and the datasets that a run makes from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Dataset
from slurmrl.data import dataset, preparation
from slurmrl.data.dataset import SampleRows
from slurmrl.data.prepared import PreparedRows


def write_rows(folder: Path, *rows: Mapping[str, Any], name: str = "rows") -> str:
    """Write a file of JSON lines and return its path."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(config: Dataset, tokenizer: Any, folder: Path) -> SampleRows:
    """Return the dataset of all parts, whose files of tokens are in ``folder``."""
    directories = [
        preparation.prepare(folder, 1, part, tokenizer, lambda what: None)
        for part in config.parts.values()
    ]
    return dataset.make(config, [PreparedRows(each) for each in directories])

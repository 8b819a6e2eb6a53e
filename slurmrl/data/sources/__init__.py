"""The files of rows that a dataset can have. Torch-free.

A new format is a `base.RowSource` in a file of its own and a case in `open_source`.
"""

from __future__ import annotations

from pathlib import Path

from slurmrl.data.sources.base import RowSource, arrow_files, wrong_beginning
from slurmrl.data.sources.jsonl import JsonArray, JsonLines, begins_array
from slurmrl.errors import ConfigError, Problem


def open_source(
    path: Path, split: str | None = None, *, most_bytes: int | None = None
) -> RowSource:
    """The rows of a file or folder.

    ``most_bytes``: only the first whole rows in about that many bytes.

    :raises ConfigError: a folder without a dataset, a split that is not there, or a file that is
        compressed or not UTF-8 text.
    :raises MissingDependencyError: Parquet or Arrow files without pyarrow.
    :raises EnvironmentFailure: the files cannot be read.
    """
    if path.is_dir() or path.suffix == ".parquet":
        from slurmrl.data.sources.arrow import ArrowFiles

        return ArrowFiles(path, arrow_files(path, split), most_bytes)
    if split is not None:
        message = f"'{split}' is not allowed: {path} is a single file, which has no splits"
        raise ConfigError((Problem("", "split", message),))
    if message := wrong_beginning(path):
        raise ConfigError((Problem(str(path), "", message),))
    if begins_array(path):
        return JsonArray(path, (path,), most_bytes)
    return JsonLines(path, (path,), most_bytes)

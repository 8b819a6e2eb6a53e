"""A tokenizer of one's own, from the texts of datasets. Torch-free."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurmrl.data.sources import open_source
from slurmrl.data.tokenizer import train_bpe
from slurmrl.errors import UsageError


def texts(files: Sequence[Path], keys: Sequence[str]) -> Iterator[str]:
    """The texts under ``keys`` in all rows. Raises UsageError with the row that has none."""
    for file in files:
        source = open_source(file)
        for number, _, row, problem in source.rows():
            if row is None:
                raise UsageError(f"{source.where(number)}: {problem}")
            for key in keys:
                text = row.get(key)
                if not isinstance(text, str):
                    what = "has no such key" if key not in row else "is no text"
                    there = ", ".join(sorted(row))
                    raise UsageError(f"{source.where(number)}: {key}: {what}; keys: {there}")
                yield text


def make_tokenizer(
    files: Sequence[Path], keys: Sequence[str], vocabulary: int, output: Path
) -> None:
    """Train a byte-level BPE tokenizer of at most ``vocabulary`` tokens and save it in the new
    folder ``output``, which appears as a whole. Raises UsageError and EnvironmentFailure."""
    if output.exists() and not (output.is_dir() and not os.listdir(output)):
        raise UsageError(f"{output} exists: --output names another folder")
    made = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    try:
        train_bpe(texts(files, keys), vocabulary, made)
        os.rename(made, output)
    finally:
        shutil.rmtree(made, ignore_errors=True)

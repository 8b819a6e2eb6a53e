"""``<role>.layout.json`` of a checkpoint: which file holds which box of a tensor in which array."""

from __future__ import annotations

import json
from pathlib import Path

from slurmrl.errors import CheckpointError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import (
    COUNT,
    INTEGER,
    SIZE,
    TEXT,
    Fields,
    check,
    each,
    items,
    list_of,
    one_of,
    table,
)
from slurmrl.tensors.checkpoint.rank_files import VERSION, RankFiles
from slurmrl.tensors.layout.layout import ITEM_BYTES, Layout, TensorSpec
from slurmrl.tensors.layout.shard import Shard

LIMIT_BYTES = 1 << 30
"""A layout of thousands of ranks has a few MB."""
_BOX = items(list_of(COUNT), list_of(SIZE), list_of(SIZE), TEXT, SIZE, list_of(SIZE))
_LAYOUT: Fields = {
    "ranks": COUNT,
    "tensors": each(items(list_of(SIZE), one_of(*ITEM_BYTES), COUNT)),
    "holders": list_of(list_of(_BOX)),
}
_FIELDS: Fields = {
    "version": INTEGER,
    "role": TEXT,
    "step": INTEGER,
    "layout": table(_LAYOUT, _LAYOUT),
}
_VERSION_1: Fields = {
    "version": INTEGER,
    "role": TEXT,
    "rank": COUNT,
    "ranks": COUNT,
    "step": INTEGER,
    "tensors": each(items(list_of(SIZE), one_of(*ITEM_BYTES))),
    "pieces": list_of(items(TEXT, list_of(SIZE), list_of(SIZE), TEXT, SIZE, list_of(SIZE))),
}
"""The header of a rank's file in version 1, which had the rank's part of the layout."""


def layout_name(role: str) -> str:
    return f"{role}.layout.json"


def layout_text(role: str, step: int, layout: Layout, frozen: str | None) -> bytes:
    values = {"version": VERSION, "role": role, "step": step, "layout": layout.to_json()}
    if frozen is not None:
        values["frozen"] = frozen
    return json.dumps(values, separators=(",", ":")).encode()


def read_layout(directory: Path, role: str, files: RankFiles) -> tuple[int, Layout, str | None]:
    """The optimizer steps so far, the layout, and `RoleSnapshot.frozen`. Checkpoints of version 1
    have the layout in the headers of all ranks' files, which are opened then.

    Raises CheckpointError, CorruptFileError, EnvironmentFailure.
    """
    path = directory / layout_name(role)
    try:
        text = atomic.read(path, limit_bytes=LIMIT_BYTES)
    except FileNotFoundError:
        return *_read_version_1(path, files), None
    values = documents.parse(text, path, {"version": INTEGER, "role": TEXT}, ("version", "role"))
    if values["version"] != VERSION:
        raise CheckpointError(
            f"{path} has version {values['version']}; this program reads versions 1 to {VERSION}"
        )
    if values["role"] != role:
        raise CheckpointError(f"{path} is labelled {values['role']}")
    check(values, {**_FIELDS, "frozen": TEXT}, path, _FIELDS)
    with documents.expecting(path):
        layout = Layout.from_json(values["layout"])
    files.origin = layout.ranks, values["step"]
    return values["step"], layout, values.get("frozen")


def _read_version_1(missing: Path, files: RankFiles) -> tuple[int, Layout]:
    if files.header(0)["version"] != 1:
        raise CheckpointError(f"{missing} does not exist")
    first = files.header(0, _VERSION_1)
    headers = [first, *(files.header(rank, _VERSION_1) for rank in range(1, first["ranks"]))]
    with documents.expecting(missing.parent):
        tensors = {
            name: TensorSpec(tuple(shape), dtype)
            for name, (shape, dtype) in first["tensors"].items()
        }
        shards = [[Shard.from_json(piece) for piece in header["pieces"]] for header in headers]
        return first["step"], Layout.of(tensors, shards)

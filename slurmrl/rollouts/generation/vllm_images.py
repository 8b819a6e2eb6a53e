"""The images of requests to vLLM, as its processors return them to its engine.

vLLM's ``MultiModalKwargsItem`` has a tensor and its way of joining for each argument of the model,
in MessagePack.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Final

from slurmrl.rollouts.generation.image_requests import GRID, PIXELS, PromptImage
from slurmrl.tensors.layout import Array

STACKED: Final = ["batched", {"keep_on_cpu": True}]
"""The way of joining grids."""
RAW: Final = 3
"""MessagePack's extension in which vLLM reads the elements of a tensor."""


def image_features(images: Sequence[PromptImage], cache: str | None) -> dict[str, Any]:
    """Return the field of a request that has the prompt's images; none without images.

    vLLM keeps the hidden states of an image under a name, which has ``cache`` in it: an update
    with ``stale_cache`` does not remove them.
    """
    if not images:
        return {}
    names = [f"{each.key}-{cache}" for each in images]
    places = [{"offset": each.offset, "length": each.length} for each in images]
    return {
        "features": {
            "mm_hashes": {"image": names},
            "mm_placeholders": {"image": places},
            "kwargs_data": {"image": [_item(each) for each in images]},
        }
    }


def _item(image: PromptImage) -> str:
    pixels, grid = image.arguments[PIXELS], image.arguments[GRID]
    joined = ["flat", {"slices": [[0, len(pixels), None]], "dim": 0, "keep_on_cpu": False}]
    fields = {
        PIXELS: {"data": _tensor(pixels), "field": joined},
        GRID: {"data": _tensor(grid[0]), "field": STACKED},
    }
    return b64encode(_packed(fields)).decode()


def _tensor(array: Array) -> list[Any]:
    return [str(array.dtype), list(array.shape), array.tobytes()]


def _packed(value: Any) -> bytes:
    """Return a value in MessagePack; bytes become the extension `RAW`."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value)
    if isinstance(value, bytes):
        return struct.pack(">BIb", 0xC9, len(value), RAW) + value
    if isinstance(value, str):
        text = value.encode()
        return struct.pack(">BI", 0xDB, len(text)) + text
    if isinstance(value, list):
        return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(_packed, value))
    pairs = (_packed(key) + _packed(each) for key, each in value.items())
    return struct.pack(">BI", 0xDF, len(value)) + b"".join(pairs)

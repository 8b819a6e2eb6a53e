"""Prompts with prepared images in requests to servers.

A server gets the arrays that training reads, not the images' files. Server and training therefore
compute with the same numbers, and the server does not change the prompt's tokens.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from slurmrl.errors import UsageError
from slurmrl.models.families import (
    PICTURE_FAMILIES,
    STRAY,
    TOKEN_FIELDS,
    VIDEO_FAMILIES,
    VIDEO_FIELD,
)
from slurmrl.tensors.layout import Array
from slurmrl.tensors.pictures import key_of, read

GRID, PIXELS = "image_grid_thw", "pixel_values"
"""Names of a model's arguments: the number of patches of each image by time, height and width
[images, 3], and the pixels [patches of all images, numbers of a patch]."""
CACHED: Final = 8
"""Number of prompts whose images stay in host memory for the requests of their completions."""


def placeholders_of(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the placeholders' token ids from a ``config.json`` object; none without images.

    The first placeholder is for images. The second is for videos, which requests do not support.
    """
    family = values.get("model_type")
    if family not in PICTURE_FAMILIES:
        return ()
    images = [int(values[name]) for name in TOKEN_FIELDS if name in values][:1]
    videos = images and family in VIDEO_FAMILIES and VIDEO_FIELD in values
    return (*images, *([int(values[VIDEO_FIELD])] if videos else []))


@dataclass(frozen=True)
class PromptImage:
    """One image of a prompt."""

    offset: int
    """Index of the image's first placeholder in the prompt's tokens."""
    length: int
    """Number of the image's placeholders."""
    arguments: Mapping[str, Array]
    """The model's arguments for this image."""
    key: str
    """Content key of the image."""


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt of a model that reads images."""

    tokens: tuple[int, ...]
    """Token ids. As in training, `STRAY` replaces a placeholder without an image."""
    images: tuple[PromptImage, ...]

    @staticmethod
    def of(prompt: Sequence[int], placeholders: Sequence[int], pictures: str) -> ServedPrompt:
        """Return a prompt with its images.

        ``placeholders``: see `placeholders_of`. ``pictures`` is the path of the prepared images, or
        "". Raises CorruptFileError, EnvironmentFailure. Raises UsageError for adjacent images
        without a token between them.
        """
        left, parts = _images(pictures) if pictures else (0, ())
        token, *others = placeholders
        tokens, found = list[int](), list[PromptImage]()
        for is_image, group in groupby(prompt, lambda each: each == token):
            run = [STRAY if each in others else each for each in group]
            if is_image:
                length = min(len(run), left)
                if length and len(found) < len(parts):
                    key, arguments = parts[len(found)]
                    found.append(PromptImage(len(tokens), length, arguments, key))
                left -= length
                run[length:] = [STRAY] * (len(run) - length)
            tokens += run
        if left or len(found) != len(parts):
            raise UsageError(
                f"{pictures} has {len(parts)} images, but the prompt has {len(found)} places for "
                "images; servers need a token between two images"
            )
        return ServedPrompt(tuple(tokens), tuple(found))


@lru_cache(maxsize=CACHED)
def _images(path: str) -> tuple[int, tuple[tuple[str, Mapping[str, Array]], ...]]:
    """Return the number of placeholders, and the content key and arguments of each image."""
    inputs = read(Path(path))
    parts = tuple((key_of(each).hex(), each) for each in _parts(inputs.arguments))
    return inputs.tokens, parts


def _parts(arguments: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Yield the arguments of each image."""
    grid, end = arguments[GRID], 0
    for number, size in enumerate(grid.prod(1).tolist()):
        yield {PIXELS: arguments[PIXELS][end : end + size], GRID: grid[number : number + 1]}
        end += size


STACKED: Final = ["batched", {"keep_on_cpu": True}]
"""Description for vLLM of how grids of several images are joined."""
RAW: Final = 3
"""Number of the MessagePack extension in which vLLM reads the elements of a tensor."""


def image_features(images: Sequence[PromptImage], cache: str | None) -> dict[str, Any]:
    """Return the field of a request with the prompt's images; {} without images.

    vLLM caches the hidden states of an image by name. Each name ends with ``cache``, the request's
    cache salt, because an update with ``stale_cache`` keeps vLLM's image cache.
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
    """Return a value in MessagePack. Bytes become the extension `RAW`."""
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

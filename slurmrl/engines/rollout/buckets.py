"""Tensors of a folder with weights, in pieces that are sent to a server one after the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from slurmrl.checkpoint.tensors import DTYPES
from slurmrl.models.headers import Header
from slurmrl.models.hf import Tensors, open_tensors

T = TypeVar("T")
BUCKET_BYTES = 32 * 2**20
"""Of tensors that are sent together; a larger tensor is sent alone."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors of one dtype that are sent together."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    """As an attribute of ``torch``."""
    last: bool
    """Whether no further one follows."""

    def read(self, files: Tensors) -> Tensor:
        """uint8: the bytes of all of them, one after the other. One alone stays where the file is
        mapped."""
        parts = [files.read(name).contiguous().view(-1).view(torch.uint8) for name in self.names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


async def read_ahead(
    folder: Path, limit: int, pack: Callable[[Bucket, Tensor], T]
) -> AsyncGenerator[tuple[Bucket, T]]:
    """All tensors of ``folder``, each bucket with what ``pack`` makes of its bytes (`Bucket.read`)
    in another thread. The next one is read and packed while its receiver works on one: two are in
    memory."""

    def read(bucket: Bucket) -> T:
        return pack(bucket, bucket.read(files))

    with open_tensors(folder) as files:
        buckets = list(buckets_of(files, limit))
        reading = asyncio.ensure_future(asyncio.to_thread(read, buckets[0]))
        try:
            for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
                content = await reading
                if following is not None:
                    reading = asyncio.ensure_future(asyncio.to_thread(read, following))
                yield bucket, content
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def buckets_of(files: Tensors, limit: int) -> Iterator[Bucket]:
    """All tensors in buckets of one dtype (receivers look at the bytes as its elements, which must
    be aligned) and of at most ``limit`` bytes, or of one tensor."""
    headers: dict[str, Header] = {}
    size = 0
    for name in files.names():
        header = files.header(name)
        first = next(iter(headers.values()), header)
        if headers and (size + bytes_of(header) > limit or header.dtype != first.dtype):
            yield _bucket(headers, last=False)
            headers, size = {}, 0
        headers[name] = header
        size += bytes_of(header)
    yield _bucket(headers, last=True)


def _bucket(headers: dict[str, Header], *, last: bool) -> Bucket:
    return Bucket(
        names=list(headers),
        shapes=[list(header.shape) for header in headers.values()],
        dtype=DTYPES[next(iter(headers.values())).dtype],
        last=last,
    )


def bytes_of(header: Header) -> int:
    """Of a tensor."""
    return math.prod(header.shape) * int(getattr(torch, DTYPES[header.dtype]).itemsize)

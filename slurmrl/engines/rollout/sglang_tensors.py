"""Weights for an SGLang server in the bodies of requests: it needs to be reached over HTTP alone.

SGLang unpickles what ``/update_weights_from_tensor`` brings. The pickles have the values of the
tensors, as torch's own pickles do, and none of the handles of memory that SGLang's clients send to
servers of their host: those depend on the torch of both sides, and on CPUs need a daemon of it.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
from collections.abc import Mapping

import torch
from torch import Tensor

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.buckets import Bucket
from slurmrl.engines.rollout.fitness import Receiver
from slurmrl.engines.rollout.sglang_sender import SglangSender, Succeed


class SglangTensors(SglangSender[bytes]):
    """Each tensor rank of the server gets all tensors in a list entry of its own."""

    def __init__(self, address: Address, receiver: Receiver, succeed: Succeed) -> None:
        super().__init__(address, receiver, succeed)
        self.bucket_bytes //= receiver.ranks

    async def _prepare(self, held: str) -> None:
        """Every request is complete in itself."""

    def _pack(self, bucket: Bucket, content: Tensor) -> bytes:
        return b",".join([b'"%b"' % pickled(bucket, content)] * self._receiver.ranks)

    async def _send(self, bucket: Bucket, packed: bytes, body: Mapping[str, object]) -> None:
        # (to look for what JSON must escape would take as long as the rest)
        rest = json.dumps(body).encode()
        text = b'{"serialized_named_tensors": [%b], %b' % (packed, rest.removeprefix(b"{"))
        await self._succeed("/update_weights_from_tensor", text)

    async def close(self) -> None:
        """The server knows nothing of this client."""


def pickled(bucket: Bucket, content: Tensor) -> bytes:
    """The pickle of the bucket's tensors with their names, in base64."""
    dtype = getattr(torch, bucket.dtype)
    sizes = [math.prod(shape) * dtype.itemsize for shape in bucket.shapes]
    parts = zip(bucket.names, bucket.shapes, torch.split(content, sizes), strict=True)
    # (a view would be pickled with all that it is a view of)
    named = [(name, part.clone().view(dtype).view(shape)) for name, shape, part in parts]
    return base64.b64encode(pickle.dumps(named, protocol=5))

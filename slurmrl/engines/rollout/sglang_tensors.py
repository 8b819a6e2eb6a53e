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
from slurmrl.engines.rollout.sglang_sender import SglangSender, UpdatedServer

ENCODED_BYTES = 3 * 2**20
"""In one piece of base64: no other thread runs meanwhile. A multiple of 3, so that pieces join."""


class SglangTensors(SglangSender[list[bytes]]):
    """Each tensor rank of the server gets all tensors, in a list entry of its own."""

    def __init__(self, address: Address, receiver: Receiver, server: UpdatedServer) -> None:
        super().__init__(address, receiver, server)
        self.bucket_bytes //= receiver.ranks

    async def _prepare(self, held: str) -> None:
        """Every request is complete in itself."""

    def _pack(self, bucket: Bucket, content: Tensor) -> list[bytes]:
        """The pickle of the bucket's tensors with their names, in base64."""
        dtype = getattr(torch, bucket.dtype)
        sizes = [math.prod(shape) * dtype.itemsize for shape in bucket.shapes]
        parts = zip(bucket.names, bucket.shapes, torch.split(content, sizes), strict=True)
        # (a view would be pickled with all that it is a view of)
        named = [(name, part.clone().view(dtype).view(shape)) for name, shape, part in parts]
        pickled = memoryview(pickle.dumps(named, protocol=5))
        begins = range(0, len(pickled), ENCODED_BYTES)
        return [base64.b64encode(pickled[begin : begin + ENCODED_BYTES]) for begin in begins]

    async def _send(self, bucket: Bucket, packed: list[bytes], body: Mapping[str, object]) -> None:
        rest = json.dumps(body).encode().removeprefix(b"{")
        entries = [piece for _ in range(self._receiver.ranks) for piece in (b'", "', *packed)][1:]
        text = (b'{"serialized_named_tensors": ["', *entries, b'"], ' + rest)
        await self._server.succeed("/update_weights_from_tensor", text)

    async def close(self) -> None:
        """The server knows nothing of this client."""

"""Weight versions without a trial: tensors with random bits, some of which change at each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.tensors.layout import ITEM_BYTES, Array
from slurmrl.tensors.weights.format import VersionId, VersionManifest
from slurmrl.tensors.weights.writer import PartWriter, VersionBits, publish

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed.weight": ("bfloat16", (40, 64)),
    "layers.0.norm.weight": ("float32", (64,)),
    "layers.0.up.weight": ("bfloat16", (64, 32)),
    "lm_head.scale": ("float32", ()),
    "nothing": ("float16", (0, 4)),
}
Bits = dict[str, Array]


def random_bits(seed: int) -> Bits:
    chance = np.random.default_rng(seed)
    return {
        name: chance.integers(0, 256, ITEM_BYTES[dtype] * int(np.prod(shape)), np.uint8)
        for name, (dtype, shape) in SHAPES.items()
    }


def changed(bits: Bits, seed: int, share: float = 0.05) -> Bits:
    """Flip low bits of a share of the bytes of some of the tensors."""
    chance = np.random.default_rng(seed)
    after = {name: values.copy() for name, values in bits.items()}
    for values in after.values():
        if chance.random() < 0.8:
            values[chance.random(values.size) < share] ^= 1
    return after


class Ranks:
    """Two ranks, each of which owns every other tensor, and the publisher."""

    def __init__(
        self, versions: Path, *, frozen: str | None = None, calls: SystemCalls = REAL
    ) -> None:
        self.versions, self.frozen = versions, frozen
        self.calls = calls
        self._previous: list[VersionBits | None] = [None, None]

    def publish(
        self, version: VersionId, bits: Bits, base: VersionId | None = None
    ) -> VersionManifest:
        folder = self.versions / version.name
        parts = []
        for rank, previous in enumerate(self._previous):
            against = None if base is None else previous
            with PartWriter(folder, rank, against, frozen=self.frozen, calls=self.calls) as writer:
                for name in sorted(bits)[rank::2]:
                    writer.add(name, *SHAPES[name], bits[name])
                parts.append(writer.finish())
            own = {name: bits[name].copy() for name in sorted(bits)[rank::2]}
            self._previous[rank] = VersionBits(version, own)
        return publish(folder, parts, version, base, clock=lambda: 1e9, calls=self.calls)


def published(versions: Path, count: int, whole_every: int = 4) -> dict[VersionId, Bits]:
    """Publish ``count`` versions of incarnation 1; return their bits."""
    ranks, bits, base = Ranks(versions), random_bits(0), None
    found: dict[VersionId, Bits] = {}
    for step in range(1, count + 1):
        version = VersionId(step, 1)
        ranks.publish(version, bits, None if (step - 1) % whole_every == 0 else base)
        found[version], base = bits, version
        bits = changed(bits, step)
    return found

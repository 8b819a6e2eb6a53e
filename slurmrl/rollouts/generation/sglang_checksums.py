"""The checksums that SGLang computes of its weights (``/weights_checker``), and its own functions
for them: 0.5.20 to 0.5.23 have the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator
from torch import Tensor

from slurmrl.errors import RunFailedError
from slurmrl.rollouts.generation.weight_checks import Digest, Held, TensorPart, elements, sha256

TILE = 8192
"""Words of 32 bits that are summed."""
CHUNK = {"cpu": 16 * TILE, "cuda": 512 * TILE}
"""Words that are computed at a time: in a CPU's cache, or some 100 MB of a GPU."""
MOST_WORDS = 2**31 - 1
"""SGLang's kernel cannot count further."""
BITS = 2**32 - 1
SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & BITS)
FACTORS = (0x27D4EB2D, 0x165667B1)
TURNS = (15, 13)
TRAINED = "target"
"""The role of the model that is trained. A model that only proposes tokens has another one."""


class _ChecksumPlace(BaseModel):
    tp_rank: int
    tp_size: int
    role: str = TRAINED


class _ChecksumRank(BaseModel):
    checksums: dict[str, str]
    parallelism_info: list[_ChecksumPlace]
    """One place of each model, of all of which 0.5.21 and later report together: the parameters of
    another model than the trained one have its role before their names."""

    @field_validator("parallelism_info", mode="before")
    @classmethod
    def _one_of_0_5_20(cls, value: object) -> object:
        return [value] if isinstance(value, dict) else value

    def of_trained(self) -> Iterator[Held]:
        others = tuple(place.role + "." for place in self.parallelism_info if place.role != TRAINED)
        own = {name: value for name, value in self.checksums.items() if not name.startswith(others)}
        for place in self.parallelism_info:
            if place.role == TRAINED:
                yield Held(TensorPart(place.tp_rank, place.tp_size), own)


class _ChecksumReply(BaseModel):
    ranks: list[_ChecksumRank]


REPLY = TypeAdapter(_ChecksumReply)


def digest_of(settings: object) -> Digest | str:
    """How a server with these settings (``/server_info``) computes checksums, or why that is not
    known."""
    values: Mapping[str, object] = settings if isinstance(settings, dict) else {}
    if values.get("quantization") or values.get("torchao_config"):
        return "it quantizes them"
    if values.get("dp_size", 1) != 1:
        return "it is several servers behind one address (--dp-size)"
    if values.get("device") == "cuda":
        return on_gpu
    native = values.get("attention_backend") == "torch_native" and values.get("tp_size") == 1
    if values.get("device") == "cpu" and native:
        return on_cpu
    return "it may store them in another form (--device, --attention-backend, --tp-size)"


def dtype_of(settings: object) -> object:
    """The type in which a server with these settings computes; ``auto`` if it chooses."""
    return settings.get("dtype") if isinstance(settings, dict) else None


def read_checksums(where: str, reply: object) -> list[Held]:
    """What the ranks of a server report."""
    try:
        ranks = REPLY.validate_python(reply).ranks
    except ValidationError as error:
        raise RunFailedError(
            f"{where}/weights_checker: the answer does not have SGLang's form: {error}"
        ) from error
    return [held for rank in ranks for held in rank.of_trained()]


def on_cpu(tensor: Tensor, device: torch.device) -> str:
    """Of a parameter in host memory."""
    return sha256(tensor)[:16]


def on_gpu(tensor: Tensor, device: torch.device) -> str | None:
    """Of a parameter on a GPU: two hashes of 32 bits of each tile of words, which depend on where
    the words are, summed over all tiles as one number of 64 bits."""
    found = elements(tensor)
    if missing := -len(found) % 4:
        found = torch.cat([found, found.new_zeros(missing)])
    words = found.view(torch.int32)
    if not 0 < len(words) <= MOST_WORDS:
        return None
    size = CHUNK[device.type]
    high = low = 0
    for begin in range(0, len(words), size):
        chunk = words[begin : begin + size].to(device)
        index = torch.arange(begin, begin + len(chunk), dtype=torch.int32, device=device)
        upper, lower = (
            _tiles(chunk, index, *how, length=4 * len(words))
            for how in zip(SEEDS, FACTORS, TURNS, strict=True)
        )
        high, low = high + upper, low + lower
    return f"{_mixed_64((high << 32) + low):016x}"


def _tiles(words: Tensor, index: Tensor, seed: int, factor: int, turn: int, *, length: int) -> int:
    """The sum of a hash of each tile. Tensors are of int32, whose operations wrap."""
    place = (index * factor + _signed(seed)) ^ (index << turn | _shifted(index, 32 - turn))
    mixed = _mixed(words ^ place)
    tiles = torch.nn.functional.pad(mixed, (0, -len(mixed) % TILE)).view(-1, TILE)
    sums = tiles.sum(1, dtype=torch.int32) ^ _signed(length & BITS)
    return int((_mixed(sums).long() & BITS).sum())


def _mixed(words: Tensor) -> Tensor:
    """MurmurHash3's finalizer (https://github.com/aappleby/smhasher)."""
    words = (words ^ _shifted(words, 16)) * _signed(0x85EBCA6B)
    words = (words ^ _shifted(words, 13)) * _signed(0xC2B2AE35)
    return words ^ _shifted(words, 16)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's is arithmetic)."""
    shifted: Tensor = (words >> bits) & ((1 << 32 - bits) - 1)
    return shifted


def _signed(bits: int) -> int:
    """The number of int32 that has these bits."""
    return bits - 2**32 if bits >= 2**31 else bits


def _mixed_64(value: int) -> int:
    """splitmix64's finalizer (https://prng.di.unimi.it/splitmix64.c)."""
    value &= 2**64 - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return value ^ value >> 31

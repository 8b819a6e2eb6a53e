"""Check whether a server has the weights of a version.

The checks compare checksums of the server's parameters with checksums of the version's files.

A server joins matrices that are separate in the files, splits parameters over its tensor ranks and
pads the vocabulary. `parameter` does the same with tensors of the files. Unknown parameters are not
compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slurmrl import log
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.hf import as_tensor, read_values
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.shapes import LM_HEAD, FolderTensors
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.tensors.layout import Box, Index, TensorSpec

logger = log.get(__name__)

Digest: TypeAlias = Callable[[Tensor, torch.device], str | None]
"""Function that computes a server's checksum of a parameter, possibly on the given device. The
function returns None for an unknown checksum."""
JOINED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Joined parameters of servers, each with the tensors in the files."""
EXPERTS: Mapping[str, Sequence[Sequence[str]]] = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
"""Mapping from the servers' parameter for all experts of a block to the names of an expert's
matrices in the files of each family. Files have a tensor for each matrix of an expert."""
VOCABULARY = ("embed_tokens.weight", LM_HEAD, "wte.weight")
FULL_ROWS = 64
"""Servers pad the vocabulary with rows of zeros to a multiple of this number."""
SPLIT_INSIDE = ("o_proj.weight", "down_proj.weight")
"""Matrices whose columns are split over the tensor ranks."""
NORM = "norm.weight"
ADDS_ONE = ("gemma",)
"""Families whose norms multiply by 1 + weight, the sum that SGLang stores."""
REPEATED = (NORM, "o_proj.bias", "down_proj.bias")
"""Tensors that are not split: every tensor rank has them completely."""
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Matrices of gpt2 that the files store as [inputs, outputs]."""
TYPES: Mapping[str, str] = {
    **{name: name for name in ("float32", "float16", "bfloat16")},
    "float": "float32",
    "half": "float16",
}
"""Mapping from the servers' names of element types to torch's names."""
LANGUAGE_MODEL = ("model.language_model.", "language_model.model.", "model.")
"""Prefixes of a language model next to an image encoder, on servers and in files."""
SHOWN = 3
KEPT = 2
"""Number of versions whose checksums are kept. (At one time, servers may load two versions.)"""


@dataclass(frozen=True)
class TensorPart:
    """One of the tensor ranks over which a server splits its parameters."""

    rank: int = 0
    of: int = 1


@dataclass(frozen=True)
class Held:
    """The checksums of a tensor rank's parameters, by their names on the server."""

    part: TensorPart
    checksums: Mapping[str, str]


Place: TypeAlias = tuple[int, str]
"""Place of a rank in a server's reply, and the name of a parameter."""
Expected: TypeAlias = dict[tuple[TensorPart, str], str | None]
"""Mapping from tensor rank and parameter name to checksum; None for unknown checksums."""


def parameter(
    files: FolderTensors, config: Mapping[str, Any], name: str, part: TensorPart
) -> Tensor | None:
    """Return a server's parameter, made from the files; None for an unknown parameter."""
    specs = files.specs()
    if "vision_config" in config:
        name, config = _beside_encoder(name, specs), config.get("text_config", config)
    module, _, kind = name.rpartition(".")
    path, _, module = module.rpartition(".")
    sources = [f"{path}.{each}.{kind}" for each in JOINED.get(module, ())] or [name]
    if kind in EXPERTS:
        return _experts(files, name, part)
    if any(source not in specs for source in sources):
        return None
    if name.endswith(NORM) and config.get("model_type") in ADDS_ONE:
        return None
    tensors: list[Tensor] = []
    for source in sources:
        spec = specs[source]
        rows = _own_rows(name, source, spec.shape, config, part, joined=len(sources) > 1)
        if rows is None:
            return None
        tensors.append(_read(files, source, spec, *rows))
    if name.endswith(TRANSPOSED):
        tensors = [tensors[0].T]
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _read(files: FolderTensors, name: str, spec: TensorSpec, axis: int, own: range) -> Tensor:
    """Return the part of a file's tensor with the indices ``own`` along an axis.

    Indices after the tensor's end give zeros, because servers pad the vocabulary.
    """
    if not spec.shape:
        return as_tensor(files.read(name, Box.whole(spec.shape)), spec.dtype)
    start, size = [0] * len(spec.shape), list(spec.shape)
    start[axis] = min(own.start, size[axis])
    size[axis] = max(min(own.stop, size[axis]) - start[axis], 0)
    found = as_tensor(files.read(name, Box(tuple(start), tuple(size))), spec.dtype)
    missing = len(own) - size[axis]
    return torch.cat([found, found.new_zeros(missing, *found.shape[1:])]) if missing else found


def _beside_encoder(name: str, specs: Collection[str]) -> str:
    """Return a parameter's name in the files of a language model with an image encoder.

    The result is empty for the encoder: servers store some of its parameters in other forms, and a
    frozen encoder is the same in all versions.
    """
    if name.endswith(LM_HEAD):
        return next((each for each in (LM_HEAD, f"language_model.{LM_HEAD}") if each in specs), "")
    own = next((each for each in LANGUAGE_MODEL if name.startswith(each)), None)
    files = [each for each in LANGUAGE_MODEL if f"{each}{VOCABULARY[0]}" in specs]
    return files[0] + name.removeprefix(own) if own and files else ""


def _experts(files: FolderTensors, name: str, part: TensorPart) -> Tensor | None:
    """A tensor rank's part of the matrices of a block's experts: [experts, rows, columns]."""
    block, _, kind = name.rpartition(".")
    specs = files.specs()
    own = [each for each in EXPERTS[kind] if f"{block}.0.{each[0]}.weight" in specs]
    if not own:
        return None
    found: list[Tensor] = []
    while f"{block}.{len(found)}.{own[0][0]}.weight" in specs:
        sources = [f"{block}.{len(found)}.{each}.weight" for each in own[0]]
        matrices: list[Tensor] = []
        for source in sources:
            spec = specs[source]
            axis = 1 if kind == "w2_weight" else 0
            if spec.shape[axis] % part.of:
                return None
            size = [*spec.shape]
            size[axis] //= part.of
            start = [part.rank * size[axis] if each == axis else 0 for each in range(len(size))]
            own_part = Box(tuple(start), tuple(size))
            matrices.append(as_tensor(files.read(source, own_part), spec.dtype))
        found.append(torch.cat(matrices))
    return torch.stack(found)


def _own_rows(
    name: str,
    source: str,
    shape: Index,
    config: Mapping[str, Any],
    part: TensorPart,
    *,
    joined: bool,
) -> tuple[int, range] | None:
    """Return the axis along which tensor ranks split a file's tensor, and a rank's indices on it.

    Return None for a parameter whose split is unknown.
    """
    axis, rows = (1 if name.endswith(SPLIT_INSIDE) else 0), name.endswith(VOCABULARY)
    if not shape or part.of == 1 or name.endswith(REPEATED):
        size = shape[0] if shape else 1
        return 0, range(size + (-size % FULL_ROWS if rows else 0))
    if not (axis or joined or rows):
        return None
    whole = shape[axis] + (-shape[axis] % FULL_ROWS if rows else 0)
    of = part.of
    if ".k_proj." in source or ".v_proj." in source:  # ranks may share key-value heads
        of = min(of, int(config.get("num_key_value_heads") or 0))  # 0: unknown
    if not of or part.of % of or whole % of:
        return None
    size = whole // of
    first = part.rank // (part.of // of) * size
    return axis, range(first, first + size)


def elements(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, row by row."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def sha256(tensor: Tensor) -> str:
    """Return the checksum of a tensor in host memory."""
    return hashlib.sha256(elements(tensor).numpy().data).hexdigest()


def in_type(digest: Digest, stored: str | None, server: object) -> Digest:
    """Return a digest that first converts tensors to the server's element type.

    ``stored`` is the element type of the files, or None. ``server`` is the server's name of its
    type. If the types are equal or one is unknown, return ``digest``.
    """
    name = type_name(server)
    if stored is None or name is None or name == stored:
        return digest
    wanted = getattr(torch, name)

    def converted(tensor: Tensor, device: torch.device) -> str | None:
        return digest(tensor.to(wanted) if tensor.is_floating_point() else tensor, device)

    return converted


def type_name(server: object) -> str | None:
    """Return torch's name of a server's element type, such as ``bfloat16``; None if unknown."""
    name = str(server).removeprefix("torch.")
    return TYPES.get(name)


class WeightChecks:
    """The checks of all servers of a run.

    At the first check of a server, some parameters agree with the files, because the server stores
    them in a known form. These parameters must agree in all later checks.
    """

    def __init__(self, device: torch.device | None = None, *, own: bool = False) -> None:
        """``device`` is the device on which this process computes checksums.

        ``own``: this run starts the servers, without weights.
        """
        self.own = own
        self.types: set[str] = set()
        """Names of the element types in which servers compute, if servers report them."""
        self._device = device or torch.device("cpu")
        self._lock = asyncio.Lock()
        self._expected: dict[str, Expected] = {}
        """Mapping from version to checksums of parameters."""
        self._comparable: dict[str, set[Place]] = {}
        """Mapping from server to the parameters that agreed at its first check."""
        self._before: dict[str, tuple[str, Sequence[Held]]] = {}
        """Mapping from server to the last version that it has loaded, and its checksums."""
        self._told: set[tuple[str, str]] = set()

    def digest(
        self, where: str, digest: Digest | str, stored: str | None, server: object
    ) -> Digest | str:
        """Return how a server computes checksums of files that it converts to its element type.

        Log the server's type if it differs from the type of the files. `in_type` describes the
        arguments. ``digest`` may be the reason why the server's checksum is unknown.
        """
        name = type_name(server)
        if name is not None:
            self.types.add(name)
        if stored is not None and name not in (None, stored):
            self.tell(where, f"it computes in {name}; training computes in {stored} (actor.dtype)")
        return digest if isinstance(digest, str) else in_type(digest, stored, server)

    def began(self, where: str) -> bool:
        """Return whether a server has been checked."""
        return where in self._comparable

    async def check(
        self,
        where: str,
        version: WeightVersion,
        held: Sequence[Held],
        digest: Digest,
        *,
        replaced: Sequence[Held] = (),
    ) -> None:
        """Compare the parameters of the server ``where`` after it has loaded ``version``.

        ``replaced`` are the previous parameters, if their weights differed. Raises RunFailedError
        if the server lacks the weights, and UsageError if the files lack the server's output layer.
        """
        if self.own and where not in self._comparable:
            _check_head(where, version, held)
        expected = await self.expect(version, held, digest)
        now, before = _places(held), _places(replaced)
        self._forget_other_form(where, now)
        files = {place: expected[held[place[0]].part, place[1]] for place in now}
        agree = {place for place in now if now[place] == files[place]}
        if where in self._comparable:
            wrong = self._comparable[where] - agree
        else:
            differ = {place for place in now.keys() - agree if files[place] is not None}
            wrong = {place for place in differ if before.get(place) == now[place]}
        if wrong:
            names = sorted(name for _, name in wrong)
            raise RunFailedError(
                f"{where}: its weights are not version {version.name}: {len(wrong)} of "
                f"{len(now)} parameters differ from {version.folder} ({', '.join(names[:SHOWN])})"
            )
        if where not in self._comparable:
            self._comparable[where] = agree
            self._tell_of_the_rest(where, sorted(name for _, name in now.keys() - agree), len(now))
        self._compare_starts(where, version.name, held)

    async def expect(
        self, version: WeightVersion, held: Iterable[Held], digest: Digest
    ) -> Expected:
        """Return the checksums of a version's files for the parameters of ``held``.

        The checksums are computed once for all servers. Concurrent callers wait.
        """
        assert version.folder is not None, "servers load versions from folders"
        ended = threading.Event()
        async with self._lock:
            expected = self._expected.setdefault(version.name, {})
            while len(self._expected) > KEPT:
                del self._expected[next(iter(self._expected))]
            try:
                await asyncio.to_thread(self._add, expected, version.folder, held, digest, ended)
            finally:
                ended.set()
        return expected

    def last_held(self, where: str) -> Sequence[Held]:
        """Return a server's checksums at the last check; empty before the first check."""
        _, held = self._before.get(where, ("", ()))
        return held

    def _add(
        self,
        expected: Expected,
        folder: Path,
        held: Iterable[Held],
        digest: Digest,
        ended: threading.Event,
    ) -> None:
        """Add missing expected checksums. Stop once ``ended`` is set: no caller waits any more."""
        config = read_values(folder)
        files = open_folder(folder)
        for each in held:
            for name in each.checksums:
                key = each.part, name
                if ended.is_set():
                    return
                if key not in expected:
                    tensor = parameter(files, config, name, each.part)
                    expected[key] = None if tensor is None else self._of(tensor, digest)

    def _of(self, tensor: Tensor, digest: Digest) -> str | None:
        try:
            return digest(tensor, self._device)
        except torch.OutOfMemoryError:  # servers and trainers may use the GPU's whole memory
            return digest(tensor, torch.device("cpu"))

    def _tell_of_the_rest(self, where: str, names: Sequence[str], count: int) -> None:
        if names:
            some = ", ".join(list(dict.fromkeys(names))[:SHOWN])
            self.tell(
                where,
                f"{len(names)} of its {count} parameters cannot be compared with the files of a "
                f"version, because it stores them in another form: {some}"
                f"{', …' * (len(names) > SHOWN)}",
            )

    def tell(self, where: str, what: str) -> None:
        """Log a message about a server once."""
        if (where, what) not in self._told:
            self._told.add((where, what))
            logger.warning("%s: %s", where, what)

    def _forget_other_form(self, where: str, now: Mapping[Place, str]) -> None:
        """Forget the checksums of a server that was restarted over another number of GPUs."""
        before = self._before.get(where)
        if before is not None and _places(before[1]).keys() != now.keys():
            del self._before[where], self._comparable[where]

    def _compare_starts(self, where: str, version: str, held: Sequence[Held]) -> None:
        before = self._before.get(where)
        if before is not None and before[0] == version and before[1] != held:
            raise RunFailedError(
                f"{where}: after a restart, its weights of version {version} differ from its "
                "earlier weights of this version"
            )
        self._before[where] = version, held


def _places(held: Sequence[Held]) -> dict[Place, str]:
    return {
        (number, name): checksum
        for number, each in enumerate(held)
        for name, checksum in each.checksums.items()
    }


class ServerCheck:
    """The checks of one server since the last connection."""

    def __init__(
        self,
        checks: WeightChecks,
        where: str,
        digest: Digest | str,
        report: Callable[[], Awaitable[Sequence[Held]]],
        *,
        first_only: bool = False,
    ) -> None:
        """``digest`` is how the server computes checksums, or the reason why this is unknown.

        ``report`` requests the server's checksums. With ``first_only``, check only the first
        version, because the server takes long.
        """
        self._checks, self._where, self._report = checks, where, report
        self._first_only = first_only
        self._digest: Digest | None = None
        self._replaced: Sequence[Held] = ()
        self._expecting: asyncio.Task[Expected] | None = None
        if isinstance(digest, str):
            self._give_up(digest)
        else:
            self._digest = digest

    async def before_load(self, version: WeightVersion) -> None:
        """Prepare the check of ``version``. Call this method before the server loads the version.

        If the server's parameters are known, compute the expected checksums during the load.
        """
        first = self._checks.own and not self._checks.began(self._where)
        self._replaced = (await self._held() or ()) if first else ()
        self.close()
        known = self._replaced or self._checks.last_held(self._where)
        if self._digest is not None and known:
            expecting = self._checks.expect(version, known, self._digest)
            self._expecting = asyncio.create_task(expecting)
            self._expecting.add_done_callback(_forget)

    def close(self) -> None:
        """Cancel the computation of expected checksums."""
        if self._expecting is not None:
            self._expecting.cancel()
            self._expecting = None

    async def after_load(self, version: WeightVersion) -> None:
        """Check the loaded version. Raises RunFailedError if the server lacks its weights."""
        held = await self._held()
        if held is None or self._digest is None:
            return
        await self._checks.check(self._where, version, held, self._digest, replaced=self._replaced)
        if self._first_only:
            self._digest = None

    async def _held(self) -> Sequence[Held] | None:
        if self._digest is None:
            return None
        try:
            return await self._report()
        except UsageError as error:  # the server lacks the route, or rejects these weights
            if self._checks.began(self._where):
                raise
            self._give_up(error)
            return None

    def _give_up(self, reason: object) -> None:
        self._digest = None
        self._checks.tell(self._where, f"its weights are not checked: {reason}")


def _forget(expecting: asyncio.Task[Expected]) -> None:
    """Ignore an error of the files, because `ServerCheck.after_load` reads them again."""
    if not expecting.cancelled():
        expecting.exception()


def _check_head(where: str, version: WeightVersion, held: Iterable[Held]) -> None:
    """Raise UsageError if a server has a separate output layer that the files lack.

    The layer would keep its initial values.
    """
    names = {name for each in held for name in each.checksums if name.endswith(LM_HEAD)}
    assert version.folder is not None, "servers load versions from folders"
    if names and not names & open_folder(version.folder).specs().keys():
        raise UsageError(
            f"{where}: it needs the output layer as a separate tensor ({min(names)}), which the "
            "weights lack, because the model ties the layer to the embedding "
            "(tie_word_embeddings): use another rollout.backend"
        )

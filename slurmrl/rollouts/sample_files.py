"""Samples of one item as arrays, and the files of samples that tasks write. Torch-free.

A file contains the groups that a task has finished within a short time. Each group is a safetensors
document, which can be read separately. A group exists when a record of the task's result log names
it (`StoredGroup`). Bytes that no record names come from a killed writer. docs/protocols.md
describes the files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from array import array
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slurmrl.backoff import HIDDEN_PAUSES_S, attempts
from slurmrl.data.ledger import LEASE, StoredGroup
from slurmrl.data.meta import EXPERTS, IDS, SIZES, SampledMasks
from slurmrl.errors import CorruptFileError, SampleFileError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import (
    NO_FILE,
    REAL,
    SystemCalls,
    discard,
    explain,
    make_private,
    opened,
    pwrite_all,
)
from slurmrl.fsio.documents import INTEGER, NUMBER, SIZE, TEXT, FieldType, list_of
from slurmrl.rewards.base import Stats, scores_problem
from slurmrl.rollouts.completions import Completion, joined_masks
from slurmrl.tensors.checkpoint.tensors import Checksum
from slurmrl.tensors.layout import Array
from slurmrl.tensors.weights.format import VERSION, VersionId

READ_BYTES = 4 << 20
"""Number of bytes that are read at a time."""
_FILE = re.compile(r"([0-9]+)\.samples")
_DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, *NO_FILE})
"""Error numbers of problems that affect only one file."""
PER_TOKEN = {"input_ids": "<i4", "drawn_by": "<i4", "logprobs": "<f4", "turn_rewards": "<f4"}
PER_COMPLETION = {
    "lengths": "<i4",
    "prompt_lengths": "<i4",
    "finished": "|b1",
    "failed": "|b1",
    "turns": "<i4",
    "tool_calls": "<i4",
    "tool_failures": "<i4",
}
MASKS = {SIZES: "<i4", IDS: "<i4"}
"""Fields of groups with sampling masks."""
EXPERT_SIZES = "expert_sizes"
ROUTES = {EXPERT_SIZES: "<i4", EXPERTS: "<i2"}
"""Fields of groups with experts."""
OWN = "group"
"""Key in the metadata of a document; the value is JSON."""
_METADATA = {"item": SIZE, "lease": TEXT, "versions": list_of(VERSION)}
_SCORE = FieldType("a number or null", lambda value: value is None or NUMBER.accepts(value))
SCORED = {
    "scores": list_of(_SCORE),
    "parts": list_of(documents.each(NUMBER)),
    "stats": documents.each(documents.items(NUMBER, NUMBER)),
    "submission": INTEGER,
}
"""Fields of the JSON object with a group's scores."""
_SCORED = {"judged": documents.table(SCORED)}
_HEAD = struct.Struct("<Q")


class SampleWriter:
    """Writes the files of one task attempt into ``folder``, which no other attempt uses."""

    def __init__(self, folder: Path, *, calls: SystemCalls = REAL) -> None:
        """Make the directory. Raises EnvironmentFailure."""
        self._folder = folder
        self._calls = calls
        self._number = 0
        atomic.make_private_directory(folder, calls=calls)

    def write(self, groups: Sequence[SampleGroup]) -> tuple[StoredGroup, ...]:
        """Write the next file durably to disk, and return the places of its groups.

        The caller must record these places before it writes another file.

        Raises EnvironmentFailure. The caller can then write the groups again.
        """
        name = f"{self._number:08d}.samples"
        parts = [group.to_bytes() for group in groups]
        self._write(self._folder / name, b"".join(parts))
        self._number += 1
        stored, offset = [], 0
        for group, data in zip(groups, parts, strict=True):
            stored.append(
                StoredGroup(
                    item=group.item,
                    lease=group.lease,
                    file=name,
                    offset=offset,
                    length=len(data),
                    checksum=str(Checksum(data)),
                    versions=group.versions,
                )
            )
            offset += len(data)
        return tuple(stored)

    def _write(self, path: Path, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW  # truncate a leftover file
        try:
            with opened(path, flags, self._calls) as descriptor:
                make_private(descriptor, self._calls)
                pwrite_all(descriptor, data, 0, self._calls)
                self._calls.fsync(descriptor)
        except OSError as error:
            discard(path, self._calls)  # Free the file's space on a full disk.
            if isinstance(error, FileNotFoundError):
                self._make_folder_again()
            raise explain(error, "write", path) from error
        atomic.sync_directory(self._folder, calls=self._calls)

    def _make_folder_again(self) -> None:
        """Make the folder for the next try after a user or a purge has removed it.

        If the parent folder is missing, too, the task attempt is lost, and the task exits.
        """
        atomic.make_private_directory(self._folder, parents=False, calls=self._calls)


def read_group(folder: Path, stored: StoredGroup, *, calls: SystemCalls = REAL) -> SampleGroup:
    """Read one recorded group of a file.

    If this host may see an old state of the directory, read a file that looks missing or damaged
    again for about a minute. Raises EnvironmentFailure, or SampleFileError if the group is missing
    or damaged and must be generated again.
    """
    pauses_s = HIDDEN_PAUSES_S if calls.caches(folder.parent.parent) else ()
    for last in attempts(pauses_s, lambda pause_s: calls.sleep(pause_s)):
        with suppress(*(() if last else (SampleFileError,))):
            return read_once(folder, stored, calls=calls)
    raise AssertionError("unreachable: the last attempt returns or raises")


def read_once(folder: Path, stored: StoredGroup, *, calls: SystemCalls = REAL) -> SampleGroup:
    """Read one recorded group without retries. Raises as `read_group` does."""
    path = folder / stored.file
    where = f"{path}, item {stored.item},"
    try:
        data = _read(path, stored.offset, stored.length, calls)
    except OSError as error:
        if error.errno in _DAMAGE:
            reason = os.strerror(error.errno or 0)
            raise SampleFileError(f"{path} cannot be read: {reason}") from error
        raise explain(error, "read", path) from error
    if len(data) < stored.length:
        raise SampleFileError(f"{where} is truncated")
    if str(Checksum(data)) != stored.checksum:
        raise SampleFileError(f"{where} has another checksum")
    try:
        group = SampleGroup.from_bytes(data)
    except ValueError as error:
        raise SampleFileError(f"{where} is not a group of samples: {error}") from error
    if (group.item, group.lease, group.versions) != (stored.item, stored.lease, stored.versions):
        raise SampleFileError(f"{where} differs from its record: another item, lease or versions")
    return group


def remove_settled(
    folder: Path, needed: Container[str], newest: str | None, *, calls: SystemCalls = REAL
) -> list[str]:
    """Remove the files up to ``newest`` that are not ``needed``; return their names.

    ``newest`` is the last file that a record names, because later files may not be recorded yet.
    None means that the attempt has ended and its log was read to the end. ``needed`` are files with
    groups that are unsettled in the newest commit. Raises EnvironmentFailure; a later call removes
    the remaining files.
    """
    try:
        names = atomic.list_names(folder, calls=calls)
    except FileNotFoundError:  # nothing was written yet
        return []
    most = None if newest is None else _number_of(newest)
    removed = []
    for name in names:
        number = _number_of(name)
        old = number is not None and (most is None or number <= most)
        if old and name not in needed and atomic.remove(folder / name, calls=calls):
            removed.append(name)
    return removed


def _number_of(name: str) -> int | None:
    found = _FILE.fullmatch(name)
    return None if found is None else int(found[1])


def _read(path: Path, offset: int, length: int, calls: SystemCalls) -> bytes:
    """Return ``length`` bytes of a file; fewer at its end."""
    parts = []
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW, calls) as descriptor:
        while length and (part := calls.pread(descriptor, min(READ_BYTES, length), offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleGroup:
    """All completions of an item that were made under one lease.

    Raises ValueError if the fields contradict each other. (n completions; T tokens of all
    completions, side by side, including prompts)
    """

    item: int
    lease: str
    versions: tuple[str, ...]
    """Versions of the weights that sampled tokens, from old to new, at least one."""
    lengths: Array
    """int32 [n]: tokens of each completion with its prompt."""
    prompt_lengths: Array
    """int32 [n]: tokens of each prompt."""
    finished: Array
    """bool [n]: whether the completion ended by itself, not at a limit."""
    failed: Array
    """bool [n]: whether the episode failed. Then no token of the policy counts."""
    turns: Array
    """int32 [n]: turns of the policy."""
    tool_calls: Array
    """int32 [n]"""
    tool_failures: Array
    """int32 [n]: failed tool calls."""
    input_ids: Array
    """int32 [T]"""
    drawn_by: Array
    """int32 [T]: index in ``versions`` of the weights that sampled the token; -1 for tokens that
    were not sampled."""
    logprobs: Array
    """float32 [T]: log-probability under the sampling distribution; 0 for other tokens."""
    turn_rewards: Array
    """float32 [T]: reward of a turn, at its last token; 0 elsewhere."""
    masks: SampledMasks | None = None
    """Sampling mask of each token; None without a record."""
    expert_sizes: Array | None = None
    """int32 [n]: number of entries of each completion in ``experts``; None without a record."""
    experts: Array | None = None
    """int16: experts of all completions, side by side (see `data.meta.EXPERTS`)."""
    scores: tuple[float | None, ...] | None = None
    """Score of each completion by the task, None for completions that the reward could not score.
    None without scores: the trainers then score the group."""
    parts: tuple[Mapping[str, float], ...] = ()
    """Unweighted scores of the parts of the reward (see `WeightedReward.given`)."""
    stats: Stats = field(default_factory=dict)
    """Metrics that the reward's functions returned in addition to scores."""
    submission: int = 0
    """Number of the submission whose code and settings the task used to score. Submissions may
    differ in their reward."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ValueError(problem)

    @staticmethod
    def of(
        item: int,
        lease: str,
        completions: Sequence[Completion],
        held: str,
    ) -> SampleGroup:
        """Make a group. If no token was sampled, its version is ``held``, the task's version."""
        drawn = {name for each in completions for name in each.versions if name}
        versions = tuple(sorted(drawn or {held}, key=VersionId.parse))
        place = {name: number for number, name in enumerate(versions)} | {"": -1}
        before = [len(each.prompt) for each in completions]
        pairs = list(zip(before, completions, strict=True))
        sizes, experts = _joined_experts(completions)
        masks = joined_masks(completions)
        return SampleGroup(
            item=item,
            lease=lease,
            versions=versions,
            lengths=np.array([len(each.sequence) for each in completions], np.int32),
            prompt_lengths=np.array(before, np.int32),
            finished=np.array([each.finished for each in completions], np.bool_),
            failed=np.array([bool(each.failure) for each in completions], np.bool_),
            turns=np.array([each.turns for each in completions], np.int32),
            tool_calls=np.array([each.tool_calls for each in completions], np.int32),
            tool_failures=np.array([each.tool_failures for each in completions], np.int32),
            input_ids=_joined([each.sequence for each in completions], np.int32),
            drawn_by=_joined(
                [[-1] * n + [place[name] for name in each.versions] for n, each in pairs], np.int32
            ),
            logprobs=_joined([(*[0.0] * n, *each.logprobs) for n, each in pairs], np.float32),
            turn_rewards=_joined([[0.0] * n + each.rewards for n, each in pairs], np.float32),
            masks=masks if masks.ids else None,
            expert_sizes=sizes,
            experts=experts,
        )

    def routes(self) -> list[Array]:
        """Return the experts of each completion; empty arrays without a record."""
        if self.experts is None or self.expert_sizes is None:
            return [np.zeros(0, np.int16)] * self.lengths.size
        return np.split(self.experts, self.expert_sizes.cumsum()[:-1])

    def to_bytes(self) -> bytes:
        """Return one safetensors document, which is equal for equal groups."""
        arrays = {name: getattr(self, name) for name in (*PER_TOKEN, *PER_COMPLETION)}
        if self.masks is not None:
            both = (self.masks.sizes, self.masks.ids)
            arrays |= zip(MASKS, (np.array(each, np.int32) for each in both), strict=True)
        if self.experts is not None:
            arrays |= {name: getattr(self, name) for name in ROUTES}
        own: dict[str, Any] = {"item": self.item, "lease": self.lease, "versions": self.versions}
        if self.scores is not None:
            own["judged"] = {name: getattr(self, name) for name in SCORED}
        return save(arrays, {OWN: json.dumps(own)})

    @staticmethod
    def from_bytes(data: bytes) -> SampleGroup:
        """Parse the bytes of a group. Raises ValueError if the bytes are not valid."""
        try:
            arrays: dict[str, Any] = load(data)
            (size,) = _HEAD.unpack_from(data)
            header = documents.parse(data[_HEAD.size : _HEAD.size + size], "the header")
            own = documents.parse(
                header["__metadata__"][OWN], "the header", _METADATA | _SCORED, _METADATA
            )
        except (SafetensorError, CorruptFileError, LookupError, TypeError) as error:
            raise ValueError(str(error)) from error
        if set(arrays) - {*MASKS, *ROUTES} != {*PER_TOKEN, *PER_COMPLETION}:
            raise ValueError(f"has the wrong arrays: {sorted(arrays)}")
        masks = _read_masks([arrays.pop(name, None) for name in MASKS])
        return SampleGroup(
            item=own["item"],
            lease=own["lease"],
            versions=tuple(own["versions"]),
            masks=masks,
            **_read_scores(own.get("judged")),
            **arrays,
        )

    def with_scores(self, scored: Mapping[str, Any]) -> SampleGroup:
        """Return the group with the scores in a JSON object of `SCORED`.

        Raises ValueError for invalid scores.
        """
        return replace(self, **_read_scores(scored))

    def _problem(self) -> str | None:
        if not SIZE.accepts(self.item) or not LEASE.accepts(self.lease):
            return f"item {self.item!r} or lease {self.lease!r} is invalid"
        if self.lengths.dtype != PER_COMPLETION["lengths"] or self.lengths.ndim != 1:
            return f"lengths are {self.lengths.dtype} {self.lengths.shape}"
        if not self.lengths.size or self.lengths.min() < 1:
            return "there is no completion, or a completion has no tokens"
        tokens, count = int(self.lengths.sum(dtype=np.int64)), self.lengths.size
        wanted = {name: (dtype, tokens) for name, dtype in PER_TOKEN.items()}
        wanted |= {name: (dtype, count) for name, dtype in PER_COMPLETION.items()}
        for name, (dtype, size) in wanted.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (size,):
                return f"{name} is {array.dtype} {array.shape}, expected {dtype} ({size},)"
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"{name} has numbers that are not finite"
        return self._wrong_values()

    def _wrong_values(self) -> str | None:
        found = [VersionId.parse(name) for name in self.versions]
        if not found or found != sorted(set(found)):
            return f"versions are {self.versions}, expected at least one, from old to new"
        if self.input_ids.min() < 0:
            return "a token id is negative"
        if self.drawn_by.min() < -1 or self.drawn_by.max() >= len(found):
            return f"a token was sampled by none of the versions {self.versions}"
        if self.masks is not None and (wrong := self._wrong_masks(self.masks)):
            return wrong
        if wrong := self._wrong_experts():
            return wrong
        if self.scores is None:
            return None
        return scores_problem(self.scores, self.parts, self.stats, self.lengths.size)

    def _wrong_experts(self) -> str | None:
        sizes, experts = self.expert_sizes, self.experts
        if sizes is None and experts is None:
            return None
        if sizes is None or experts is None or sizes.shape != self.lengths.shape:
            return "has only some arrays of the experts"
        if (sizes.dtype.str, experts.dtype.str) != tuple(ROUTES.values()):
            return f"experts are {experts.dtype}, their sizes {sizes.dtype}"
        whole = (sizes >= 0).all() and not (sizes % self.lengths).any()
        if not whole or experts.shape != (sizes.sum(dtype=np.int64),) or (experts < -1).any():
            return f"some of the {experts.size} expert numbers are invalid, or numbers are missing"
        return None

    def _wrong_masks(self, masks: SampledMasks) -> str | None:
        sizes, ids = np.array(masks.sizes, np.int32), np.array(masks.ids, np.int32)
        if sizes.shape != self.input_ids.shape or sizes.min() < 0 or sizes.sum() != ids.size:
            return f"sampling masks need one size per token, and sizes that sum to {ids.size} ids"
        if (ids < 0).any():
            return "a token id of a sampling mask is negative"
        if ((sizes > 0) & (self.drawn_by < 0)).any():
            return "a token that was not sampled has a sampling mask"
        drawn = np.repeat(self.input_ids, sizes) == ids
        if drawn.sum() != (sizes > 0).sum():
            return "a token is missing in its sampling mask or occurs twice"
        return None


def _joined_experts(completions: Sequence[Completion]) -> tuple[Array | None, Array | None]:
    """Return the sizes and the experts; None if no experts were recorded."""
    rows = [each.routes() for each in completions]
    if not any(row.size for row in rows):
        return None, None
    return np.array([row.size for row in rows], np.int32), np.concatenate(rows)


def _read_scores(scored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a JSON object of `SCORED`."""
    if scored is None:
        return {}
    stats = {name: tuple(pair) for name, pair in scored.get("stats", {}).items()}
    lists = {name: tuple(scored.get(name, ())) for name in ("scores", "parts")}
    return {**lists, "stats": stats, "submission": scored.get("submission", 0)}


def _read_masks(arrays: Sequence[Array | None]) -> SampledMasks | None:
    sizes, ids = arrays
    if sizes is None and ids is None:
        return None
    if sizes is None or ids is None or {sizes.dtype.str, ids.dtype.str} != {*MASKS.values()}:
        raise ValueError("has only some arrays of the sampling masks, or arrays of other types")
    return SampledMasks(array("i", sizes.tobytes()), array("i", ids.tobytes()))


def _joined(rows: Sequence[Sequence[Any]], dtype: type[np.generic]) -> Array:
    return np.array([value for row in rows for value in row], dtype)

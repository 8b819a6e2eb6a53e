"""The completions of one item as arrays, and as the bytes of a safetensors document. Torch-free."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slurmrl.data.ledger import LEASE
from slurmrl.data.meta import EXPERTS, IDS, SIZES, SampledSupport
from slurmrl.errors import CorruptFileError
from slurmrl.fsio import documents, objects
from slurmrl.fsio.shapes import SIZE, TEXT, list_of
from slurmrl.rewards.scores import JudgedCompletions
from slurmrl.tensors.layout import Array
from slurmrl.tensors.weights.format import VERSION, VersionId

if TYPE_CHECKING:
    from slurmrl.rollouts.completions import Completions
    from slurmrl.rollouts.runner import EpisodeOutcome

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
SUPPORT = {SIZES: "<i4", IDS: "<i4"}
"""Only in groups with supports."""
EXPERT_SIZES = "expert_sizes"
ROUTES = {EXPERT_SIZES: "<i4", EXPERTS: "<i2"}
"""Only in groups with experts."""
OWN = "group"
"""Key of the document's metadata, whose value is JSON."""
_METADATA = {"item": SIZE, "lease": TEXT, "versions": list_of(VERSION)}
_JUDGED = {"judged": objects.shape(JudgedCompletions)}
_HEAD = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleGroup:
    """All completions of an item, made under a lease.

    Raises ValueError if the fields contradict each other. (n completions; T tokens of all of them,
    side by side, prompts included)
    """

    item: int
    lease: str
    versions: tuple[str, ...]
    """Of the weights that drew tokens, from old to new, at least one."""
    lengths: Array
    """int32 [n]: tokens of each completion with its prompt."""
    prompt_lengths: Array
    """int32 [n]: tokens of each prompt."""
    finished: Array
    """bool [n]: it ended by itself, and not at a limit."""
    failed: Array
    """bool [n]: its episode failed, so that the policy wrote nothing that counts."""
    turns: Array
    """int32 [n]: of the policy."""
    tool_calls: Array
    """int32 [n]"""
    tool_failures: Array
    """int32 [n]: of these calls."""
    input_ids: Array
    """int32 [T]"""
    drawn_by: Array
    """int32 [T]: place in ``versions`` of the weights that drew the token; -1 where the policy did
    not."""
    logprobs: Array
    """float32 [T]: under the distribution that the token was drawn from; 0 for others."""
    turn_rewards: Array
    """float32 [T]: what a turn has earned, at its last token; 0 elsewhere."""
    support: SampledSupport | None = None
    """What each token was drawn from; None: it was not recorded."""
    expert_sizes: Array | None = None
    """int32 [n]: numbers in ``experts`` of each completion; None: none were recorded."""
    experts: Array | None = None
    """int16: those of all completions, side by side (see `data.meta.EXPERTS`)."""
    judged: JudgedCompletions | None = None
    """What the reward gave the completions in the task; None: the trainers judge them."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ValueError(problem)

    @staticmethod
    def of(
        item: int,
        lease: str,
        outcomes: Sequence[EpisodeOutcome],
        held: str,
    ) -> SampleGroup:
        """``held``: the version that the task had, which counts if none drew a token."""
        completions = [outcome.completions for outcome in outcomes]
        drawn = {name for each in completions for name in each.versions if name}
        versions = tuple(sorted(drawn or {held}, key=VersionId.parse))
        place = {name: number for number, name in enumerate(versions)} | {"": -1}
        before = [len(each.prompt) for each in completions]
        pairs = list(zip(before, completions, strict=True))
        sizes, experts = _joined_experts(completions)
        return SampleGroup(
            item=item,
            lease=lease,
            versions=versions,
            lengths=np.array([len(each.sequence) for each in completions], np.int32),
            prompt_lengths=np.array(before, np.int32),
            finished=np.array([each.finished for each in completions], np.bool_),
            failed=np.array([bool(each.failure) for each in outcomes], np.bool_),
            turns=np.array([each.turns for each in completions], np.int32),
            tool_calls=np.array([each.tool_calls for each in outcomes], np.int32),
            tool_failures=np.array([each.tool_failures for each in outcomes], np.int32),
            input_ids=_joined([each.sequence for each in completions], np.int32),
            drawn_by=_joined(
                [[-1] * n + [place[name] for name in each.versions] for n, each in pairs], np.int32
            ),
            logprobs=_joined([[0.0] * n + each.logprobs for n, each in pairs], np.float32),
            turn_rewards=_joined([[0.0] * n + each.rewards for n, each in pairs], np.float32),
            support=_joined_support(completions),
            expert_sizes=sizes,
            experts=experts,
        )

    def routes(self) -> list[Array]:
        """The experts of each completion, or nothing for it."""
        if self.experts is None or self.expert_sizes is None:
            return [np.zeros(0, np.int16)] * self.lengths.size
        return np.split(self.experts, self.expert_sizes.cumsum()[:-1])

    def to_bytes(self) -> bytes:
        """One safetensors document, the same for the same group."""
        arrays = {name: getattr(self, name) for name in (*PER_TOKEN, *PER_COMPLETION)}
        if self.support is not None:
            both = (self.support.sizes, self.support.ids)
            arrays |= zip(SUPPORT, (np.array(each, np.int32) for each in both), strict=True)
        if self.experts is not None:
            arrays |= {name: getattr(self, name) for name in ROUTES}
        own: dict[str, Any] = {"item": self.item, "lease": self.lease, "versions": self.versions}
        if self.judged is not None:
            own["judged"] = objects.to_json(self.judged)
        return save(arrays, {OWN: json.dumps(own)})

    @staticmethod
    def from_bytes(data: bytes) -> SampleGroup:
        """Raises ValueError if these are not the bytes of a group."""
        try:
            arrays = load(data)
            (size,) = _HEAD.unpack_from(data)
            header = documents.parse(data[_HEAD.size : _HEAD.size + size], "the header")
            own = documents.parse(
                header["__metadata__"][OWN], "the header", _METADATA | _JUDGED, _METADATA
            )
            found = own.get("judged")
            judged = (
                None if found is None else objects.from_json(JudgedCompletions, found, "the header")
            )
        except (SafetensorError, CorruptFileError, LookupError, TypeError) as error:
            raise ValueError(str(error)) from error
        if set(arrays) - {*SUPPORT, *ROUTES} != {*PER_TOKEN, *PER_COMPLETION}:
            raise ValueError(f"has the arrays {sorted(arrays)}")
        support = _read_support([arrays.pop(name, None) for name in SUPPORT])
        return SampleGroup(
            item=own["item"],
            lease=own["lease"],
            versions=tuple(own["versions"]),
            support=support,
            judged=judged,
            **arrays,
        )

    def _problem(self) -> str | None:
        if not SIZE.accepts(self.item) or not LEASE.accepts(self.lease):
            return f"item {self.item!r} of lease {self.lease!r}"
        if self.lengths.dtype != PER_COMPLETION["lengths"] or self.lengths.ndim != 1:
            return f"lengths are {self.lengths.dtype} {self.lengths.shape}"
        if not self.lengths.size or self.lengths.min() < 1:
            return "a completion without tokens, or none at all"
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
            return f"a token was drawn by none of the versions {self.versions}"
        if self.support is not None and (wrong := self._wrong_support(self.support)):
            return wrong
        if wrong := self._wrong_experts():
            return wrong
        return None if self.judged is None else self.judged.problem(self.lengths.size)

    def _wrong_experts(self) -> str | None:
        sizes, experts = self.expert_sizes, self.experts
        if sizes is None and experts is None:
            return None
        if sizes is None or experts is None or sizes.shape != self.lengths.shape:
            return "has a part of the arrays of experts"
        if (sizes.dtype.str, experts.dtype.str) != tuple(ROUTES.values()):
            return f"experts are {experts.dtype}, their sizes {sizes.dtype}"
        whole = (sizes >= 0).all() and not (sizes % self.lengths).any()
        if not whole or experts.shape != (sizes.sum(dtype=np.int64),) or (experts < -1).any():
            return f"{experts.size} numbers of experts, or other ones than each token has"
        return None

    def _wrong_support(self, support: SampledSupport) -> str | None:
        sizes, ids = np.array(support.sizes, np.int32), np.array(support.ids, np.int32)
        if sizes.shape != self.input_ids.shape or sizes.min() < 0 or sizes.sum() != ids.size:
            return f"{sizes.size} supports with {ids.size} token ids"
        if (ids < 0).any():
            return "a token id of a support is negative"
        if ((sizes > 0) & (self.drawn_by < 0)).any():
            return "a token that was not drawn has a support"
        drawn = np.repeat(self.input_ids, sizes) == ids
        if drawn.sum() != (sizes > 0).sum():
            return "a token is not in its support, or more than once"
        return None


def _joined_support(completions: Sequence[Completions]) -> SampledSupport | None:
    """Of all tokens, if any was recorded."""
    support = SampledSupport()
    for each in completions:
        support.skip(len(each.prompt))
        support.extend(each.support)
    return support if support.ids else None


def _joined_experts(completions: Sequence[Completions]) -> tuple[Array | None, Array | None]:
    """Sizes and experts, if any were recorded."""
    rows = [each.routes() for each in completions]
    if not any(row.size for row in rows):
        return None, None
    return np.array([row.size for row in rows], np.int32), np.concatenate(rows)


def _read_support(arrays: Sequence[Array | None]) -> SampledSupport | None:
    sizes, ids = arrays
    if sizes is None and ids is None:
        return None
    if sizes is None or ids is None or {sizes.dtype.str, ids.dtype.str} != {*SUPPORT.values()}:
        raise ValueError("has a part of the arrays of supports, or of other types")
    return SampledSupport(array("i", sizes.tobytes()), array("i", ids.tobytes()))


def _joined(rows: Sequence[Sequence[Any]], dtype: type[np.generic]) -> Array:
    return np.array([value for row in rows for value in row], dtype)

"""Completions that rollout tasks have made, read from their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.rollout.recorded import add_experts, add_support
from slurmrl.algorithms.rollout.sampling import generation_options
from slurmrl.algorithms.rollout.totals import Totals
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.algorithms.token_notes import noted
from slurmrl.config.schema import Logging
from slurmrl.data.meta import SampledSupport
from slurmrl.data.sample import SequenceSample
from slurmrl.rollouts.sample_files import SampleGroup
from slurmrl.tensors.layout import Array

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine


class StoredInterface(Interface):
    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The keys of `RolloutInterface.generate`, and ``turn_rewards`` of episodes.

        Raises SampleFileError, EnvironmentFailure.
        """
        read = context.stored
        assert read is not None, "the master names the samples of such a batch"
        groups = [read(name) for name in sample.ids]
        episode = context.settings.config.rollout.episode
        turns, tools = episode.has_turns, bool(episode.tools)
        made = as_sample(sample.ids, groups, context.device, turns=turns)
        options = generation_options(context)
        if options.support:
            add_support(made, _support(groups))
        if options.experts:
            add_experts(made, [routes for group in groups for routes in group.routes()])
        stats = Totals.of_groups(groups).stats(turns=turns, tools=tools)
        kept = context.settings.config.logging
        return CallResult(made, stats, notes=_versions(sample.ids, groups, kept))


def as_sample(
    ids: tuple[str, ...],
    groups: Sequence[SampleGroup],
    device: torch.device | None = None,
    *,
    turns: bool,
    metadata: Mapping[str, list[Any]] | None = None,
) -> SequenceSample:
    """The groups' keys.

    Tensors of tokens are where the models compute, as those of their own generation.
    """
    data: dict[str, Tensor | None] = {
        "input_ids": _packed([each.input_ids for each in groups], torch.int64),
        "prompt_mask": _packed([each.drawn_by < 0 for each in groups], torch.bool),
        "logprobs": _packed([each.logprobs for each in groups], torch.float32),
    }
    if turns:
        data[TURN_REWARDS] = _packed([each.turn_rewards for each in groups], torch.float32)
    data = {key: None if value is None else value.to(device) for key, value in data.items()}
    rows = [each.lengths.tolist() for each in groups]
    finished = _packed([each.finished for each in groups], torch.bool)
    return SequenceSample.grouped(rows, ids, data, metadata, per_sequence={"finished": finished})


def _support(groups: Sequence[SampleGroup]) -> SampledSupport:
    support = SampledSupport()
    for group in groups:
        if group.support is None:
            support.skip(group.input_ids.size)
        else:
            support.extend(group.support)
    return support


def _versions(
    ids: Sequence[str], groups: Sequence[SampleGroup], settings: Logging
) -> list[dict[str, Any]]:
    """Which weights drew each token of the kept completions (see `token_notes`)."""
    notes = []
    for one in noted([len(each.lengths) for each in groups], settings):
        group = groups[one.item]
        start = int(group.lengths[: one.place].sum())
        first = start + int(group.prompt_lengths[one.place])
        last = min(start + int(group.lengths[one.place]), first + settings.sample_tokens)
        drawn = {"names": list(group.versions), "drawn_by": group.drawn_by[first:last].tolist()}
        notes.append({"id": ids[one.item], "index": one.place, "versions": drawn})
    return notes


def _packed(arrays: Sequence[Array], dtype: torch.dtype) -> Tensor:
    return torch.cat(
        [torch.from_numpy(each).to(dtype) for each in arrays] or [torch.empty(0, dtype=dtype)]
    )

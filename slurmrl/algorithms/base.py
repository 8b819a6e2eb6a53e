"""The contract between an algorithm's code and the workers that execute its calls.

This module does not import torch, so a user's schema and interface can share a file.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slurmrl.plan.dataflow import Record

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from slurmrl.config.schema import Dataset
    from slurmrl.data.sample import SequenceSample
    from slurmrl.engines.base import GenerateEngine, TrainEngine
    from slurmrl.plan.settings import Settings
    from slurmrl.rollouts.sample_files import SampleGroup

Stats = dict[str, tuple[float, float]]
"""Metrics: name -> (sum, count)."""


@dataclass(frozen=True)
class CallContext:
    """Facts that a call needs in addition to its model and its batch."""

    step: int
    seed: int
    scalars: Mapping[str, float]
    """Values of the master's scalar controller."""
    tokenizer: PreTrainedTokenizerBase
    settings: Settings
    """``settings.config`` is the configuration, ``settings.algorithm`` its section ``algorithm``.
    In the evaluation of a suite, ``config.evaluation`` and ``config.reward`` are the suite's
    settings."""
    stop_token_ids: tuple[int, ...]
    """The tokens that end a completion."""
    batch: tuple[str, ...]
    """Ids of the whole batch, in order; a rank's sample has some of these items."""
    cores: int = 1
    """Number of CPU cores for each rank of this host."""
    evaluation: bool = False
    """Whether the call belongs to an evaluation, which has separate sampling settings and random
    streams."""
    device: torch.device | None = None
    """Device of this rank's models."""
    stored: Callable[[str], SampleGroup] | None = None
    """Function that reads the completions of an item by its id; None unless rollout tasks made the
    completions. Raises SampleFileError, EnvironmentFailure."""

    @property
    def dataset(self) -> Dataset:
        """The section of the dataset whose items the call gets."""
        config = self.settings.config
        evaluates = self.evaluation and config.evaluation is not None
        return config.held_out if evaluates else config.dataset


@dataclass(frozen=True)
class CallResult:
    """The result of a call.

    In ``stats``, generate and inference report this rank's (sum, count), which the master adds up
    over the data-parallel ranks. train_step reports global means as (mean, 1), equal on all ranks.
    """

    sample: SequenceSample | None = None
    """The output of the call, for the same ids as its input."""
    stats: Stats = field(default_factory=dict)
    texts: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the samples table: ``logging.samples`` completions of each rank, and the other
    completions of their prompts."""
    notes: list[dict[str, Any]] = field(default_factory=list)
    """Additional fields for rows of the samples table, which another call may make. Each has the
    row's ``id`` and ``index`` (0 for an item's only completion)."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Mapping from the id of each item that a filter rejects to the reason."""
    records: Mapping[str, Record] = field(default_factory=dict)
    """Mapping from item id to a JSON object. The call ``record`` returns lines of the trial's
    results. Other calls of an evaluation may return scores for its file."""


class Interface(ABC):  # noqa: B024 - each interface implements some of the methods
    """An algorithm's code for one or more calls.

    Each process constructs the class once for each call, without arguments. An object has no state
    that a resumed trial would need.

    ``engine`` is None for a call without a role. Each data-parallel rank gets different items,
    possibly none. Methods may contain collectives.
    """

    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        raise NotImplementedError(f"{type(self).__name__} does not run inference")

    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def filter(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        raise NotImplementedError(f"{type(self).__name__} does not filter")

    def record(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        raise NotImplementedError(f"{type(self).__name__} does not record")

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release resources, such as the processes of a reward."""

"""Several models with separate layouts and engines in one worker, trained on recorded rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import LossFn, Outputs, ServingOptions
from slurmrl.models.decoder import Decoder
from slurmrl.rollouts.generation.base import RolloutEngine
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import batch, model, prompts
from tests.distributed.engines.mixed_cases import ROLES, Step, context, replay
from tests.distributed.engines.one_process import norm_of, random_model
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    TIED,
    close,
    outputs_of,
    reference,
)
from tests.pool import RankPool

SHARES = (5e-6, 2e-5)
"""Of a gradient's largest element, how far rounding may take it at each step: advantages come from
float32 outputs, and the second step's from weights that the first one left."""
STEPS = len(SHARES)


class OneProcess:
    """A stand-in for an engine: a model in one process, with torch's optimizer."""

    def __init__(self, decoder: Decoder, options: dict[str, Any]) -> None:
        self.context = SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("cpu"))
        self.decoder = decoder
        self.gradients: list[dict[str, Tensor]] = []
        """Of each step, as the weights after it."""
        self.weights: list[dict[str, Tensor]] = []
        self._optimizer = reference(decoder, options)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    @torch.no_grad()
    def forward(self, sample: SequenceSample, *, temperature: float = 1.0) -> Outputs:
        return {name: whole.float() for name, whole in outputs_of(self.decoder, sample).items()}

    def train_batch(
        self, sample: SequenceSample, loss_fn: LossFn, denominator: float, **_: Any
    ) -> dict[str, float]:
        self._optimizer.zero_grad()
        total, stats = loss_fn(outputs_of(self.decoder, sample), sample)
        (total / denominator).backward()  # type: ignore[no-untyped-call]
        found = {n: p.grad for n, p in self.decoder.named_parameters() if p.grad is not None}
        self.gradients.append({name: gradient.clone() for name, gradient in found.items()})
        self._optimizer.step()
        self.weights.append({n: p.detach().clone() for n, p in self.decoder.named_parameters()})
        own = {"denominator": denominator, "grad_norm": norm_of(found), "lr": 1e-2}
        own |= {"skipped": 0.0, "vetoed": 0.0}
        return {**{name: value.item() for name, value in stats.items()}, **own}

    @contextmanager
    def serving(self, version: str, options: ServingOptions) -> Iterator[RolloutEngine]:
        yield NativeRollout(self.decoder, version=version, own=False, turns=False, masked=False)

    def onload(self) -> None: ...

    def offload(self) -> None: ...


def recorded(engine: Any, number: int) -> SequenceSample:
    """Return completions of the initial actor, with the log-probabilities of their tokens."""
    sample = prompts(batch(number))
    rollout = RolloutInterface().generate(engine, sample, context(number, sample.ids)).sample
    assert rollout is not None
    finished = rollout.tensor("finished")
    assert finished.any()
    assert not finished.all()
    return rollout


def assert_same(ours: Step, theirs: Step) -> None:
    """Compare a rank's inference results and training statistics with those of one process."""
    for role, made in ours.made.items():
        whole = theirs.made[role]
        wanted = whole.take([whole.ids.index(name) for name in made.ids])
        for key in made.keys:
            assert torch.allclose(made.tensor(key), wanted.tensor(key), atol=1e-5), (role, key)
    for role, stats in ours.stats.items():
        assert {name: value for name, (value, _) in stats.items()} == pytest.approx(
            {name: value for name, (value, _) in theirs.stats[role].items()}, rel=1e-5, abs=1e-6
        ), role


def assert_same_state(checkpoint: RoleCheckpoint, alone: OneProcess, number: int) -> None:
    """Compare the gradients of a step, which are the first moments, and the weights after it."""
    gradients = alone.gradients[number]
    whole = norm_of(gradients)
    for name, gradient in gradients.items():
        found = torch.from_numpy(checkpoint.read(f"exp_avg/{name}"))
        close(name, found, gradient, whole, share=SHARES[number])
        weights = torch.from_numpy(checkpoint.read(name))
        assert (weights - alone.weights[number][name]).abs().max() < 2e-6, name


@pytest.mark.long
def test_models_in_one_process_compute_as_if_alone(ranks: RankPool, tmp_path: Path) -> None:
    """The outputs of frozen models and the critic determine the loss of the trained models."""
    settings = model(architecture=TIED, **BUDGET)
    alone = {}
    for role in ROLES:
        decoder = random_model(tmp_path / role.role, TIED, role.head, role.seed)
        alone[role.role] = OneProcess(decoder, settings["optimizer"])
    rollouts = [recorded(alone["actor"], number) for number in range(STEPS)]
    for one in alone.values():
        one.decoder.double()
    for number in range(STEPS):
        (tmp_path / str(number)).mkdir()
    results = ranks(
        4,
        "tests.distributed.engines.mixed_cases:run",
        settings,
        tmp_path,
        rollouts,
        deadline_s=400.0,
    )
    expected = replay(alone, rollouts)
    for found in results:
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    for number in range(STEPS):
        for role in ("actor", "critic"):
            checkpoint = RoleCheckpoint(tmp_path / str(number), role)
            assert_same_state(checkpoint, alone[role], number)
    last = expected[-1].stats["actor"]
    assert abs(last["kl"][0]) > 0.01
    assert abs(last["importance_ratio"][0] - 1) > 0.01
    assert last["clip_fraction"][0] > 0

"""The critic's values and training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.advantages import (
    Estimates,
    SumOverRanks,
    estimate,
    moments,
    only_scored,
    spread_over_tokens,
    trained_completions,
)
from slurmrl.algorithms.policy.objective import value_loss
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.policy.updates import global_result, run_updates
from slurmrl.algorithms.scalars import ReturnMoments
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class CriticInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``values``: position t holds the value of the state after token t.

        They are aligned with the tokens and in units of the returns.
        """
        assert engine is not None
        values = engine.forward(sample.only(["input_ids"]))["values"]
        settings = cast(PolicyGradient, context.settings.algorithm)
        if settings.value_norm != "none":
            values = ReturnMoments.of(context.scalars).denormalized(values)
        data: dict[str, Tensor | None] = {"values": values}
        lengths = {"values": sample.lengths["input_ids"]}
        return CallResult(SequenceSample(sample.ids, lengths, data=data))

    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Regression of the values before each response token to the returns.

        With ``value_norm``, both are normalised, and the moments include these returns.
        """
        assert engine is not None
        ppo = cast(PolicyGradient, context.settings.algorithm)
        sample = only_scored(sample).to(engine.context.device)
        estimates = estimate(sample, context, engine.all_reduce_sum)
        mean, std = moments(estimates.returns, engine.all_reduce_sum)
        _, error = moments(estimates.returns - estimates.old_values, engine.all_reduce_sum)
        stats = {
            "returns_mean": mean,
            "returns_std": std,
            "explained_variance": explained_variance(std, error),
        }
        training = _training_sample(sample, estimates, ppo)
        if ppo.value_norm != "none":
            before = ReturnMoments.of(context.scalars)
            after = _joined(before, mean, std, estimates.returns, ppo, engine.all_reduce_sum)
            stats |= after.scalars()
            # The old values as the model gave them: clipping compares them with its new outputs.
            training.data["values"] = before.normalized(training.tensor("values"))
            training.data["returns"] = after.normalized(training.tensor("returns"))
        means = run_updates(
            engine,
            training,
            context,
            "state_mask",
            partial(critic_loss, ppo=ppo),
            ppo,
        )
        return global_result({**stats, **means}, "critic")


def critic_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, ppo: PolicyGradient
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {values} [T]."""
    return value_loss(
        outputs["values"],
        batch.tensor("values"),
        batch.tensor("returns"),
        batch.tensor("state_mask"),
        value_clip=ppo.value_clip,
        huber_delta=ppo.value_huber_delta,
    )


def _joined(
    moments: ReturnMoments,
    mean: float,
    std: float,
    returns: Tensor,
    settings: PolicyGradient,
    all_reduce_sum: SumOverRanks,
) -> ReturnMoments:
    """Return the moments after a step whose returns have this mean and standard deviation.

    ``mean`` and ``std`` are over all ranks; ``returns`` are this rank's returns.
    """
    square = std**2 + mean**2
    count = float(all_reduce_sum(returns.new_tensor(float(len(returns)), dtype=torch.float64)))
    if not count:
        return moments
    if settings.value_norm == "moving":
        return moments.moving(mean, square, count)
    return moments.exponential(mean, square, settings.value_norm_decay)


def explained_variance(returns_std: float, error_std: float) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant.

    It is 0 when the returns do not vary.
    """
    return 1.0 - (error_std / returns_std) ** 2 if returns_std > 0 else 0.0


def _training_sample(
    sample: SequenceSample, estimates: Estimates, settings: PolicyGradient
) -> SequenceSample:
    """The sample with returns aligned like values: at the state before their token."""
    ids = sample.tensor("input_ids")
    counts = trained_completions(sample, settings)[estimates.responses.sequence]
    states = estimates.responses.tokens - 1
    returns = spread_over_tokens(estimates.returns, states, len(ids))
    data: dict[str, Tensor | None] = {
        "input_ids": ids,
        "values": sample.tensor("values"),
        "returns": returns,
        "state_mask": spread_over_tokens(counts, states, len(ids)),
    }
    return SequenceSample(sample.ids, dict.fromkeys(data, sample.lengths["input_ids"]), data=data)

"""SimPO (Meng et al. 2024, arXiv 2405.14734, eq. 6): pairs of answers without a reference model."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from slurmrl.algorithms.base import Interface
from slurmrl.algorithms.schema import AlgorithmSchema
from slurmrl.config.schema import NonNegativeFloat, PositiveFloat
from slurmrl.plan.dataflow import Call, Method, RoleUse


class SimPO(AlgorithmSchema):
    beta: PositiveFloat = 2.0
    """Factor of the mean log-probability of an answer's tokens."""
    gamma: NonNegativeFloat = 1.0
    """Margin by which the chosen answer should win."""

    dataset_types: ClassVar = ("preference",)

    def sequences_per_item(self, config):
        return 2 * (config.dataset.max_pairs_per_prompt or 1)

    def roles(self):
        return (RoleUse("actor", trained=True),)

    def calls(self, config):
        interface = f"{__name__}:SimPOInterface"
        keys, metrics = (
            ("input_ids", "prompt_mask"),
            ("loss", "accuracy", "grad_norm", "lr", "skipped"),
        )
        train = Method.TRAIN_STEP
        return (Call("actor_train", "actor", train, interface, keys, metrics=metrics),)


class SimPOInterface(Interface):
    def train_step(self, engine, sample, context):
        from slurmrl.algorithms.sequences import global_means, train_on_batch

        loss_fn = partial(simpo_loss, options=context.settings.algorithm)
        means, sums = train_on_batch(engine, sample, loss_fn, float(sample.bs))
        return global_means({**means, "accuracy": sums["accuracy"] / sums["denominator"]})


def simpo_loss(outputs, batch, options):
    """Return the loss and the metrics as sums over the items of a micro-batch."""
    from torch.nn.functional import logsigmoid

    from slurmrl.algorithms.pairs import pair_weights, split_pairs
    from slurmrl.algorithms.sequences import answer_lengths, answer_logprobs

    logp = answer_logprobs(outputs["logp"], batch)
    chosen, rejected = split_pairs(logp / answer_lengths(batch).to(logp))
    weights = pair_weights(batch, logp)  # a row may have several pairs
    loss = -logsigmoid(options.beta * (chosen - rejected) - options.gamma)
    return (weights * loss).sum(), {"accuracy": (weights * (chosen > rejected)).sum()}

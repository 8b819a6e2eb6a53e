"""Selective language modeling: a second, frozen model selects the tokens to learn.

The method is from Lin et al. 2024 (Rho-1, arXiv 2404.07965, section 2.2). The actor learns the
tokens of answers that the guide predicts better than the actor. The paper selects a fixed share of
each batch. Here a threshold decides, so that the choice of a token does not depend on other tokens.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from slurmrl.algorithms.base import CallResult, Interface
from slurmrl.algorithms.schema import AlgorithmSchema
from slurmrl.plan.dataflow import Call, Method, RoleUse


class Selective(AlgorithmSchema):
    threshold: float = 0.0
    """Excess loss log(p_guide / p_actor) in nats above which a token is learned."""

    dataset_types: ClassVar = ("prompt_answer", "messages")

    def roles(self):
        return (RoleUse("actor", trained=True), RoleUse("guide", trained=False))

    def calls(self, config):
        keys = ("input_ids", "prompt_mask")
        guide = Call(
            name="guide_inf",
            role="guide",
            method=Method.INFERENCE,
            interface=f"{__name__}:GuideInterface",
            inputs=("input_ids",),
            outputs=("guide_logprobs",),
        )
        train = Call(
            name="actor_train",
            role="actor",
            method=Method.TRAIN_STEP,
            interface=f"{__name__}:SelectiveInterface",
            inputs=(*keys, "guide_logprobs"),
            metrics=("loss", "selected", "grad_norm", "lr", "skipped"),
        )
        return (guide, train)


class GuideInterface(Interface):
    def inference(self, engine, sample, context):
        """Return ``guide_logprobs``, with one value for each token."""
        from slurmrl.data.sample import SequenceSample

        key, logp = "guide_logprobs", engine.forward(sample.only(["input_ids"]))["logp"]
        lengths = {key: sample.lengths["input_ids"]}
        return CallResult(SequenceSample(sample.ids, lengths, data={key: logp}))


class SelectiveInterface(Interface):
    def train_step(self, engine, sample, context):
        """Make one update with the mean over all answer tokens; unselected tokens count as 0."""
        from slurmrl.algorithms.sequences import global_means, train_on_batch

        tokens = float((~sample.tensor("prompt_mask")).sum())
        loss_fn = partial(selective_loss, threshold=context.settings.algorithm.threshold)
        means, sums = train_on_batch(engine, sample, loss_fn, tokens)
        return global_means({**means, "selected": sums["selected"] / sums["denominator"]})


def selective_loss(outputs, batch, threshold):
    """Return the loss and the metrics as sums over the tokens of a micro-batch."""
    import torch

    logp = outputs["logp"]
    excess = batch.tensor("guide_logprobs") - logp.detach()
    selected = ~batch.tensor("prompt_mask") & (excess > threshold)
    return -torch.where(selected, logp, 0.0).sum(), {"selected": selected.float().sum()}

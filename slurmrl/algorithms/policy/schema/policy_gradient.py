"""All settings of policy gradients, and the models and calls that they need."""

from __future__ import annotations

from typing import ClassVar, Literal

from slurmrl.algorithms.policy.schema.advantages import Advantages
from slurmrl.algorithms.policy.schema.objective import (
    Correction,
    Objective,
    Updates,
    Value,
)
from slurmrl.algorithms.schema import AlgorithmSchema, generate_call, reward_call
from slurmrl.config.schema import Config
from slurmrl.graph.call import Call, Method, RoleUse

ACTOR_METRICS = (
    "actor_loss",
    "clip_fraction",
    "importance_ratio",
    "approx_kl_k1",
    "approx_kl",
    "entropy",
    "kl",
    "kl_sequence",
    "completions",
    "kl_coef",
    "advantages_mean",
    "advantages_std",
    "early_stop",
    "actor_grad_norm",
    "actor_lr",
    "actor_updates",
    "actor_skipped",
)
CRITIC_METRICS = (
    "value_loss",
    "value_clip_fraction",
    "returns_mean",
    "returns_std",
    "explained_variance",
    "critic_grad_norm",
    "critic_lr",
    "critic_updates",
    "critic_skipped",
)
MISMATCH_METRICS = (
    "mismatch/kl",
    "mismatch/kl_k1",
    "mismatch/ratio_max",
    "mismatch/effective_sample_size",
)
OLD_LOGPROBS = "old_logprobs"
"""Key of the log-probabilities that the training engine computed before the updates."""


class PolicyGradient(Correction, Value, Objective, Updates, Advantages, AlgorithmSchema):
    """Policy gradients: the actor completes prompts, a rule rewards completions, the reference
    model gives the KL penalty, and the critic's values give advantages."""

    name: Literal["ppo"] = "ppo"
    """`ppo`: proximal policy optimisation."""

    dataset_types: ClassVar[tuple[str, ...]] = ("prompt",)
    trains_on_samples: ClassVar[bool] = True

    @property
    def optimizer_steps(self) -> int:
        return self.n_minibatches * self.n_epochs

    def untrained_steps(self, role: str) -> int:
        return self.critic_warmup_steps if role == "actor" else 0

    @property
    def epochs(self) -> int:
        return self.n_epochs

    @property
    def minibatches(self) -> int:
        return 1 if self.shuffle_minibatches else self.n_minibatches

    def roles(self) -> tuple[RoleUse, ...]:
        return (
            RoleUse("actor", trained=True, head="lm"),
            RoleUse("critic", trained=True, head="value"),
            RoleUse("ref", trained=False, head="lm"),
        )

    def calls(self, config: Config) -> tuple[Call, ...]:
        recomputes = self.recomputes(config.actor.dtype)
        old = OLD_LOGPROBS if recomputes else "logprobs"
        rollout = ("input_ids", "prompt_mask", old, "finished")
        judged = (*rollout, "rewards", "ref_logprobs", "values")
        weighed = (*judged, "logprobs") if self.correction != "none" else judged
        actor_metrics = (*ACTOR_METRICS, *self.objective_metrics(recomputes=recomputes))
        critic_metrics = (*CRITIC_METRICS, *self.value_metrics())
        actor = "slurmrl.algorithms.policy.actor:ActorInterface"
        critic = "slurmrl.algorithms.policy.critic:CriticInterface"
        ids = ("input_ids",)
        return (
            generate_call(),
            reward_call(),
            *((recompute_call(),) if recomputes else ()),
            Call("ref_inf", "ref", Method.INFERENCE, actor, ids, ("ref_logprobs",)),
            Call("critic_inf", "critic", Method.INFERENCE, critic, ids, ("values",)),
            Call("actor_train", "actor", Method.TRAIN_STEP, actor, weighed, (), actor_metrics),
            Call("critic_train", "critic", Method.TRAIN_STEP, critic, judged, (), critic_metrics),
        )

    def controller(self) -> str:
        return "slurmrl.algorithms.policy.scalars:PolicyScalars"

    def objective_metrics(self, *, recomputes: bool) -> tuple[str, ...]:
        """Metrics of the actor's training that follow from the settings. Where old
        log-probabilities are recomputed, that call compares them with generation's."""
        corrected = ("correction_weight", "correction_masked")
        return (
            *(corrected if self.correction != "none" else ()),
            *(("m2_masked",) if self.m2_threshold is not None else ()),
            *(() if recomputes else MISMATCH_METRICS),
        )

    def value_metrics(self) -> tuple[str, ...]:
        names = ("value_norm_weight", "value_norm_mean", "value_norm_square")
        return () if self.value_norm == "none" else names


def recompute_call() -> Call:
    """The actor's training engine computes the log-probabilities of the completions."""
    return Call(
        name="actor_inf",
        role="actor",
        method=Method.INFERENCE,
        interface="slurmrl.algorithms.policy.actor:RecomputeInterface",
        inputs=("input_ids", "prompt_mask", "logprobs"),
        outputs=(OLD_LOGPROBS,),
        metrics=("logprob_difference_mean", "logprob_difference_max", *MISMATCH_METRICS),
    )

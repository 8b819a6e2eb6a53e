"""Settings of PPO. Torch-free."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slurmrl.algorithms.schema import AlgorithmSchema, generate_call, reward_call
from slurmrl.config.schema import Config, PositiveFloat, PositiveInt, Section
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
OLD_LOGPROBS = "old_logprobs"
"""Key of the log-probabilities that the training engine computed before the updates."""
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class KL(Section):
    """The KL penalty for moving away from the reference model."""

    kind: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps the coefficient; `adaptive` steers the measured KL to `target`."""
    coef: NonNegativeFloat = 0.1
    """Initial coefficient: penalty per token for each nat of log(p/p_ref)."""
    target: PositiveFloat = 6.0
    """Adaptive: target of the mean KL per completion, in nats."""
    horizon: PositiveFloat = 10000.0
    """Adaptive: completions over which the coefficient moves by up to 20 %."""


class PPO(AlgorithmSchema):
    """Proximal policy optimisation: the actor completes prompts, a rule rewards completions, the
    reference model gives the KL penalty, and the critic's values give advantages."""

    name: Literal["ppo"] = "ppo"
    """`ppo`."""
    n_minibatches: PositiveInt = 4
    """Consecutive parts of a batch, of equal numbers of prompts, with one optimizer step each. They
    are the same for every number of ranks."""
    n_epochs: PositiveInt = 1
    """Passes over each batch."""
    kl: KL = KL()
    discount: Fraction = 1.0
    """Discount per token (gamma)."""
    gae_lambda: Fraction = 1.0
    """Weight of longer returns in the advantages (lambda)."""
    clip_ratio: PositiveFloat = 0.2
    """The probability ratio of a token is clipped to the range from 1 - this to 1 + this."""
    value_clip: PositiveFloat | None = 0.2
    """New values are clipped to this distance from the old ones; null does not clip."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the actor's loss."""
    normalize_advantages: bool = True
    """Normalise the advantages to mean 0 and standard deviation 1 over all response tokens of the
    batch."""
    reward_bias: float = 0.0
    """Subtracted from each reward, before scaling."""
    reward_scaling: float = 1.0
    """Factor of each reward, before clipping."""
    reward_clip: PositiveFloat | None = 20.0
    """Rewards are clipped to this magnitude; null does not clip."""
    mask_no_eos_with_zero: bool = False
    """Give completions without a stop token the reward 0 instead of the reward function's score."""
    recompute_logprobs: bool | None = None
    """Compute the old log-probabilities of a batch with the training engine before it is trained
    on, instead of using those of generation. Default: true if the actor computes in bfloat16, in
    which the kernels of generation and training round differently; false in float32."""
    early_stop_importance_ratio: PositiveFloat | None = 5.0
    """If the mean probability ratio of a minibatch's tokens exceeds this, skip its update of the
    actor and all later ones of the step; null disables this."""

    dataset_types: ClassVar[tuple[str, ...]] = ("prompt",)

    @property
    def optimizer_steps(self) -> int:
        return self.n_minibatches * self.n_epochs

    @property
    def minibatches(self) -> int:
        return self.n_minibatches

    def roles(self) -> tuple[RoleUse, ...]:
        return (
            RoleUse("actor", trained=True, head="lm"),
            RoleUse("critic", trained=True, head="value"),
            RoleUse("ref", trained=False, head="lm"),
        )

    def calls(self, config: Config) -> tuple[Call, ...]:
        recomputes = self.recompute_logprobs
        if recomputes is None:
            recomputes = config.actor.dtype == "bfloat16"
        old = OLD_LOGPROBS if recomputes else "logprobs"
        rollout = ("input_ids", "prompt_mask", old, "finished")
        judged = (*rollout, "rewards", "ref_logprobs", "values")
        actor = "slurmrl.algorithms.ppo.actor:PPOActorInterface"
        critic = "slurmrl.algorithms.ppo.critic:PPOCriticInterface"
        ids = ("input_ids",)
        return (
            generate_call(),
            reward_call(),
            *((recompute_call(),) if recomputes else ()),
            Call("ref_inf", "ref", Method.INFERENCE, actor, ids, ("ref_logprobs",)),
            Call("critic_inf", "critic", Method.INFERENCE, critic, ids, ("values",)),
            Call("actor_train", "actor", Method.TRAIN_STEP, actor, judged, (), ACTOR_METRICS),
            Call("critic_train", "critic", Method.TRAIN_STEP, critic, judged, (), CRITIC_METRICS),
        )

    def controller(self) -> str:
        return "slurmrl.algorithms.kl_control:KLController"


def recompute_call() -> Call:
    """The actor's training engine computes the log-probabilities of the completions."""
    return Call(
        name="actor_inf",
        role="actor",
        method=Method.INFERENCE,
        interface="slurmrl.algorithms.ppo.actor:RecomputeInterface",
        inputs=("input_ids", "prompt_mask", "logprobs"),
        outputs=(OLD_LOGPROBS,),
        metrics=("logprob_difference_mean", "logprob_difference_max"),
    )

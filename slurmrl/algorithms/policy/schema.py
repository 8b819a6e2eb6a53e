"""All settings of policy gradients, and the models and calls that they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import model_validator

from slurmrl.algorithms.policy.hyperparameters import (
    OF_COMPLETIONS,
    OF_GROUPS,
    Advantages,
    Correction,
    Filters,
    Objective,
    RewardShaping,
    Updates,
    Value,
    filter_call,
    reject_unused,
)
from slurmrl.algorithms.policy.presets import CHOICES, PRESETS, settings_of, with_defaults
from slurmrl.algorithms.scalars import VALUE_NORM
from slurmrl.algorithms.schema import (
    TURN_REWARDS,
    AlgorithmSchema,
    generate_call,
    reward_calls,
    routes,
    supports,
)
from slurmrl.config.schema import Config
from slurmrl.config.source import KeyPath
from slurmrl.errors import UsageError
from slurmrl.plan.algorithms import PolicyGradientName
from slurmrl.plan.dataflow import REWARD_MODEL, Call, Method, RoleUse
from slurmrl.plan.precision import unlike_training
from slurmrl.registry import near

ACTOR_METRICS = (
    "actor/loss",
    "actor_loss",
    "clip_fraction",
    "importance_ratio",
    "approx_kl_k1",
    "approx_kl",
    "entropy",
    "completions",
    "advantages_mean",
    "advantages_std",
    "early_stop",
    "actor_grad_norm",
    "actor_lr",
    "actor_updates",
    "actor_skipped",
)
KL_METRICS = ("kl", "kl_sequence")
"""Metrics of an actor with a reference model."""
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
REF_LOGPROBS = "ref_logprobs"
"""Key of the reference model's log-probabilities."""
GREEDY = "greedy_"
"""Prefix of the keys of greedy completions."""
ACTOR = "slurmrl.algorithms.policy.actor:ActorInterface"
CRITIC = "slurmrl.algorithms.policy.baselines:CriticInterface"


class PolicyGradient(
    Filters, Correction, Value, Objective, Updates, Advantages, RewardShaping, AlgorithmSchema
):
    """Policy gradients: the actor learns from the advantages of its completions.

    The actor completes prompts, and a reward scores the completions. The models and calls of a step
    follow from the settings.
    """

    name: PolicyGradientName = "ppo"
    """Preset: a table of defaults for the other keys (docs/algorithms.md). `slurmrl plan` prints
    the resulting settings. Example: `grpo`"""

    based_on: ClassVar[str] = "ppo"
    """Preset for users' own algorithms, which are subclasses."""
    dataset_types: ClassVar[tuple[str, ...]] = ("prompt",)
    trains_on_samples: ClassVar[bool] = True
    replays: ClassVar[bool] = True

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if cls.based_on not in PRESETS:
            hint = near(str(cls.based_on), sorted(PRESETS))
            raise UsageError(f"{cls.__name__}.based_on is {cls.based_on!r}, not a preset; {hint}")
        if "replays" not in vars(cls):  # a user's code may compute probabilities differently
            cls.replays = False

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, values: Any) -> Any:
        return with_defaults(values, cls.based_on) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _critic_settings_need_a_critic(self) -> PolicyGradient:
        used = dict.fromkeys(Value.model_fields, self.uses_critic)
        reject_unused(self, used, f"advantage: {self.advantage}")
        return self

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

    @property
    def preset(self) -> Mapping[str, Any]:
        return settings_of(self._preset_name, {key: getattr(self, key) for key in CHOICES})

    @property
    def completions(self) -> int:
        return PRESETS[self._preset_name].completions

    @property
    def _preset_name(self) -> str:
        return self.name if self.name in PRESETS else self.based_on

    @property
    def uses_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def uses_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def penalises_in_loss(self) -> bool:
        """Whether the actor's loss has the KL penalty."""
        return self.uses_reference and self.kl.where == "loss"

    def roles(self) -> tuple[RoleUse, ...]:
        critic = (RoleUse("critic", trained=True, head="value"),)
        ref = (RoleUse("ref", trained=False, head="lm"),)
        return (
            RoleUse("actor", trained=True, head="lm"),
            *(critic if self.uses_critic else ()),
            *(ref if self.uses_reference else ()),
        )

    def why_unused(self, role: str) -> str:
        if role == "critic":
            return f"algorithm.advantage is {self.advantage}; only gae trains a critic"
        if role == "ref":
            return "algorithm.kl.coef is 0, so no KL penalty needs a reference"
        return super().why_unused(role)

    def completed(self, config: Config) -> Self:
        return self.model_copy(update=settled_correction(self, config))

    def notes(self, config: Config) -> Iterator[str]:
        yield from correction_notes(self.completed(config), config)

    def calls(self, config: Config) -> tuple[Call, ...]:
        return self.completed(config)._calls(config)

    def _calls(self, config: Config) -> tuple[Call, ...]:
        recomputes = bool(self.recompute_logprobs)
        greedy = self.advantage == "greedy"
        turns = config.rollout.episode.has_turns and self.advantage not in OF_COMPLETIONS
        supported, routed = supports(self, config), routes(self, config)
        scored = (
            *("input_ids", "prompt_mask", OLD_LOGPROBS if recomputes else "logprobs", "finished"),
            "rewards",
            *((TURN_REWARDS,) if turns else ()),
            *((REF_LOGPROBS,) if self.uses_reference else ()),
            *(("values",) if self.uses_critic else ()),
            *(("greedy_prompt_mask", "greedy_finished", "greedy_rewards") if greedy else ()),
        )
        return (
            generate_call(config, also=(*supported, *routed)),
            *reward_calls(config),
            *((filter_call(),) if self.filters else ()),
            *((greedy_generate_call(config), *greedy_reward_calls(config)) if greedy else ()),
            *((recompute_call((*supported, *routed)),) if recomputes else ()),
            *self._inference_calls(supported),
            *self._training_calls(scored, (*supported, *routed), recomputes=recomputes),
        )

    def _inference_calls(self, supported: tuple[str, ...]) -> Iterator[Call]:
        """Yield the calls in which models other than the actor process the completions."""
        ids = ("input_ids",)
        if self.uses_reference:
            inputs = (*ids, *supported)
            yield Call("ref_inf", "ref", Method.INFERENCE, ACTOR, inputs, (REF_LOGPROBS,))
        if self.uses_critic:
            yield Call("critic_inf", "critic", Method.INFERENCE, CRITIC, ids, ("values",))

    def _training_calls(
        self, scored: tuple[str, ...], recorded: tuple[str, ...], *, recomputes: bool
    ) -> Iterator[Call]:
        train = Method.TRAIN_STEP
        weighed = (*scored, *recorded, *(("logprobs",) if self.compares else ()))
        metrics = (*ACTOR_METRICS, *self.objective_metrics(recomputes=recomputes))
        yield Call("actor_train", "actor", train, ACTOR, weighed, (), metrics)
        if self.uses_critic:
            metrics = (*CRITIC_METRICS, *self.value_metrics())
            yield Call("critic_train", "critic", train, CRITIC, scored, (), metrics)

    def conflicts(self, config: Config) -> Iterator[tuple[KeyPath, str]]:
        """Yield settings of different sections that exclude each other."""
        limit = config.rollout.most_written
        if self.overlong_buffer is not None and self.overlong_buffer > limit:
            whole = "the tokens that the policy may write in an episode"
            whole = whole if config.rollout.episode.has_turns else "rollout.max_new_tokens"
            message = f"{self.overlong_buffer} is not allowed: it exceeds {whole} ({limit})"
            yield ("algorithm", "overlong_buffer"), message
        if self.n_minibatches > self.batch_size:
            message = (
                f"{self.n_minibatches} is not allowed: a minibatch has at least one of the "
                f"{self.batch_size} prompts of batch_size"
            )
            yield ("algorithm", "n_minibatches"), message
        groups = {
            "zero_variance: drop": self.zero_variance == "drop",
            f"advantage: {self.advantage}": self.advantage in OF_GROUPS,
            f"advantage_std: {self.advantage_std}": self.advantage_std == "group",
        }
        users = [f"algorithm.{setting}" for setting, compares in groups.items() if compares]
        if users and config.rollout.n == 1:
            message = (
                f"1 is not allowed with {users[0]}, which compares completions of the same prompt; "
                "use 2 or more"
            )
            yield ("rollout", "n"), message

    def controller(self) -> str:
        return "slurmrl.algorithms.scalars:PolicyScalars"

    def objective_metrics(self, *, recomputes: bool) -> tuple[str, ...]:
        """Return the metrics of the actor's training that depend on the settings.

        With ``recomputes``, the call that recomputes log-probabilities reports the mismatch.
        """
        corrected = ("correction_weight", "correction_masked")
        return (
            "kl_coef",
            *(KL_METRICS if self.uses_reference else ()),
            *(("kl_loss",) if self.penalises_in_loss else ()),
            *(corrected if self.compares else ()),
            *(("m2_masked",) if self.m2_threshold is not None else ()),
            *(() if recomputes else MISMATCH_METRICS),
        )

    def value_metrics(self) -> tuple[str, ...]:
        return () if self.value_norm == "none" else VALUE_NORM


def recompute_call(recorded: tuple[str, ...] = ()) -> Call:
    """Return the call in which the actor's training engine recomputes log-probabilities."""
    return Call(
        name="actor_inf",
        role="actor",
        method=Method.INFERENCE,
        interface="slurmrl.algorithms.policy.actor:RecomputeInterface",
        inputs=("input_ids", "prompt_mask", "logprobs", *recorded),
        outputs=(OLD_LOGPROBS,),
        metrics=("logprob_difference_mean", "logprob_difference_max", *MISMATCH_METRICS),
    )


def greedy_generate_call(config: Config) -> Call:
    """Return the call in which the actor completes each prompt once more, without sampling."""
    turns = (GREEDY + TURN_REWARDS,) if config.rollout.episode.has_turns else ()
    return Call(
        name="greedy_gen",
        role="actor",
        method=Method.GENERATE,
        interface="slurmrl.algorithms.policy.baselines:GreedyRolloutInterface",
        inputs=("prompt_ids",),
        outputs=("greedy_input_ids", "greedy_prompt_mask", "greedy_finished", *turns),
        metrics=("greedy_response_length",),
    )


def greedy_reward_calls(config: Config) -> tuple[Call, ...]:
    """Return the calls that score greedy completions: a reward model's call, if any, and rules."""
    turns = (GREEDY + TURN_REWARDS,) if config.rollout.episode.has_turns else ()
    scoring = Call(
        name="greedy_reward_inf",
        role=None,
        method=Method.INFERENCE,
        interface="slurmrl.algorithms.policy.baselines:GreedyRewardInterface",
        inputs=("greedy_input_ids", "greedy_prompt_mask", "greedy_finished", *turns),
        outputs=("greedy_rewards",),
        metrics=("greedy_reward",),
    )
    if config.reward is None or not config.reward.uses_model:
        return (scoring,)
    scores = Call(
        name="greedy_reward_model_inf",
        role=REWARD_MODEL,
        method=Method.INFERENCE,
        interface="slurmrl.algorithms.policy.baselines:GreedyScoresInterface",
        inputs=("greedy_input_ids", "greedy_prompt_mask"),
        outputs=("greedy_model_scores",),
    )
    return (scores, replace(scoring, inputs=(*scoring.inputs, "greedy_model_scores")))


def settled_correction(settings: Correction, config: Config) -> dict[str, Any]:
    """Return the values of `recompute_logprobs` and `correction`, with their computed defaults."""
    stale, unlike = bool(_staleness(config)), bool(unlike_training(config))
    recomputes, correction = settings.recompute_logprobs, settings.correction
    if recomputes is None:
        if settings.compares:
            recomputes = True
        elif stale or (unlike and correction == "none"):
            recomputes = False
        else:
            recomputes = unlike or config.actor.dtype == "bfloat16"
    if correction is None:
        correction = "truncate" if recomputes and (stale or unlike) else "none"
    return {"recompute_logprobs": recomputes, "correction": correction}


def correction_notes(settings: Correction, config: Config) -> Iterator[str]:
    """Yield notes, with reasons, on settings that correct for stale or imprecise completions.

    ``settings`` are the result of `settled_correction`.
    """
    reasons = [reason for reason in (_staleness(config), unlike_training(config)) if reason]
    if not reasons:
        return
    because = " and ".join(reasons)
    if settings.corrects:
        yield (
            f"algorithm.correction {settings.correction}: importance weights correct for the "
            f"policy that sampled the tokens, because {because}"
        )
    elif not settings.recompute_logprobs:
        yield (
            "algorithm.recompute_logprobs false: ratios compare with the policy that sampled the "
            f"tokens, because {because}"
        )
    else:
        yield (
            "wrong gradients: algorithm.recompute_logprobs true with correction none trains "
            f"completions as if the present policy had sampled them, but {because}; set "
            "algorithm.correction, or recompute_logprobs to false"
        )


def _staleness(config: Config) -> str:
    """Return how old completions may be; empty if they always come from the current weights."""
    tasks = config.rollout.tasks
    if tasks is None or not tasks.max_staleness:
        return ""
    steps = "1 step" if tasks.max_staleness == 1 else f"{tasks.max_staleness} steps"
    return f"completions may be {steps} old (rollout.tasks.max_staleness)"

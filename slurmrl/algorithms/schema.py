"""Base class of all algorithms' settings. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from slurmrl.config.schema import Config, PositiveInt, Section
from slurmrl.config.source import KeyPath
from slurmrl.data.meta import EXPERTS, IDS, SIZES
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.dataflow import (
    REWARD_MODEL,
    Call,
    Measure,
    Method,
    Record,
    Refill,
    RoleUse,
    Summary,
)
from slurmrl.plan.metric_names import UNSCORED

ROLLOUT = "slurmrl.algorithms.rollout_calls:RolloutInterface"
REFERENCE = "slurmrl.algorithms.sequences:ReferenceInterface"
MODEL_SCORES = "slurmrl.algorithms.reward_model:ScoresInterface"
PAIR_SCORES = "slurmrl.algorithms.reward_model:PairScoresInterface"
RULE_REWARD = "slurmrl.algorithms.rule_reward:RuleRewardInterface"
TURN_REWARDS = "turn_rewards"
"""Key of the rewards of an episode's turns, at the last token of each turn; other tokens have 0."""
EPISODE_METRICS = ("turns", "context_length", "episode_failed")
"""Metrics of episodes that may have several turns."""
TOOL_METRICS = ("tool_calls", "tool_failed")


class AlgorithmSchema(Section, ABC):
    """Settings of an algorithm; a subclass adds its ``name`` and its hyperparameters."""

    name: str
    """Name of the algorithm; `module:Class` for your own."""
    batch_size: PositiveInt
    """Number of prompts, or other items of the dataset, in one step on all ranks. Example: `64`"""

    dataset_types: ClassVar[tuple[str, ...]]
    """Types of training dataset that the algorithm accepts."""

    evaluation_types: ClassVar[tuple[str, ...]] = ("prompt",)
    """Types of held-out dataset that the algorithm can evaluate."""

    trains_on_samples: ClassVar[bool] = False
    """Whether losses need tokens sampled with the models' probabilities. If true, top-k and top-p
    are allowed only for an algorithm that ``replays`` sampling masks."""

    replays: ClassVar[bool] = False
    """Whether log-probabilities of all models use generation's sampling masks, and the actor uses
    the experts that generation has recorded."""

    one_pass: ClassVar[bool] = False
    """Whether a run passes over the dataset once, item by item. If true, `total_steps` is only an
    upper bound."""

    @property
    def preset(self) -> Mapping[str, Any]:
        """The defaults that ``name`` sets."""
        return {}

    @property
    def completions(self) -> int:
        """Default of ``rollout.n``."""
        return 1

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of each trained model in a step of the run."""
        return 1

    def completed(self, config: Config) -> Self:
        """Return the settings with defaults that depend on other parts of the configuration."""
        return self

    def untrained_steps(self, role: str) -> int:
        """Return the number of steps at the start of a run in which a role is not trained yet."""
        return 0

    @property
    def epochs(self) -> int:
        """Number of passes of each trained model over a batch."""
        return self.optimizer_steps // self.minibatches

    @property
    def minibatches(self) -> int:
        """Number of equal consecutive parts of a batch, each for one optimizer step."""
        return 1

    def sequences_per_item(self, config: Config) -> int:
        """Return the number of sequences of an item in training: the completions of a prompt."""
        generates = any(call.method == Method.GENERATE for call in self.calls(config))
        return config.rollout.n if generates else 1

    @abstractmethod
    def roles(self) -> tuple[RoleUse, ...]:
        """Return the models that the algorithm uses."""

    def why_unused(self, role: str) -> str:
        """Return the reason why these settings do not use a model, for a message."""
        if role == REWARD_MODEL:
            return "only a reward named 'model' that scores completions uses it"
        return f"algorithm {getattr(self, 'name', type(self).__name__)} does not use this model"

    @abstractmethod
    def calls(self, config: Config) -> tuple[Call, ...]:
        """Return the calls of one step."""

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        """Return the calls that complete held-out prompts and score the completions."""
        return (generate_call(config), *reward_calls(config))

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        """Return a mapping from each metric of an evaluation to its kind.

        The metrics come from the scores of the items (`CallResult.records`). A metric is reported
        as ``eval/<name>``, and the ends of its confidence interval with ``/low`` and ``/high``. The
        default is the metrics of scored completions. ``config.evaluation`` is set.
        """
        evaluation = config.evaluation
        assert evaluation is not None, "the caller evaluates"
        if not any("rewards" in call.outputs for call in self.evaluation_calls(config)):
            return {}
        rates = dict.fromkeys(evaluation.rates, Measure.RATE)
        return {"reward": Measure.REWARD, **rates}

    def conflicts(self, config: Config) -> Iterable[tuple[KeyPath, str]]:
        """Return the key and the message of each setting that this algorithm excludes.

        The settings can be anywhere in the configuration.
        """
        return ()

    def notes(self, config: Config) -> Iterable[str]:
        """Return notes about features that these settings lack, with the settings that add them."""
        return ()

    def summarize(self, config: Config, records: Iterable[Record]) -> Summary | None:
        """Return a summary of the lines of the trial's results, or None.

        The summary is written next to the results and into the metrics of the last step.
        """
        return None

    def refill(self) -> Refill:
        """Return how a step fills its batch if its calls contain a filter."""
        return Refill()

    def controller(self) -> str:
        """Return ``module:Class`` of the ScalarController. The argument is this schema."""
        return "slurmrl.algorithms.scalars:NoScalars"


def train_call(interface: str, inputs: tuple[str, ...], metrics: tuple[str, ...] = ()) -> Call:
    """Return the call that updates the actor; ``metrics`` are added to its standard metrics."""
    return Call(
        name="actor_train",
        role="actor",
        method=Method.TRAIN_STEP,
        interface=interface,
        inputs=inputs,
        metrics=("loss", *metrics, "grad_norm", "lr", "skipped"),
    )


def compare_call(interface: str, inputs: tuple[str, ...], metrics: tuple[str, ...]) -> Call:
    """Return the call for the actor's loss and ``metrics`` on held-out answers."""
    return Call(
        name="actor_compare",
        role="actor",
        method=Method.INFERENCE,
        interface=interface,
        inputs=inputs,
        metrics=("loss", *metrics),
    )


def sequences_of_pairs(config: Config) -> int:
    """Return the number of sequences of a prompt's pairs; without a limit, assume one pair."""
    return 2 * (config.dataset.max_pairs_per_prompt or 1)


def reference_call() -> Call:
    """Return the call for the reference model's log-probabilities of whole answers."""
    return Call(
        name="ref_inf",
        role="ref",
        method=Method.INFERENCE,
        interface=REFERENCE,
        inputs=("input_ids", "prompt_mask"),
        outputs=("ref_logps",),
    )


def supports(algorithm: Algorithm, config: Config) -> tuple[str, ...]:
    """Return the keys of sampling masks; () if generation for training does not record them."""
    restricted = config.rollout.top_k is not None and not config.rollout.greedy
    return (SIZES, IDS) if restricted and algorithm.replays else ()


def routes(algorithm: Algorithm, config: Config) -> tuple[str, ...]:
    """Return the key of the tokens' experts; () if generation for training does not record them."""
    return (EXPERTS,) if config.rollout.replay_experts and algorithm.replays else ()


def generate_call(config: Config, *, also: tuple[str, ...] = ()) -> Call:
    """Return the call in which the actor completes prompts.

    ``prompt_mask`` is True on all tokens that the actor did not write. ``also`` are further
    outputs, such as the keys of `supports`.
    """
    turns = config.rollout.episode.has_turns
    return Call(
        name="actor_gen",
        role="actor",
        method=Method.GENERATE,
        interface=ROLLOUT,
        inputs=("prompt_ids",),
        outputs=(
            *("input_ids", "prompt_mask", "logprobs", "finished"),
            *((TURN_REWARDS,) if turns else ()),
            *also,
        ),
        metrics=(
            *("response_length", "prompt_length", "finished"),
            *(EPISODE_METRICS if turns else ()),
            *(TOOL_METRICS if config.rollout.episode.tools else ()),
        ),
    )


def reward_calls(config: Config) -> tuple[Call, ...]:
    """Return the calls that score completions: the reward model's call, if any, and the rules."""
    scoring = reward_call(config)
    if config.reward is None or not config.reward.uses_model:
        return (scoring,)
    scores = Call(
        name="reward_model_inf",
        role=REWARD_MODEL,
        method=Method.INFERENCE,
        interface=MODEL_SCORES,
        inputs=("input_ids", "prompt_mask"),
        outputs=("model_scores",),
        metrics=("model_score",),
    )
    return (scores, replace(scoring, inputs=(*scoring.inputs, "model_scores")))


def reward_call(config: Config) -> Call:
    """Return the call in which rules score completions, from the metadata of the items.

    The rewards of an episode's turns are part of the reward.
    """
    turns = (TURN_REWARDS,) if config.rollout.episode.has_turns else ()
    return Call(
        name="reward_inf",
        role=None,
        method=Method.INFERENCE,
        interface=RULE_REWARD,
        inputs=("input_ids", "prompt_mask", "finished", *turns),
        outputs=("rewards",),
        metrics=("reward", "reward_unjudged", UNSCORED),
    )

"""The algorithms. A new one is two modules in ``slurmrl/algorithms`` and one line here.

An algorithm's schema is a config section that also declares which models it uses and which calls
it makes. Schemas are torch-free; implementations are separate modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, Protocol, Self, TypeAlias, get_args

from slurmrl.config.schema import Config
from slurmrl.config.source import KeyPath
from slurmrl.plan.dataflow import REWARD_MODEL, Call, Measure, Record, Refill, RoleUse, Summary
from slurmrl.registry import Registry

PolicyGradientName: TypeAlias = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "remax",
    "reinforce_pp",
    "gspo",
    "cispo",
    "sapo",
    "lite_ppo",
    "m2po",
]
"""Names for sets of defaults of the same algorithm."""
POLICY_GRADIENTS: Final[tuple[PolicyGradientName, ...]] = get_args(PolicyGradientName)
ALGORITHMS = Registry(
    "algorithm",
    {
        "sft": "slurmrl.algorithms.supervised_schema:SFT",
        **dict.fromkeys(POLICY_GRADIENTS, "slurmrl.algorithms.policy.schema:PolicyGradient"),
        "dpo": "slurmrl.algorithms.preference_schema:DPO",
        "kto": "slurmrl.algorithms.preference_schema:KTO",
        "distill": "slurmrl.algorithms.supervised_schema:Distill",
        "reward_model": "slurmrl.algorithms.preference_schema:RewardModel",
        "generate": "slurmrl.algorithms.offline_schema:Generate",
        "evaluate": "slurmrl.algorithms.offline_schema:Evaluate",
    },
)


def uses_of(config: Config, algorithm: Algorithm) -> tuple[RoleUse, ...]:
    """The models of a trial: the algorithm's models, and the reward model if a call uses it."""
    calls = list(all_calls(config, algorithm))
    if all(call.role != REWARD_MODEL for call in calls):
        return algorithm.roles()
    return (*algorithm.roles(), RoleUse(REWARD_MODEL, trained=False, head="value"))


def all_calls(config: Config, algorithm: Algorithm) -> Iterator[Call]:
    """Yield the calls by the trainers, in a step and in the evaluation of each suite.

    Some calls come more than once.
    """
    yield from algorithm.calls(config)
    for own in config.evaluations.values() if config.trainers_evaluate else ():
        yield from algorithm.evaluation_calls(own)


class Algorithm(Protocol):
    """Parts of an algorithm's schema that the plan and the master need."""

    dataset_types: ClassVar[tuple[str, ...]]
    """Types of training dataset that it accepts."""
    evaluation_types: ClassVar[tuple[str, ...]]
    """Types of held-out dataset that it can evaluate."""

    trains_on_samples: ClassVar[bool]
    """Whether losses assume that tokens were sampled with the probabilities that they compute.
    Then sampling may not be restricted to a part of the vocabulary, unless it ``replays`` the
    recorded sampling masks."""

    replays: ClassVar[bool]
    """Whether all models compute log-probabilities under the part of the vocabulary that generation
    has recorded for each token, and the actor with the recorded experts."""

    one_pass: ClassVar[bool]
    """Whether a run goes over the dataset once, item by item."""

    @property
    def name(self) -> str: ...

    @property
    def preset(self) -> Mapping[str, Any]:
        """Defaults of settings that follow from ``name``."""
        ...

    @property
    def completions(self) -> int:
        """Default of ``rollout.n``."""
        ...

    @property
    def batch_size(self) -> int:
        """Dataset items of one step."""
        ...

    def completed(self, config: Config) -> Self:
        """Return the settings with defaults that depend on other parts of the configuration."""
        ...

    def roles(self) -> tuple[RoleUse, ...]:
        """The models that it uses with these settings."""
        ...

    def why_unused(self, role: str) -> str:
        """Why it does not use a model with these settings, and which setting would use it."""
        ...

    def calls(self, config: Config) -> tuple[Call, ...]:
        """The calls of a training step."""
        ...

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        """The calls of an evaluation."""
        ...

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        """Return how the scores of an evaluation's items become metrics, by the metrics' names."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of each trained model in one step."""
        ...

    def untrained_steps(self, role: str) -> int:
        """Steps at the start of a run in which a trained role is not trained yet."""
        ...

    @property
    def epochs(self) -> int:
        """Passes of each trained model over a batch."""
        ...

    def sequences_per_item(self, config: Config) -> int:
        """Sequences that an item has in training: the completions of a prompt."""
        ...

    @property
    def minibatches(self) -> int:
        """Consecutive parts of a batch, one for each optimizer step."""
        ...

    def conflicts(self, config: Config) -> Iterable[tuple[KeyPath, str]]:
        """Return settings anywhere in the configuration that this algorithm excludes together.

        Each has its key and the message.
        """
        ...

    def notes(self, config: Config) -> Iterable[str]:
        """Parts that the run leaves out with these settings, for people."""
        ...

    def summarize(self, config: Config, records: Iterable[Record]) -> Summary | None:
        """Summary of the lines of the trial's results; None: there is none."""
        ...

    def refill(self) -> Refill:
        """Return how a step fills its batch if its calls contain a filter."""
        ...

    def controller(self) -> str:
        """``module:Class`` of the scalars that the master keeps for it."""
        ...

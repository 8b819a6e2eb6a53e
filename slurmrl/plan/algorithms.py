"""The table of algorithms, and the interface of their schemas.

An algorithm's schema is a section of the configuration that also declares the models and the calls
of the algorithm. Schemas do not import torch; implementations are separate modules. To add an
algorithm, add both modules to ``slurmrl/algorithms`` and a line here.
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
"""Names of variants of one algorithm, which differ in their defaults."""
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
    """Return the models of a trial: the algorithm's models, and the reward model if it is used."""
    calls = list(all_calls(config, algorithm))
    if all(call.role != REWARD_MODEL for call in calls):
        return algorithm.roles()
    return (*algorithm.roles(), RoleUse(REWARD_MODEL, trained=False, head="value"))


def all_calls(config: Config, algorithm: Algorithm) -> Iterator[Call]:
    """Yield the trainers' calls in a step and in the evaluation of each suite.

    The result may contain a call more than once.
    """
    yield from algorithm.calls(config)
    for own in config.evaluations.values() if config.trainers_evaluate else ():
        yield from algorithm.evaluation_calls(own)


class Algorithm(Protocol):
    """The interface of an algorithm's schema that the plan and the master need."""

    dataset_types: ClassVar[tuple[str, ...]]
    """Types of training dataset that the algorithm accepts."""
    evaluation_types: ClassVar[tuple[str, ...]]
    """Types of held-out dataset that the algorithm can evaluate."""

    trains_on_samples: ClassVar[bool]
    """Whether the losses need tokens that were sampled from the models' distributions. Sampling
    masks are then allowed only if the algorithm ``replays`` them."""

    replays: ClassVar[bool]
    """Whether log-probabilities of all models use the recorded sampling masks, and the actor uses
    the recorded experts."""

    one_pass: ClassVar[bool]
    """Whether a run processes the dataset once, item by item."""

    @property
    def name(self) -> str: ...

    @property
    def preset(self) -> Mapping[str, Any]:
        """Defaults of settings that depend on ``name``."""
        ...

    @property
    def completions(self) -> int:
        """Default of ``rollout.n``, the number of completions of a prompt."""
        ...

    @property
    def batch_size(self) -> int:
        """Return the number of dataset items in one step."""
        ...

    def completed(self, config: Config) -> Self:
        """Return the settings with defaults that depend on other parts of the configuration."""
        ...

    def roles(self) -> tuple[RoleUse, ...]:
        """Return the models that the algorithm uses with these settings."""
        ...

    def why_unused(self, role: str) -> str:
        """Return why the algorithm does not use a model, and the setting that would change this."""
        ...

    def calls(self, config: Config) -> tuple[Call, ...]:
        """Return the calls of a training step."""
        ...

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        """Return the calls of an evaluation."""
        ...

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        """Return a mapping from each metric of an evaluation to its measure."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of each trained model in one step."""
        ...

    def untrained_steps(self, role: str) -> int:
        """Return the number of steps at the start of a run that do not train a trained role yet."""
        ...

    @property
    def epochs(self) -> int:
        """Number of passes of each trained model over a batch."""
        ...

    def sequences_per_item(self, config: Config) -> int:
        """Return the number of sequences of an item in training, such as a prompt's completions."""
        ...

    @property
    def minibatches(self) -> int:
        """Number of parts of a batch; each part has one optimizer step."""
        ...

    def conflicts(self, config: Config) -> Iterable[tuple[KeyPath, str]]:
        """Return key and message of each setting of the configuration that is not allowed."""
        ...

    def notes(self, config: Config) -> Iterable[str]:
        """Return sentences for the user about parts of the run that these settings disable."""
        ...

    def summarize(self, config: Config, records: Iterable[Record]) -> Summary | None:
        """Return the summary of the trial's results from their lines; None without a summary."""
        ...

    def refill(self) -> Refill:
        """Return the way in which a step fills its batch if a call filters completions."""
        ...

    def controller(self) -> str:
        """Return ``module:Class`` of the scalars that the master keeps for the algorithm."""
        ...

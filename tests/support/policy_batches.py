"""Random batches of policy gradients, in the form of ranks and for loops over single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch

from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.data.sample import SequenceSample
from tests.support.policy_reference import Completion, Prompt

VOCABULARY = 7


@dataclass
class Batch:
    prompts: list[Prompt]
    sample: SequenceSample

    @staticmethod
    def draw(
        algorithm: PolicyGradient,
        random: Random,
        actor: torch.Tensor,
        temperature: float,
        limit: int,
    ) -> Batch:
        """Sample groups of different sizes with failed episodes and, in some batches, many turns.

        At least one completion is finished. ``actor`` [V, V] has the logits by the previous token;
        completions have up to ``limit`` tokens.
        """
        turns = random.random() < 0.5
        table = (actor / temperature).log_softmax(-1).tolist()

        def draw() -> Completion:
            return completion(random, table, limit, turns=turns)

        prompts = [
            Prompt(
                f"item{item}",
                [draw() for _ in range(random.choice((1, 2, 3, 4)))],
                draw() if algorithm.advantage == "greedy" else None,
            )
            for item in range(random.randint(3, 7))
        ]
        prompts[0].completions[0] = first = completion(random, table, limit, turns=turns, fails=0.0)
        first.finished = True
        return Batch(prompts, sample_of(prompts, algorithm))


def completion(
    random: Random, table: Sequence[Sequence[float]], limit: int, *, turns: bool, fails: float = 0.1
) -> Completion:
    """Return a completion of some turns. A failed episode has only a prompt."""
    read = [True] * random.randint(1, 3)
    if random.random() >= fails:
        read += [turns and random.random() < 0.3 for _ in range(random.randint(0, limit - 1))]
        read.append(False)
    ids = [random.randrange(VOCABULARY) for _ in read]
    own = [0.0, *(table[before][after] for before, after in pairwise(ids))]

    def noisy(scale: float) -> list[float]:
        return [0.0, *(value + random.gauss(0.0, scale) for value in own[1:])]

    return Completion(
        ids,
        read,
        behavior=noisy(0.3),
        recomputed=own,
        reference=noisy(0.5),
        values=[random.gauss(0.0, 1.0) for _ in ids],
        turns=[random.choice((0.0, 0.5)) * (not mine) for mine in read] if turns else None,
        reward=random.choice((0.0, 0.0, 1.0, 0.25)),
        finished=random.random() < 0.7,
    )


def sample_of(prompts: Sequence[Prompt], algorithm: PolicyGradient) -> SequenceSample:
    """Return the keys that training reads."""
    completions = [each for prompt in prompts for each in prompt.completions]
    names = {
        "input_ids": "ids",
        "prompt_mask": "read",
        "logprobs": "behavior",
        **({"ref_logprobs": "reference"} if algorithm.uses_reference else {}),
        **({"values": "values"} if algorithm.uses_critic else {}),
    }
    if completions[0].turns is not None and algorithm.advantage in ("gae", "greedy", "none"):
        names["turn_rewards"] = "turns"
    data = {
        key: _tensor([x for each in completions for x in getattr(each, name)])
        for key, name in names.items()
    }
    sample = SequenceSample.grouped(
        [[len(each.ids) for each in prompt.completions] for prompt in prompts],
        [prompt.name for prompt in prompts],
        data,
        per_sequence=_judged(completions),
    )
    greedy = [prompt.greedy for prompt in prompts if prompt.greedy is not None]
    if greedy:
        read = torch.tensor([x for each in greedy for x in each.read])
        judged = _judged(greedy)
        sample.update_(
            SequenceSample.from_default(
                [len(each.read) for each in greedy],
                sample.ids,
                {"greedy_prompt_mask": read},
                per_sequence={f"greedy_{name}": value for name, value in judged.items()},
            )
        )
    return sample


def _judged(completions: Sequence[Completion]) -> dict[str, torch.Tensor]:
    return {
        "rewards": _tensor([each.reward for each in completions]),
        "finished": torch.tensor([each.finished for each in completions]),
    }


def _tensor(values: Sequence[float]) -> torch.Tensor:
    """Return a tensor in float64, or in an integer type for tokens and bits."""
    return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)

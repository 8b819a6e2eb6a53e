"""Episodes on ranks that share the prompts or the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.config.schema import Dataset, EpisodeSettings, Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import load_tokenizer
from tests.distributed.engines.cases import ARCHITECTURE, Setup, make, model
from tests.pool import RankPool
from tests.unit.algorithms.test_algorithms_episodes import OWN, TOKENIZER, prompts

HERE = "tests.distributed.algorithms.test_algorithms_episodes_ranks"
IDS = ["a", "bb", "ccc", "dddd", "x"]


def episodes(setup: Setup, name: str) -> dict[str, Any] | None:
    """The keys of each item that this rank made; None on a rank that follows its leader."""
    engine: Any = make(setup)
    share = [IDS[place] for place in setup.split[engine.context.dp_rank]]
    rollout = Rollout(
        n=2, max_new_tokens=6, episode=EpisodeSettings(name=name, options={"message": "4"})
    )
    dataset = Dataset(type="prompt", path="unused")
    config = SimpleNamespace(rollout=rollout, evaluation=None, dataset=dataset)
    settings: Any = SimpleNamespace(config=config, algorithm=PolicyGradient(batch_size=5))
    tokenizer = load_tokenizer(TOKENIZER)
    context = CallContext(3, 1, {}, tokenizer, settings, (1,), tuple(IDS))
    sample = prompts(share) if share else prompts(["none"]).take([])
    made = RolloutInterface().generate(engine, sample, context).sample
    return None if made is None else _by_item(made)


def _by_item(made: SequenceSample) -> dict[str, Any]:
    keys = ("input_ids", "prompt_mask", "finished", "turn_rewards", "logprobs")
    return {
        name: {key: made.take([place]).tensor(key).tolist() for key in keys}
        for place, name in enumerate(made.ids)
    }


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        pytest.param({"dp": 2}, [[0, 1, 2, 3, 4], []], id="d2-all-on-one"),
        pytest.param({"dp": 2}, [[0, 2], [1, 3, 4]], id="d2"),
        pytest.param({"dp": 1, "tp": 2}, [[0, 1, 2, 3, 4]], id="t2"),
        pytest.param({"dp": 2, "tp": 2}, [[0, 2], [1, 3, 4]], id="d2t2"),
        pytest.param({"dp": 2, "tp": 2}, [[0, 1, 2, 3, 4], []], id="d2t2-all-on-one"),
    ],
)
def test_episodes_do_not_depend_on_the_number_of_ranks(
    ranks: RankPool, sizes: dict[str, int], split: list[list[int]]
) -> None:
    """Also covers a rank without a prompt, and ranks of a model on which only the leader runs
    tools.
    """
    settings = model(architecture={**ARCHITECTURE, "vocab_size": 34, "hidden_size": 24})
    (alone,) = ranks(
        1, f"{HERE}:episodes", Setup(model=settings, split=[range(5)]), f"{OWN}:several"
    )
    setup = Setup(model=settings, sizes=sizes, split=split)
    results = ranks(setup.ranks, f"{HERE}:episodes", setup, f"{OWN}:several")
    leaders = [not rank % sizes.get("tp", 1) for rank in range(setup.ranks)]
    assert [result is not None for result in results] == leaders
    found = {name: item for result in results for name, item in (result or {}).items()}
    assert found.keys() == alone.keys() == set(IDS)
    for name, item in alone.items():
        logprobs, wanted = (torch.tensor(each.pop("logprobs")) for each in (found[name], item))
        torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=1e-4)
        assert found[name] == item

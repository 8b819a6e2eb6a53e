"""Tests of the records of generate and evaluate, and of their summary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.offline import CompletionRecords, LikelihoodRecords, PairRecords
from slurmrl.algorithms.summaries import (
    mean,
    of_completions,
    of_likelihood,
    of_preferences,
    rate,
    ratio,
    summarize,
)
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import ConfigError, UsageError
from slurmrl.plan.dataflow import Estimate, Measure
from slurmrl.plan.settings import Settings, load_settings
from tests.support.trials import ARCHITECTURE

PAIRS = [{"id": "b", "chosen": [2.0], "rejected": [1.0]}]
EXAMPLES = Path(__file__).parents[3] / "examples"


class Letters:
    """A tokenizer: token 1 is "a", token 2 is "b", and so on. Token 0 ends a completion."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(96 + each) for each in ids)


def context(settings: Any = None) -> CallContext:
    letters: Any = Letters()
    return CallContext(1, 1, {}, letters, settings, (0,), ("p@0", "q@0"))


@pytest.fixture
def completions() -> SequenceSample:
    """Return two completions for each of two prompts of one token."""
    lengths = [[3, 2], [2, 4]]
    return SequenceSample(
        ("p@0", "q@0"),
        {"input_ids": lengths, "prompt_mask": lengths, "logprobs": lengths}
        | {"finished": [[1, 1], [1, 1]], "rewards": [[1, 1], [1, 1]]},
        {"prompt": ["P", "Q"], "answer": ["a", ""]},
        {
            "input_ids": torch.tensor([9, 1, 0, 9, 2, 9, 3, 9, 1, 2, 0]),
            "prompt_mask": torch.tensor([1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0]).bool(),
            "logprobs": torch.tensor([0, -1.0, -2, 0, -3, 0, -4, 0, -5, -6, -7]),
            "finished": torch.tensor([True, False, False, True]),
            "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0]),
        },
    )


def test_record_of_a_prompt_holds_all_its_completions(completions: SequenceSample) -> None:
    """Texts omit the stop token. Token ids contain it, with its log-probability."""
    records = CompletionRecords().record(None, completions, context()).records
    ended = {"text": "a", "tokens": 2, "finished": True, "reward": 1.0}
    cut = {"text": "b", "tokens": 1, "finished": False, "reward": 0.0}
    assert records["p@0"] == {
        "id": "p",
        "prompt": "P",
        "answer": "a",
        "completions": [
            {**ended, "token_ids": [1, 0], "logprobs": [-1.0, -2.0]},
            {**cut, "token_ids": [2], "logprobs": [-3.0]},
        ],
    }
    assert "answer" not in records["q@0"], "the dataset has none"
    assert [each["text"] for each in records["q@0"]["completions"]] == ["c", "ab"]


def test_an_episode_is_recorded_with_its_turns() -> None:
    lengths = [[6, 1]]
    packed = ("input_ids", "prompt_mask", "logprobs", "turn_rewards")
    sample = SequenceSample(
        ("p@0",),
        dict.fromkeys(packed, lengths) | {"finished": [[1, 1]], "rewards": [[1, 1]]},
        {"prompt": ["P"], "answer": [""]},
        {
            "input_ids": torch.tensor([9, 1, 8, 7, 2, 0, 9]),
            "prompt_mask": torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool(),
            "logprobs": torch.tensor([0, -1.0, 0, 0, -2, -3, 0]),
            "turn_rewards": torch.tensor([0, 0.5, 0, 0, 0, 1, 0]),
            "finished": torch.tensor([True, False]),
            "rewards": torch.tensor([1.5, 0.0]),
        },
    )
    letters: Any = type("Text", (), {"decode": lambda self, ids, **_: str(ids)})()
    two = CallContext(1, 1, {}, letters, None, (0,), ("p@0",))  # type: ignore[arg-type]
    first, failed = CompletionRecords().record(None, sample, two).records["p@0"]["completions"]
    assert first == {
        "text": "[2]",
        "tokens": 3,
        "finished": True,
        "reward": 1.5,
        "turns": [
            {"wrote": "[1]", "reward": 0.5},
            {"read": "[8, 7]"},
            {"wrote": "[2, 0]", "reward": 1.0},
        ],
        "token_ids": [1, 8, 7, 2, 0],
        "logprobs": [-1.0, 0.0, 0.0, -2.0, -3.0],
        "sampled": [True, False, False, True, True],
    }
    assert (failed["tokens"], failed["token_ids"], failed["turns"]) == (0, [], [])


def test_completions_are_recorded_only_if_requested(completions: SequenceSample) -> None:
    sample = completions.only(["input_ids", "prompt_mask", "finished"])
    records = CompletionRecords().record(None, sample, context()).records
    assert records["p@0"]["completions"][0] == {"text": "a", "tokens": 2, "finished": True}


def test_pairs_and_likelihoods_are_recorded_by_item() -> None:
    lengths = [[3, 2, 2, 2], [2, 4]]
    ones = [[1] * 4, [1] * 2]
    scores = torch.tensor([1.0, 0.5, 2, 3, -1, -2])
    sample = SequenceSample(
        ("p@0", "q@0"),
        {"input_ids": lengths, "prompt_mask": lengths, "model_scores": ones, "answer_logps": ones},
        data={
            "input_ids": torch.arange(15),
            "prompt_mask": torch.tensor([1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0]).bool(),
            "model_scores": scores,
            "answer_logps": -scores,
        },
    )
    pairs = PairRecords().record(None, sample, context()).records
    assert pairs["p@0"] == {"id": "p", "chosen": [1.0, 2.0], "rejected": [0.5, 3.0]}
    summary = of_preferences(pairs.values())
    assert summary.estimates["accuracy"].value == 0.75, "the mean of 1/2 and 1"
    assert summary.estimates["margin"].value == (-0.25 + 1.0) / 2
    likely = LikelihoodRecords().record(None, sample, context()).records
    assert likely["q@0"] == {"id": "q", "logprob": 3.0, "tokens": 4}
    assert likely["p@0"] == {"id": "p", "logprob": -6.5, "tokens": 5}


def test_pair_of_equal_answers_is_recorded_as_a_tie() -> None:
    """The scores differ only by rounding."""
    sample = SequenceSample(
        ("p@0",),
        {"input_ids": [[2, 2]], "model_scores": [[1, 1]]},
        data={
            "input_ids": torch.tensor([4, 5, 4, 5]),
            "model_scores": torch.tensor([0.5, 0.5000001]),
        },
    )
    (pair,) = PairRecords().record(None, sample, context()).records.values()
    assert pair == {"id": "p", "chosen": [0.5], "rejected": [0.5]}


def make_settings(folder: Path, *overrides: str, example: str = "evaluate") -> Settings:
    """Settings of the example from new weights."""
    more = [
        "actor.path=null",
        f"actor.architecture={json.dumps(ARCHITECTURE)}",
        f"actor.tokenizer={EXAMPLES / 'addition' / 'tokenizer'}",
    ]
    return load_settings(EXAMPLES / f"{example}.yaml", [*more, *overrides], root=folder)


def test_summary_of_completions_equals_the_mean_over_all_subsets(tmp_path: Path) -> None:
    """avg@n, pass@k and maj@k against enumeration, with intervals over the prompts."""
    settings = make_settings(tmp_path, "rollout.n=3", "algorithm.pass_score=0.5")
    rewards = {"p": [1.0, 0.5, 0.0], "q": [0.0, 0.2, 0.0]}
    texts = {"p": ["4", "4", "5"], "q": ["1", "2", "2"]}
    lines = [
        {
            "id": name,
            "completions": [
                {"text": text, "reward": reward}
                for text, reward in zip(texts[name], rewards[name], strict=True)
            ],
        }
        for name in rewards
    ]
    summary = settings.algorithm.summarize(settings.config, lines)
    assert summary is not None
    values = {name: estimate.value for name, estimate in summary.estimates.items()}
    subsets = list(combinations([True, True, False], 2))
    assert values == pytest.approx(
        {
            "avg@3": (0.5 + 0.2 / 3) / 2,
            "pass@1": (2 / 3) / 2,
            "pass@2": sum(map(any, subsets)) / len(subsets) / 2,
            "pass@3": 0.5,
            "maj@2": (1 + 1 / 2 + 1 / 2) / 3 / 2,
            "maj@3": 0.5,
        }
    )
    for name, estimate in summary.estimates.items():
        column = [score[name] for score in summary.scores]
        assert estimate.value == pytest.approx(sum(column) / 2), "scores are those of the items"
        assert estimate.low < estimate.value < estimate.high
    assert summary.scores[1]["rewards"] == rewards["q"]


@pytest.mark.parametrize(
    ("rewards", "interval"),
    [
        ([[0.0], [1.0], [0.0]], rate),
        ([[0.0]] * 200, rate),
        ([[1.0], *[[0.0]] * 199], rate),
        ([[1.0, 0.0], [0.0, 0.0]], rate),
        ([[0.5], [1.0], [0.0]], mean),
        ([[0.5, 0.5], [1.0, 0.0]], mean),
        ([[-1.0], [1.0]], mean),
    ],
)
def test_interval_of_rewards_is_chosen_by_scores(
    rewards: list[list[float]], interval: Callable[[list[float]], Estimate]
) -> None:
    """Wilson's interval applies if every reward is 1 or 0, regardless of the reward's name."""
    lines = [
        {"id": str(at), "completions": [{"text": "", "reward": each} for each in row]}
        for at, row in enumerate(rewards)
    ]
    n = len(rewards[0])
    found = of_completions(lines, n=n, pass_score=None, pattern=None).estimates[f"avg@{n}"]
    assert found == interval([sum(row) / n for row in rewards])
    if interval is rate:
        assert 0.0 <= found.low < found.high <= 1.0


def test_means_and_ratios_have_correct_intervals() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    center = 4.0
    deviation = math.sqrt(sum((value - center) ** 2 for value in values) / 3)
    half = 1.959963984540054 * deviation / 2
    assert mean(values) == pytest.approx((center, center - half, center + half))
    doubled = ratio(values, [2.0] * 4)
    assert doubled == pytest.approx([bound / 2 for bound in mean(values)])
    alone = mean([3.0])
    assert alone.value == 3.0
    assert all(map(math.isnan, alone[1:]))


def test_mean_of_a_score_ignores_items_without_the_score() -> None:
    """For example, one kind of answer lacks the score. Other measures need it for each item."""
    scores = [{"id": "a", "own": 1.0}, {"id": "b"}, {"id": "c", "own": 4.0}]
    estimate = summarize(scores, {"own": Measure.PART_MEAN}).estimates["own"]
    assert estimate == mean([1.0, 4.0])
    with pytest.raises(UsageError, match="item 'b' has none as its score 'own'"):
        summarize(scores, {"own": Measure.MEAN})


def test_non_finite_scores_give_no_estimate() -> None:
    """Scores of a diverged model, which JSON has as null, never look like numbers."""
    lines = [{"id": "a", "chosen": [None], "rejected": [1.0]}, *PAIRS]
    estimates = of_preferences(lines).estimates
    assert math.isnan(estimates["margin"].value)
    assert estimates["accuracy"].value == 0.5
    nothing = [{"id": "a", "logprob": None, "tokens": 3}, {"id": "b", "logprob": -1.0, "tokens": 1}]
    assert math.isnan(of_likelihood(nothing).estimates["perplexity"].value)


@pytest.mark.parametrize(("size", "center"), [(1e200, 5e199), (1.5e308, math.nan)])
def test_overflowing_sums_give_no_estimate(size: float, center: float) -> None:
    """For example, perplexities of a diverged model must not end the run."""
    found = mean([0.0, size, size, 0.0] if size > 1e300 else [0.0, size])
    assert found == pytest.approx((center, math.nan, math.nan), nan_ok=True)


def test_perplexity_weighs_tokens() -> None:
    lines = [{"id": "a", "logprob": -2.0, "tokens": 1}, {"id": "b", "logprob": -4.0, "tokens": 5}]
    estimates = of_likelihood(lines).estimates
    assert estimates["loss"].value == 1.0
    assert estimates["perplexity"] == pytest.approx([math.exp(x) for x in estimates["loss"]])


@pytest.mark.parametrize("example", ["generate", "evaluate"])
def test_offline_pass_keeps_file_order_and_commits_each_step(tmp_path: Path, example: str) -> None:
    config = make_settings(tmp_path, example=example).config
    assert (config.dataset.shuffle, config.checkpoint.every_steps) == (False, 1)
    chosen = ["dataset.shuffle=true", "checkpoint.every_epochs=1"]
    config = make_settings(tmp_path, *chosen, example=example).config
    assert (config.dataset.shuffle, config.checkpoint.every_steps) == (True, 10)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["algorithm.measure=preferences"], "algorithm.measure", "type prompt; allowed: comp"),
        (
            ["algorithm.measure=likelihood", "algorithm.pass_score=0.5"],
            "algorithm.pass_score",
            "with measure likelihood",
        ),
        (["dataset.type=kto"], "dataset.type", "prompt or preference or prompt_answer"),
        (["stop_when=reward >= 1"], "stop_when", "ends after the last row"),
        (["evaluation.dataset.path=x", "evaluation.dataset.type=prompt"], "evaluation", "trains"),
        (["reward=null"], "reward", "is required to score"),
        (["algorithm.vote_pattern=("], "algorithm.vote_pattern", "must be a regular expression"),
        (["rollout.greedy=true"], "rollout", "n 8 is not allowed with greedy"),
    ],
)
def test_offline_pass_rejects_settings_without_effect(
    tmp_path: Path, overrides: list[str], key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_settings(tmp_path, *overrides)
    problems = {problem.key: str(problem) for problem in caught.value.problems}
    assert words in problems[key]


def test_training_requires_total_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_settings(tmp_path, "total_steps=null", example="sft")
    assert "total_steps: is required" in str(caught.value)


def test_offline_pass_rejects_weighted_sources(tmp_path: Path) -> None:
    heldout = EXAMPLES / "addition" / "heldout.jsonl"
    sources = [
        "dataset.path=''",
        f"dataset.sources={{a: {{path: {heldout}, weight: 1}}, b: {{path: {heldout}, weight: 2}}}}",
    ]
    with pytest.raises(ConfigError, match="processes each row once"):
        make_settings(tmp_path, *sources)

"""Generation, rewards and SFT as calls of the graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import RecomputeInterface
from slurmrl.algorithms.policy.baselines import (
    GreedyRewardInterface,
    GreedyRolloutInterface,
    GreedyScoresInterface,
)
from slurmrl.algorithms.reward_model import ScoresInterface
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.algorithms.rollout_sampling import (
    completions,
    evaluation_seed,
    generation_options,
    sampling_keys,
)
from slurmrl.algorithms.rule_reward import RuleRewardInterface, decode_completions, last_turns
from slurmrl.algorithms.supervised import SFTInterface
from slurmrl.config.schema import Dataset, Evaluation, Logging, Reward, Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import RewardError, UsageError
from slurmrl.rewards.base import ExactMatch

MakeWorld = Callable[..., Any]
STOPS = ("45", "33", "6", "70")
TOKENIZER = Path(__file__).parents[3] / "examples" / "addition" / "tokenizer"


def prompts(ids: list[str]) -> SequenceSample:
    tokens = torch.tensor([2, 3, 4] * len(ids))
    return SequenceSample.from_default([3] * len(ids), ids, {"prompt_ids": tokens})


def evaluating(context: CallContext, **options: Any) -> CallContext:
    dataset = Dataset(type="prompt", path="unused")
    config = context.settings.config.model_copy(
        update={"evaluation": Evaluation(dataset=dataset, **options)}
    )
    settings = replace(context.settings, config=config)
    return replace(context, evaluation=True, settings=settings)


def test_sampling_keys_are_stable_and_depend_on_the_sample_id() -> None:
    keys = sampling_keys(("a@0", "a@1", "b@0"))
    assert keys.tolist() == sampling_keys(("a@0", "a@1", "b@0")).tolist()
    assert len(set(keys.tolist())) == 3
    assert keys[0].item() == -2547367560560890577
    groups = sampling_keys(("a@0", "a@1"), 3).tolist()
    assert groups[::3] == keys[:2].tolist()
    assert len(set(groups)) == 6
    assert sampling_keys(()).shape == (0,)


def test_completion_depends_on_its_id_but_not_on_the_batch(make_world: MakeWorld) -> None:
    world = make_world()
    context = world.context(step=3)
    both = RolloutInterface().generate(world.actor, prompts(["x@0", "y@0"]), context).sample
    alone = RolloutInterface().generate(world.actor, prompts(["y@0"]), context).sample
    assert both is not None
    assert alone is not None
    second = both.take([both.ids.index("y@0")])
    for key in ("input_ids", "prompt_mask", "finished"):
        assert torch.equal(second.tensor(key), alone.tensor(key))
    assert both.tensor("prompt_mask").tolist().count(True) == 6


def with_rollout(context: CallContext, **options: Any) -> CallContext:
    config = context.settings.config
    rollout = config.rollout.model_copy(update=options)
    settings = replace(context.settings, config=config.model_copy(update={"rollout": rollout}))
    return replace(context, settings=settings)


def test_greedy_baseline_is_one_greedy_completion_per_prompt(make_world: MakeWorld) -> None:
    """The baseline does not depend on the rollout's n and temperature, and has separate keys."""
    world = make_world()
    context = world.context(step=3)
    both = prompts(["x@0", "y@0"])
    sampled = with_rollout(context, n=3, temperature=2.0)
    baseline = GreedyRolloutInterface().generate(world.actor, both, sampled).sample
    wanted = RolloutInterface().generate(world.actor, both, with_rollout(context, greedy=True))
    assert baseline is not None
    assert wanted.sample is not None
    assert set(baseline.keys) == {"greedy_input_ids", "greedy_prompt_mask", "greedy_finished"}
    assert baseline.sequence_counts("greedy_input_ids") == [1, 1]
    for key in ("input_ids", "prompt_mask", "finished"):
        assert torch.equal(baseline.tensor(f"greedy_{key}"), wanted.sample.tensor(key))


def test_rank_without_completions_has_no_greedy_baseline(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a server uses several GPUs, only one rank has the completions."""
    world = make_world()
    monkeypatch.setattr(type(world.actor), "serving", lambda *_: nullcontext(None))
    made = GreedyRolloutInterface().generate(world.actor, prompts(["x@0"]), world.context(step=3))
    assert (made.sample, made.stats) == (None, {})


def test_completion_does_not_depend_on_the_number_per_prompt(make_world: MakeWorld) -> None:
    """Each completion has its own random stream."""
    world = make_world()
    drawn = {}
    for n in (1, 2, 5):
        context = with_rollout(world.context(step=3), n=n)
        sample = RolloutInterface().generate(world.actor, prompts(["x@0", "y@0"]), context).sample
        assert sample is not None
        assert sample.sequence_counts("input_ids") == sample.sequence_counts("finished") == [n, n]
        cuts = sample.cu_seqlens("input_ids").tolist()
        tokens = sample.tensor("input_ids").tolist()
        drawn[n] = [tokens[start:stop] for start, stop in pairwise(cuts)]
        assert all(row[:3] == [2, 3, 4] for row in drawn[n])
    assert drawn[2][0::2] == drawn[1]
    assert drawn[5][0:2] + drawn[5][5:7] == drawn[2]
    assert len({tuple(row) for row in drawn[5]}) == 10


def test_reward_does_not_get_the_stop_token(make_world: MakeWorld) -> None:
    """Stop tokens need not be special tokens. Here, the second completion ends with an 8."""
    context = judging(make_world().context(step=1), samples=2)
    context = replace(context, stop_token_ids=(1, 11))
    sample = completed()
    sample.tensor("finished").fill_(True)
    result = RuleRewardInterface().inference(None, sample, context)
    assert [row["completion"] for row in result.texts] == ["3", ""]


def test_completion_ends_at_a_stop_string(make_world: MakeWorld) -> None:
    world = make_world()
    context = judging(with_rollout(world.context(step=1), stop_strings=STOPS), samples=1)
    for asked in (context, evaluating(context, max_new_tokens=9)):
        sample = prompts([f"{n}@0" for n in range(64)])
        made = RolloutInterface().generate(world.actor, sample, asked).sample
        assert made is not None
        rows, finished = last_turns(made), made.tensor("finished").tolist()
        texts = decode_completions(made, rows, asked)
        stopped = [text.endswith(STOPS) for text in texts]
        assert [
            string or row[-1] in world.stops for string, row in zip(stopped, rows, strict=True)
        ] == finished
        assert not any(stop in text[:-1] for stop in STOPS for text in texts)
        assert 3 < sum(stopped) < sum(finished) < 64
        assert generation_options(asked).stop_strings == STOPS


def test_evaluation_has_its_own_settings_and_random_stream(make_world: MakeWorld) -> None:
    world = make_world()
    world.stops = (*world.stops, 5, 9)
    training = world.context(step=1)
    evaluation = evaluating(training, temperature=0.5, max_new_tokens=4, n=3)
    assert (completions(training), completions(evaluation)) == (1, 3)
    config = evaluation.settings.config.model_copy(
        update={"rollout": Rollout(max_new_tokens=9, top_k=3, min_new_tokens=2)}
    )
    settings = replace(training.settings, config=config)
    options = generation_options(replace(training, settings=settings))
    assert (options.max_new_tokens, options.top_k, options.temperature) == (9, 3, 1.0)
    assert options.stop_token_ids == training.stop_token_ids
    options = generation_options(replace(evaluation, settings=settings))
    assert (options.max_new_tokens, options.top_k, options.temperature) == (4, None, 0.5)
    assert options.stop_token_ids == training.stop_token_ids
    assert evaluation_seed(1) != evaluation_seed(2)
    assert 0 <= evaluation_seed(1) < 2**63
    ids = [f"{index}@0" for index in range(8)]
    same = evaluating(training, max_new_tokens=6)
    drawn = [
        RolloutInterface().generate(world.actor, prompts(ids), context).sample
        for context in (training, same)
    ]
    assert drawn[0].tensor("input_ids").tolist() != drawn[1].tensor("input_ids").tolist()


def test_recomputed_logprobs_replace_generation_logprobs(make_world: MakeWorld) -> None:
    world, other = make_world(), make_world()
    sample, expected = world.rollout(step=1), other.rollout(step=1)
    expected_stats = other.train_actor(expected, 1, kl_coef=0.1)
    context = world.context(1, sample.ids)
    response = ~sample.tensor("prompt_mask")
    exact = sample.tensor("logprobs").clone()
    wrong = exact - 0.25 * response
    wrong[response.nonzero()[3]] += 1.25
    sample.data["logprobs"] = wrong
    result = RecomputeInterface().inference(world.actor, sample, context)
    assert result.sample is not None
    found = result.sample.tensor("old_logprobs")
    assert (found - exact)[response].abs().max() < 1e-5
    count = int(response.sum())
    reported = {name: total / number for name, (total, number) in result.stats.items()}
    assert reported["logprob_difference_max"] == pytest.approx(1.0, abs=1e-4)
    mean = (0.25 * (count - 1) + 1.0) / count
    assert reported["logprob_difference_mean"] == pytest.approx(mean, abs=1e-4)
    sample.update_(result.sample)
    stats = world.train_actor(sample, 1, kl_coef=0.1)
    # (Otherwise the first minibatch compares the engines, here this call did.)
    expected_stats = {
        name: value for name, value in expected_stats.items() if not name.startswith("mismatch/")
    }
    assert stats == pytest.approx(expected_stats, rel=1e-3, abs=1e-4)


def completed() -> SequenceSample:
    """Two sums with an answer each; the second is wrong and has no stop token."""
    rows = [("1+2=", "3<eos>", True), ("4+5=", "8", False)]
    tokenizer = load_tokenizer(TOKENIZER)
    texts = [
        [tokenizer(text, add_special_tokens=False).input_ids for text in row[:2]] for row in rows
    ]
    flat = [ids for prompt, answer in texts for ids in (*prompt, *answer)]
    mask = [own for prompt, answer in texts for own in [True] * len(prompt) + [False] * len(answer)]
    return SequenceSample.from_default(
        [len(prompt) + len(answer) for prompt, answer in texts],
        ["a@0", "b@0"],
        {
            "input_ids": torch.tensor(flat),
            "prompt_mask": torch.tensor(mask),
        },
        {
            "prompt": ["1+2=", "4+5="],
            "answer": ["3", "9"],
            "row": [{"answer": "3"}, {"answer": "9"}],
            "line": [1, 2],
        },
        per_sequence={"finished": torch.tensor([row[2] for row in rows])},
    )


def judging(context: CallContext, samples: int) -> CallContext:
    config = context.settings.config.model_copy(
        update={"reward": Reward(name="exact_match"), "logging": Logging(samples=samples)}
    )
    settings = replace(context.settings, config=config)
    return replace(context, settings=settings, tokenizer=load_tokenizer(TOKENIZER))


def test_rewards_score_decoded_completions(make_world: MakeWorld) -> None:
    context = judging(make_world().context(step=1), samples=1)
    interface = RuleRewardInterface()
    result = interface.inference(None, completed(), context)
    assert result.sample is not None
    assert result.sample.tensor("rewards").tolist() == [1.0, 0.0]
    assert result.stats == {"reward": (1.0, 2.0)}
    assert result.texts == [
        {
            "id": "a@0",
            "prompt": "1+2=",
            "completion": "3",
            "answer": "3",
            "reward": 1.0,
            "finished": True,
            "tokens": ["3", "<eos>"],
            "left_out": 0,
        }
    ]
    nothing = interface.inference(None, completed().take([]), context)
    assert nothing.stats == {"reward": (0.0, 0.0)}
    interface.close()


def test_reward_must_not_record_a_metric_of_slurmrl(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = judging(make_world().context(step=1), samples=1)
    monkeypatch.setattr(ExactMatch, "stats", lambda _: {"entropy": (1.0, 2.0)})
    with pytest.raises(RewardError, match=r"reward exact_match: stats\(\) returned entropy, a"):
        RuleRewardInterface().inference(None, completed(), context)


def test_samples_show_rendered_prompt_if_template_adds_text(make_world: MakeWorld) -> None:
    context = judging(make_world().context(step=1), samples=2)
    sample = completed()
    sample = replace(sample, metadata={**sample.metadata, "prompt": ["2=", "4+5="]})
    result = RuleRewardInterface().inference(None, sample, context)
    assert [(row["prompt"], row.get("rendered")) for row in result.texts] == [
        ("2=", "1+2="),
        ("4+5=", None),
    ]


def test_a_reward_model_scores_completions(make_world: MakeWorld) -> None:
    world = make_world()
    context = judging(world.context(step=1), samples=1)
    sample = completed()
    world.critic.storages()["score.weight"].normal_()
    known = SequenceSample(
        sample.ids,
        {"input_ids": sample.lengths["input_ids"]},
        data={"input_ids": sample.tensor("input_ids") % 12},  # the model's vocabulary
    )
    result = ScoresInterface().inference(world.critic, known, context)
    assert result.sample is not None
    sample.update_(result.sample)
    values = world.critic.forward(known)["values"].tolist()
    cuts = sample.cu_seqlens("input_ids").tolist()
    scores = [values[cut - 1] for cut in cuts[1:]]
    assert sample.tensor("model_scores").tolist() == scores
    assert result.stats["model_score"] == (pytest.approx(sum(scores)), 2.0)
    options = {"name": "model", "options": {"scale": 2.0, "bias": 0.5}}
    parts = {"judge": options, "right": {"name": "exact_match", "weight": 10.0}}
    for reward, right in (({"parts": parts}, [10.0, 0.0]), (options, [0.0, 0.0])):
        update = {"reward": Reward.model_validate(reward)}
        config = context.settings.config.model_copy(update=update)
        judged = replace(context, settings=replace(context.settings, config=config))
        found = RuleRewardInterface().inference(None, sample, judged).sample
        assert found is not None
        wanted = [2 * (score - 0.5) + more for score, more in zip(scores, right, strict=True)]
        assert found.tensor("rewards").tolist() == pytest.approx(wanted)
        keys = ("input_ids", "prompt_mask", "finished")
        greedy = {f"greedy_{key}": sample.tensor(key) for key in keys}
        rows = {key: sample.lengths[key.removeprefix("greedy_")] for key in greedy}
        again = SequenceSample(sample.ids, rows, sample.metadata, dict(greedy))
        again.data["greedy_input_ids"] = known.tensor("input_ids")
        made = GreedyScoresInterface().inference(world.critic, again, judged).sample
        assert made is not None
        again.data["greedy_input_ids"] = sample.tensor("input_ids")
        again.update_(made)
        found = GreedyRewardInterface().inference(None, again, judged).sample
        assert found is not None
        assert found.tensor("greedy_rewards").tolist() == pytest.approx(wanted)


def test_reward_scores_each_completion_of_a_prompt(make_world: MakeWorld) -> None:
    context = judging(make_world().context(step=1), samples=3)
    pair = completed()
    swapped = pair.take([1, 0])
    rows = [pair.item_lengths("input_ids"), swapped.item_lengths("input_ids")]
    data: dict[str, Any] = {
        key: torch.cat([pair.tensor(key), swapped.tensor(key)])
        for key in ("input_ids", "prompt_mask", "finished")
    }
    finished = {"finished": data.pop("finished")}
    group = SequenceSample.grouped(rows, pair.ids, data, pair.metadata, per_sequence=finished)
    result = RuleRewardInterface().inference(None, group, context)
    assert result.sample is not None
    assert result.sample.lengths == {"rewards": [[1, 1], [1, 1]]}
    assert result.sample.tensor("rewards").tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result.stats == {"reward": (1.0, 4.0)}
    assert result.records == {}, "this is training"
    held_out = RuleRewardInterface().inference(None, group, evaluating(context, n=2)).records
    first, second = {"rewards": [1.0, 0.0], "reward": 0.5}, {"rewards": [0.0, 0.0], "reward": 0.0}
    assert held_out == {"a@0": first, "b@0": second}
    shown = [(row["id"], row["index"], row["completion"], row["answer"]) for row in result.texts]
    of_first, of_second = [(0, "3", "3"), (1, "8", "3")], [(0, "8", "9"), (1, "3", "9")]
    assert shown == [("a@0", *one) for one in of_first] + [("b@0", *one) for one in of_second]
    wrong = rewarded(context, "nan_for_the_second")
    with pytest.raises(RewardError, match=r":1 \(sample a@0, index 1\), completion '8'"):
        RuleRewardInterface().inference(None, group, wrong)
    asking = RuleRewardInterface()
    asking.inference(None, group, rewarded(context, "Asking"))
    assert asking._reward is not None
    asked = asking._reward._parts[""].scorer._object.asked  # type: ignore[attr-defined]
    tokens = group.tensor("input_ids").tolist()
    cuts, prompt = group.cu_seqlens("input_ids").tolist(), group.tensor("prompt_mask").tolist()
    assert asked == {
        "token_ids": [
            [token for token, mask in zip(tokens[a:b], prompt[a:b], strict=True) if not mask]
            for a, b in pairwise(cuts)
        ],
        "finished": group.tensor("finished").tolist(),
        "sample_ids": ["a@0", "a@0", "b@0", "b@0"],
        "indices": [0, 1, 0, 1],
        "siblings": [["3", "8"]] * 2 + [["8", "3"]] * 2,
        "step": 1,
        "evaluation": False,
    }


def rewarded(context: CallContext, name: str) -> CallContext:
    """Return the context with one of the rewards of users."""
    reward = Reward(name=f"tests.support.users_rewards:{name}")
    config = context.settings.config.model_copy(update={"reward": reward})
    return replace(context, settings=replace(context.settings, config=config))


def test_missing_reward_is_reported(make_world: MakeWorld) -> None:
    with pytest.raises(UsageError, match="no reward"):
        RuleRewardInterface().inference(None, completed(), make_world().context(step=1))


def pairs() -> SequenceSample:
    generator = torch.Generator().manual_seed(0)
    return SequenceSample.from_default(
        [5, 4],
        ["a", "b"],
        {
            "input_ids": torch.randint(2, 12, (9,), generator=generator),
            "prompt_mask": torch.tensor([True] * 2 + [False] * 3 + [True] * 3 + [False]),
        },
    )


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


def test_sft_notes_show_prompt_and_trained_tokens(make_world: MakeWorld) -> None:
    """The second row has two turns. The loss includes the first token of the model's turn."""
    world = make_world()
    context = replace(world.context(step=1), tokenizer=cast(Any, Letters()))
    sample = SequenceSample.from_default(
        [3, 5],
        ["a@0", "b@0"],
        {
            "input_ids": torch.tensor([2, 3, 4, 5, 6, 7, 8, 9]),
            "prompt_mask": torch.tensor([1, 1, 0, 1, 0, 1, 1, 0]).bool(),
        },
    )
    found = SFTInterface().train_step(world.actor, sample, context).texts
    assert [(row["id"], row["prompt"], row["completion"]) for row in found] == [
        ("a@0", "cd", "e"),
        ("b@0", "f", "ghij"),
    ]
    assert (found[1]["tokens"], found[1]["values"]) == (list("ghij"), {"masked": [0, 1, 1, 0]})
    for step, rows in ((99, 0), (100, 2)):
        later = replace(context, step=step)
        assert len(SFTInterface().train_step(world.actor, sample, later).texts) == rows


def test_sft_lowers_the_reported_mean_loss_over_answer_tokens(make_world: MakeWorld) -> None:
    world = make_world()
    sample, context, interface = pairs(), world.context(step=99), SFTInterface()
    logp = world.actor.forward(sample.only(["input_ids"]))["logp"]
    wanted = -float(logp[~sample.tensor("prompt_mask")].mean())
    held_out = interface.inference(world.actor, sample, context).stats["loss"]
    assert held_out == (pytest.approx(4 * wanted, rel=1e-5), 4.0)
    lines = interface.inference(world.actor, sample, context).records
    assert [line["tokens"] for line in lines.values()] == [3, 1]
    total = sum(line["logprob"] for line in lines.values())
    assert total == pytest.approx(-4 * wanted, rel=1e-5)
    losses = []
    for _ in range(10):
        stats = interface.train_step(world.actor, sample, context).stats
        losses.append(stats["loss"][0])
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
    assert losses[-1] < losses[0] / 2

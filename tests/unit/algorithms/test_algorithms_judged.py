"""DPO, KTO and reward models: losses against loops over sequences, and steps on a real engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.kto import (
    KTOInterface,
    answer_losses,
    answer_stats,
    batch_kl,
    kto_loss,
    on_their_side,
)
from slurmrl.algorithms.pairs import DPOInterface, dpo_loss, tied
from slurmrl.algorithms.preference_schema import DPO, KTO, RewardModel
from slurmrl.algorithms.reward_model import RewardModelInterface, score_loss
from slurmrl.algorithms.sequences import ReferenceInterface, nth_sequences
from slurmrl.algorithms.summaries import summarize
from slurmrl.config.schema import Config, Dataset, Evaluation, Model, Optimizer
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.plan.settings import Settings
from tests.unit.algorithms.conftest import ARCHITECTURE, alone, means

LENGTHS = [[3, 4], [5, 3, 2, 6, 3, 3], [2, 2]]
"""Tokens of the sequences of each item; each prompt has one token, so an answer may have one."""
LABELED = [[3, 4], [5, 3], [2, 2], [4, 2]]


def judged(lengths: Sequence[Sequence[int]], **extra: Tensor) -> SequenceSample:
    generator = torch.Generator().manual_seed(1)
    flat = [length for item in lengths for length in item]
    total, count = sum(flat), len(flat)
    mask = torch.tensor([place == 0 for length in flat for place in range(length)])
    data: dict[str, Tensor] = {
        "input_ids": torch.randint(0, 12, (total,), generator=generator),
        "prompt_mask": mask,
        "ref_logps": torch.randn(count, generator=generator, dtype=torch.float64),
        **extra,
    }
    ones = [[1] * len(item) for item in lengths]
    singles = [[1] for _ in lengths]
    keys = {"input_ids": lengths, "prompt_mask": lengths, "ref_logps": ones, "desirable": singles}
    rows = {key: [list(item) for item in keys[key]] for key in data}
    return SequenceSample(tuple(map(str, range(len(lengths)))), rows, data=dict(data))


def answers(values: Tensor, lengths: Sequence[Sequence[int]]) -> list[list[list[float]]]:
    """Yield the values after the prompt of each sequence, by item."""
    pieces = iter(values.split([length for item in lengths for length in item]))
    return [[next(pieces)[1:].tolist() for _ in item] for item in lengths]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def expected_dpo(logp: Tensor, sample: SequenceSample, dpo: DPO) -> float:
    """Return the sum over prompts of the mean loss of their pairs, computed by loops."""
    refs = iter(sample.tensor("ref_logps").tolist())
    total = 0.0
    for item in answers(logp, sample.lengths["input_ids"]):
        entropies = [-sum(tokens) / len(tokens) for tokens in item]
        ratios = [sum(tokens) - (next(refs) * (not dpo.reference_free)) for tokens in item]
        if dpo.length_normalized:
            ratios = [ratio / len(tokens) for ratio, tokens in zip(ratios, item, strict=True)]
        own = dpo.sft_coef * sum(entropies[::2])
        for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True):
            h = chosen - rejected
            if dpo.loss == "ipo":
                own += (h - 0.5 / dpo.beta) ** 2
            elif dpo.loss == "hinge":
                own += max(0.0, 1.0 - dpo.beta * h)
            else:
                own -= (1 - dpo.label_smoothing) * math.log(sigmoid(dpo.beta * h))
                own -= dpo.label_smoothing * math.log(sigmoid(-dpo.beta * h))
        total += own / (len(ratios) // 2)
    return total


def slope(function: Callable[[Tensor], float], at: Tensor) -> Tensor:
    """Return the gradient by central differences."""
    step, found = 1e-6, []
    for index in range(len(at)):
        shift = torch.zeros_like(at)
        shift[index] = step
        found.append((function(at + shift) - function(at - shift)) / (2 * step))
    return torch.tensor(found, dtype=torch.float64)


def check(
    loss: Callable[[Tensor], Tensor], expected: Callable[[Tensor], float], at: Tensor
) -> None:
    """Check that the loss and its gradient equal the reference."""
    point = at.clone().requires_grad_()
    value = loss(point)
    value.backward()
    assert point.grad is not None
    assert value.item() == pytest.approx(expected(at), rel=1e-12)
    torch.testing.assert_close(point.grad, slope(expected, at), rtol=1e-6, atol=1e-7)


def tokens_of(lengths: Sequence[Sequence[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    total = sum(map(sum, lengths))
    return -torch.rand(total, generator=generator, dtype=torch.float64)


DPOS = (
    DPO(batch_size=3),
    DPO(batch_size=3, beta=2.0, label_smoothing=0.2),
    DPO(batch_size=3, loss="ipo", beta=0.5),
    DPO(batch_size=3, loss="hinge", beta=0.7),
    DPO(batch_size=3, reference_free=True, beta=0.5),
    DPO(batch_size=3, loss="ipo", beta=0.5, length_normalized=True),
    DPO(batch_size=3, sft_coef=0.3),
)


@pytest.mark.parametrize("dpo", DPOS)
def test_dpo_equals_its_formula(dpo: DPO) -> None:
    """Covers items with several pairs and answers of one token. No two variants are equal."""
    sample, at = judged(LENGTHS), tokens_of(LENGTHS)
    check(
        lambda logp: dpo_loss({"logp": logp}, sample, dpo)[0],
        lambda logp: expected_dpo(logp, sample, dpo),
        at,
    )
    values = [expected_dpo(at, sample, other) for other in DPOS]
    assert len({round(value, 6) for value in values}) == len(DPOS)


def test_dpo_metrics_are_means_over_prompts_of_pair_means() -> None:
    dpo, sample, at = DPO(batch_size=3, beta=0.5), judged(LENGTHS), tokens_of(LENGTHS)
    _, stats = dpo_loss({"logp": at}, sample, dpo)
    refs = iter(sample.tensor("ref_logps").tolist())
    wanted = dict.fromkeys(stats, 0.0)
    for item in answers(at, LENGTHS):
        logps = [sum(tokens) for tokens in item]
        rewards = [dpo.beta * (logp - next(refs)) for logp in logps]
        count = len(item) // 2
        for pair in range(count):
            chosen, rejected = rewards[2 * pair : 2 * pair + 2]
            wanted["rewards/chosen"] += chosen / count
            wanted["rewards/rejected"] += rejected / count
            wanted["rewards/margins"] += (chosen - rejected) / count
            wanted["rewards/accuracies"] += (chosen > rejected) / count
            wanted["logps/chosen"] += logps[2 * pair] / count
            wanted["logps/rejected"] += logps[2 * pair + 1] / count
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(wanted)


def test_label_smoothing_needs_the_sigmoid_loss() -> None:
    with pytest.raises(ValueError, match="no meaning for loss 'ipo'"):
        DPO(batch_size=1, loss="ipo", label_smoothing=0.1)


def test_negative_coefficient_is_rejected() -> None:
    """Such a coefficient would make the chosen answers less likely."""
    with pytest.raises(ValueError, match="sft_coef"):
        DPO(batch_size=1, sft_coef=-0.1)


def expected_kto(logp: Tensor, sample: SequenceSample, kl: float, kto: KTO) -> float:
    total = 0.0
    rows = zip(
        answers(logp, sample.lengths["input_ids"]),
        sample.tensor("ref_logps").tolist(),
        sample.tensor("desirable").tolist(),
        strict=True,
    )
    for item, ref, desirable in rows:
        ratio = sum(item[0]) - ref
        if desirable:
            total += kto.desirable_weight * (1 - sigmoid(kto.beta * (ratio - kl)))
        else:
            total += kto.undesirable_weight * (1 - sigmoid(kto.beta * (kl - ratio)))
    return total


@pytest.mark.parametrize(
    ("options", "kl"),
    [({}, 0.0), ({"beta": 0.5}, 0.7), ({"desirable_weight": 1.5, "undesirable_weight": 0.5}, 0.2)],
)
def test_kto_equals_its_formula(options: dict[str, float], kl: float) -> None:
    kto = KTO(batch_size=4, **options)
    labels = torch.tensor([True, False, False, True])
    sample = nth_sequences(judged(LABELED, desirable=labels), 0)
    check(
        lambda logp: kto_loss({"logp": logp}, sample, kl, kto)[0],
        lambda logp: expected_kto(logp, sample, kl, kto),
        tokens_of(sample.lengths["input_ids"]),
    )


def test_nth_sequences_keeps_values_of_those_sequences() -> None:
    labels = torch.tensor([True, False, False, True])
    sample = judged(LABELED, desirable=labels)
    second = nth_sequences(sample, 1)
    assert second.keys == ("input_ids", "prompt_mask", "ref_logps")
    assert second.lengths["input_ids"] == [[item[1]] for item in LABELED]
    pieces = sample.tensor("input_ids").split([length for item in LABELED for length in item])
    assert second.tensor("input_ids").tolist() == torch.cat(pieces[1::2]).tolist()
    assert second.tensor("ref_logps").tolist() == sample.tensor("ref_logps")[1::2].tolist()
    assert nth_sequences(sample.take([]), 0).tensor("input_ids").shape == (0,)


@pytest.mark.parametrize("center_coef", [0.0, 0.3])
def test_loss_of_reward_model_equals_formula(center_coef: float) -> None:
    """Scores are the values at the last tokens; other positions get no gradient."""
    options = RewardModel(batch_size=3, center_coef=center_coef)
    sample = judged(LENGTHS)

    def expected(values: Tensor) -> float:
        total = 0.0
        for item in answers(values, LENGTHS):
            scores = [tokens[-1] for tokens in item]
            losses = [
                -math.log(sigmoid(c - r)) + center_coef * (c + r) ** 2
                for c, r in zip(scores[::2], scores[1::2], strict=True)
            ]
            total += sum(losses) / len(losses)
        return total

    check(
        lambda values: score_loss({"values": values}, sample, options)[0],
        expected,
        tokens_of(LENGTHS),
    )
    _, stats = score_loss({"values": torch.zeros(36)}, sample, options)
    assert stats["accuracy"].item() == 0.0, "a tie is no success"


@pytest.mark.parametrize("seed", range(3))
def test_equal_answers_tie_despite_rounding_of_their_values(seed: int) -> None:
    """A model's values of equal sequences differ by rounding, which depends on the micro-batch."""
    lengths = [[3, 3], [2, 4], [3, 3, 4, 4], [5, 5]]
    sample = judged(lengths)
    ids = sample.tensor("input_ids")
    ids[:6] = torch.tensor([4, 5, 6] * 2)
    ids[18:26] = torch.tensor([7, 5, 5, 7] * 2)
    ids[26:36] = torch.tensor([4, 5, 6, 7, 8, 4, 5, 6, 7, 9])
    noise = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 1e-7
    found = tied(noise, sample).view(-1, 2)
    margins = found[:, 0] - found[:, 1]
    assert (margins == 0).tolist() == [True, False, False, True, False]
    assert found[:, 0].tolist() == noise[0::2].tolist()
    values = torch.randn(36, requires_grad=True)
    loss, stats = score_loss({"values": values}, sample.take([0]), RewardModel(batch_size=1))
    assert (stats["accuracy"].item(), stats["margin"].item()) == (0.0, 0.0)
    assert not torch.autograd.grad(loss, values)[0].any()
    config = SimpleNamespace(algorithm=RewardModel(batch_size=1), config=Config.model_construct())
    evaluated = SimpleNamespace(settings=config, stop_token_ids=())
    outputs = {"values": values[:6]}
    scores = RewardModelInterface().scores(outputs, sample.take([0]), cast(CallContext, evaluated))
    assert scores[0].item() == scores[1].item()
    outputs = {"logp": values[:6], "entropy": torch.zeros(6)}
    loss, stats = dpo_loss(outputs, sample.take([0]), DPO(batch_size=1, reference_free=True))
    assert (stats["rewards/accuracies"].item(), stats["rewards/margins"].item()) == (0.0, 0.0)
    assert not torch.autograd.grad(loss, values)[0].any()


# -- steps on an engine ----------------------------------------------------------------------


def engine(head: Any = "lm", *, most_tokens: int = 1000, seed: int = 1) -> FSDPEngine:
    return FSDPEngine(
        "actor",
        Model(
            architecture=ARCHITECTURE,
            max_tokens_per_microbatch=most_tokens,
            optimizer=Optimizer(lr=1e-2, eps=1e-3),
        ),
        head=head,
        trained=True,
        context=alone("actor"),
        seed=seed,
        total_steps=100,
        source=None,
    )


def context(algorithm: Any) -> CallContext:
    config = Config.model_construct(total_steps=1)
    settings = Settings(config, algorithm, cast(Any, None))
    return CallContext(1, 1, {}, cast(Any, None), settings, (), ())


CASES: tuple[tuple[Any, Any, list[list[int]], Any], ...] = (
    (DPO(batch_size=3), DPOInterface, LENGTHS, "lm"),
    (KTO(batch_size=4), KTOInterface, LABELED, "lm"),
    (RewardModel(batch_size=3), RewardModelInterface, LENGTHS, "value"),
)


def batch_of(lengths: list[list[int]]) -> SequenceSample:
    """A batch with the reference log-probabilities of an engine."""
    labels = torch.tensor([place % 2 == 0 for place in range(len(lengths))])
    sample = judged(lengths, desirable=labels)
    result = ReferenceInterface().inference(engine(seed=2), sample, context(None))
    assert result.sample is not None
    sample.update_(result.sample)
    return sample


@pytest.mark.parametrize(("algorithm", "interface", "lengths", "head"), CASES)
def test_loss_does_not_depend_on_micro_batches_and_order(
    algorithm: Any, interface: Any, lengths: list[list[int]], head: Any
) -> None:
    """An item is never split over micro-batches of any size. Metrics and updates are the same."""
    sample = batch_of(lengths)
    whole, small = engine(head), engine(head, most_tokens=1)
    wanted = means(interface().train_step(whole, sample, context(algorithm)))
    shuffled = sample.take([*range(1, len(lengths)), 0])
    found = means(interface().train_step(small, shuffled, context(algorithm)))
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert wanted["grad_norm"] > 0
    for name, values in whole.storages().items():
        torch.testing.assert_close(small.storages()[name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("algorithm", "interface", "lengths", "head"), CASES)
def test_steps_lower_the_loss_and_evaluation_reports_the_same(
    algorithm: Any, interface: Any, lengths: list[list[int]], head: Any
) -> None:
    sample, model = batch_of(lengths), engine(head)
    before = means(interface().inference(model, sample, context(algorithm)))
    first = means(interface().train_step(model, sample, context(algorithm)))
    assert before == pytest.approx({name: first[name] for name in before}, rel=1e-5, abs=1e-6)
    for _ in range(15):
        interface().train_step(model, sample, context(algorithm))
    after = means(interface().inference(model, sample, context(algorithm)))
    assert after["loss"] < before["loss"]
    margin = "margin" if head == "value" else "rewards/margins"
    assert after[margin] > before[margin] + 0.01


@pytest.mark.parametrize(("algorithm", "interface", "lengths", "head"), CASES)
def test_evaluation_metrics_are_means_of_item_scores(
    algorithm: Any, interface: Any, lengths: list[list[int]], head: Any
) -> None:
    """Each item has a line whose scores include the schema's measures."""
    sample = batch_of(lengths)
    result = interface().inference(engine(head), sample, context(algorithm))
    lines, found = [result.records[name] for name in sample.ids], means(result)
    (kind,) = algorithm.dataset_types
    evaluation = Evaluation(dataset=Dataset(type=kind, path="rows"))
    config = Config.model_construct(evaluation=evaluation)
    measures = algorithm.evaluation_measures(config)
    estimates = summarize(lines, measures).estimates
    for name, estimate in estimates.items():
        assert estimate.value == pytest.approx(found[name], rel=1e-4, abs=1e-6)
        assert estimate.low <= estimate.value <= estimate.high
    assert len(estimates) == len(measures) == (4 if kind == "kto" else 2)
    if kind == "kto":
        assert all(estimate.low < estimate.high for estimate in estimates.values())
        return
    pairs = [len(line["chosen"]) for line in lines]
    assert pairs == [len(item) // 2 for item in sample.lengths["input_ids"]]


def test_kto_accuracy_is_the_share_of_correctly_ranked_answers() -> None:
    """A tie does not count."""
    logratios = torch.tensor([0.5, 0.2, 0.1, 0.5, 0.2, 0.1])
    desirable = torch.tensor([True, True, True, False, False, False])
    kto = KTO(batch_size=4)
    right = on_their_side(logratios, desirable, 0.2)
    assert right.tolist() == [True, False, False, False, False, True]
    assert (answer_losses(logratios, desirable, 0.2, kto) < 0.5).tolist() == right.tolist()
    sums = answer_stats(logratios, logratios, desirable, 0.2, kto)
    assert (sums["right"], sums["count/chosen"], sums["count/rejected"]) == (2, 3, 3)


def test_kto_reference_kl_comes_from_mismatched_answers() -> None:
    sample, model = batch_of(LABELED), engine()
    logp = model.forward(sample.only(["input_ids"]))["logp"]
    sums = [[sum(tokens) for tokens in item] for item in answers(logp, LABELED)]
    refs = sample.tensor("ref_logps").tolist()
    ratios = [own[1] - ref for own, ref in zip(sums, refs[1::2], strict=True)]
    mean = sum(ratios) / len(ratios)
    shift = 0.5 - mean
    sample.data["ref_logps"] = sample.tensor("ref_logps") - shift
    assert batch_kl(model, sample) == pytest.approx(0.5, abs=1e-5)
    sample.data["ref_logps"] = sample.tensor("ref_logps") + 1.0
    assert batch_kl(model, sample) == 0.0


def test_kto_reports_metrics_if_all_labels_are_equal() -> None:
    sample = batch_of(LABELED)
    sample.data["desirable"] = torch.ones(4, dtype=torch.bool)
    found = means(KTOInterface().train_step(engine(), sample, context(KTO(batch_size=4))))
    assert "rewards/chosen" in found
    assert not {"rewards/rejected", "rewards/margins", "logps/rejected"} & set(found)


def test_reference_logprobs_exclude_prompt_tokens() -> None:
    sample, model = judged(LENGTHS), engine()
    result = ReferenceInterface().inference(model, sample, context(None))
    assert result.sample is not None
    logp = model.forward(sample.only(["input_ids"]))["logp"]
    wanted = [sum(tokens) for item in answers(logp, LENGTHS) for tokens in item]
    assert result.sample.tensor("ref_logps").tolist() == pytest.approx(wanted, rel=1e-5)
    assert result.sample.lengths["ref_logps"] == [[1] * len(item) for item in LENGTHS]

"""Calls of runs without training, which write a record for each item of the dataset."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.pairs import tied
from slurmrl.algorithms.rule_reward import decode_completions, last_turns, transcript
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.algorithms.sequences import (
    TOKENS,
    answer_lengths,
    answer_logprobs,
    per_sequence,
    row_id,
)
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


COLUMNS: Final = (TOKENS, "prompt_mask", "logprobs")


class CompletionRecords(Interface):
    """Records the completions of each prompt."""

    def record(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        completions = iter(_completions(sample, context))
        records: dict[str, dict[str, Any]] = {}
        for place, (name, count) in enumerate(
            zip(sample.ids, sample.sequence_counts(TOKENS), strict=True)
        ):
            answer = sample.metadata["answer"][place]
            records[name] = {
                "id": row_id(name),
                "prompt": sample.metadata["prompt"][place],
                **({"answer": answer} if answer else {}),
                "completions": [next(completions) for _ in range(count)],
            }
        return CallResult(records=records)


def _completions(sample: SequenceSample, context: CallContext) -> Iterator[dict[str, Any]]:
    texts = decode_completions(sample, last_turns(sample), context)
    columns = {key: sample.tensor(key).tolist() for key in COLUMNS if key in sample.keys}
    finished = sample.tensor("finished").tolist()
    rewards = sample.tensor("rewards").tolist() if "rewards" in sample.keys else None
    cuts = pairwise(sample.cu_seqlens(TOKENS).tolist())
    for number, (text, (start, stop)) in enumerate(zip(texts, cuts, strict=True)):
        wrote = [not read for read in columns["prompt_mask"][start:stop]]
        behind = start + (wrote.index(True) if any(wrote) else len(wrote))
        completion = {"text": text, "tokens": sum(wrote), "finished": bool(finished[number])}
        if rewards is not None:
            completion["reward"] = rewards[number]
        if TURN_REWARDS in sample.keys:
            completion["turns"] = transcript(sample, number, context.tokenizer)
        if "logprobs" in columns:
            completion["token_ids"] = columns[TOKENS][behind:stop]
            completion["logprobs"] = columns["logprobs"][behind:stop]
            if TURN_REWARDS in sample.keys:
                completion["sampled"] = wrote[behind - start :]
        yield completion


class PairRecords(Interface):
    """Records the scores of both answers of each pair."""

    def record(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        scores = _by_item(sample, tied(sample.tensor("model_scores"), sample))
        return CallResult(
            records={
                name: {"id": row_id(name), "chosen": own[0::2], "rejected": own[1::2]}
                for name, own in zip(sample.ids, scores, strict=True)
            }
        )


class LikelihoodInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``answer_logps``, log p(answer | prompt) [S], and report the loss per token."""
        assert engine is not None
        sums = answer_logprobs(engine.forward(sample.only([TOKENS]))["logp"], sample)
        tokens = float((~sample.tensor("prompt_mask")).sum())
        stats = {"loss": (-float(sums.double().sum()), tokens)}
        return CallResult(per_sequence(sample, "answer_logps", sums), stats)


class LikelihoodRecords(Interface):
    """Records the log-probability and the number of tokens of each answer."""

    def record(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        sums = _by_item(sample, sample.tensor("answer_logps"))
        lengths = _by_item(sample, answer_lengths(sample))
        return CallResult(
            records={
                name: {"id": row_id(name), "logprob": sum(own), "tokens": int(sum(tokens))}
                for name, own, tokens in zip(sample.ids, sums, lengths, strict=True)
            }
        )


def _by_item(sample: SequenceSample, values: Tensor) -> list[list[float]]:
    """Return the values [S] of sequences as one list for each item."""
    counts = sample.sequence_counts(TOKENS)
    listed = values.tolist()
    ends = accumulate(counts)
    return [listed[end - count : end] for end, count in zip(ends, counts, strict=True)]

"""Reward models: training on pairs, scores of completions and of given answers.

The score is the model's value at the token with which generation would have ended the answer. The
scored token is the first stop token of the answer's last turn, or the last token of a truncated
completion. Tokens that a chat template adds after the end of a turn, such as a newline after
``<|im_end|>``, do not count, because a completion never has them.

Models without `SCORE_AT` in their config.json were trained on whole rendered conversations. The
score of such a model is its value at the last token of a conversation.

S is the number of sequences, T the number of packed tokens and P the number of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.pairs import (
    PairInterface,
    PairValues,
    pair_stats,
    pair_weights,
    split_pairs,
    tied,
)
from slurmrl.algorithms.preference_schema import SCORE_METRICS, RewardModel
from slurmrl.algorithms.sequences import TOKENS, last_values, per_sequence
from slurmrl.data.conversations import ASSISTANT
from slurmrl.data.encoder import Encoder, expanded
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.estimates.shape import scored_at_turn_end

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn, TrainEngine


READ = "prompt_mask"
"""Key of the mask of prompts. Calls in plans of old versions do not read this key, so they use the
value at the last token."""
ScoreReader: TypeAlias = Callable[[Tensor, SequenceSample], Tensor]
"""Function that returns the scores [S] of sequences from the values [T] of their tokens."""


class RewardModelInterface(PairInterface):
    metrics = SCORE_METRICS

    def loss_fn(self, context: CallContext) -> LossFn:
        options = cast(RewardModel, context.settings.algorithm)
        return partial(score_loss, options=options, read=self._reader(context))

    def scores(
        self, outputs: dict[str, Tensor], batch: SequenceSample, context: CallContext
    ) -> Tensor:
        return tied(self._reader(context)(outputs["values"], batch), batch)

    def _reader(self, context: CallContext) -> ScoreReader:
        """Return the function that selects scores. Evaluation reads the same token as training."""
        config = context.settings.config
        turn_end = config.total_steps != 0 or scored_at_turn_end(config.actor)
        return partial(pair_values, stops=context.stop_token_ids, turn_end=turn_end)


def score_loss(
    outputs: dict[str, Tensor],
    batch: SequenceSample,
    options: RewardModel,
    *,
    read: ScoreReader = last_values,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and statistics, both sums over the items. ``outputs``: {values} [T].

    ``read`` returns the scores [S] from ``values``.
    """
    scores = split_pairs(tied(read(outputs["values"], batch), batch))
    weights = pair_weights(batch, scores.chosen)
    loss = (weights * pair_losses(scores, options)).sum()
    stats = pair_stats(weights, PairValues(*(part.detach() for part in scores)))
    names = {
        "accuracies": "accuracy",
        "margins": "margin",
        "chosen": "score_chosen",
        "rejected": "score_rejected",
    }
    return loss, {names[key]: value for key, value in stats.items()}


def pair_losses(scores: PairValues, options: RewardModel) -> Tensor:
    """Return the losses -log s(chosen - rejected) [P] of pairs (Ouyang et al. 2022, eq. 1).

    ``center_coef`` times the squared sum of both scores is added (Eisenstein et al. 2023, eq. 2).
    """
    losses = -logsigmoid(scores.chosen - scores.rejected)
    if options.center_coef:
        losses = losses + options.center_coef * (scores.chosen + scores.rejected).square()
    return losses


class TurnEnd(NamedTuple):
    """Tokens with which a chat template ends the assistant's turn."""

    token: int
    """Token with which generation ends."""
    after: Sequence[int]
    """Tokens that the template adds after ``token``."""


def turn_ends(sample: SequenceSample, stops: Sequence[int]) -> Tensor:
    """Return the positions [S] of the tokens with which generation would have ended the last turns.

    For a failed episode, in which the model wrote no token, return the last token.
    """
    ids, read = sample.tensor(TOKENS), sample.tensor(READ)
    cuts = sample.cu_seqlens(TOKENS).long().to(ids.device)
    place = torch.arange(len(ids), device=ids.device)
    numbers = torch.arange(len(cuts) - 1, device=ids.device)
    owner = torch.repeat_interleave(numbers, cuts.diff())
    last = (cuts[:-1] - 1).scatter_reduce(0, owner, torch.where(read, -1, place), "amax")
    last = torch.where(last < cuts[:-1], cuts[1:] - 1, last)
    context = torch.where(read & (place < last[owner]), place, -1)
    before = (cuts[:-1] - 1).scatter_reduce(0, owner, context, "amax")
    # Some templates do not mark the end token as part of the assistant's turn.
    turn = (place > before[owner]) & (place <= last[owner] + 1)
    stop = turn & torch.isin(ids, ids.new_tensor(stops))
    first = torch.full_like(last, len(ids))
    first = first.scatter_reduce(0, owner, torch.where(stop, place, len(ids)), "amin")
    return torch.where(first < len(ids), first, last)


def whole_conversations(sample: SequenceSample, context: CallContext) -> SequenceSample:
    """Append the tokens that the dataset's chat template puts after the end of a turn.

    Truncated completions remain unchanged.
    """
    sample = sample.only([TOKENS, READ])
    end = template_end(context)
    if end is None or not end.after:
        return sample.only([TOKENS])
    ids = sample.tensor(TOKENS)
    cuts = pairwise(sample.cu_seqlens(TOKENS).tolist())
    places = turn_ends(sample, context.stop_token_ids).tolist()
    parts = [
        torch.cat([ids[begin : place + 1], ids.new_tensor(end.after)])
        if ids[place] == end.token
        else ids[begin:stop]
        for (begin, stop), place in zip(cuts, places, strict=True)
    ]
    lengths = iter(map(len, parts))
    rows = [[next(lengths) for _ in item] for item in sample.lengths[TOKENS]]
    tokens = torch.cat(parts) if parts else ids
    return SequenceSample(sample.ids, {TOKENS: rows}, data={TOKENS: tokens})


def template_end(context: CallContext) -> TurnEnd | None:
    """Return how the chat template of the dataset ends a turn; None without a template.

    The result is also None if the template rejects a plain conversation. If several sources have
    templates, use the first template.
    """
    config = next((part for part in context.dataset.parts.values() if part.is_chat), None)
    if config is None:
        return None
    messages = [{"role": "user", "content": "Hello."}, {"role": ASSISTANT, "content": "Hello."}]
    (row,) = Encoder(config, context.tokenizer).conversations([(messages, None)])
    if isinstance(row, str):
        return None
    (sequence,) = row
    sample = SequenceSample.from_default(
        [len(sequence.tokens)],
        [""],
        {TOKENS: torch.tensor(sequence.tokens), READ: torch.tensor(expanded(sequence.runs))},
    )
    place = int(turn_ends(sample, context.stop_token_ids))
    return TurnEnd(sequence.tokens[place], list(sequence.tokens[place + 1 :]))


def pair_values(
    values: Tensor, sample: SequenceSample, stops: Sequence[int], *, turn_end: bool
) -> Tensor:
    """Return the scores [S] of answers from the values [T] of their whole conversations."""
    if turn_end and READ in sample.keys:
        return values[turn_ends(sample, stops).to(values.device)]
    return last_values(values, sample)


class ScoresInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``model_scores``, the score of each completion, and report their mean."""
        assert engine is not None
        scores = self._scores(engine, sample, context)
        stats = {"model_score": (float(scores.double().sum()), float(len(scores)))}
        return CallResult(per_sequence(sample, "model_scores", scores), stats)

    def _scores(self, engine: TrainEngine, sample: SequenceSample, context: CallContext) -> Tensor:
        model = context.settings.config.reward_model
        turn_end = model is not None and scored_at_turn_end(model)
        if not turn_end and READ in sample.keys:
            sample = whole_conversations(sample, context)
        values = _values(engine, sample)
        return pair_values(values, sample, context.stop_token_ids, turn_end=turn_end)


class PairScoresInterface(ScoresInterface):
    """Interface in which the actor is the reward model and scores the answers of pairs."""

    def _scores(self, engine: TrainEngine, sample: SequenceSample, context: CallContext) -> Tensor:
        turn_end = scored_at_turn_end(context.settings.config.actor)
        values = _values(engine, sample)
        return pair_values(values, sample, context.stop_token_ids, turn_end=turn_end)


def _values(engine: TrainEngine, sample: SequenceSample) -> Tensor:
    values: Tensor = engine.forward(sample.only([TOKENS]))["values"]
    return values

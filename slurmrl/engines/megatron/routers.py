"""Routers of megatron's layers: recorded experts, and the load-balancing loss of a whole batch.

There are T packed tokens, L blocks with experts in a chunk, E experts and K experts per token.

megatron passes each layer a mask of its tokens, and keeps the mask for recomputation. The mask
gives routers all facts about a micro-batch. Routers themselves store nothing, because several
micro-batches may be in a pipeline, and a process may have several models. (megatron's own
`RouterReplay` keeps records in lists of its class.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from slurmrl.engines.megatron.parts import CORRECTION
from slurmrl.models.architecture import ModelConfig, MoE
from slurmrl.models.experts import UNKNOWN, Balance, scaled_weights, scores_of


def marks(real: Tensor, recorded: Tensor | None, experts: int) -> Tensor:
    """Return the mask of tokens [T, 1 + L * E]: ``real`` [T], and allowed experts of each block.

    With ``recorded`` experts [T, L, K], a token may be sent only to these experts of a block. If
    the record does not name K different experts, for example if it is `UNKNOWN`, all experts are
    allowed. Without ``recorded``, the mask is [T, 1].
    """
    if recorded is None:
        return real[:, None]
    allowed = real.new_zeros((*recorded.shape[:2], experts))
    allowed.scatter_(-1, recorded.long().clamp(min=0), recorded != UNKNOWN)
    free = allowed.sum(-1, keepdim=True) != recorded.shape[-1]
    return torch.cat((real[:, None], (allowed | free).flatten(1)), 1)


class Router(TopKRouter):  # type: ignore[misc]
    """A router that replays recorded experts and has a load-balancing loss of the whole batch.

    The backward pass adds the gradient of that loss. megatron's own loss is per micro-batch, or
    uses counts that change between micro-batches.
    """

    router_replay: _Among | None

    def __init__(self, *, moe: MoE, balance: Balance | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.moe = moe
        if moe.corrected:
            correction = torch.zeros(moe.experts, dtype=torch.float32, device=self.weight.device)
            self.register_buffer(CORRECTION, correction)
        self.balance = balance
        self.number = 0 if balance is None else balance.join()
        self.block = 0
        """This router's index among the routers of its chunk."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the choices, both [T, E], for ``logits`` [T, 1, E].

        ``padding_mask`` [T, 1, 1 + L * E] has the tokens' `marks`. The mask is None if record and
        loss are missing.
        """
        if padding_mask is None:
            assert self.balance is None
            return self._among(logits, None)
        marked, experts = padding_mask.flatten(1), logits.shape[-1]
        real, allowed = marked[:, :1], marked[:, 1:]
        first = self.block * experts
        own = allowed[:, first : first + experts] if allowed.shape[1] else None
        weights, chosen = self._among(logits, own)
        if self.balance is None:
            return weights, chosen
        probabilities = logits.view_as(weights).softmax(-1, dtype=torch.float32) * real
        counts = (chosen & real).sum(0)
        return self.balance.follow(self.number, weights, probabilities, counts), chosen

    def _among(self, logits: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights and choices among the ``allowed`` experts [T, E], or among all if None."""
        if self.moe.exact:
            return self._exact(logits.flatten(0, -2), allowed)
        self.router_replay = None if allowed is None else _Among(allowed)
        try:
            chosen: tuple[Tensor, Tensor] = super().routing(logits)
        finally:
            self.router_replay = None
        return chosen

    def _exact(self, logits: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights and choices as the built-in decoder computes them.

        Groups of experts do not restrict recorded experts.
        """
        scores, values = scores_of(self.moe, logits, self._buffers.get(CORRECTION))
        if allowed is not None:
            recorded = scores.masked_fill(~allowed, -torch.inf)
            values = torch.where(allowed.all(-1, keepdim=True), values, recorded)
        experts = values.topk(self.moe.per_token).indices
        weights = scaled_weights(self.moe, scores.gather(-1, experts))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, experts, True)
        return torch.zeros_like(scores).scatter(-1, experts, weights), chosen


@dataclass(frozen=True)
class _Among:
    """Replacement of megatron's `RouterReplay` in one call of a router."""

    allowed: Tensor
    """[T, E]: whether a token may be sent to an expert."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers [T, topk] of the best allowed experts."""
        among = scores.masked_fill(~self.allowed, -torch.inf)
        return compute_topk(among, topk, num_groups, group_topk)


def balance_of(config: ModelConfig) -> Balance | None:
    """Return the load-balancing loss of a model; None for a model without this loss.

    The loss is a mean over the layers with experts of all stages.
    """
    moe = config.moe
    if moe is None or not moe.balance or not moe.layers:
        return None
    return Balance(moe.experts, moe.per_token, moe.balance / len(moe.layers))

"""The mixture-of-experts block: each token is processed by the top K experts of its router.

Experts may have biases and clamped gates (OpenAI 2025, gpt-oss).

The load-balancing loss is over all tokens of an optimizer step (Fedus et al. 2021, Switch
Transformers, equations 4 to 6). If n_e of N tokens choose expert e, and P_e is the mean probability
of expert e, the loss of a block is E times the sum over its E experts of (n_e / N) * P_e. The
counts have no gradient, so a token's part of the gradient follows from its own probabilities and
the counts of the whole batch. A batch is split into micro-batches and over ranks. The batch's
tokens are therefore counted before training, in a forward pass of all micro-batches without
gradients and a sum over the ranks.

Shapes: T tokens, M tokens sorted by expert, K experts per token, E experts, L blocks with experts,
h hidden size, i inner size of an expert, C cells of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slurmrl.models.architecture import Clamp, ModelConfig, MoE
from slurmrl.models.layer_parts import GatedMLP
from slurmrl.models.parallel.split import WHOLE, Split
from slurmrl.tensors.ops.arguments import wide
from slurmrl.tensors.ops.elementwise import gated_product
from slurmrl.tensors.ops.products import grouped_linear


class ClampedExperts(nn.Module):
    """The feed-forward blocks of all experts, with stacked matrices.

    Rows of gates and values alternate. Each tensor rank has a share of every expert's inner units,
    and one rank adds the biases of the outputs.
    """

    def __init__(
        self, experts: int, hidden: int, inner: int, clamp: Clamp, *, adds_bias: bool = True
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))
        self.clamp, self.adds_bias = clamp, adds_bias

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``x`` [M, h], sorted by expert, to [M, h]; ``counts`` [E] are tokens per expert."""
        experts = torch.arange(counts.shape[0], device=counts.device)
        experts = torch.repeat_interleave(experts, counts, output_size=x.shape[0])
        halves = grouped_linear(x, self.gate_up_proj, counts) + self.gate_up_proj_bias[experts]
        out = grouped_linear(clamped_product(halves, self.clamp), self.down_proj, counts)
        bias = self.down_proj_bias[experts]
        return out + (bias if self.adds_bias else bias * 0)


def clamped_product(x: Tensor, clamp: Clamp) -> Tensor:
    """Return the gated products [M, i] of ``x`` [M, 2i]. In x, gates and values alternate.

    Only ``x`` is kept for the backward pass.
    """
    out: Tensor = _ClampedProduct.apply(x, clamp)  # type: ignore[no-untyped-call]
    return out


class _ClampedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clamp: Clamp) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clamp = clamp
        gate, up = _halves(x, clamp)
        return (up + 1) * (gate * (gate * clamp.alpha).sigmoid())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        alpha, limit = ctx.clamp
        gate, up = _halves(x, ctx.clamp)
        share = (gate * alpha).sigmoid()
        of_gate = grad * (up + 1) * share * (1 + alpha * gate * (1 - share))
        of_up = grad * gate * share
        inside = torch.stack((x[..., 0::2] <= limit, x[..., 1::2].abs() <= limit), -1)
        return (torch.stack((of_gate, of_up), -1) * inside).flatten(-2), None


def _halves(x: Tensor, clamp: Clamp) -> tuple[Tensor, Tensor]:
    return x[..., 0::2].clamp(max=clamp.limit), x[..., 1::2].clamp(-clamp.limit, clamp.limit)


UNKNOWN = -1
"""Value in place of unrecorded experts, which the router chooses in a replay."""
Pass = Literal["other", "count", "train"]


class ExpertLayer(nn.Module):
    """The gated feed-forward blocks of all experts, with stacked matrices."""

    def __init__(self, experts: int, hidden: int, inner: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.activation = activation

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``x`` [M, h], sorted by expert, to [M, h]; ``counts`` [E] are tokens per expert."""
        gate, up = (grouped_linear(x, w, counts) for w in (self.gate_proj, self.up_proj))
        return grouped_linear(gated_product(gate, up, self.activation), self.down_proj, counts)


class RouterLinear(nn.Linear):
    """The linear layer that scores the experts.

    With ``corrected``, the layer also has a float32 buffer that is added to the scores for the
    choice. With ``exact``, its logits are float32 whatever the model's type.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        *,
        corrected: bool = False,
        exact: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden, experts, bias=bias)
        self.exact = exact
        if corrected:
            self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    @property
    def correction(self) -> Tensor | None:
        """The correction [E] of the choice; None if the router has none."""
        return self._buffers.get("e_score_correction_bias")

    def _apply(self, fn: Any, recurse: bool = True) -> RouterLinear:
        exact = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, values in self._buffers.items():
            if values is not None and values.dtype != torch.float32:
                self._buffers[name] = cast(Tensor, exact[name]).to(values.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [T, E] of tokens ``x`` [T, h]."""
        if not self.exact:
            return super().forward(x)
        dtype = wide(x.dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype))


def scores_of(moe: MoE, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scores of experts and the values that choose them (DeepSeek-AI 2024), [T, E] each.

    The experts with the K largest values are chosen. In groups that a token does not use, all
    values are -inf. A group ranks by its largest value; with a correction, by the sum of its two
    largest values (DeepSeek-V3).
    """
    if correction is None:
        values = scores = logits.softmax(-1, dtype=wide(logits.dtype))
    else:
        scores = logits.sigmoid()
        values = scores + correction
    if moe.groups > 1:
        grouped = values.view(values.shape[0], moe.groups, -1)
        best = (
            grouped.topk(2 if moe.corrected else 1, -1)
            .values.sum(-1)
            .topk(moe.chosen_groups, -1)
            .indices
        )
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        values = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores, values


def scaled_weights(moe: MoE, weights: Tensor) -> Tensor:
    """Return the weights of a token's experts from their scores; experts are the last dim."""
    if moe.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if moe.corrected else 0.0))
    return weights * moe.scale if moe.scale != 1 else weights


class SparseMLP(nn.Module):
    """A router, its experts, and shared experts, which process every token.

    Each tensor rank has a share of every expert's inner units, and the whole router.
    """

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        moe = config.moe
        assert moe is not None
        self.moe = moe
        biased = moe.clamp is not None
        self.gate = RouterLinear(
            config.hidden_size, moe.experts, corrected=moe.corrected, exact=moe.exact, bias=biased
        )
        inner = moe.inner // split.tensor.size
        self.experts: nn.Module
        if moe.clamp is not None:
            first = split.tensor.rank == 0
            sizes = (moe.experts, config.hidden_size, inner)
            self.experts = ClampedExperts(*sizes, moe.clamp, adds_bias=first)
        else:
            self.experts = ExpertLayer(moe.experts, config.hidden_size, inner, config.activation)
        self.shared_experts = GatedMLP(config, split, moe.shared) if moe.shared else None
        self.per_token = moe.per_token
        self.balance: Balance | None = None
        """Load-balancing loss of the model; None if it has none."""
        self.number = 0
        """Index of this block among the blocks with experts."""
        self.tokens: int | None = None
        """Number of tokens before the padding in the next call; None without padding."""
        self.routes: Routes | None = None
        """Object that records or replaces the choices of the next calls; with None, the router
        chooses."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [T, h] for ``x`` [T, h]."""
        if self.shared_experts is not None:
            out: Tensor = self._routed(x) + self.shared_experts(x)
            return out
        return self._routed(x)

    def _routed(self, x: Tensor) -> Tensor:
        x = self.split.enter(x)
        logits: Tensor = self.gate(x)
        if self.moe.exact:
            probabilities, values = scores_of(self.moe, logits, self.gate.correction)
            chosen = values.topk(self.per_token).indices
            weights = probabilities.gather(-1, chosen)
        else:
            probabilities = logits.softmax(-1, dtype=wide(logits.dtype))
            weights, chosen = probabilities.topk(self.per_token)
        if self.routes is not None:
            taken = self.routes.chosen(self.number, chosen)
            if taken is not chosen:
                weights, chosen = probabilities.gather(-1, taken), taken
        weights = scaled_weights(self.moe, weights)
        counts = tokens_of_experts(chosen, probabilities.shape[1])
        if self.balance is not None:
            real = probabilities[: self.tokens]
            loads = tokens_of_experts(chosen[: self.tokens], real.shape[1])
            weights = self.balance.follow(self.number, weights, real, loads)
        order = chosen.flatten().argsort(stable=True)
        outputs = self.experts(x.index_select(0, order // self.per_token), counts)
        parts: Tensor = outputs.index_select(0, order.argsort())
        parts = parts.view(x.shape[0], self.per_token, -1)
        return self.split.leave((parts * weights.to(x.dtype).unsqueeze(-1)).sum(1))


class Routes(Protocol):
    """Object that records or replaces the experts that routers choose."""

    def chosen(self, block: int, own: Tensor) -> Tensor:
        """Return the experts [T, K] that a block uses; its router has chosen ``own`` [T, K]."""
        ...


class Recorded:
    """Routes that store the choices of the routers in the cache."""

    def __init__(self, cells: Sequence[Tensor], slots: Tensor) -> None:
        """Record into ``cells``, which are [C, K] int16 for each block.

        ``slots`` [T] are the cells of the next call's tokens. Padding may follow these tokens.
        """
        self._cells, self._slots = cells, slots

    def chosen(self, block: int, own: Tensor) -> Tensor:
        tokens = own[: self._slots.shape[0]].to(torch.int16)
        self._cells[block].index_copy_(0, self._slots, tokens)
        return own


class Replayed:
    """Routes that replay the recorded experts of packed sequences."""

    def __init__(self, experts: Tensor) -> None:
        """Replay ``experts`` [T, L, K] in the order of the sample; `UNKNOWN` is not replayed."""
        self._experts = experts.long()
        self._own = self._experts

    def arrange(self, order: Tensor, split: Split) -> None:
        """Prepare for this rank's tokens. ``order`` [T]: the sample index of each packed token."""
        tokens = order.shape[0]
        first, last = split.own_range(tokens)
        own = self._experts[order[first:last]]
        missing = split.part_tokens(tokens) - (last - first)
        padding = own.new_full((missing, *own.shape[1:]), UNKNOWN)
        self._own = torch.cat((own, padding)) if missing else own

    def place(self, places: Tensor, tokens: int) -> None:
        """Prepare for calls of ``tokens`` tokens: the sample at ``places`` [T], and padding."""
        own = self._experts.new_full((tokens, *self._experts.shape[1:]), UNKNOWN)
        self._own = own.index_copy(0, places, self._experts)

    def chosen(self, block: int, own: Tensor) -> Tensor:
        recorded = self._own[:, block]
        return torch.where(recorded == UNKNOWN, own, recorded)


class Balance:
    """The load-balancing loss of a model's blocks on this rank; ``weight`` scales each loss."""

    def __init__(self, experts: int, per_token: int, weight: float) -> None:
        self.weight = weight
        self.now: Pass = "other"
        """Purpose of the next passes; ``other`` if their tokens do not belong to the batch."""
        self._experts, self._per_token = experts, per_token
        self._blocks = 0
        self._counts = torch.zeros(0, device="cpu")
        self._tokens: list[int] = []

    def join(self) -> int:
        """Register a block; return its number."""
        self._blocks += 1
        return self._blocks - 1

    def begin(self, device: torch.device) -> None:
        """Reset the counts for a new batch."""
        shape = (self._blocks, self._experts)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)

    def sum_counts(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Sum the counts over all ranks after the counting passes.

        Collective over the ``groups`` along which tokens are spread.
        """
        for group in groups if self._blocks else ():
            dist.all_reduce(self._counts, group=group)
        self._tokens = [chosen // self._per_token for chosen in self._counts.sum(-1).tolist()]

    def follow(self, block: int, values: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Count tokens, or return ``values`` with the gradient of the loss attached.

        A block passes its router's ``probabilities`` [T, E], the number ``counts`` [E] of tokens
        that chose each expert, and ``values`` on which its output depends.
        """
        if self.now == "count":
            self._counts[block] += counts
        elif self.now == "train" and torch.is_grad_enabled() and probabilities.shape[0]:
            loss = balance_loss(probabilities, self._counts[block], self._tokens[block])
            return _with_loss(values, loss * self.weight)
        return values


def tokens_of_experts(chosen: Tensor, experts: int) -> Tensor:
    """Return the number of tokens of each expert [E] from ``chosen`` [T, K].

    Unlike bincount, this does not wait for the GPU.
    """
    each = chosen.flatten()
    return each.new_zeros(experts).scatter_add_(0, each, torch.ones_like(each))


def balance_loss(probabilities: Tensor, counts: Tensor, tokens: int | None = None) -> Tensor:
    """Return the contribution of T tokens with ``probabilities`` [T, E] to a block's loss.

    ``tokens`` is the number of all tokens of the batch (default: T), of which ``counts`` [E] chose
    each expert.
    """
    experts = probabilities.shape[1]
    tokens = probabilities.shape[0] if tokens is None else tokens
    return probabilities.sum(0) @ counts.to(probabilities.dtype) * (experts / max(tokens, 1) ** 2)


def _with_loss(values: Tensor, loss: Tensor) -> Tensor:
    """Return ``values`` such that their backward pass adds the gradient of ``loss``."""
    out: Tensor = _WithLoss.apply(values, loss)  # type: ignore[no-untyped-call]
    return out


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = loss.shape, loss.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(ctx.shape, dtype=ctx.dtype)

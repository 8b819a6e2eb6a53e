"""A test of generation: a model's cache must give the outputs of its training pass.

Configs do not state whether a family's states survive padding on the left, a new order of rows or
a second batch. A few tokens are tried before the first completion.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slurmrl.errors import UsageError
from slurmrl.models.hf_rows import (
    LONG,
    SHORT,
    difference,
    relative,
    tolerance,
    trial_tokens,
)
from slurmrl.models.hf_session import HFSession

STEP_TOLERANCE = 1e-2
"""Relative difference of logits that is accepted even in float32: the state-space layers of Zamba2
and Nemotron-H limit time steps only where they read several tokens."""
ADVICE = "Set rollout.backend to sglang or vllm if such a server knows the family"
NEW = 2
"""Tokens after each prompt."""


@torch.no_grad()
def check_generation(model: nn.Module, inner: PreTrainedModel) -> None:
    """Raise UsageError if logits of generated tokens are not the logits of the training pass.

    ``model`` runs ``inner``, with gathered weights.
    """
    name = inner.config.model_type
    try:
        found = difference(inner, lambda trial: _difference(model, inner, trial))
    except (ValueError, AttributeError, TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{name} models cannot generate with implementation hf: a test of their cache failed "
            f"({error}). {ADVICE}"
        ) from error
    if found > max(STEP_TOLERANCE, tolerance(inner)):
        raise UsageError(
            f"{name} models cannot generate with implementation hf: in a test, logits of "
            f"generated tokens differ by {found:.1%} from a pass over the whole sequence. {ADVICE}"
        )


def _difference(model: nn.Module, inner: PreTrainedModel, trial: int) -> float:
    """Return the relative difference of logits for two prompts of unequal lengths.

    The shorter prompt is padded. The rows change places before new tokens, and another session
    begins.
    """
    ids = trial_tokens(inner, trial, LONG + SHORT)
    rows = (ids[:LONG], ids[LONG:])
    wanted = [_logits(model, row)[-NEW - 1 :] for row in rows]
    lengths = [LONG - NEW, SHORT - NEW]
    session, other = (HFSession(model, inner, lengths, 2 * LONG) for _ in range(2))
    prompts = torch.cat([row[:-NEW] for row in rows])
    found = [session.prompts(prompts)]
    other.prompts(prompts.flip(0))
    session.keep(torch.tensor([1, 0], device=prompts.device))
    alive = torch.ones(2, dtype=torch.bool, device=prompts.device)
    for place in range(-NEW, 0):
        read = session.next(torch.stack([rows[1][place], rows[0][place]]), alive)
        found.append(read.flip(0))
    return relative(torch.stack(found, dim=1), torch.stack(wanted))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits [L, V] of one sequence."""
    step = {"input_ids": ids[None], "use_cache": False}
    logits: Tensor = model(ids, ids, 0, step).logits[0]
    return logits

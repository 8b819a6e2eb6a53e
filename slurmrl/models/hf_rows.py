"""Rows of equal width for models of transformers, and tests that show which rows a model supports.

Rows are as wide as the longest sequence. A row has several sequences one after the other if they do
not affect each other in the model; this leaves little padding. In families with convolutions or
recurrent states, a sequence affects the next sequence of its row. Configs do not state this, so
each model is tested.

Padding is on the right, without a mask, because a causal model does not see it.

Shapes: T packed tokens, S sequences, R rows, W width of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slurmrl import log
from slurmrl.errors import UsageError
from slurmrl.models.base import PackedModel, RowKind
from slurmrl.models.hf_config import BY_COLUMN, compressing_field
from slurmrl.models.packed import packed_positions, packed_rows
from slurmrl.tensors.bins import best_fit

LOG = log.get(__name__)
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Mapping from dtype to the largest relative difference (of 2-norms) that counts as rounding."""
COARSE_TOLERANCE = 0.1
"""Maximum relative difference that counts as rounding in half precision."""
LEAST_LEAK, NOISE_FACTOR = 1e-6, 3.0
"""Bounds of the relative change of a sequence's outputs if the tokens of its neighbor change: an
absolute bound, and a factor of the change by rounding. A larger change is a leak."""
TRIALS = 3
"""Number of tests with different tokens. Rounding may change a router's choice in one test."""
LONG, SHORT = 8, 3
"""Numbers of tokens of the long sequence and of each of the two short sequences in a test."""
OFFSETS = torch.tensor([0, LONG, LONG + SHORT, LONG + 2 * SHORT], dtype=torch.int32)
LAST = slice(LONG + SHORT, None)


class RowPlaces(NamedTuple):
    """The place of each packed token in rows."""

    rows: Tensor
    """[T] int64: row of each token."""
    columns: Tensor
    """[T] int64: column of each token."""
    shape: tuple[int, int]
    """(R, W)."""
    positions: Tensor | None
    """[R, W] int64: positions, from 0 in each sequence; None if each row has one sequence."""


def row_places(cu_seqlens: Tensor, width: int, kind: RowKind) -> RowPlaces:
    """Return the places of packed tokens in rows; ``cu_seqlens`` [S+1] is in host memory."""
    lengths = cu_seqlens.diff().long()
    tokens, count = int(cu_seqlens[-1]), lengths.shape[0]
    held = best_fit(lengths.tolist(), width) if kind == "packed" else []
    if not 0 < len(held) < count:
        columns = packed_positions(cu_seqlens, tokens)
        return RowPlaces(packed_rows(cu_seqlens, tokens), columns, (count, width), None)
    row_of, first = torch.empty_like(lengths), torch.empty_like(lengths)
    positions = torch.arange(width).repeat(len(held), 1)
    for row, sequences in enumerate(held):
        column = 0
        for index in sequences:
            row_of[index], first[index] = row, column
            positions[row, column:] = torch.arange(width - column)
            column += int(lengths[index])
    sequence = packed_rows(cu_seqlens, tokens)
    columns = packed_positions(cu_seqlens, tokens) + first[sequence]
    return RowPlaces(row_of[sequence], columns, (len(held), width), positions)


@torch.no_grad()
def choose_rows(model: PackedModel, inner: PreTrainedModel) -> RowKind:
    """Return ``packed`` if sequences of a row do not affect each other on the CPU, else ``single``.

    ``model`` calls ``inner``. Raises UsageError if even padding changes outputs.
    """
    family = model.config.model_type
    fields = inner.config.get_text_config().to_dict()
    by_column = bool(fields.get(BY_COLUMN)) or compressing_field(fields) is not None
    reason = "outputs depend on columns" if by_column else "packed sequences affect each other"
    try:
        apart = not by_column and _keeps_apart(model, inner)
    except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
        apart, reason = False, f"a test of packed sequences failed: {error}"
    if apart:
        return "packed"
    try:
        found = _padding_difference(model, inner)
    except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
        LOG.info("%s: padding could not be tried on the CPU: %s", family, error)
        return "single"  # The model's code may run only on GPUs.
    if found > tolerance(inner):
        raise UsageError(
            f"implementation hf does not support this {family} model: in a test, outputs of a "
            f"padded sequence differ by {found:.1%} from the same sequence without padding, so "
            "results would depend on the batch"
        )
    LOG.info("%s: sequences are padded, not packed: %s", family, reason)
    return "single"


def tolerance(inner: PreTrainedModel) -> float:
    """Return the relative difference that counts as rounding in the model's dtype."""
    return TOLERANCE.get(next(inner.parameters()).dtype, COARSE_TOLERANCE)


def trial_tokens(inner: PreTrainedModel, trial: int, count: int) -> Tensor:
    """Return random tokens [count] on the model's device. The tokens are equal in all processes."""
    generator = torch.Generator().manual_seed(trial)
    device = next(inner.parameters()).device
    return torch.randint(vocabulary(inner), (count,), generator=generator).to(device)


def vocabulary(inner: PreTrainedModel) -> int:
    """Return the number of token embeddings."""
    table: Any = inner.get_input_embeddings()
    return int(table.weight.shape[0])


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the 2-norm of the difference relative to the 2-norm of ``wanted``."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def difference(inner: PreTrainedModel, measure: Callable[[int], float]) -> float:
    """Return the smallest measured difference; stop at a difference that counts as rounding.

    ``measure`` gets the number of the test.
    """
    found: list[float] = []
    for trial in range(TRIALS):
        found.append(measure(trial))
        if found[-1] <= tolerance(inner):
            break
    return min(found)


def _keeps_apart(model: PackedModel, inner: PreTrainedModel) -> bool:
    """Return whether the first sequence of a row changes the second sequence only by rounding."""
    model.rows = "packed"
    for trial in range(TRIALS):
        ids = trial_tokens(inner, trial, int(OFFSETS[-1]))
        others = ids.clone()
        others[LONG : LONG + SHORT] = (ids[LONG : LONG + SHORT] + 1) % vocabulary(inner)
        found, changed = (model(each, OFFSETS, LONG) for each in (ids, others))
        noise = relative(changed[:LONG], found[:LONG])
        leak = relative(changed[LAST], found[LAST])
        if leak <= max(LEAST_LEAK, NOISE_FACTOR * noise):
            alone = model(ids[LAST], torch.tensor([0, SHORT], dtype=torch.int32), SHORT)
            if relative(found[LAST], alone) <= tolerance(inner):
                return True
    return False


def _padding_difference(model: PackedModel, inner: PreTrainedModel) -> float:
    """Return the relative difference between short sequences with and without a long sequence."""
    model.rows = "single"
    both = torch.tensor([0, SHORT, 2 * SHORT], dtype=torch.int32)

    def measure(trial: int) -> float:
        ids = trial_tokens(inner, trial, int(OFFSETS[-1]))
        return relative(model(ids, OFFSETS, LONG)[LONG:], model(ids[LONG:], both, SHORT))

    return difference(inner, measure)

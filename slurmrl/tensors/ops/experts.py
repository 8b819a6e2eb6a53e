"""Products with one of several matrices per token, without padding.

M tokens sorted by expert, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT_BYTES = 16
"""What torch's grouped kernels ask of the rows of all operands."""
ON_GPUS = (torch.bfloat16,)
ON_CPUS = (torch.float32, torch.bfloat16, torch.float16)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each token times its expert's matrix: x [M, i], weight [E, o, i], counts [E] tokens of each
    expert, in order -> [M, o].

    One grouped kernel where torch has one for the type and the sizes, else a loop over the
    experts that have tokens.
    """
    if _fits(x, weight):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    sizes: list[int] = counts.tolist()
    parts, matrices = x.split_with_sizes(sizes), weight.unbind()
    used = [n for n, size in enumerate(sizes) if size] or [0]
    return torch.cat([F.linear(parts[n], matrices[n]) for n in used])


def _fits(x: Tensor, weight: Tensor) -> bool:
    aligned = all(n * x.element_size() % ALIGNMENT_BYTES == 0 for n in weight.shape[1:])
    return aligned and x.dtype in (ON_GPUS if x.is_cuda else ON_CPUS)

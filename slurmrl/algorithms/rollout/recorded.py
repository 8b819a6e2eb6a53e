"""What generation has recorded about completions, as keys of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np
import torch

from slurmrl.data.meta import EXPERTS, IDS, SIZES, SampledSupport
from slurmrl.data.sample import SequenceSample
from slurmrl.tensors.layout import Array


def add_support(sample: SequenceSample, support: SampledSupport) -> None:
    """Add the keys of the support of all tokens under ``input_ids``, in their order."""
    rows = sample.lengths["input_ids"]
    ends = [0, *accumulate(support.sizes)]
    cuts = pairwise(accumulate(chain.from_iterable(rows), initial=0))
    of_sequences = iter([ends[stop] - ends[start] for start, stop in cuts])
    lengths = {SIZES: rows, IDS: [[next(of_sequences) for _ in row] for row in rows]}
    device = sample.tensor("input_ids").device
    data = {
        key: torch.from_numpy(np.array(values, np.int32)).to(device)
        for key, values in ((SIZES, support.sizes), (IDS, support.ids))
    }
    sample.update_(SequenceSample(sample.ids, lengths, data=dict(data)))


def add_experts(sample: SequenceSample, experts: Sequence[Array]) -> None:
    """Add the key of the experts of each sequence, int16 in any shape."""
    sizes = iter([each.size for each in experts])
    lengths = {EXPERTS: [[next(sizes) for _ in row] for row in sample.lengths["input_ids"]]}
    flat = [each.reshape(-1) for each in experts]
    values = torch.from_numpy(np.concatenate([np.zeros(0, np.int16), *flat]))
    data = {EXPERTS: values.to(sample.tensor("input_ids").device)}
    sample.update_(SequenceSample(sample.ids, lengths, data=dict(data)))

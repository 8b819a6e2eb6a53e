"""What generation has recorded about the tokens of a sample, for models that compute them again."""

from __future__ import annotations

from slurmrl.data.sample import SequenceSample
from slurmrl.data.support import IDS, SIZES
from slurmrl.ops.support import Support


def support_of(sample: SequenceSample | None) -> Support | None:
    """The supports of a sample's tokens; None if all were drawn from the whole vocabulary."""
    if sample is None or SIZES not in sample.keys:
        return None
    return Support.of(sample.tensor(SIZES), sample.tensor(IDS))

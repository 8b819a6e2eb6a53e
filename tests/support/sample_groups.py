"""Small groups of samples."""

from __future__ import annotations

import numpy as np

from slurmrl.rollouts.sample_files import SampleGroup

VERSIONS = ("4.1", "5.1")


def small_group(item: int, lease: str = "1.0") -> SampleGroup:
    """Return two completions of 3 and 2 tokens that depend on the item."""
    return SampleGroup(
        item=item,
        lease=lease,
        versions=VERSIONS,
        lengths=np.array([3, 2], np.int32),
        prompt_lengths=np.array([1, 1], np.int32),
        finished=np.array([True, False]),
        failed=np.array([False, False]),
        turns=np.array([2, 1], np.int32),
        tool_calls=np.array([1, 0], np.int32),
        tool_failures=np.array([0, 0], np.int32),
        input_ids=np.array([1, item, 3, 1, item], np.int32),
        drawn_by=np.array([-1, 0, 1, -1, 1], np.int32),
        logprobs=np.array([0, -0.5, -1, 0, -2], np.float32),
        turn_rewards=np.array([0, 0, 1, 0, item], np.float32),
    )

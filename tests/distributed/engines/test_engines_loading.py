"""A rank's memory during loading of a checkpoint of another layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.engines.loading_cases import BLOCK_BYTES
from tests.distributed.engines.test_engines_megatron import EVEN
from tests.distributed.transfer.move_cases import Side
from tests.pool import RankPool

LARGE = {**EVEN, "hidden_size": 240, "intermediate_size": 960, "vocab_size": 2048}
"""4.5 million parameters: 54 MB with both moments."""
MEGATRON = Side({"pp": 2, "dp": 1, "cp": 1, "tp": 2}, "megatron", trained=True)
FSDP = Side({"dp": 4}, trained=True)


@pytest.mark.parametrize("sides", [(MEGATRON, FSDP), (FSDP, MEGATRON)], ids=["fsdp", "megatron"])
def test_loading_keeps_at_most_a_ranks_part_and_one_block(
    ranks: RankPool, tmp_path: Path, sides: tuple[Side, Side]
) -> None:
    """A rank never holds the whole model, or a whole tensor of other ranks."""
    job = "tests.distributed.engines.loading_cases:loaded"
    for peak, own in ranks(4, job, [*sides], LARGE, tmp_path):
        assert peak < 12 * BLOCK_BYTES < own // 4

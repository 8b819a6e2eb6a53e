"""Moves between engines and layouts, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.engines.test_engines_megatron import EVEN, MOE, TIED
from tests.distributed.transfer.move_cases import Side
from tests.pool import RankPool

HERE = "tests.distributed.transfer.move_cases"


def megatron(**changes: Any) -> Side:
    sizes = {axis: changes.pop(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    return Side(sizes, "megatron", **changes)


DENSE = [
    Side({"dp": 4}),
    Side({"dp": 2, "tp": 2}, trained=True),
    Side({"dp": 1, "cp": 2, "tp": 2}),
    Side({"dp": 1, "tp": 4}, dtype="bfloat16"),
    Side({"dp": 2}, ranks=(1, 3), dtype="bfloat16"),
    megatron(dp=2, tp=2),
    megatron(pp=2, tp=2, trained=True, dtype="bfloat16"),
    megatron(pp=2, dp=2, virtual_pipeline=2),
    megatron(pp=2, ranks=(0, 2)),
    Side({"dp": 2, "tp": 2}, "native"),
    Side({"dp": 3}, "native", ranks=(0, 2, 3), dtype="bfloat16"),
]
EXPERTS = [
    Side({"dp": 4}),
    Side({"dp": 2, "tp": 2}, "native", dtype="bfloat16"),
    Side({"dp": 2, "tp": 2}),
    megatron(dp=2, tp=2, sequence_parallel=True, expert_sizes={"dp": 1, "ep": 2, "tp": 2}),
    megatron(dp=4, expert_sizes={"dp": 1, "ep": 4, "tp": 1}, dtype="bfloat16"),
    megatron(pp=2, dp=2, expert_sizes={"pp": 2, "dp": 1, "ep": 2, "tp": 1}),
]


@pytest.mark.parametrize(
    ("architecture", "sides"),
    [(EVEN, DENSE), (TIED, DENSE), (MOE, EXPERTS)],
    ids=["dense", "tied", "experts"],
)
def test_weight_move_between_all_layout_pairs_is_exact(
    ranks: RankPool, architecture: dict[str, Any], sides: list[Side]
) -> None:
    received = ranks(4, f"{HERE}:all_pairs", sides, architecture)
    pairs = len(sides) * (len(sides) - 1)
    pairs -= sum(side.trained for side in sides) * (len(sides) - 1)
    assert len(received[0]) == pairs
    sent = [pair for pair in received[0] if sum(counts[pair] for counts in received)]
    assert len(sent) > pairs / 2  # in the other pairs every rank has what it needs


def test_weight_move_allocates_at_most_its_staging_buffer(ranks: RankPool) -> None:
    """Rows of a matrix are sent and received in place. Only scattered elements pass through
    buffers, whose size the plan's staging limits. Consecutive copies of whole models need no
    buffer.
    """
    whole = [Side({"dp": 1}), Side({"dp": 4}, "native")]
    for peak, _ in ranks(4, f"{HERE}:allocated", whole, EVEN):
        assert peak < 1024  # (norms share a message)
    split = [megatron(pp=2, tp=2), Side({"dp": 2, "tp": 2}, "native", dtype="bfloat16")]
    found = ranks(4, f"{HERE}:allocated", split, EVEN)
    assert all(peak <= staging for peak, staging in found)
    assert any(peak > 1024 for peak, _ in found)


def test_coalesced_transfers_move_the_same_weights(ranks: RankPool) -> None:
    sides = [megatron(pp=2, tp=2), Side({"dp": 2, "tp": 2}, "native", dtype="bfloat16")]
    ranks(4, f"{HERE}:coalesced", sides, EVEN)


def test_weight_move_can_update_a_moving_average(ranks: RankPool) -> None:
    sides = [megatron(pp=2, tp=2), Side({"dp": 2, "tp": 2})]
    ranks(4, f"{HERE}:moving_average", sides, TIED, 0.3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stale replica", "norm.weight' on rank 3 of the source differs from rank 0"),
        ("wrong box", "of the target differs"),
        ("skipped tie", "'model.embed_tokens.weight' on rank 3 of the target differs"),
    ],
)
def test_verification_detects_a_faulty_move(ranks: RankPool, fault: str, message: str) -> None:
    sides = [Side({"dp": 1, "tp": 4}), megatron(pp=2, tp=2)]
    reports = ranks(4, f"{HERE}:planted", sides, TIED, fault)
    assert all(reports)
    assert any(message in report for report in reports)

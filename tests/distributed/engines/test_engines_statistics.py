"""Statistics of a loss, summed over ranks; some ranks have no micro-batch."""

from __future__ import annotations

import pytest
import torch

from slurmrl.engines.microbatch import Sums
from tests.distributed.engines.cases import Setup, context
from tests.pool import RankError, RankPool

HERE = __name__


def totals(names: list[list[str]]) -> dict[str, float]:
    """Return the totals of each rank, whose entry has one statistic of every name."""
    here = context(Setup())
    sums = Sums(here.device)
    sums.add({name: torch.tensor(1.0) for name in names[here.dp_rank]})
    return sums.over_ranks(here, some_empty=True)


def test_statistic_names_of_any_length_reach_ranks_without_samples(ranks: RankPool) -> None:
    names = [f"share of tokens in bucket {number}, größer als zuvor" for number in range(300)]
    found = ranks(3, f"{HERE}:totals", [[], names, names])
    assert found == [dict.fromkeys(sorted(names), 2.0)] * 3


def test_different_statistic_names_on_ranks_are_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"UsageError: .* a, c .*the same names"):
        ranks(3, f"{HERE}:totals", [["b", "c"], [], ["a", "c"]], deadline_s=60.0)

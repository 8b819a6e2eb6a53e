"""Recorded supports and experts where ranks share the vocabulary and the sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engines.cases import Setup, model
from tests.distributed.engines.one_process import of_folder, random_model
from tests.distributed.engines.test_engines_megatron import EVEN, MOE
from tests.pool import RankPool

HERE = "tests.distributed.engines.replay_cases:replayed"


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_replay_experts_as_one_process_does(
    sequence: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """With tokens that are split in other ways than sequences."""
    random_model(tmp_path / "model", MOE)
    settings = model(architecture=MOE, max_tokens_per_microbatch=16)
    alone = of_folder(Setup(model=settings, sizes={"dp": 1}), tmp_path / "model")
    (wanted,) = ranks(1, HERE, alone, 3, 4)
    settings = {**settings, "model": {"sequence_parallel": sequence}}
    several = Setup(model=settings, sizes={"cp": 2, "tp": 2})
    for found in ranks(4, HERE, of_folder(several, tmp_path / "model"), 3, 4):
        assert_same(found, wanted)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_ranks_replay_supports_as_one_process_does(
    engine: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Outputs, and the loss and gradient of a step, with several micro-batches."""
    random_model(tmp_path / "model", EVEN)
    settings = model(architecture=EVEN, max_tokens_per_microbatch=16)
    alone = of_folder(Setup(model=settings, sizes={"dp": 1}), tmp_path / "model")
    (wanted,) = ranks(1, HERE, alone)
    if engine == "megatron":
        settings = {**settings, "model": {"make_vocab_size_divisible_by": 1}}
    several = Setup(engine=engine, model=settings, sizes={"cp": 2, "tp": 2})
    for found in ranks(4, HERE, of_folder(several, tmp_path / "model")):
        assert_same(found, wanted)


def assert_same(found: Any, wanted: Any) -> None:
    """The outputs, and the statistics of a step."""
    (outputs, stats), (wanted_outputs, wanted_stats) = found, wanted
    for name, values in wanted_outputs.items():
        assert (outputs[name] - values).abs().max() < 2e-5, name
    for name in ("loss", "grad_norm"):
        assert stats[name] == pytest.approx(wanted_stats[name], rel=1e-5)


def test_ranks_that_share_a_server_have_its_supports(ranks: RankPool) -> None:
    for found in ranks(2, "tests.distributed.engines.replay_cases:shared"):
        assert found is not None
        assert (list(found.sizes), list(found.ids)) == ([0, 2], [4, 7])

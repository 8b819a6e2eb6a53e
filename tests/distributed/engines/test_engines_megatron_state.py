"""Tests of the memory, checkpoints and offloading of the megatron engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.layout import Box, Layout, sources, view
from tests.distributed.engines.cases import LENGTHS, Setup, model
from tests.distributed.engines.megatron_cases import Case, Placed, placed
from tests.distributed.engines.one_process import random_model
from tests.distributed.engines.test_engines_contract import (
    plain_decoder,
    plain_outputs,
    value_model,
)
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    EVEN,
    FAST,
    LONG,
    MOE,
    TIED,
    grid,
)
from tests.pool import RankError, RankPool

HERE = "tests.distributed.engines.megatron_cases"
FSDP = "tests.distributed.engines.cases"
ADAM = {"betas": (0.9, 0.95), "schedule": "cosine"}


def assembled(results: list[tuple[Layout, dict[str, Tensor]]]) -> dict[str, np.ndarray[Any, Any]]:
    """Whole tensors, from all ranks' storages."""
    layout = results[0][0]
    layout.check()
    storages = [{n: flat.numpy() for n, flat in held.items()} for _, held in results]
    found = {}
    for name, spec in layout.tensors.items():
        found[name] = np.zeros(spec.shape, np.float32)
        for part, box in sources(layout.holders[name], Box.whole(spec.shape)):
            shard = part.shard(name)
            stored = storages[part.ranks[0]][shard.storage]
            found[name][box.slices] = view(stored, shard.offset_of(box), shard.strides, box.size)
    return found


ALL = {**FAST, **LONG}
VALUED = ("t2 sp tied", "p2 v2", "p4 tied", "d2 experts e2")
"""Layouts that are also looked at with a value head."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, head) for name, (where, _, head) in ALL.items() if len(where.ranks) <= 4),
        *((name, "value") for name in VALUED),
    ],
)
def test_pieces_of_all_ranks_form_the_tensors_of_the_files(
    ranks: RankPool, tmp_path: Path, name: str, head: Any
) -> None:
    where, architecture, _ = ALL[name]
    decoder = random_model(tmp_path, architecture, head)
    case = Case(where, model(architecture=None, **BUDGET), head, source=tmp_path)
    found = assembled(ranks(len(where.ranks), f"{HERE}:held", case, deadline_s=300.0))
    expected = decoder.state_dict()
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert np.array_equal(found[tensor], value.numpy()), tensor


@pytest.mark.long
def test_missing_value_head_is_initialized_to_zero(ranks: RankPool, tmp_path: Path) -> None:
    decoder = random_model(tmp_path, TIED)
    case = Case(placed(pp=2), model(architecture=None, **BUDGET), "value", source=tmp_path)
    found = assembled(ranks(2, f"{HERE}:held", case, deadline_s=300.0))
    assert not found.pop("score.weight").any()
    expected = dict(decoder.named_parameters())
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert np.array_equal(values, expected[name].detach().numpy()), name


ONE_WAY = [(True, "lm"), (False, "value")]
OTHER = [(True, "value"), (False, "lm")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "trained", "head"),
    [
        *((where, *case) for where in (placed(tp=2, sp=True), placed(pp=2)) for case in ONE_WAY),
        *((where, *case) for where in (placed(pp=2, dp=2), placed(cp=2, tp=2)) for case in OTHER),
    ],
)
def test_outputs_on_every_rank_equal_one_process(
    ranks: RankPool, tmp_path: Path, where: Placed, trained: bool, head: Any
) -> None:
    if head == "value":
        decoder = value_model(tmp_path, **TIED)
        case = Case(where, model(architecture=None, **BUDGET), head, trained, tmp_path)
    else:
        decoder = plain_decoder(head, **TIED)
        case = Case(where, model(architecture=TIED, **BUDGET), head, trained)
    with torch.no_grad():
        expected = plain_outputs(decoder)
    for outputs, share in ranks(len(where.ranks), f"{HERE}:outputs", case, deadline_s=300.0):
        assert set(outputs) == set(expected)
        for name, whole in expected.items():
            wanted = [whole.split(LENGTHS)[index] for index in share]
            assert torch.allclose(outputs[name], torch.cat(wanted), atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "where", [placed(tp=2, sp=True), placed(pp=2, v=2), placed(dp=2, experts=grid(1, 1, 2, 1))]
)
def test_resuming_is_bit_exact(ranks: RankPool, tmp_path: Path, where: Placed) -> None:
    architecture = MOE if where.expert_sizes else TIED
    settings = model(architecture=architecture, optimizer=ADAM, **BUDGET)
    case = Case(where, settings)
    for folder in ("straight", "again"):
        for number in range(3):
            (tmp_path / folder / str(number)).mkdir(parents=True)
    straight, again = tmp_path / "straight", tmp_path / "again"
    whole = ranks(2, f"{HERE}:train", case, range(3), save=straight, deadline_s=300.0)
    rest = ranks(2, f"{HERE}:train", case, range(1, 3), load=straight / "0", save=again)
    assert [result[1:] for result in whole] == rest
    for rank in range(2):
        name = f"2/actor.{rank}.safetensors"
        assert (straight / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.long
def test_checkpoint_moves_between_layouts_and_engines(ranks: RankPool, tmp_path: Path) -> None:
    settings = model(architecture=EVEN, optimizer=ADAM, **BUDGET)
    folders = [tmp_path / str(index) for index in range(4)]
    for folder in folders:
        (folder / "0").mkdir(parents=True)
    first = Case(placed(tp=2, sp=True), settings)
    ranks(2, f"{HERE}:train", first, save=folders[0], deadline_s=300.0)
    source = folders[0] / "0"
    where = placed(pp=2, dp=2)
    ranks(4, f"{HERE}:resaved", Case(where, settings), source, folders[1])
    setup = Setup(model=settings, split=[[]] * 2)
    ranks(2, f"{FSDP}:train", setup, range(1, 1), load=folders[1], save=folders[2])
    ranks(2, f"{HERE}:resaved", Case(placed(cp=2), settings), folders[2], folders[3])
    checkpoints = [RoleCheckpoint(folder, "actor") for folder in (source, *folders[1:])]
    assert [checkpoint.step for checkpoint in checkpoints] == [1, 1, 1, 1]
    for name in checkpoints[0].layout.tensors:
        values = [checkpoint.read(name) for checkpoint in checkpoints]
        assert np.any(values[0])
        assert all(np.array_equal(values[0], value) for value in values[1:]), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "architecture", "dtype"),
    [
        (placed(), TIED, "float32"),
        (placed(dp=2), TIED, "bfloat16"),
        (placed(tp=2, sp=True), TIED, "float32"),
        (placed(pp=2, v=2), TIED, "bfloat16"),
        (placed(dp=2, experts=grid(1, 1, 2, 1)), MOE, "float32"),
        (placed(dp=2, experts=grid(1, 1, 2, 1)), MOE, "bfloat16"),
    ],
)
def test_offload_frees_memory_and_onload_restores_it(
    ranks: RankPool, where: Placed, architecture: dict[str, Any], dtype: str
) -> None:
    case = Case(where, model(architecture=architecture, dtype=dtype, **BUDGET))
    results = ranks(len(where.ranks), f"{HERE}:offloaded", case, deadline_s=300.0)
    for before, during, first, kept in results:
        assert before > 0
        assert during == 0
        assert first == kept


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "recompute"),
    [(placed(dp=2), "off"), (placed(tp=2, sp=True), "selective"), (placed(pp=2), "full")],
)
def test_bfloat16_trains_on_float32_weights(
    ranks: RankPool, tmp_path: Path, where: Placed, recompute: str
) -> None:
    results = []
    for dtype in ("float32", "bfloat16"):
        for number in range(2):
            (tmp_path / dtype / str(number)).mkdir(parents=True)
        settings = model(architecture=EVEN, dtype=dtype, gradient_checkpointing=recompute, **BUDGET)
        run = ranks(
            2, f"{HERE}:train", Case(where, settings), range(2), save=tmp_path / dtype,
            deadline_s=300.0,
        )  # fmt: skip
        results.append([stats["loss"] for stats in run[0]])
    exact, rough = results
    assert rough == pytest.approx(exact, rel=0.05, abs=0.02)
    assert rough != exact
    layout = RoleCheckpoint(tmp_path / "bfloat16" / "1", "actor").layout
    assert {spec.dtype for spec in layout.tensors.values()} == {"float32"}


@pytest.mark.long
def test_frozen_model_saves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(placed(tp=2, sp=True), model(architecture=EVEN, **BUDGET), trained=False)
    for files, message in ranks(2, f"{HERE}:frozen", case, tmp_path, deadline_s=300.0):
        assert files == []
        assert "actor is frozen" in message


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "architecture", "message"),
    [
        (placed(tp=4), EVEN, "t4 does not divide num_key_value_heads 2"),
        (placed(tp=2), {**EVEN, "intermediate_size": 49}, "t2 does not divide intermediate_size"),
        (placed(pp=2), {**EVEN, "num_hidden_layers": 3}, "p2 does not divide num_hidden_layers 3"),
        (
            placed(pp=2, v=2),
            {**EVEN, "num_hidden_layers": 6},
            "p2 times 2 chunks does not divide num_hidden_layers 6",
        ),
        (
            placed(dp=2, experts=grid(1, 1, 2, 1)),
            {**MOE, "num_experts": 3},
            "e2 does not divide the number of experts 3",
        ),
        (placed(tp=2), MOE, "on t2, experts can be trained only with sequence parallelism"),
    ],
)
def test_layouts_that_do_not_fit_are_rejected(
    ranks: RankPool, where: Placed, architecture: dict[str, Any], message: str
) -> None:
    case = Case(where, model(architecture=architecture, **BUDGET))
    with pytest.raises(RankError, match=f"actor: {message}"):
        ranks(len(where.ranks), f"{HERE}:outputs", case, deadline_s=300.0)


@pytest.mark.long
def test_sequences_beyond_all_positions_are_rejected(ranks: RankPool) -> None:
    """Beyond these positions, dynamic rotary embeddings would depend on the length of the
    sequence.
    """
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    architecture = {**EVEN, "rope_scaling": rope, "max_position_embeddings": 10}
    case = Case(placed(), model(architecture=architecture, **BUDGET))
    with pytest.raises(RankError, match=r"a sequence of 12 tokens .* has positions for 10"):
        ranks(1, f"{HERE}:outputs", case, deadline_s=300.0)


def test_surviving_update_share_is_computed_from_float32_weights(ranks: RankPool) -> None:
    """Each rank updates a part of the optimizer's float32 weights. The model's own weights are
    rounded.
    """
    settings = model(architecture=EVEN, dtype="bfloat16", **BUDGET)
    for wide, share in ranks(2, f"{HERE}:kept", Case(placed(dp=2), settings)):
        assert wide
        assert 0.0 < share < 1.0

"""The native engine, whose weights come from the engine that trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.config.schema.roles import Model
from slurmrl.engines import ENGINES
from slurmrl.errors import UsageError
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.parallel.groups import build
from slurmrl.tensors.transfer.execute import Holdings, Mover
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Placed, Setup, batch, completed, loss, model
from tests.distributed.engines.test_engines_families import FAMILIES, MOE
from tests.pool import RankPool

HERE = "tests.distributed.engines.test_engines_native"
EVEN = {**cases.ARCHITECTURE, "vocab_size": 34}
OPTIONS = GenerationOptions(max_new_tokens=8, stop_token_ids=(3, 4))
HALVES = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
WHOLE = [list(range(10))]


def moved(setup: Setup, sizes: dict[str, int], split: list[list[int]]) -> list[Any]:
    """Return the completions of the trained engine, and of the native engine after a move into
    offloaded memory.
    """
    trained: Any = cases.make(setup)
    ranks = tuple(range(dist.get_world_size()))
    context = build(
        [Placed("rollout", ranks, sizes, "native")],
        rank=dist.get_rank(),
        device=torch.device("cpu"),
    )["rollout"]
    native = ENGINES.load("native")(
        "rollout",
        Model(**setup.model),
        head="lm",
        trained=False,
        context=context,
        seed=7,
        total_steps=1,
        source=None,
    )
    sample = batch().take(setup.split[trained.context.dp_rank])
    trained.train_batch(sample, loss, cases.denominator(sample))
    native.offload()
    with pytest.raises(UsageError, match="rollout is offloaded"):
        native.storages()
    native.onload()
    sides = [PlacedLayout(engine.layout(), ranks) for engine in (trained, native)]
    plan = plan_move(*sides, hosts=dict.fromkeys(ranks, 0), budget=1 << 20)
    held, taken = (
        Holdings(side, dist.get_rank(), engine.storages())
        for side, engine in zip(sides, (trained, native), strict=True)
    )
    Mover(plan, dist.get_rank(), held, taken, group=None, device=torch.device("cpu")).run()
    own = setup.split[trained.context.dp_rank]
    return [completed(trained, own, OPTIONS), completed(native, split[context.dp_rank], OPTIONS)]


@pytest.mark.parametrize(
    ("settings", "trained", "native"),
    [
        pytest.param(model(architecture=EVEN), {"tp": 2}, {"dp": 2}, id="t2-d2"),
        pytest.param(model(architecture=EVEN), {"dp": 2}, {"tp": 2}, id="d2-t2"),
        pytest.param(model(architecture=MOE), {"dp": 2}, {"dp": 1, "tp": 2}, id="experts"),
        pytest.param(
            model(architecture=FAMILIES["gpt2"], implementation="hf"), {"dp": 2}, {"dp": 2}, id="hf"
        ),
    ],
)
def test_native_engine_generates_like_the_training_engine(
    ranks: RankPool, settings: dict[str, Any], trained: dict[str, int], native: dict[str, int]
) -> None:
    split = {2: HALVES, 1: WHOLE}
    setup = Setup(model=settings, sizes=trained, split=split[trained.get("dp", 1)])
    results = ranks(2, f"{HERE}:moved", setup, native, split[native.get("dp", 1)])
    expected, found = (
        {k: v for one in side for k, v in one.items()} for side in zip(*results, strict=True)
    )
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        for (tokens, logp), (own, own_logp) in zip(rows, found[name], strict=True):
            assert own == tokens
            assert own_logp == pytest.approx(logp, abs=1e-4)

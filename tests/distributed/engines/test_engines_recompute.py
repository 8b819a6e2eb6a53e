"""Tests of recomputation and stored activations of the megatron engine, whose values stay
bit-identical.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.engines.cases import Setup, model
from tests.distributed.engines.cases import make as make_setup
from tests.distributed.engines.megatron_cases import Case, make, placed, step
from tests.distributed.engines.test_engines_megatron import BUDGET, EVEN, FAST, LONG
from tests.pool import RankPool
from tests.support.rotation import rotating

MODES = ("off", "selective", "full")
PRODUCTS = "aten::mm"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
ACTIVATIONS = "aten::silu"
NORMS = "aten::rsqrt_"
COMPILED = {
    "slurmrl_cpu::gated": ACTIVATIONS,
    "slurmrl_cpu::gated_gradient": ACTIVATIONS,
    "slurmrl_cpu::norm": NORMS,
}
"""Compiled operators, by the one of torch that they have in them."""


class Traced(TorchDispatchMode):
    """The number of calls of each operator, and the bytes of live results when the backward pass
    reaches attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.kept_bytes = 0
        self._results: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == f"{ATTENTION}_backward" and not self.calls[name]:
            alive = [size for storage, size in self._results.values() if storage() is not None]
            self.kept_bytes = sum(alive)
        self.calls[COMPILED.get(name, name)] += 1
        out = func(*args, **kwargs or {})
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._results[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out


@dataclass(frozen=True)
class Trained:
    """Two steps of an engine."""

    stats: list[dict[str, float]]
    calls: Counter[str]
    """Of the first step."""
    kept_bytes: int
    checksum: str
    """Of what is saved after them."""


def trained(case: Case, folder: Path) -> Trained:
    engine = make(case)
    with Traced() as traced:
        stats = [step(engine, 0)]
    stats.append(step(engine, 1))
    return Trained(stats, traced.calls, traced.kept_bytes, engine.save(folder)[0].checksum)


LAYOUTS = (
    *("one", "t2 sp tied", "p2 v2", "c4", "llama t2", "d2 experts e2"),
    "experts attn t2 d2 ffn e2 t2",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"),
    rotating(
        *(pytest.param(name, "float32") for name in LAYOUTS),
        *(pytest.param(name, "bfloat16") for name in ("t2 sp tied", "d2 experts e2")),
        shares=3,
    ),
)
def test_recomputation_repeats_expected_operations_with_equal_results(
    ranks: RankPool, tmp_path: Path, name: str, dtype: str
) -> None:
    """``selective`` repeats the first products of feed-forward blocks, but no product and no
    attention of the attention part. All modes give the same bits.
    """
    where, architecture, head = {**FAST, **LONG}[name]
    case = Case(where, model(architecture=architecture, dtype=dtype, **BUDGET), head)
    found = {}
    for mode in MODES:
        (tmp_path / mode).mkdir()
        again = replace(case, model={**case.model, "gradient_checkpointing": mode})
        found[mode] = ranks(
            len(where.ranks), f"{__name__}:trained", again, tmp_path / mode, deadline_s=300.0
        )
    for off, selective, full in zip(*found.values(), strict=True):
        assert off.stats == selective.stats == full.stats
        assert off.checksum == selective.checksum == full.checksum
        assert 0 < off.calls[ATTENTION] == selective.calls[ATTENTION] < full.calls[ATTENTION]
        assert 0 < off.calls[PRODUCTS] < selective.calls[PRODUCTS] < full.calls[PRODUCTS]
        if "num_experts" not in architecture:
            first_products = off.calls[ACTIVATIONS] / 2  # in the backward pass, too
            assert selective.calls[PRODUCTS] - off.calls[PRODUCTS] == first_products
        for operator in (ACTIVATIONS, NORMS):
            assert 0 < off.calls[operator] < selective.calls[operator], operator


def test_fsdp_and_megatron_keep_the_same_activations(ranks: RankPool) -> None:
    """The difference between ``selective`` and ``full`` is the same in both engines, and much
    smaller than the activations of ``off``.
    """
    architecture = {**EVEN, "intermediate_size": 960, "num_key_value_heads": 4}
    more: dict[str, list[int]] = {"off": [], "selective": []}
    for where in ("fsdp", "megatron"):
        kept = {}
        for mode in MODES:
            settings = model(architecture=architecture, gradient_checkpointing=mode)
            case = Setup(model=settings) if where == "fsdp" else Case(placed(), settings)
            (kept[mode],) = ranks(1, f"{__name__}:kept_bytes", case)
        for mode, found in more.items():
            found.append(kept[mode] - kept["full"])
    assert more["selective"][0] == pytest.approx(more["selective"][1], rel=0.15)
    assert max(more["selective"]) < 0.1 * min(more["off"])


def kept_bytes(case: Case | Setup) -> int:
    engine = make(case) if isinstance(case, Case) else make_setup(case)
    step(engine, 0)  # the first one also tries out kernels
    with Traced() as traced:
        step(engine, 1)
    return traced.kept_bytes

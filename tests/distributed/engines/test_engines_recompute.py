"""What the megatron engine computes again in backward passes; values stay as they are, to the bit.
(The same of the built-in decoder is in the tests of models and of families.)"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.engines.cases import model
from tests.distributed.engines.megatron_cases import Case, make, step
from tests.distributed.engines.test_engines_megatron import BUDGET, FAST, LONG
from tests.pool import RankPool

PRODUCTS = "aten::mm"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
ACTIVATIONS = "aten::silu"
NORMS = "aten::rsqrt_"


class Counted(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **kwargs or {})


def trained(case: Case, folder: Path) -> tuple[list[dict[str, float]], Counter[str], str]:
    """Statistics of two steps, the operators that ran in the first, the checksum of what is saved
    after them."""
    engine = make(case)
    with Counted() as counted:
        stats = [step(engine, 0)]
    stats.append(step(engine, 1))
    return stats, counted.calls, engine.save(folder)[0].checksum


LAYOUTS = (
    *("one", "t2", "t2 sp tied", "p2 v2", "c2", "llama t2", "mistral t2 sp", "d2 experts e2"),
    *("t2 sp p2 c2", "experts t2 sp", "experts attn t2 d2 ffn e2 t2"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in LAYOUTS),
        *((name, "bfloat16") for name in ("t2", "d2 experts e2")),
    ],
)
def test_what_runs_again_and_that_values_stay(
    ranks: RankPool, tmp_path: Path, name: str, dtype: str
) -> None:
    where, architecture, head = {**FAST, **LONG}[name]
    case = Case(where, model(architecture=architecture, dtype=dtype, **BUDGET), head)
    found = {}
    for mode in ("off", "selective", "full"):
        (tmp_path / mode).mkdir()
        again = replace(case, model={**case.model, "gradient_checkpointing": mode})
        found[mode] = ranks(
            len(where.ranks), f"{__name__}:trained", again, tmp_path / mode, deadline_s=300.0
        )
    for off, selective, full in zip(*found.values(), strict=True):
        assert off[0] == selective[0] == full[0]
        assert off[2] == selective[2] == full[2]
        for operator in (PRODUCTS, ATTENTION):
            assert 0 < off[1][operator] == selective[1][operator] < full[1][operator], operator
        for operator in (ACTIVATIONS, NORMS):
            assert 0 < off[1][operator] < selective[1][operator], operator

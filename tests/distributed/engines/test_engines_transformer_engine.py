"""TransformerEngine's modules in megatron's layers, with its kernels replaced by torch's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.engines.cases import model
from tests.distributed.engines.megatron_cases import Case, placed
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    DESCENT,
    EVEN,
    FAST,
    LONG,
    MOE,
    compared,
    start,
)
from tests.distributed.engines.test_engines_replay_ranks import megatron_as_fsdp
from tests.pool import RankPool
from tests.support.rotation import rotating
from tests.support.transformer_engine_cpu import FOLDER

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not FOLDER.is_dir(), reason=f"TransformerEngine's Python is not in {FOLDER}"
    ),
]
HERE = "tests.distributed.engines.transformer_engine_cases"
COUNTED = "tests.distributed.engines.test_engines_recompute:trained"
TRAIN = "tests.distributed.engines.megatron_cases:train"
LAYOUTS = {
    name: {**FAST, **LONG}[name]
    for name in (
        *("one", "t2 sp tied", "p2 v2", "value t2 sp", "llama t2", "gemma t2 sp"),
        *("d2 experts e2", "experts t2 sp e2", "experts attn t2 d2 ffn e2 t2"),
    )
}
USED = {"transformer_engine": True}


@pytest.fixture(scope="module")
def te_ranks() -> Iterator[RankPool]:
    """Return separate ranks, because megatron-core looks for TransformerEngine only when it is
    imported.
    """
    with RankPool() as pool:
        yield pool


@pytest.mark.parametrize("name", rotating(*LAYOUTS, shares=3))
def test_model_with_transformer_engine_trains_as_in_one_process(
    te_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    where, architecture, head = LAYOUTS[name]
    compared(te_ranks, tmp_path, where, head, start(tmp_path, architecture, head), USED, **DESCENT)


def test_layers_of_transformer_engine_replay_recorded_experts(
    te_ranks: RankPool, tmp_path: Path
) -> None:
    """Also covers a block of experts that megatron recomputes."""
    where, architecture, _ = LAYOUTS["experts t2 sp e2"]
    megatron_as_fsdp(where, architecture, "selective", te_ranks, tmp_path, **USED)


def test_layers_use_transformer_engine_modules(te_ranks: RankPool) -> None:
    case = Case(placed(), model(architecture=MOE, **USED, **BUDGET))
    (kinds,) = te_ranks(1, f"{HERE}:kinds", case)
    assert kinds >= {"RMSNorm", "TEColumnParallelLinear", "TERowParallelLinear"}
    assert kinds >= {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
    assert not kinds & {"Norm", "RowParallelLinear", "SequentialMLP"}


@pytest.mark.parametrize("fp8", ["hybrid", "e4m3", None])
def test_fp8_reaches_megatron_without_state_between_steps(
    te_ranks: RankPool, fp8: str | None
) -> None:
    """Micro-batches have a multiple of 16 tokens, which FP8 products need."""
    settings = model(architecture=EVEN, dtype="bfloat16", fp8=fp8, **USED, **BUDGET)
    case = Case(placed(), settings)
    ((found, tokens),) = te_ranks(1, f"{HERE}:fp8_settings", case)
    assert found["bf16"]
    assert (found["fp8"], tokens) == (fp8, 2 if fp8 is None else 16)
    if fp8 is not None:  # scales of earlier steps would have to be part of checkpoints
        assert found["fp8_recipe"] == "tensorwise"
        assert not found["fp8_param"]
        assert found["disable_parameter_transpose_cache"]


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputation_does_not_change_the_step(
    te_ranks: RankPool, recompute: str, dtype: str
) -> None:
    settings = model(architecture=MOE, dtype=dtype, **USED, **BUDGET)
    again = {**settings, "gradient_checkpointing": recompute}
    kept, computed = (
        te_ranks(2, TRAIN, Case(placed(tp=2, sp=True), one), range(2)) for one in (settings, again)
    )
    assert kept == computed


def test_selective_mode_repeats_norms_and_feed_forward_blocks(
    te_ranks: RankPool, tmp_path: Path
) -> None:
    """The products of attention are not repeated."""
    settings = model(architecture=EVEN, **USED, **BUDGET)
    again = {**settings, "gradient_checkpointing": "selective"}
    cases = (Case(placed(), one) for one in (settings, again))
    kept, computed = (te_ranks(1, COUNTED, case, tmp_path)[0].calls for case in cases)
    blocks = kept["aten::silu"]
    assert computed["aten::mm"] - kept["aten::mm"] == 2 * blocks > 0
    assert computed["aten::rsqrt"] > kept["aten::rsqrt"] > 0


def test_release_unsupported_by_megatron_is_not_used(te_ranks: RankPool) -> None:
    assert te_ranks(1, f"{HERE}:chosen", "2.11.0", "bfloat16") == [(True, [])]
    assert te_ranks(1, f"{HERE}:chosen", "2.11.0", "float32") == [(False, [])]
    (found,) = te_ranks(1, f"{HERE}:chosen", "2.12.0", "bfloat16")
    message = (
        "TransformerEngine 2.12.0 is not used: megatron-core supports >=2.9.0a0,<2.12; set "
        "transformer_engine: true to use it anyway"
    )
    assert found == (False, [message])


def test_missing_transformer_engine_is_an_error_if_required(ranks: RankPool) -> None:
    assert ranks(1, f"{HERE}:without", None) == [False]
    assert ranks(1, f"{HERE}:without", False) == [False]
    (message,) = ranks(1, f"{HERE}:without", True)
    assert message.startswith("transformer_engine: true needs TransformerEngine: pip install")

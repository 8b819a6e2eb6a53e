"""Long sequences on four context ranks with two attention heads, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import Setup, model
from tests.distributed.engines.long_cases import LongStep
from tests.pool import RankPool

HERE = "tests.distributed.engines.long_cases"
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.1,
    "max_position_embeddings": 131072,
}


def setup_of(ranks: int, tokens: int, **changes: Any) -> Setup:
    settings = model(architecture=SMALL, max_tokens_per_microbatch=tokens, **changes)
    return Setup(model=settings, sizes={"cp": ranks})


def trained(
    ranks: RankPool, n: int, lengths: tuple[int, ...], **options: Any
) -> tuple[list[LongStep], list[list[str]]]:
    setup = setup_of(n, sum(lengths), **options.pop("settings", {}))
    results = ranks(n, f"{HERE}:train_long", setup, lengths, deadline_s=1800.0, **options)
    steps, files = zip(*results, strict=True)
    assert all(step.stats == steps[0].stats for step in steps)
    return list(steps), list(files)


def assert_near(found: RoleCheckpoint, expected: RoleCheckpoint, share: float) -> None:
    """Compare the first moments after one step, which are the gradients. Small gradients are sums
    whose terms nearly cancel.
    """
    names = [name for name, _ in expected.weights()]
    gradients = {name: expected.read(f"exp_avg/{name}") for name in names}
    whole = sum(float(np.square(each, dtype=float).sum()) for each in gradients.values()) ** 0.5
    for name, theirs in gradients.items():
        bound = max(share * np.abs(theirs).max(), 2e-8 * whole)
        assert np.abs(found.read(f"exp_avg/{name}") - theirs).max() <= bound, name


def compare_with_one_rank(
    ranks: RankPool, folder: Path, lengths: tuple[int, ...], **settings: Any
) -> LongStep:
    found: dict[int, list[LongStep]] = {}
    for n in (4, 1):
        (folder / str(n)).mkdir()
        found[n], _ = trained(ranks, n, lengths, save=folder / str(n), settings=settings)
    (ours,), (theirs,) = found[4][0].stats, found[1][0].stats
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    assert ours["tokens"] == sum(lengths)
    assert_near(*(RoleCheckpoint(folder / str(n), "actor") for n in (4, 1)), share=1e-5)
    return max(found[4], key=lambda step: step.peak_bytes)


@pytest.mark.parametrize("lengths", [(8192,), (100, 1500, 6592)])
def test_sequence_of_8192_tokens_trains_as_in_one_process(
    ranks: RankPool, tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    compare_with_one_rank(ranks, tmp_path, lengths)


def test_resumed_ring_training_is_bit_identical(ranks: RankPool, tmp_path: Path) -> None:
    """Two steps equal one step, a checkpoint, and one step of new engines."""
    folders = [tmp_path / name for name in ("whole", "first", "second")]
    for folder in folders:
        folder.mkdir()
    lengths = (700, 30, 411, 1)
    _, whole = trained(ranks, 4, lengths, steps=range(2), save=folders[0])
    trained(ranks, 4, lengths, steps=range(1), save=folders[1])
    _, second = trained(ranks, 4, lengths, steps=range(1, 2), load=folders[1], save=folders[2])
    assert second == whole
    assert all(whole)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_sequence_of_131072_tokens_trains_as_in_one_process(
    ranks: RankPool, tmp_path: Path, record_property: Any
) -> None:
    """One sequence, which four ranks hold in parts."""
    step = compare_with_one_rank(ranks, tmp_path, (131072,), gradient_checkpointing="selective")
    record_property("seconds", step.seconds[0])
    record_property("cpu_seconds", step.cpu_seconds)
    record_property("peak_mib", (step.peak_bytes - step.started_bytes) >> 20)
    assert step.peak_bytes - step.started_bytes < 2**30

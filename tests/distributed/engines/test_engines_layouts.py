"""The fsdp engine's layouts: tensor, sequence and context parallelism against one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.shapes import stored_shapes
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import ARCHITECTURE, LENGTHS, Setup, batch, model
from tests.distributed.engines.one_process import (
    assert_as_one_process,
    of_folder,
    random_model,
)
from tests.distributed.engines.test_engines_contract import value_model
from tests.distributed.engines.test_engines_families import FAMILIES, plain_decoder
from tests.pool import RankError, RankPool
from tests.support.generated import generate

CASES = "tests.distributed.engines.cases"
HERE = "tests.distributed.engines.layout_cases"
ITEMS = len(LENGTHS)
SPLITS = {
    1: [list(range(ITEMS))],
    2: [[1, 5], [0, 2, 3, 4, 6, 7, 8, 9]],
    4: [[1, 5], [], [0, 2, 3, 4, 6, 8, 9], [7]],
}
EVEN = {"intermediate_size": 48, "initializer_range": 0.1}
"""Weights small enough that rounding is not magnified beyond the bounds; those of models with
experts also leave every router a margin."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**ARCHITECTURE, **EVEN},
    "llama": {
        **ARCHITECTURE,
        **EVEN,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {**ARCHITECTURE, **EVEN, "model_type": "qwen2", "tie_word_embeddings": True},
    "mistral": {**FAMILIES["mistral"], **EVEN},
    "gemma": {**FAMILIES["gemma"], **EVEN},
    "mixtral": {**FAMILIES["mixtral"], **EVEN, "num_local_experts": 4},
    "qwen3_moe": {
        **FAMILIES["qwen3_moe"],
        **EVEN,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "initializer_range": 0.145,
    },
    "glm4_moe": {
        **FAMILIES["glm4_moe"],
        **EVEN,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "initializer_range": 0.12,
    },
    "deepseek_v3": {
        **FAMILIES["deepseek_v3"],
        **EVEN,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "moe_intermediate_size": 16,
        "initializer_range": 0.12,
    },
    "gpt_oss": {
        **FAMILIES["gpt_oss"],
        **EVEN,
        "intermediate_size": 16,
        "initializer_range": 0.12,
    },
    "gpt2": {**FAMILIES["gpt2"], "initializer_range": 0.1},
}
T2, T4, C2, C4 = {"tp": 2}, {"tp": 4}, {"cp": 2}, {"cp": 4}
D2T2, D2C2, C2T2 = {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}
LAYOUTS: dict[str, dict[str, int]] = {
    "d2": {"dp": 2},
    "d4": {"dp": 4},
    "t2": T2,
    "t4": T4,
    "c2": C2,
    "c4": C4,
    "d2t2": D2T2,
    "d2c2": D2C2,
    "c2t2": C2T2,
    "c3": {"cp": 3},
}
"""The heads of these models are 4, so c3 uses ring attention."""


def setup_of(sizes: dict[str, int], architecture: dict[str, Any], **changes: Any) -> Setup:
    """Return a setup. ``layers`` makes each layer a unit, and ``sequence`` adds sequence
    parallelism.
    """
    options = {"small_bytes": 0} if changes.pop("layers", False) else {}
    parallel = {"sequence_parallel": changes.pop("sequence", False)}
    head, engine = changes.pop("head", "lm"), changes.pop("engine", "fsdp")
    settings = {"max_tokens_per_microbatch": 16, "model": parallel, **changes}
    split = SPLITS[sizes.get("dp", 1)]
    return Setup(
        model=model(architecture=architecture, **settings),
        split=split,
        sizes=sizes,
        options=options,
        head=head,
        engine=engine,
    )


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("qwen3", "t2", {}),
        ("qwen3", "t4", {"sequence": True}),
        ("mixtral", "d2t2", {"sequence": True, "layers": True}),
        ("gpt2", "c2t2", {"sequence": True, "layers": True}),
        ("qwen3_moe", "d2c2", {}),
        ("glm4_moe", "c2t2", {"sequence": True, "gradient_checkpointing": "selective"}),
        ("deepseek_v3", "d2t2", {"layers": True}),
        ("deepseek_v3", "c2t2", {"sequence": True, "gradient_checkpointing": "selective"}),
        ("gpt_oss", "c2t2", {"sequence": True, "gradient_checkpointing": "selective"}),
        ("gpt_oss", "t4", {"layers": True}),
        ("gemma", "c4", {"gradient_checkpointing": "full"}),
        ("qwen2", "c2t2", {"gradient_checkpointing": "selective", "layers": True}),
    ],
)
def test_gradients_in_each_layout_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, layout: str, options: dict[str, Any]
) -> None:
    """Gradients differ at most by the documented bounds.

    t4 and c4 have more ranks than key-value heads.
    """
    setup = setup_of(LAYOUTS[layout], MODELS[family], **options)
    assert_as_one_process(ranks, tmp_path, setup, MODELS[family])


FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
RINGS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("qwen3", {"cp": 3}, {}),
    ("mistral", {"cp": 3}, {"gradient_checkpointing": "selective", "layers": True}),
    ("gpt_oss", {"cp": 3}, {}),
    ("qwen2", {"cp": 4}, {"gradient_checkpointing": "full"}),
    ("mixtral", {"cp": 2, "tp": 2}, {"sequence": True, "layers": True}),
    ("llama", {"dp": 2, "cp": 2}, {"head": "value"}),
]
"""Context ranks that cannot have equally many heads pass keys on: of four heads on three ranks, or
with ``FEW_HEADS`` on more ranks than heads."""


@pytest.mark.parametrize(("family", "sizes", "options"), RINGS)
def test_ring_attention_gradients_match_one_process(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    few = FEW_HEADS if sizes["cp"] * sizes.get("tp", 1) == 4 else {}
    if "dp" in sizes:
        few = {**FEW_HEADS, "num_attention_heads": 3, "hidden_size": 18}
    architecture = {**MODELS[family], **few}
    setup = setup_of(sizes, architecture, **options)
    assert_as_one_process(ranks, tmp_path, setup, architecture)


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("qwen3", "t2", {}),
        ("gpt2", "c2", {"layers": True}),
        ("qwen3", "c2t2", {"sequence": True, "layers": True}),
        pytest.param("qwen3", "t4", {"sequence": True}, marks=pytest.mark.long),
        pytest.param("mixtral", "d2t2", {"sequence": True}, marks=pytest.mark.long),
        pytest.param("gpt2", "d2c2", {}, marks=pytest.mark.long),
        pytest.param("llama", "c4", {"layers": True}, marks=pytest.mark.long),
    ],
)
def test_value_model_gradients_match_one_process(
    ranks: RankPool, tmp_path: Path, family: str, layout: str, options: dict[str, Any]
) -> None:
    setup = setup_of(LAYOUTS[layout], MODELS[family], head="value", **options)
    assert_as_one_process(ranks, tmp_path, setup, MODELS[family])


PAIRS = [
    (family, layout)
    for (row, family), (column, layout) in product(enumerate(MODELS), enumerate(LAYOUTS))
    if (row + column) % 3 == 0
]
"""Each family in three layouts, and each layout with two or three families."""


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_family_trains_as_in_one_process_in_each_layout(
    ranks: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    """Layouts that combine tensor parallelism with other axes use sequence parallelism. Half of the
    pairs have one unit per layer, so each family and each layout has both kinds of units.
    """
    sizes = LAYOUTS[layout]
    sequence, layers = "tp" in sizes and len(sizes) > 1, PAIRS.index((family, layout)) % 2 == 1
    setup = setup_of(sizes, MODELS[family], sequence=sequence, layers=layers)
    assert_as_one_process(ranks, tmp_path, setup, MODELS[family])


@pytest.mark.parametrize(("layout", "sequence"), [("d2t2", False), ("c2t2", True)])
def test_outputs_and_values_have_the_order_of_the_sample(
    ranks: RankPool, tmp_path: Path, layout: str, sequence: bool
) -> None:
    value = value_model(tmp_path, **MODELS["qwen3"])
    for head in ("lm", "value"):
        setup = setup_of(LAYOUTS[layout], MODELS["qwen3"], sequence=sequence, head=head)
        if head == "value":
            setup = of_folder(setup, tmp_path)
        results = ranks(4, f"{HERE}:forward", setup)
        decoder = value if head == "value" else plain_decoder(MODELS["qwen3"])
        sample = batch()
        ids, cu = sample.tensor("input_ids"), sample.cu_seqlens("input_ids")
        with torch.no_grad():
            hidden = decoder(ids, cu, max(LENGTHS))
            if head == "value":
                expected = {"values": decoder.values(hidden)}
            else:
                logp, entropy = decoder.logprobs(hidden, ids, cu, 0.7)
                expected = {"logp": logp, "entropy": entropy}
        for rank, found in enumerate(results):
            share = setup.split[rank // 2 if "dp" in setup.sizes else 0]
            for name, whole in expected.items():
                parts = whole.split(LENGTHS)
                wanted = torch.cat([parts[index] for index in share])
                assert torch.allclose(found[name], wanted, atol=2e-5), name


def assembled(
    shapes: dict[str, tuple[int, ...]], results: list[list[tuple[str, tuple[int, ...], Tensor]]]
) -> dict[str, Tensor]:
    """Whole tensors from all ranks' shards; copies must be equal."""
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, start, values in (piece for rank in results for piece in rank):
        box = tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))
        held = found[name][box]
        assert bool((held.isnan() | (held == values)).all()), name
        found[name][box] = values
    return found


FEW_LAYOUTS = [("qwen3", "d2t2"), ("qwen3", "t4"), ("mixtral", "c2t2"), ("gpt2", "d2t2")]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*pair, marks=() if pair in FEW_LAYOUTS else pytest.mark.long)
        for pair in dict.fromkeys([*FEW_LAYOUTS, *PAIRS[::2]])
    ],
)
def test_layout_locates_every_element(
    ranks: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    """Covers a folder in which all elements differ, and weights from the seed."""
    config = ModelConfig.from_hf(MODELS[family])
    shapes = stored_shapes(config, "lm")
    drawn = setup_of(LAYOUTS[layout], MODELS[family])
    read = of_folder(drawn, tmp_path)
    values = random_model(tmp_path, MODELS[family]).state_dict()
    initial = {name: init_tensor(name, shape, config, 7) for name, shape in shapes.items()}
    for setup, expected in ((read, values), (drawn, initial)):
        found = assembled(shapes, ranks(setup.ranks, f"{HERE}:held", setup))
        for name in shapes:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_completions_in_each_layout_equal_one_process(ranks: RankPool, family: str) -> None:
    """Covers fewer key-value heads than tensor ranks, and rows that do not fill their parts."""
    options = GenerationOptions(max_new_tokens=6, stop_token_ids=(3, 4, 5))
    sample = batch()
    expected = generate(
        plain_decoder(MODELS[family]),
        sample.tensor("input_ids"),
        sample.cu_seqlens("input_ids"),
        options,
        seed=3,
        step=0,
        keys=torch.arange(ITEMS),
    )
    lengths = expected.lengths.tolist()
    wanted = [part.tolist() for part in expected.tokens.split(lengths)]
    logps = [part.tolist() for part in expected.logprobs.split(lengths)]
    for layout, sequence in (
        ("t4", True),
        ("d2t2", False),
        ("c2t2", True),
        ("c3", False),
    ):
        setup = setup_of(LAYOUTS[layout], MODELS[family], sequence=sequence)
        for found in ranks(setup.ranks, f"{CASES}:completions", setup, options):
            for name, rows in found.items():
                index = int(name.removeprefix("item"))
                assert rows[0][0] == wanted[index]
                assert rows[0][1] == pytest.approx(logps[index], abs=1e-5)


def test_checkpoints_move_between_layouts(ranks: RankPool, tmp_path: Path) -> None:
    """A checkpoint of one layout that other layouts load and save keeps its weights and moments."""
    moving = {"optimizer": {"betas": (0.9, 0.95)}}
    order = ["d2", "d2t2", "c2t2", "t4", "d2"]
    folders = [tmp_path / str(index) for index in range(len(order))]
    for index, (layout, folder) in enumerate(zip(order, folders, strict=True)):
        folder.mkdir()
        setup = setup_of(LAYOUTS[layout], MODELS["qwen3"], **moving)
        steps, source = (range(2), None) if index == 0 else (range(2, 2), folders[index - 1])
        ranks(setup.ranks, f"{CASES}:train", setup, steps, load=source, save=folder)
    checkpoints = [RoleCheckpoint(folder, "actor") for folder in folders]
    assert [checkpoint.ranks for checkpoint in checkpoints] == [2, 4, 4, 4, 2]
    for name in checkpoints[0].layout.tensors:
        values = [checkpoint.read(name) for checkpoint in checkpoints]
        assert np.any(values[0])
        assert all(np.array_equal(values[0], other) for other in values[1:]), name
    for checkpoint in checkpoints[1:4]:
        held = sum(p.box.count for _, p in checkpoint.layout.all_shards())
        whole = sum(int(np.prod(t.shape)) for t in checkpoint.layout.tensors.values())
        assert held == whole  # each element once, though several ranks have it


@pytest.mark.parametrize(
    ("engine", "needed"), [("fsdp", [(0, 1), (1, 2, 3)]), ("megatron", [range(4)] * 2)]
)
def test_rank_loads_only_its_own_boxes_in_blocks(
    ranks: RankPool, tmp_path: Path, engine: str, needed: list[tuple[int, ...]]
) -> None:
    """A rank opens only the files with its boxes, and never holds a second copy of a tensor."""
    large = {**ARCHITECTURE, "vocab_size": 2**15, "tie_word_embeddings": True}
    saving = Setup(model=model(architecture=large), split=[[0], [1], [2], [3]])
    ranks(4, f"{CASES}:train", saving, range(0), save=tmp_path)
    loading = Setup(engine=engine, model=model(architecture=large), split=[[0], [1]])
    own_bytes = 2**15 * large["hidden_size"] * 4 // 2
    for peak in ranks(2, f"{HERE}:load_from_few_files", loading, tmp_path, needed):
        assert peak < own_bytes // 2, "the layout's text, two blocks, and no half of the embedding"


def test_ranks_with_the_same_samples_return_equal_results(ranks: RankPool) -> None:
    results = ranks(4, f"{HERE}:shared", Setup(sizes=D2T2, split=SPLITS[2]))
    assert results[0] == results[1]
    assert results[2] == results[3]
    ids, lengths, metadata, data = results[3]
    assert ids == ("a2", "b")
    assert lengths["input_ids"] == [[2], [1]]
    assert metadata == {"row": [{"rank": 2}, None]}
    assert data["input_ids"] == ([2, 5, 6], torch.int64)
    assert data["finished"] == ([True, False], torch.bool)
    assert data["values"] is None


def test_weights_can_stay_in_host_memory(ranks: RankPool, tmp_path: Path) -> None:
    setup = setup_of(D2T2, MODELS["qwen3"], cpu_offload=True, layers=True)
    assert_as_one_process(ranks, tmp_path, setup, MODELS["qwen3"])


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ({"tp": 3}, {}, "t3 does not divide num_attention_heads 4"),
        ({"tp": 2}, {"intermediate_size": 49}, "t2 does not divide intermediate_size 49"),
        ({"pp": 2}, {}, "does not split along pp"),
    ],
)
def test_layouts_that_do_not_fit_are_rejected(
    ranks: RankPool, sizes: dict[str, int], change: dict[str, Any], message: str
) -> None:
    setup = setup_of(sizes, {**MODELS["qwen3"], **change})
    with pytest.raises(RankError, match=message):
        ranks(setup.ranks, f"{HERE}:forward", setup)


def test_context_parallelism_is_rejected_for_transformers_models(ranks: RankPool) -> None:
    setup = setup_of({"cp": 2}, MODELS["qwen3"], implementation="hf")
    with pytest.raises(RankError, match="supports d and t only"):
        ranks(2, f"{HERE}:forward", setup)

"""Models of transformers that tensor ranks share by the families' own plans."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmrl.errors import UsageError
from slurmrl.models import hf_tensor
from slurmrl.models.hf_config import TENSOR_FAMILIES, WHOLE_ATTENTION, HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_tensor import OF_PARTS
from slurmrl.models.parallel.split import Axis
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.layout import Box
from tests.distributed.engines.cases import Setup, model
from tests.distributed.engines.test_engines_layouts import setup_of
from tests.pool import RankPool
from tests.support.families import tiny
from tests.support.rotation import rotating

CASES = "tests.distributed.engines.cases"
CASES_OF_TENSOR = "tests.distributed.engines.hf_tensor_cases"
LAYOUT_CASES = "tests.distributed.engines.layout_cases"
HEAD_NORM = re.compile(r"self_attn\.[qk]_norm\.")
BOUND = 1e-5
STEPS = range(3)
ALONE = {"dp": 1}


def setup(
    family: str,
    sizes: dict[str, int],
    *,
    layers: bool = False,
    head: str = "lm",
    vocabulary: int = 34,
    **changes: Any,
) -> Setup:
    architecture = {**tiny(family), "vocab_size": vocabulary, "initializer_range": 0.1}
    one = setup_of(sizes, {}, layers=layers, head=head)
    settings = {"max_tokens_per_microbatch": 16, "implementation": "hf", **changes}
    return replace(one, model=model(architecture=architecture, **settings))


def saved_tensors(folder: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint. The first moments equal the last gradients."""
    saved = RoleCheckpoint(folder, "actor")
    shapes = {name: spec.shape for name, spec in saved.layout.tensors.items()}
    return {name: saved.read(name, Box.whole(shape)) for name, shape in shapes.items()}


def assert_trains_alike(
    ranks: RankPool, folder: Path, one: Setup, split: Setup, bound: float
) -> Path:
    """Compare two steps on one rank and on a split model, and a third step of each from the
    checkpoint of the other.

    ``bound`` is the bound of saved tensors. Return the checkpoint of the split model.
    """
    folders = folder / "one", folder / "split"
    for each in folders:
        each.mkdir()
    (wanted, _), *_ = ranks(1, f"{CASES}:train", one, range(2), save=folders[0])
    (found, _), *_ = ranks(split.ranks, f"{CASES}:train", split, range(2), save=folders[1])
    for line, other in zip(wanted, found, strict=True):
        assert other == pytest.approx(line, rel=BOUND)
    assert wanted[0]["loss"] != wanted[1]["loss"]
    whole, parts = map(saved_tensors, folders)
    assert whole.keys() == parts.keys()
    for name, values in whole.items():
        assert values.shape == parts[name].shape
        assert np.abs(parts[name] - values).max() <= bound * np.abs(values).max(), name
    (rest, _), *_ = ranks(1, f"{CASES}:train", one, range(2, 3), load=folders[1])
    (other_rest, _), *_ = ranks(split.ranks, f"{CASES}:train", split, range(2, 3), load=folders[0])
    assert other_rest[0] == pytest.approx(rest[0], rel=BOUND)
    return folders[1]


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {"tp": 2}, {}),
        ("qwen3", {"dp": 2, "tp": 2}, {"layers": True}),
        ("gemma3_text", {"tp": 2}, {"layers": True, "gradient_checkpointing": "full"}),
        ("starcoder2", {"dp": 2, "tp": 2}, {}),
        ("starcoder2", {"tp": 2}, {"vocabulary": 33}),  # each rank has the whole vocabulary
        ("qwen3", {"tp": 2}, {"head": "value"}),
        ("qwen3_moe", {"dp": 2, "tp": 2}, {"layers": True}),
        ("gpt_oss", {"tp": 2}, {}),
        ("qwen3_next", {"tp": 2}, {"gradient_checkpointing": "full"}),
        ("deepseek_v3", {"tp": 2}, {}),
    ],
)
def test_tensor_ranks_train_as_one_rank(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    """Gradients, weights and statistics are equal, and checkpoints move between the layouts."""
    same = {name: options[name] for name in ("head", "vocabulary") if name in options}
    alone = setup(family, ALONE, **same)
    assert_trains_alike(ranks, tmp_path, alone, setup(family, sizes, **options), 3 * BOUND)


@pytest.mark.parametrize("family", ["glm4_moe", "nemotron_h"])
def test_tensor_ranks_train_as_one_rank_with_loops_over_experts(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    """A token uses one group of experts, so in some micro-batches a rank has no token."""
    groups = {"moe_intermediate_size": 12, "n_group": 2, "topk_group": 1}

    def grouped(sizes: dict[str, int]) -> Setup:
        made = setup(family, sizes, max_tokens_per_microbatch=12)
        architecture = {**made.model["architecture"], **groups}
        return replace(made, model={**made.model, "architecture": architecture})

    assert_trains_alike(ranks, tmp_path, grouped(ALONE), grouped({"tp": 2}), 3 * BOUND)


THIRDS = [sorted(TENSOR_FAMILIES)[first::3] for first in range(3)]
LARGE = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "families",
    [
        [
            "deepseek_v2",  # latent vectors, with keys that all heads share
            "gemma4_text",  # experts next to a dense layer
            "glm4_moe",
            "mimo_v2_flash",  # sinks of heads
            "mixtral",
            "nemotron_h",  # experts without a gate, state-space layers
            "olmo2",  # norms over all heads
            "qwen3_5_moe_text",  # linear attention, a gated shared expert
            "starcoder2",  # biases
        ],
        *rotating(*(pytest.param(third, marks=LARGE) for third in THIRDS)),
    ],
    ids=["some", "first third", "second third", "last third"],
)
def test_listed_families_compute_the_same_on_two_tensor_ranks(
    ranks: RankPool, families: list[str]
) -> None:
    """Log-probabilities, and gradients of whole and of split parameters."""
    found = ranks(2, f"{CASES_OF_TENSOR}:differences", families, deadline_s=1500)
    for family, logits, gradients, shares_attention in found[0]:
        assert logits < BOUND, family
        assert gradients < BOUND, family
        assert shares_attention != (family in WHOLE_ATTENTION), family
    assert [family for family, *_ in found[0]] == families


def test_replicated_weights_stay_equal_if_kernels_round_differently(ranks: RankPool) -> None:
    """GPU kernels may round differently if ``deterministic`` is false. Each rank has olmo2's whole
    attention.
    """
    case, split = f"{CASES_OF_TENSOR}:copies_after_training", setup("olmo2", {"tp": 2})
    first, second = ranks(2, case, split, deterministic=False)
    assert any(".q_proj." in name for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)
    first, second = ranks(2, case, split, deterministic=True)
    assert not all(torch.equal(first[name], second[name]) for name in first), "it costs nothing"


def test_docs_say_how_many_families_tensor_ranks_can_share() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert f"- **Families:** {len(TENSOR_FAMILIES)} families, " in text


def test_layout_of_tensor_ranks_contains_the_whole_weights(ranks: RankPool) -> None:
    """Moves to rollouts and exports read this layout."""
    parts = ranks(4, f"{LAYOUT_CASES}:held", setup("gemma3_text", {"dp": 2, "tp": 2}))
    (whole,) = ranks(1, f"{LAYOUT_CASES}:held", setup("gemma3_text", ALONE))
    for name, _, values in whole:
        covered = torch.zeros(values.shape)
        for rank in parts:
            for start, part in ((s, p) for n, s, p in rank if n == name):
                box = tuple(slice(a, a + b) for a, b in zip(start, part.shape, strict=True))
                assert torch.equal(values[box], part), name
                covered[box] = 1
        assert covered.all(), name


def test_tensor_ranks_share_vocabulary_that_has_equal_parts() -> None:
    """A tied weight remains one parameter. The padding token's row gets no gradient."""
    for family, size, rows in (("llama", 34, 17), ("llama", 33, 33), ("gemma2", 34, 17)):
        config = HFConfig.from_hf({**tiny(family), "vocab_size": size, "pad_token_id": 20})
        made = HFModel(config, "lm", source=None, seed=0, dtype=torch.float32)
        made.split(Axis(1, 2))
        inner: Any = made.inner
        table, head = inner.get_input_embeddings(), inner.get_output_embeddings()
        assert (table.weight.shape[0], head.weight.shape[0]) == (rows, rows)
        assert (table.weight is head.weight) == (family == "gemma2")
        assert table.padding_idx == 20 - (size - rows)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("phi3", {}, "'t' is not possible for phi3 models"),
        ("mixtral", {"num_local_experts": 3}, "t2 does not divide num_local_experts 3"),
        ("qwen3_next", {"num_attention_heads": 3}, "t2 does not divide num_attention_heads 3"),
        ("cohere", {"use_qk_norm": True}, "with model.layers.0.self_attn.k_norm.weight, which has"),
        ("llama", {"num_key_value_heads": 1}, "t2 does not divide num_key_value_heads 1"),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}},
            "t2 does not divide the heads of model.layers.1.self_attn.k_proj: 1",
        ),
        ("llama", {"intermediate_size": 33}, "t2 does not divide intermediate_size 33"),
    ],
)
def test_models_that_tensor_ranks_cannot_share_are_rejected(
    family: str, changes: dict[str, Any], message: str
) -> None:
    values = {**tiny(family), **changes}
    assert re.search(message, hf_tensor.refusal(values, "lm", 2)), "before a job"
    config = HFConfig.from_hf(values)
    made = HFModel(config, "lm", source=None, seed=0, dtype=torch.float32)
    with pytest.raises(UsageError, match=message):
        made.split(Axis(0, 2))


def test_text_parts_of_multimodal_configs_are_accepted_before_a_job() -> None:
    """Transformers runs only the language model of these configs."""
    for whole, part in (("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")):
        values = {"model_type": whole, "text_config": tiny(part)}
        assert hf_tensor.refusal(values, "lm", 2) == ""
    values = {"model_type": "gemma3", "text_config": tiny("gemma3_text")}
    assert "'t' is not possible for gemma3 models" in hf_tensor.refusal(values, "lm", 2)


@pytest.mark.parametrize("family", ["exaone4", "gemma3_text", "qwen3"])
def test_head_norm_gradients_are_summed_if_the_plan_omits_the_norms(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Plans of transformers 5.0 leave them out."""
    config = HFConfig.from_hf(tiny(family))
    made = HFModel(config, "lm", source=None, seed=0, dtype=torch.float32)
    plan = {name: style for name, style in made.inner.tp_plan.items() if style != OF_PARTS}
    assert len(plan) == len(made.inner.tp_plan) - 2
    monkeypatch.setattr(type(made.inner), "tp_plan", plan)
    made.split(Axis(0, 2))
    assert made.tensor is not None
    summed = {name for name, _ in made.named_parameters() if made.tensor.sums(name)}
    assert summed == {name for name, _ in made.named_parameters() if HEAD_NORM.search(name)}
    assert len(summed) == 4

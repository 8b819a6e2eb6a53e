"""Rows with several sequences, in families that separate sequences within a row and families that
do not.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from slurmrl.engines.hf_batch import HFRollout
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.base import RowKind
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_rows import row_places
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.rollouts.generation.native.native_rollout import ReadOutcome
from tests.support.families import VOCABULARY, tiny

APART = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gemma4_text", "qwen3_moe"),
    *("olmo3", "glm4_moe", "deepseek_v3", "llama4_text", "cohere2", "granite", "minimax_m2"),
    *("phi3", "gpt2", "gpt_neox"),
)
"""Families whose sequences can share a row."""
MIXING = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "nemotron_h", "falcon_h1", "bamba"),
    *("granitemoehybrid", "jamba", "mamba", "mamba2", "lfm2", "opt", "bloom", "gpt_oss"),
)
"""Families whose packed sequences would affect each other or have wrong positions."""
UNEVEN = ("biogpt", "zamba2")
"""Families without names of blocks, and with a block that several layers share."""
ONLY_TRAINING = ("recurrent_gemma",)
"""Families that mix sequences and cannot generate."""
BY_COLUMN = {"llama4_text": {"attn_temperature_tuning": False}}
"""Values without which a family's rows are not packed: its queries scale by the column."""
LENGTHS = (5, 1, 9, 12, 3, 17, 2)


def built(values: dict[str, Any], dtype: torch.dtype = torch.float32) -> HFModel:
    return HFModel(HFConfig.from_hf(values), "lm", source=None, seed=3, dtype=dtype)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return ids, offsets(LENGTHS)


def offsets(lengths: Any) -> Tensor:
    return nn.functional.pad(torch.as_tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def logprobs(model: HFModel, ids: Tensor, lengths: Any) -> Tensor:
    cu = offsets(lengths)
    values, _ = model.logprobs(model(ids, cu, int(max(lengths))), ids, cu, temperature=1.0)
    return values


@torch.no_grad()
@pytest.mark.parametrize("name", [*APART, *MIXING, *UNEVEN, *ONLY_TRAINING])
def test_logprobs_do_not_depend_on_the_batch(name: str) -> None:
    model = built(tiny(name, **BY_COLUMN.get(name, {})))
    assert model.rows == ("packed" if name in APART else "single")
    ids, _ = batch()
    alone = torch.cat([logprobs(model, each, [len(each)]) for each in ids.split(LENGTHS)])
    kinds: list[RowKind] = ["packed", "single"] if name in APART else ["single"]
    for kind in kinds:
        model.rows = kind
        found = (logprobs(model, ids, LENGTHS) - alone).abs().max()
        assert found < (1e-4 if name == "zamba2" else 1e-5), kind  # its states sum up more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["jamba", "lfm2", "falcon_h1", "qwen3_next", "llama", "qwen3_moe"])
def test_new_weights_show_which_families_mix_sequences(name: str, dtype: torch.dtype) -> None:
    """Sequences of a row hardly affect each other until training makes weights larger."""
    model = built(tiny(name, initializer_range=0.02), dtype)
    assert model.rows == ("packed" if name in APART else "single")


def test_reason_for_padded_rows_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="slurmrl.models.hf_rows"):
        built(tiny("lfm2"))
        built(tiny("llama"))
    assert [record.getMessage() for record in caplog.records] == [
        "lfm2: sequences are padded, not packed: packed sequences affect each other"
    ]


def test_model_whose_outputs_depend_on_padding_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_attention(*_: Any, **given: Any) -> BaseModelOutputWithPast:
        states = nn.functional.one_hot(given["input_ids"].flip(1) % 32, 32).float().cumsum(1)
        return BaseModelOutputWithPast(last_hidden_state=states)

    monkeypatch.setattr(LlamaModel, "forward", reversed_attention)
    with pytest.raises(
        UsageError, match=r"not support this llama model: .* padded sequence differ"
    ):
        built(tiny("llama"))


def test_gradients_do_not_depend_on_the_layout() -> None:
    ids, cu = batch()
    gradients = []
    for kind in ("packed", "single"):
        model = built(tiny("qwen3"))
        model.rows = kind  # type: ignore[assignment]
        logp, _ = model.logprobs(model(ids, cu, max(LENGTHS)), ids, cu, temperature=1.0)
        logp.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for packed, padded in zip(*gradients, strict=True):
        assert (packed - padded).abs().max() < 1e-4 * padded.abs().max()


def test_packed_rows_are_few_and_keep_sequences_whole() -> None:
    cu = offsets((4, 8, 3, 1, 2, 6))
    places = row_places(cu, 8, "packed")
    assert places.shape == (3, 8)
    assert len({*zip(places.rows.tolist(), places.columns.tolist(), strict=True)}) == 24
    positions = places.positions
    assert positions is not None
    for first, last in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        rows, columns = places.rows[first:last], places.columns[first:last]
        assert len(set(rows.tolist())) == 1
        assert columns.diff().eq(1).all()
        assert positions[rows, columns].tolist() == list(range(last - first))


@torch.no_grad()
def test_rows_are_not_packed_if_queries_scale_by_column() -> None:
    """The scale begins beyond the columns of the trial."""
    scaled = {"attn_temperature_tuning": True, "floor_scale": 12, "attn_scale": 2.0}
    no_rope = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
    model = built(tiny("llama4_text", **scaled, **no_rope))
    ids, _ = batch()
    alone = torch.cat([logprobs(model, each, [len(each)]) for each in ids.split(LENGTHS)])
    assert (logprobs(model, ids, LENGTHS) - alone).abs().max() < 1e-5
    assert model.rows == "single"
    session = model.session([12], 20, 12)
    with pytest.raises(UsageError, match="in the batch after 11 columns"):
        session.prompts(ids[:12])


@torch.no_grad()
def test_rows_are_not_packed_if_attention_compresses_blocks() -> None:
    """The blocks of the trial's short sequences are not full."""
    model = built(tiny("deepseek_v4"))
    lengths = (5, 9, 12)
    ids = torch.randint(model.inner.config.vocab_size, (sum(lengths),))
    alone = torch.cat([logprobs(model, each, [len(each)]) for each in ids.split(lengths)])
    assert (logprobs(model, ids, lengths) - alone).abs().max() < 1e-5
    assert model.rows == "single"
    with pytest.raises(UsageError, match="compresses blocks of columns"):
        model.session([5], 9, 64)


def test_rows_with_one_sequence_each_need_no_positions() -> None:
    """Attention then needs no mask."""
    assert row_places(offsets((5, 6, 8)), 8, "packed").positions is None
    assert row_places(offsets((5, 3, 8)), 8, "single").shape == (3, 8)


@torch.no_grad()
@pytest.mark.parametrize("name", [*APART, *MIXING, "zamba2"])
def test_generation_logits_equal_training_logits(name: str) -> None:
    """Prompts of unequal lengths, rows that change places, and more rows that join."""
    model = built(tiny(name, **BY_COLUMN.get(name, {})))
    ids, _ = batch()
    rows = [row for row in ids.split(LENGTHS) if len(row) > 2]
    wanted = [model(row, row, 0, {"input_ids": row[None], "use_cache": False}) for row in rows]
    logits = [each.logits[0][-3:] for each in wanted]
    order = torch.tensor([3, 0, 2, 4, 1])
    session = model.session([len(row) - 2 for row in rows], prefill_tokens=20)
    found = session.prompts(torch.cat([row[:-2] for row in rows]))
    assert (found - torch.stack([each[0] for each in logits])).abs().max() < 1e-4
    session.keep(order)
    for place in (-2, -1):
        fresh = torch.stack([rows[index][place] for index in order])
        found = session.next(fresh, torch.ones(5, dtype=torch.bool))
        exact = torch.stack([logits[index][3 + place] for index in order])
        assert (found - exact).abs().max() < 1e-4


def test_family_with_states_outside_the_cache_cannot_generate() -> None:
    model = built(tiny("recurrent_gemma"))
    with pytest.raises(UsageError, match=r"recurrent_gemma models cannot generate .* differ by"):
        model.session([3, 2], prefill_tokens=20)


@pytest.mark.parametrize(
    ("family", "message"), [("recurrent_gemma", "cannot generate"), ("qwen3", None)]
)
def test_rollout_task_fails_at_start_if_the_family_cannot_generate(
    tmp_path: Path, family: str, message: str | None
) -> None:
    """Tasks that fail at their start end the trial with the reason."""
    model = built(tiny(family))
    model.inner.save_pretrained(tmp_path)
    version = WeightVersion(name="1.1", folder=tmp_path)

    async def install() -> str | None:
        engine = HFRollout(model, None, 20)
        with pytest.raises(UsageError, match=message) if message else nullcontext():
            await engine.update_weights(version)
        return engine.version

    assert asyncio.run(install()) == (None if message else "1.1")


def test_generation_is_not_tested_after_another_rank_failed_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test computes with all ranks, and a rank that has failed would not take part."""
    model = built(tiny("qwen3"))
    model.inner.save_pretrained(tmp_path)
    engine = HFRollout(model, None, 20)
    monkeypatch.setattr(engine, "_outcomes", lambda _: {ReadOutcome.READ, ReadOutcome.BROKEN})
    monkeypatch.setattr(model, "require_generation", lambda: pytest.fail("it computed"))
    with pytest.raises(RunFailedError, match="other ranks of the model failed"):
        engine._read("1.1", tmp_path)


def test_recomputation_does_not_disable_the_generation_cache() -> None:
    """In training mode, layers that recompute would ignore the cache."""
    ids, cu = batch()
    model = built(tiny("qwen3"))
    plain = model(ids, cu, max(LENGTHS))
    model.use("full")
    model.session([3, 2], prefill_tokens=20)  # (raises if outputs differ)
    assert torch.equal(model(ids, cu, max(LENGTHS)), plain)
    assert model.inner.training

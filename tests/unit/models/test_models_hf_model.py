from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.config.schema.roles import Lora
from slurmrl.errors import UsageError
from slurmrl.models import hf_tensor
from slurmrl.models.architecture import Head
from slurmrl.models.hf_adapters import adapted_shapes
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_files import complete, file_form
from slurmrl.models.hf_loading import only_multiplies, reject_dropout, tensor_specs
from slurmrl.models.hf_model import HFModel
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.ops import logprobs
from tests.support.families import VOCABULARY, tiny
from tests.support.generated import generate
from tests.support.largest_tensor import LargestTensor

GEMMA2 = tiny("gemma2", attention_dropout=0.5)
FALCON = tiny("falcon")
MIXTRAL = tiny("mixtral")
LENGTHS = (5, 1, 9, 12)


def made(
    values: dict[str, Any], head: Head = "lm", source: Path | None = None, seed: int = 3
) -> HFModel:
    config = HFConfig.from_hf(values)
    return HFModel(config, head, source=source, seed=seed, dtype=torch.float32)


def packed(copies: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = LENGTHS * copies
    ids = torch.randint(1, VOCABULARY, (sum(lengths),), generator=generator)
    cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    return ids, cu


@pytest.mark.parametrize("values", [GEMMA2, FALCON], ids=["gemma2", "falcon"])
def test_batch_outputs_equal_outputs_of_separate_sequences(values: dict[str, Any]) -> None:
    model = made(values)
    ids, cu = packed()
    features = model(ids, cu, max(LENGTHS))
    logp, entropy = model.logprobs(features, ids, cu, temperature=0.7)
    for sequence, found, spread in zip(
        ids.split(LENGTHS), logp.split(LENGTHS), entropy.split(LENGTHS), strict=True
    ):
        assert found[0] == spread[0] == 0
        if len(sequence) == 1:
            continue
        logits = model.inner(sequence[None]).logits[0].double() / 0.7
        exact = torch.distributions.Categorical(logits=logits[:-1])
        assert torch.allclose(found[1:].double(), exact.log_prob(sequence[1:]), atol=1e-5)
        assert torch.allclose(spread[1:].double(), exact.entropy(), atol=1e-5)


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        (FALCON, True),
        (MIXTRAL, True),
        (GEMMA2, False),
        (tiny("granite", logits_scaling=3.0), False),
        (tiny("cohere", logit_scale=0.5), False),
        (tiny("phi"), False),  # its projection has a bias
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_models_with_extra_logit_operations_are_detected(
    values: dict[str, Any], plain: bool
) -> None:
    assert only_multiplies(made(values).inner) == plain


@pytest.mark.parametrize(("values", "whole"), [(FALCON, False), (GEMMA2, True)])
def test_full_logits_are_kept_only_if_necessary(
    values: dict[str, Any], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 8)
    model = made({**values, "vocab_size": 2000})
    ids, cu = packed(copies=4)
    with LargestTensor() as largest:
        logp, entropy = model.logprobs(model(ids, cu, max(LENGTHS)), ids, cu, 1.0)
        (logp + entropy).sum().backward()
    assert (
        largest.elements >= len(ids) * 2000
        if whole
        else largest.elements <= 2000 * model.inner.config.hidden_size
    )


@pytest.mark.parametrize(
    "values",
    [GEMMA2, FALCON, tiny("qwen3_next"), tiny("falcon_h1")],
    ids=lambda values: values["model_type"],
)
def test_generated_logprobs_equal_the_training_forward_pass(values: dict[str, Any]) -> None:
    model = made(values)
    ids, cu = packed()
    options = GenerationOptions(max_new_tokens=14, temperature=0.8, stop_token_ids=(3, 4, 5, 6))
    keys = torch.arange(len(LENGTHS))
    output = generate(model, ids, cu, options, seed=1, step=2, keys=keys)
    parts = generate(model, ids, cu, options, seed=1, step=2, keys=keys, prefill_tokens=20)
    assert torch.equal(parts.tokens, output.tokens)  # with one prompt read at a time
    assert (parts.logprobs - output.logprobs).abs().max() < 1e-4
    groups = generate(model, ids, cu, options, seed=1, step=2, keys=keys.repeat_interleave(2))
    rows = groups.tokens.split(groups.lengths.tolist())  # every prompt twice, with the same key
    wanted = output.tokens.split(output.lengths.tolist())
    for row, tokens in enumerate(wanted):
        assert torch.equal(rows[2 * row], tokens)
        assert torch.equal(rows[2 * row + 1], tokens)
    lengths = output.lengths
    assert len(set(lengths - torch.tensor(LENGTHS))) > 1  # some rows left the batch
    whole = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    features = model(output.tokens, whole, int(lengths.max()))
    logp, _ = model.logprobs(features, output.tokens, whole, temperature=0.8)
    new = output.logprobs != 0
    assert new.sum() == (lengths - output.prompt_lengths).sum()
    assert (logp - output.logprobs)[new].abs().max() < 1e-4


def test_new_value_model_predicts_zero_and_learns() -> None:
    model = made(FALCON, "value")
    ids, cu = packed()
    features = model(ids, cu, max(LENGTHS))
    values = model.values(features)
    assert values.shape == ids.shape
    assert not values.any()
    (values - 1).square().sum().backward()
    assert model.inner.score.weight.grad.any()


def test_critic_export_names_no_language_model_class() -> None:
    config = HFConfig.from_hf({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert "architectures" not in config.to_hf(head="value")
    assert config.to_hf()["architectures"] == ["LlamaForCausalLM"]


def test_weights_come_from_the_seed_or_the_directory(tmp_path: Path) -> None:
    torch.manual_seed(8)
    before = torch.get_rng_state()
    first, again, other = made(GEMMA2), made(GEMMA2), made(GEMMA2, seed=4)
    assert torch.equal(before, torch.get_rng_state())
    name = "inner.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    first.inner.save_pretrained(tmp_path)
    read = made(GEMMA2, source=tmp_path, seed=4)
    assert torch.equal(first.get_parameter(name), read.get_parameter(name))
    assert read.inner.config.attention_dropout == 0.0


def test_auxiliary_loss_with_zero_weight_is_accepted() -> None:
    made({**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.0})


def test_weight_initialization_does_not_touch_gpu_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    made(GEMMA2)
    assert not seeded


def test_recomputation_changes_no_gradient() -> None:
    gradients = []
    for mode in ("off", "full"):
        model = made(GEMMA2)
        model.use(mode)  # type: ignore[arg-type]
        model(*packed(), max(LENGTHS)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
    with pytest.raises(UsageError, match="checkpointing off or full only"):
        model.use("selective")


def test_uncontrolled_dropout_is_rejected() -> None:
    model = made(GEMMA2)
    model.inner.add_module("noise", torch.nn.Dropout(0.1))
    with pytest.raises(UsageError, match=r"has dropout that no field .* \(noise\)"):
        reject_dropout(model.inner)


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (GEMMA2, ["Gemma2DecoderLayer"] * 2),
        (tiny("biogpt"), ["BioGptDecoderLayer"] * 2),  # names no class
        (tiny("mamba"), ["MambaBlock"] * 2),  # names a class within another one too
        (tiny("zamba2"), ["Zamba2MambaDecoderLayer"] * 2),  # the others share a block
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_layers_are_found_for_sharding(values: dict[str, Any], classes: list[str]) -> None:
    assert [type(layer).__name__ for layer in made(values).layers] == classes


def test_unsupported_recomputation_is_rejected() -> None:
    model = made(tiny("jetmoe"))
    with pytest.raises(UsageError, match=r"checkpointing full is not allowed: JetMoe.* support"):
        model.use("full")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 3}, "'model_type' is None, must be a model type"),
        ({**GEMMA2, "model_type": "gemmatwo"}, "a gemmatwo model: Unrecognized .* gemmatwo.$"),
        ({**GEMMA2, "model_type": "t5"}, "transformers cannot build a t5 model"),
        ({**MIXTRAL, "output_router_logits": True}, "does not compute the load-balancing loss"),
    ],
)
def test_models_that_cannot_be_built_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(values)


@pytest.mark.parametrize("wrong", [{"num_attention_heads": 0}, {"hidden_size": "x"}])
def test_plan_rejects_models_that_transformers_cannot_build(wrong: dict[str, Any]) -> None:
    """Transformers' classes raise errors of any kind for such configs."""
    values = {"model_type": "llama", "vocab_size": 64, **wrong}
    config = HFConfig.from_hf(values)
    message = "transformers cannot build a llama model: "
    for read in (
        partial(tensor_specs, config, "lm"),
        partial(adapted_shapes, values, "lm", Lora(rank=2)),
        partial(file_form, config, "lm"),
    ):
        with pytest.raises(UsageError, match=message):
            read()
    assert message in hf_tensor.refusal(values, "lm", 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**GEMMA2, "num_hidden_layers": "2"}, "cannot build a gemma2 model: "),
        ({"model_type": "nothing"}, "transformers cannot build a nothing model"),
    ],
)
def test_families_that_servers_cannot_load_are_rejected(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        complete(HFConfig.from_hf(values))


def test_config_of_servers_has_the_class_and_vocabulary_of_the_model() -> None:
    """This holds whatever the folder states, for example the class of a model without a head."""
    made = complete(HFConfig.from_hf({**GEMMA2, "architectures": ["Gemma2Model"]}))
    assert made.values["architectures"] == ["Gemma2ForCausalLM"]
    assert (made.vocab_size, made.tie_embeddings) == (VOCABULARY, True)
    assert made.embedding == "model.embed_tokens.weight"

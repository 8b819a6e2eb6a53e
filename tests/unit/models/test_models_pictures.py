"""Models that read images, against transformers on each sequence alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from slurmrl.config.schema import Lora, Model
from slurmrl.config.schema.roles import VISION
from slurmrl.engines.fsdp.parameters import frozen_tower
from slurmrl.models import hf_files
from slurmrl.models.families import PICTURE_FAMILIES, STRAY, VIDEO_FAMILIES
from slurmrl.models.hf import as_array
from slurmrl.models.hf_adapters import attach_to
from slurmrl.models.hf_config import MODULE, HFConfig
from slurmrl.models.hf_loading import tensor_specs
from slurmrl.models.hf_model import HFModel
from slurmrl.models.shapes import file_form, storage_of
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.checkpoint.tensors import file_entries
from slurmrl.tensors.layout import Array, Box, TensorSpec
from slurmrl.tensors.pictures import read
from tests.support.picture_models import write_processor
from tests.support.picture_prompts import (
    complete,
    random_prompts,
    trained_logprobs,
    transformers_logprobs,
)

FAMILIES = sorted(PICTURE_FAMILIES)
CASES = [(each, False) for each in FAMILIES] + [(each, True) for each in sorted(VIDEO_FAMILIES)]
"""Families, and whether rows have videos too."""


@pytest.mark.parametrize(("family", "videos"), CASES)
def test_batches_with_images_have_transformers_logprobs_and_gradients(
    family: str, videos: bool, tmp_path: Path
) -> None:
    """Two of the sequences would fit into one row of the longest one."""
    prompts = random_prompts(tmp_path, family, videos=videos)
    model, more = prompts.model, [torch.tensor([7, 8, 9])] * len(prompts.ids)
    found = trained_logprobs(prompts, more)
    wanted = transformers_logprobs(model.inner, prompts, more)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[1:], other, atol=1e-5, rtol=0)
    parameters = dict(model.inner.named_parameters())
    gradients = [
        torch.autograd.grad(
            sum(each.sum() for each in parts), list(parameters.values()), materialize_grads=True
        )
        for parts in (found, wanted)
    ]
    for name, one, other in zip(parameters, *gradients, strict=True):
        scale = float(other.abs().max())
        assert (one - other).abs().max() <= 1e-5 * max(scale, 1.0), name
    tower = {id(p) for p in model.pictures.tower.parameters()} if model.pictures else set()
    assert any(
        id(parameters[name]) in tower and values.abs().max() > 0
        for name, values in zip(parameters, gradients[0], strict=True)
    )


@pytest.mark.parametrize(("family", "videos"), CASES)
def test_generation_from_images_has_logprobs_of_the_training_pass(
    family: str, videos: bool, tmp_path: Path
) -> None:
    """The first and last prompts have equal tokens and other pictures."""
    prompts = random_prompts(tmp_path, family, videos=videos)
    assert torch.equal(prompts.ids[0], prompts.ids[3])
    whole = complete(prompts, 10_000)
    assert [each.tokens for each in complete(prompts, 1)] == [each.tokens for each in whole]
    assert whole[0].logprobs != whole[3].logprobs
    with torch.no_grad():
        trained = trained_logprobs(prompts, [torch.tensor(each.tokens) for each in whole])
    for found, each in zip(trained, whole, strict=True):
        exact = torch.tensor(each.logprobs)
        torch.testing.assert_close(found[-len(exact) :], exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", sorted(VIDEO_FAMILIES))
def test_greedy_tokens_after_videos_equal_transformers(family: str, tmp_path: Path) -> None:
    """Later tokens continue the positions of the last frame."""
    prompts = random_prompts(tmp_path, family, videos=True)
    found = complete(prompts, 10_000, GenerationOptions(max_new_tokens=8, greedy=True))
    inner: Any = prompts.model.inner
    for number, each in enumerate(found):
        given: dict[str, Any] = {}
        if path := prompts.pictures[number]:
            arguments = read(Path(path)).arguments
            given = {name: torch.from_numpy(np.array(values)) for name, values in arguments.items()}
            given["mm_token_type_ids"] = prompts.types(number)[None]
        ids = prompts.ids[number][None]
        whole = inner.generate(input_ids=ids, do_sample=False, max_new_tokens=8, **given)
        wanted, tokens = whole[0, ids.shape[1] :].tolist(), list(each.tokens)
        # A placeholder is read as another token, see below.
        stray = (place for place, t in enumerate(tokens) if t in (prompts.image, prompts.video))
        end = next(stray, len(tokens)) + 1
        assert tokens[:end] == wanted[:end]
        assert end > 4


@pytest.mark.parametrize(("family", "videos"), CASES)
def test_placeholder_token_without_image_is_read_as_text(
    family: str, videos: bool, tmp_path: Path
) -> None:
    """A policy may sample the placeholder's id. Training and generation read the same then."""
    prompts = random_prompts(tmp_path, family, videos=videos)
    model, first = prompts.model, prompts.ids[0]
    ends = {}
    placeholders = (prompts.image, *({prompts.video} - {None}))
    for token in (*placeholders, STRAY):
        ids = torch.cat([first, torch.tensor([9, token, 9])])
        cu = torch.tensor([0, len(ids)], dtype=torch.int32)
        with torch.no_grad(), model.showing(prompts.pictures[:1]):
            ends[token] = model(ids, cu, len(ids))[-1]
        session = model.session([len(first)], 100, pictures=prompts.pictures[:1])
        with torch.no_grad():
            session.prompts(first)
            for each in (9, token, 9):
                logits = session.next(torch.tensor([each]), torch.ones(1, dtype=torch.bool))
        head: Any = model.inner.get_output_embeddings()
        torch.testing.assert_close(head(ends[token])[None], logits, atol=1e-5, rtol=0)
    assert all(torch.equal(ends[token], ends[STRAY]) for token in placeholders)


@pytest.mark.parametrize(("family", "videos"), CASES)
def test_text_outputs_are_unchanged_by_earlier_image_batches(
    family: str, videos: bool, tmp_path: Path
) -> None:
    """Some models of transformers store the positions of the last images."""
    prompts = random_prompts(tmp_path, family, videos=videos)
    model = prompts.model
    ids = torch.arange(30)
    cu = torch.tensor([0, 20, 25, 30], dtype=torch.int32)
    found = []
    for _ in range(2):
        session = model.session([5, 3], 100)
        with torch.no_grad():
            logits = [model(ids, cu, 20), session.prompts(ids[:8])]
            logits.append(session.next(torch.tensor([4, 5]), torch.ones(2, dtype=torch.bool)))
        found.append(logits)
        complete(prompts, 10_000)
        with torch.no_grad(), model.showing(prompts.pictures[1:2]):
            own = prompts.ids[1]
            model(own, torch.tensor([0, len(own)], dtype=torch.int32), len(own))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        alone = model.inner(input_ids=ids[None, 20:25], use_cache=False).logits[0]
    head: Any = model.inner.get_output_embeddings()
    torch.testing.assert_close(head(found[0][0][20:25]), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "internvl", "llava"])
def test_text_batch_gives_every_trained_parameter_a_gradient(family: str, tmp_path: Path) -> None:
    """Ranks with and without images must reduce the same gradients."""
    model = random_prompts(tmp_path, family).model
    ids = torch.arange(5)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    model.logprobs(model(ids, cu, 5), ids, cu, temperature=1.0)[0].sum().backward()
    assert [name for name, p in model.inner.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_model_of_an_image_family_has_no_image_encoder_unless_requested(
    family: str, tmp_path: Path
) -> None:
    """Transformers has two classes. Without images, a trial runs the language model."""
    values = write_processor(tmp_path, family)
    files = {}
    for vision in (False, True):
        marked = Model(vision=vision).marked(values)
        written, _ = file_form(marked, "hf", "lm")
        model = HFModel(HFConfig.from_hf(marked), "lm", source=None, seed=3, dtype=torch.float32)
        assert (model.pictures is not None) is vision
        assert VISION not in written
        served = hf_files.complete(HFConfig.from_hf(marked))
        assert storage_of(served)(f"{MODULE}lm_head.weight", ())[0].tensor == "lm_head.weight"
        shapes, _ = tensor_specs(served, "lm")
        assert shapes.keys() == dict(model.named_parameters()).keys()
        assert VISION not in served.to_hf()
        files[written["model_type"]] = any(".visual." in name for name in shapes)
    assert files == {f"{family}_text": False, family: True}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_vl"])
def test_transformers_loads_files_with_the_image_encoder(family: str, tmp_path: Path) -> None:
    values = Model(vision=True).marked(write_processor(tmp_path, family))
    model = HFModel(HFConfig.from_hf(values), "lm", source=None, seed=3, dtype=torch.float32)
    own = dict(model.named_parameters())
    written, storage = file_form(values, "hf", "lm")
    specs = [(name, TensorSpec(tuple(each.shape), "float32")) for name, each in own.items()]

    def read_box(name: str, box: Box) -> Array:
        return as_array(own[name].detach()[box.slices])

    entries = file_entries(specs, read_box, storage)
    tensors = {each.name: torch.from_numpy(np.array(each.data())) for each in entries}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(written))
    made, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(made).__name__ == written["architectures"][0]
    for name, each in made.named_parameters():
        assert torch.equal(each, own[MODULE + name]), name


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_value_model_of_an_image_family_reads_text(family: str, tmp_path: Path) -> None:
    """The model has an image encoder, but no images."""
    values = write_processor(tmp_path, family)
    model = HFModel(HFConfig.from_hf(values), "value", source=None, seed=3, dtype=torch.float32)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    model.values(model(torch.arange(5), cu, 5)).sum().backward()
    assert model.get_parameter("inner.score.weight").grad is not None


@pytest.mark.parametrize("train_vision", [False, True])
def test_audio_encoder_is_never_trained(train_vision: bool, tmp_path: Path) -> None:
    """An optimizer would decay weights that no batch uses, and adapters there would do nothing."""
    values = write_processor(tmp_path, "gemma4")
    model = HFModel(HFConfig.from_hf(values), "lm", source=None, seed=3, dtype=torch.float32)
    frozen = frozen_tower(model, Model(architecture=values, train_vision=train_vision))
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == names
    audio = {name for name, _ in model.named_parameters() if "audio" in name}
    assert audio
    assert audio <= names
    assert any("vision_tower" in name for name in names) is not train_vision
    attach_to(model, Lora(rank=2))
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert adapted
    assert not [name for name in adapted if "audio" in name or "vision_tower" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_in_the_language_model_only(family: str, tmp_path: Path) -> None:
    """A projector of images is a linear layer too."""
    values = Model(vision=True).marked(write_processor(tmp_path, family))
    model = HFModel(HFConfig.from_hf(values), "lm", source=None, seed=3, dtype=torch.float32)
    attach_to(model, Lora(rank=2, targets="all-linear"))
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert adapted
    assert not [name for name in adapted if "language_model" not in name]

"""Models that read images, against transformers on each sequence alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from slurmrl.config.schema import Dataset, Lora, Model
from slurmrl.config.schema.roles import VISION
from slurmrl.data.sample import pictures_of
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.engines.fsdp.parameters import frozen_tower
from slurmrl.engines.hf_batch import HFRollout
from slurmrl.models import hf_files
from slurmrl.models.hf import as_array
from slurmrl.models.hf_adapters import attach_to
from slurmrl.models.hf_config import MODULE, HFConfig
from slurmrl.models.hf_loading import tensor_specs
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_pictures import STRAY
from slurmrl.models.picture_families import PICTURE_FAMILIES
from slurmrl.models.shapes import file_form, storage_of
from slurmrl.rollouts.generation.base import Completion, GenerationOptions, GenerationRequest
from slurmrl.tensors.checkpoint.tensors import file_entries
from slurmrl.tensors.layout import Array, Box, TensorSpec
from slurmrl.tensors.pictures import read
from tests.support.datasets import prepared, write_rows
from tests.support.picture_models import draw, write_processor

FAMILIES = sorted(PICTURE_FAMILIES)
ROWS = (
    {"prompt": "How many <image>?", "images": ["a.png"]},
    {"prompt": "<image> or <image>, " + "which has more dots? " * 4, "images": ["b.png", "a.png"]},
    {"prompt": "Which picture?", "images": []},
    {"prompt": "How many <image>?", "images": ["c.png"]},
)


class Prompts(NamedTuple):
    """A random model with prepared prompts."""

    model: HFModel
    ids: tuple[Tensor, ...]
    pictures: list[str]
    image: int
    """Token id of placeholders."""

    def alone(self, number: int, more: Tensor) -> Tensor:
        """Return transformers' logits of a prompt with further tokens."""
        ids = torch.cat([self.ids[number], more])[None]
        if not self.pictures[number]:
            return self.model.inner(input_ids=ids, use_cache=False).logits[0]
        types = torch.nn.functional.pad((self.ids[number] == self.image).long(), (0, len(more)))
        family = self.model.config.model_type
        name = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
        marks = {} if family == "internvl" else {name: types[None]}
        given: Any = read(Path(self.pictures[number])).arguments
        arguments = {key: torch.from_numpy(np.array(values)) for key, values in given.items()}
        logits: Tensor = self.model.inner(
            input_ids=ids, use_cache=False, **arguments, **marks
        ).logits[0]
        return logits


def made(folder: Path, family: str) -> Prompts:
    values = write_processor(folder, family)
    draw(folder / "a.png", 2)
    draw(folder / "b.png", 5, (40, 24))
    draw(folder / "c.png", 3)
    path = write_rows(folder, *ROWS)
    config = Dataset(type="prompt", path=path, images_key="images", chat_template=True)
    rows = prepared(config, load_tokenizer(folder), folder / "data")
    sample = rows.sample([(0, number) for number in range(len(ROWS))])
    lengths = [length for row in sample.lengths["prompt_ids"] for length in row]
    marked = Model(vision=True).marked(values)
    model = HFModel(HFConfig.from_hf(marked), "lm", source=None, seed=3, dtype=torch.float32)
    if family == "gemma3":  # transformers begins with zero, which shows no image
        projector: Any = model.inner.get_submodule("model.multi_modal_projector")
        torch.nn.init.normal_(projector.mm_input_projection_weight, std=0.3)
    ids = sample.tensor("prompt_ids").split(lengths)
    image = values.get("image_token_id", values.get("image_token_index"))
    return Prompts(model, ids, pictures_of(sample), int(image))


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_with_images_have_transformers_logprobs_and_gradients(
    family: str, tmp_path: Path
) -> None:
    """Two of the sequences would fit into one row of the longest one."""
    prompts = made(tmp_path, family)
    model, more = prompts.model, torch.tensor([7, 8, 9])
    sequences = [torch.cat([ids, more]) for ids in prompts.ids]
    lengths = [len(each) for each in sequences]
    ids, cu = torch.cat(sequences), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    with model.showing(prompts.pictures):
        features = model(ids, cu, max(lengths))
    found = model.logprobs(features, ids, cu, temperature=1.0)[0].split(lengths)
    wanted = []
    for number, sequence in enumerate(sequences):
        logits = prompts.alone(number, more)[:-1].log_softmax(-1)
        wanted.append(logits.gather(1, sequence[1:, None])[:, 0])
        torch.testing.assert_close(found[number][1:], wanted[-1], atol=1e-5, rtol=0)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_from_images_has_logprobs_of_the_training_pass(
    family: str, tmp_path: Path
) -> None:
    """The first and last prompts have equal tokens and other pictures."""
    prompts = made(tmp_path, family)
    model = prompts.model
    assert torch.equal(prompts.ids[0], prompts.ids[3])
    whole = complete(prompts, 10_000)
    assert [each.tokens for each in complete(prompts, 1)] == [each.tokens for each in whole]
    assert whole[0].logprobs != whole[3].logprobs
    sequences = [
        torch.cat([ids, torch.tensor(each.tokens)])
        for ids, each in zip(prompts.ids, whole, strict=True)
    ]
    lengths = [len(each) for each in sequences]
    ids, cu = torch.cat(sequences), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    with torch.no_grad(), model.showing(prompts.pictures):
        logp = model.logprobs(model(ids, cu, max(lengths)), ids, cu, temperature=1.0)[0]
    for found, each in zip(logp.split(lengths), whole, strict=True):
        exact = torch.tensor(each.logprobs)
        torch.testing.assert_close(found[-len(exact) :], exact, atol=1e-5, rtol=0)


def complete(prompts: Prompts, prefill_tokens: int) -> list[Completion]:
    options = GenerationOptions(max_new_tokens=6)
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt=tuple(ids.tolist()),
            keys=(5,),
            seed=1,
            step=1,
            options=options,
            pictures=pictures,
        )
        for number, (ids, pictures) in enumerate(zip(prompts.ids, prompts.pictures, strict=True))
    ]

    async def run() -> list[tuple[Completion, ...]]:
        rollout = HFRollout(prompts.model, "1.0", prefill_tokens)
        return await asyncio.gather(*map(rollout.submit, requests))

    return [completion for (completion,) in asyncio.run(run())]


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholder_token_without_image_is_read_as_text(family: str, tmp_path: Path) -> None:
    """A policy may sample the placeholder's id. Training and generation read the same then."""
    prompts = made(tmp_path, family)
    model, first = prompts.model, prompts.ids[0]
    ends = {}
    for token in (prompts.image, STRAY):
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
    assert torch.equal(*ends.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_text_outputs_are_unchanged_by_earlier_image_batches(family: str, tmp_path: Path) -> None:
    """Some models of transformers remember the positions of the last images."""
    prompts = made(tmp_path, family)
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


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "internvl"])
def test_text_gives_every_trained_parameter_a_gradient(family: str, tmp_path: Path) -> None:
    """Ranks with and without images must reduce the same gradients."""
    model = made(tmp_path, family).model
    ids = torch.arange(5)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    model.logprobs(model(ids, cu, 5), ids, cu, temperature=1.0)[0].sum().backward()
    assert [name for name, p in model.inner.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_model_without_mark_has_no_image_encoder(family: str, tmp_path: Path) -> None:
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
def test_model_with_values_reads_text(family: str, tmp_path: Path) -> None:
    """It has an image encoder, but no images."""
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

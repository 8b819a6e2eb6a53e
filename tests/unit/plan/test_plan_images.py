"""Plans with images: models without image support are rejected with one message, and estimates
include the encoder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from slurmrl.config.allocation import parse
from slurmrl.config.schema import Model
from slurmrl.errors import ConfigError
from slurmrl.models.families import served_refusal
from slurmrl.plan.estimates.added_sizes import trained_shard
from slurmrl.plan.estimates.call_costs import memories
from slurmrl.plan.estimates.shape import parameters, shape_of
from slurmrl.plan.settings import Settings, load_settings
from tests.support.datasets import write_rows
from tests.support.picture_models import draw, write_processor
from tests.unit.plan.conftest import refused_settings

BASE = """
experiment: pictures
total_steps: 2
algorithm: {name: grpo, batch_size: 4}
actor: {path: model, implementation: hf}
dataset: {type: prompt, path: rows.jsonl, images_key: images, max_prompt_tokens: 64}
rollout: {max_new_tokens: 8}
reward: {name: exact_match}
"""
VIDEOS = ["dataset.images_key=null", "dataset.videos_key=videos"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    values = write_processor(tmp_path / "model", "qwen3_vl")
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    draw(tmp_path / "a.png", 2)
    write_rows(tmp_path, {"prompt": "How many?", "images": ["a.png"], "answer": "2"})
    (tmp_path / "grpo.yaml").write_text(BASE)
    return tmp_path


def load(folder: Path, *overrides: str) -> Settings:
    return load_settings(folder / "grpo.yaml", list(overrides))


def test_rows_with_images_get_the_chat_template(folder: Path) -> None:
    assert load(folder).config.dataset.chat_template is True
    assert load(folder, *VIDEOS).config.dataset.chat_template is True


@pytest.mark.parametrize(("key", "message", "overrides"), refused_settings("refused_images.txt"))
def test_settings_incompatible_with_images_are_rejected(
    folder: Path, key: str, message: str, overrides: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(folder, *overrides)
    found = [each for each in raised.value.problems if each.key == key]
    assert any(message in each.message for each in found), raised.value


@pytest.mark.parametrize(
    ("overrides", "built"),
    [
        ([], True),
        (["dataset.images_key=null"], False),
        (["dataset.images_key=null", "actor.vision=true"], True),
        (["dataset.images_key=null", "actor.train_vision=true"], True),
    ],
)
def test_image_encoder_is_built_only_for_images(
    folder: Path, overrides: list[str], *, built: bool
) -> None:
    """In transformers, `qwen3_5` is also a family of language models."""
    values = write_processor(folder / "model", "qwen3_5")
    (folder / "model" / "config.json").write_text(json.dumps(values))
    actor = load(folder, *overrides).config.actor
    assert actor.vision is built
    shape = shape_of(actor)
    assert shape is not None
    assert (shape.tower > 0) is built


def test_settings_of_other_families_do_not_change(folder: Path) -> None:
    """An older trial without this setting must continue."""
    assert load(folder).config.actor.vision is False


def with_reference(folder: Path, family: str, **sizes: Any) -> list[str]:
    """Write another model. Return the settings that make it the reference."""
    other = folder / "other"
    other.mkdir()
    values = write_processor(other, family)
    values["vision_config"] |= sizes
    (other / "config.json").write_text(json.dumps(values))
    return ["algorithm.kl.coef=0.1", f"ref.path={other}", "ref.implementation=hf"]


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("qwen2_5_vl", {}, "ref and actor must read the same pixels, but model_type is qwen2_5_vl"),
        ("qwen3_vl", {"patch_size": 8}, "but patch_size is 8 and 4"),
        ("qwen3_vl", {"spatial_merge_size": 4}, "but spatial_merge_size is 4 and 2"),
    ],
)
def test_reference_that_reads_other_pixels_is_rejected(
    folder: Path, family: str, sizes: dict[str, int], message: str
) -> None:
    """One processor prepares the images for all models."""
    with pytest.raises(ConfigError) as raised:
        load(folder, *with_reference(folder, family, **sizes))
    found = [each.message for each in raised.value.problems if each.key == "ref.path"]
    assert any(message in each for each in found), raised.value


@pytest.mark.parametrize("sizes", [{"depth": 3}, {"patch_size": [4, 4]}, {"image_size": []}])
def test_reference_of_another_size_reads_the_same_pixels(
    folder: Path, sizes: dict[str, Any]
) -> None:
    load(folder, *with_reference(folder, "qwen3_vl", **sizes))


def test_encoder_that_is_no_object_is_left_to_the_check_of_weights(folder: Path) -> None:
    overrides = with_reference(folder, "qwen3_vl")
    file = folder / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vision_config": 5}))
    load(folder, *overrides)


def test_encoder_that_is_no_object_is_accepted_for_servers() -> None:
    """The check of weights reports it."""
    values = {"model_type": "qwen2_5_vl", "vision_config": 5, "image_token_id": 1}
    assert {served_refusal(values, server) for server in ("sglang", "vllm")} == {""}


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_parameters_include_the_image_encoder(family: str, tmp_path: Path) -> None:
    values: dict[str, Any] = write_processor(tmp_path, family)
    with torch.device("meta"):
        made = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**values))
    tower = sum(p.numel() for p in made.get_encoder(modality="image").parameters())
    layout = parse("fsdp:d2")
    frozen, trained = (
        Model(architecture=values, implementation="hf", train_vision=train)
        for train in (False, True)
    )
    shape = shape_of(frozen)
    assert shape is not None
    assert shape.tower == tower
    total = sum(p.numel() for p in made.parameters())
    assert parameters(shape, layout, "lm").total == pytest.approx(total, rel=0.03)
    parts = [trained_shard(each, shape, layout, "lm") for each in (trained, frozen)]
    assert parts[0] - parts[1] == tower / 2


def test_memory_of_models_with_images_is_estimated(folder: Path) -> None:
    settings = load(folder)
    found = memories(settings)
    assert found["actor"].weights > 0
    assert found["actor"].optimizer == pytest.approx(2 * found["actor"].gradients)
    assert found["actor"].gradients < found["actor"].weights, "the encoder has no gradient"

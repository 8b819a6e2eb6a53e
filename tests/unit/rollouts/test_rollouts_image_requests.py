"""The images of prompts in requests to servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slurmrl.errors import UsageError
from slurmrl.models.families import STRAY
from slurmrl.rollouts.generation.image_requests import GRID, PIXELS, ServedPrompt, placeholders_of
from slurmrl.tensors.pictures import PictureInputs, path_of, write

TOKEN = 9
PATCHES = np.arange(12 * 2, dtype=np.float32).reshape(12, 2)


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """Return two images of 4 and 8 patches. With 4 patches per token, they have 1 and 2 tokens."""
    grids = np.array([[1, 2, 2], [1, 2, 4]], np.int64)
    made = PictureInputs(3, {PIXELS: PATCHES, GRID: grids})
    return str(path_of(tmp_path, write(tmp_path, made)))


def test_request_has_the_place_and_pixels_of_each_image(pictures: str) -> None:
    """A placeholder after the images was sampled, so it is another token, as in training."""
    made = ServedPrompt.of([1, TOKEN, 2, TOKEN, TOKEN, 3, TOKEN], (TOKEN,), pictures)
    assert made.tokens == (1, TOKEN, 2, TOKEN, TOKEN, 3, STRAY)
    assert [(each.offset, each.length) for each in made.images] == [(1, 1), (3, 2)]
    first, second = made.images
    np.testing.assert_array_equal(first.arguments[PIXELS], PATCHES[:4])
    np.testing.assert_array_equal(second.arguments[PIXELS], PATCHES[4:])
    assert second.arguments[GRID].tolist() == [[1, 2, 4]]
    assert first.key != second.key


def test_prompt_without_images_has_no_placeholders() -> None:
    assert ServedPrompt.of([1, TOKEN, 2], (TOKEN,), "") == ServedPrompt((1, STRAY, 2), ())


def test_sampled_placeholder_of_a_video_becomes_a_different_token(pictures: str) -> None:
    """Training does the same, with or without videos."""
    values = {"model_type": "qwen3_vl", "image_token_id": TOKEN, "video_token_id": 8}
    tokens = placeholders_of(values)
    assert tokens == (TOKEN, 8)
    assert placeholders_of({**values, "model_type": "gemma3"}) == (TOKEN,)
    assert placeholders_of({**values, "model_type": "llama"}) == ()
    made = ServedPrompt.of([8, TOKEN, 2, TOKEN, TOKEN, 8], tokens, pictures)
    assert made.tokens == (STRAY, TOKEN, 2, TOKEN, TOKEN, STRAY)


def test_images_without_a_token_between_them_are_rejected(pictures: str) -> None:
    """Their placeholders could not be distinguished."""
    with pytest.raises(UsageError, match="has 2 images, but the prompt has 1 places"):
        ServedPrompt.of([1, TOKEN, TOKEN, TOKEN], (TOKEN,), pictures)

"""Prompts with drawn images for tiny random models, and transformers' logits of each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from slurmrl.config.schema import Dataset, Model
from slurmrl.data.sample import pictures_of
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.engines.hf_batch import HFRollout
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
from slurmrl.tensors.pictures import read
from tests.support.datasets import prepared, write_rows
from tests.support.picture_models import draw, write_processor, write_video

ROWS = (
    {"prompt": "How many <image>?", "images": ["a.png"]},
    {"prompt": "<image> or <image>, " + "which has more dots? " * 4, "images": ["b.png", "a.png"]},
    {"prompt": "Which picture?", "images": []},
    {"prompt": "How many <image>?", "images": ["c.png"]},
)
FRAMES = ["1.png", "2.png", "3.png", "4.png"]
VIDEO_ROWS = (
    {"prompt": "What is in <video>?", "videos": [FRAMES[:3]]},
    {"prompt": "<image>, <video>" + "which has more dots? " * 2, "images": ["b.png"],
     "videos": [FRAMES]},
    {"prompt": "Which picture?"},
    {"prompt": "What is in <video>?", "videos": [FRAMES[1:]]},
    {"prompt": "How many <image>?", "images": ["c.png"]},
)  # fmt: skip
"""Rows with an image, a video, both, and neither."""


class Prompts(NamedTuple):
    """A model with prepared prompts."""

    model: HFModel
    ids: tuple[Tensor, ...]
    pictures: list[str]
    image: int
    """Token id of placeholders of images."""
    video: int | None
    """Token id of placeholders of videos; None if no row has any."""

    def types(self, number: int) -> Tensor:
        """Return 1 for each placeholder of images and 2 for each placeholder of videos."""
        types = (self.ids[number] == self.image).long()
        return types if self.video is None else types + 2 * (self.ids[number] == self.video)

    def alone(self, inner: Any, number: int, more: Tensor) -> Tensor:
        """Return the logits [T, V] of a model of transformers: a prompt with further tokens."""
        ids = torch.cat([self.ids[number], more])[None]
        if not self.pictures[number]:
            text: Tensor = inner(input_ids=ids, use_cache=False).logits[0]
            return text
        types = torch.nn.functional.pad(self.types(number), (0, len(more)))
        family = self.model.config.model_type
        name = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
        marks = {} if family in ("internvl", "llava") else {name: types[None]}
        given: Any = read(Path(self.pictures[number])).arguments
        arguments = {key: torch.from_numpy(np.array(values)) for key, values in given.items()}
        logits: Tensor = inner(input_ids=ids, use_cache=False, **arguments, **marks).logits[0]
        return logits


def prompts_of(model: HFModel, processor: Path, folder: Path, *, videos: bool = False) -> Prompts:
    """Return a model with rows, prepared in ``folder`` by the processor of another folder.

    They are `ROWS`, or `VIDEO_ROWS` with ``videos``.
    """
    rows: Sequence[Mapping[str, Any]] = VIDEO_ROWS if videos else ROWS
    draw(folder / "a.png", 2)
    draw(folder / "b.png", 5, (40, 24))
    draw(folder / "c.png", 3)
    for dots, name in enumerate(FRAMES):
        draw(folder / name, dots)
    path = write_rows(folder, *map(dict, rows))
    more = {"videos_key": "videos"} if videos else {}
    config = Dataset(type="prompt", path=path, images_key="images", chat_template=True, **more)
    data = prepared(config, load_tokenizer(processor), folder / "data")
    sample = data.sample([(0, number) for number in range(len(rows))])
    lengths = [length for row in sample.lengths["prompt_ids"] for length in row]
    values: Any = model.inner.config
    ids = sample.tensor("prompt_ids").split(lengths)
    video = int(values.video_token_id) if videos else None
    return Prompts(model, ids, pictures_of(sample), int(values.image_token_id), video)


def random_prompts(folder: Path, family: str, *, videos: bool = False) -> Prompts:
    """Return a random model of a family with prepared prompts."""
    marked = Model(vision=True).marked(write_processor(folder, family))
    model = HFModel(HFConfig.from_hf(marked), "lm", source=None, seed=3, dtype=torch.float32)
    show(model.inner)
    return prompts_of(model, folder, folder, videos=videos)


def show(inner: Any) -> None:
    """Transformers initializes Gemma 3's projector with zeros: replace them."""
    for name, parameter in inner.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.3)


def write_source(folder: Path, family: str, *, videos: bool = False) -> Mapping[str, Any]:
    """Write a random model, its processor, and four rows with up to two images into a folder.

    With ``videos``, the last two rows have videos: frames, and a file. Return the model's config.
    """
    values = write_processor(folder, family)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**values))
    show(model)
    model.save_pretrained(folder)
    for dots in range(1, 5):
        draw(folder / f"{dots}.png", dots, (16 + 8 * dots, 16))
    rows: list[dict[str, Any]] = [
        {"prompt": "How many?", "images": [f"{dots}.png"], "answer": str(dots)}
        for dots in range(1, 5)
    ]
    rows[1] = {"prompt": "No image", "answer": "0"}
    rows[2]["images"] = ["1.png", "4.png"]
    if videos:
        for dots, name in enumerate(names := [f"frame{dots}.png" for dots in range(4)]):
            draw(folder / name, dots)
        write_video(folder / "clip.mp4", frames=40, rate=10)
        rows[2]["videos"] = [names]
        rows[3] = {"prompt": "What moves?", "videos": ["clip.mp4"], "answer": "dot"}
    write_rows(folder, *rows)
    return values


def complete(
    prompts: Prompts, prefill_tokens: int, options: GenerationOptions | None = None
) -> list[Completion]:
    """Return a sampled completion of each prompt by the model itself."""
    options = options or GenerationOptions(max_new_tokens=6)
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


def trained_logprobs(prompts: Prompts, more: list[Tensor]) -> list[Tensor]:
    """Return the log-probabilities [T] of each prompt with further tokens by the training pass.

    All sequences are in one batch.
    """
    model = prompts.model
    sequences = [torch.cat(pair) for pair in zip(prompts.ids, more, strict=True)]
    lengths = [len(each) for each in sequences]
    ids, ends = torch.cat(sequences), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    with model.showing(prompts.pictures):
        features = model(ids, ends, max(lengths))
    return list(model.logprobs(features, ids, ends, temperature=1.0)[0].split(lengths))


def transformers_logprobs(inner: Any, prompts: Prompts, more: list[Tensor]) -> list[Tensor]:
    """Return the log-probabilities [T - 1] after the first token, of each sequence alone."""
    found = []
    for number, (ids, after) in enumerate(zip(prompts.ids, more, strict=True)):
        logits = prompts.alone(inner, number, after)[:-1].log_softmax(-1)
        found.append(logits.gather(1, torch.cat([ids, after])[1:, None])[:, 0])
    return found

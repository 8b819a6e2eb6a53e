"""Images and videos in the batches of a model of transformers.

A processor has put placeholder tokens where images belong, one for each hidden state of an image.
The model replaces their embeddings in order. A policy may also sample the id of the placeholder. In
a sequence whose pictures need n placeholders, only the first n occurrences therefore count. The
same holds for videos, whose placeholder has a different token id. Training and generation both read
any later occurrence as `STRAY`.

Shapes: R rows, W width of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slurmrl.errors import UsageError
from slurmrl.models.families import (
    PICTURE_FAMILIES,
    STRAY,
    VIDEO_FAMILIES,
    VIDEO_FIELD,
    picture_refusal,
)
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_loading import sketch
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.pictures import NONE, PictureInputs, read

TYPES: Final = ("mm_token_type_ids", "token_type_ids")
"""Names, in different families, of the argument that is 1 at image placeholders and 2 at video
placeholders. Some families have no such argument."""
POSITIONS: Final = ("input_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Arguments of models that determine the positions of tokens."""
OTHERS: Final = ("audio_tower", "embed_audio")
"""Names of parts of a model that read neither text nor images."""
CACHED: Final = 8
"""Number of picture files kept in host memory. Completions of one prompt use the same file."""


@dataclass(frozen=True)
class RowPictures:
    """The pictures of rows."""

    counts: Tensor
    """[R, 2] int64: number of placeholder tokens of each row, for images and for videos."""
    arguments: Mapping[str, Tensor]
    """Arguments of the model's ``forward``; empty without pictures."""


NOTHING: Final = RowPictures(torch.zeros((0, 2), dtype=torch.int64), {})
"""Rows without pictures."""


class PictureReader:
    """Makes a model's arguments for rows with pictures."""

    def __init__(self, inner: PreTrainedModel) -> None:
        """Read images for ``inner``, a model of `PICTURE_FAMILIES`."""
        config: Any = inner.config
        parameters = inspect.signature(inner.forward).parameters
        self._inner = inner
        self._tokens = [int(config.image_token_id)]
        if config.model_type in VIDEO_FAMILIES:
            self._tokens.append(int(getattr(config, VIDEO_FIELD)))
        self._types = next((name for name in TYPES if name in parameters), "")

    @staticmethod
    def of(inner: PreTrainedModel) -> PictureReader | None:
        """Return the reader of a model; None if the model reads no images, like a value model."""
        model: Any = inner
        known = model.config.model_type in PICTURE_FAMILIES
        return PictureReader(inner) if known and model.get_output_embeddings() else None

    @property
    def tower(self) -> nn.Module:
        """Image encoder of the model."""
        found: nn.Module = self._inner.get_encoder(modality="image")
        return found

    @property
    def text(self) -> nn.Module:
        """Language model, without the output layer."""
        body: Any = self._inner.base_model
        found: nn.Module = body.language_model
        return found

    @property
    def unused(self) -> list[nn.Module]:
        """Parts of the model that no batch uses (`OTHERS`)."""
        parts = (getattr(self._inner.base_model, name, None) for name in OTHERS)
        return [part for part in parts if part is not None]

    def trained(self) -> list[Tensor]:
        """Return the trained parameters that only batches with pictures use.

        These are all trained parameters outside the language model and the output layer.
        """
        text = {id(p) for p in self.text.parameters()}
        inner: Any = self._inner
        text |= {id(p) for p in inner.get_output_embeddings().parameters()}
        return [p for p in inner.parameters() if p.requires_grad and id(p) not in text]

    def load(self, paths: Sequence[str], device: torch.device) -> RowPictures:
        """Return the pictures of rows; the path of a row without pictures is `NONE`.

        Raises CorruptFileError, EnvironmentFailure.
        """
        if not any(paths):
            return NOTHING
        read_rows = [_read(path) for path in paths if path != NONE]
        found = iter(read_rows)
        empty = PictureInputs(0, {})
        rows = [empty if path == NONE else next(found) for path in paths]
        counts = torch.tensor([[row.tokens, row.videos] for row in rows])
        names = list(dict.fromkeys(name for row in rows for name in row.arguments))
        joined = [
            torch.cat(
                [torch.from_numpy(row.arguments[name]) for row in rows if name in row.arguments]
            )
            for name in names
        ]
        counts, *arguments = upload((counts, *joined), device)
        return RowPictures(counts, dict(zip(names, arguments, strict=True)))

    def text_only(self, ids: Tensor) -> Tensor:
        """Return tokens of any shape with `STRAY` in place of placeholders."""
        for token in self._tokens:
            ids = ids.masked_fill(ids == token, STRAY)
        return ids

    def arguments(self, ids: Tensor, pictures: RowPictures) -> dict[str, Tensor]:
        """Return the model's arguments for rows [R, W] of tokens, without their positions."""
        if not pictures.arguments:
            return {"input_ids": self.text_only(ids)}
        marks = torch.zeros_like(ids)
        for number, token in enumerate(self._tokens):
            places = ids == token
            own = places & (places.cumsum(1) <= pictures.counts[:, number, None])
            ids = ids.masked_fill(places & ~own, STRAY)
            marks += (number + 1) * own
        types = {self._types: marks} if self._types else {}
        return {"input_ids": ids, **types, **pictures.arguments}

    def positions(
        self, arguments: Mapping[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return positions [3, R, W] by time, height and width, and offsets [R] of later tokens.

        ``mask`` [R, W] is 0 at padding. Return None for a family with one position per token.
        """
        body: Any = self._inner.base_model
        if self._types not in arguments or not hasattr(body, "get_rope_index"):
            return None
        given = {name: arguments[name] for name in POSITIONS if name in arguments}
        places, offsets = body.get_rope_index(
            **given, mm_token_type_ids=arguments[self._types], attention_mask=mask
        )
        return places, offsets.squeeze(1)


def text_and_tower(values: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the complete config of a model's text, and the number of its image encoder's elements.

    ``values`` is a ``config.json`` object. Return an empty config and 0 if slurmrl supports no
    images for the family, or if transformers cannot build the model.
    """
    if picture_refusal(values):
        return {}, 0
    try:
        model: Any = sketch(HFConfig.from_hf(values), "lm")
    except UsageError:
        return {}, 0  # The check of weights reports the error.
    tied = {"tie_word_embeddings": model.config.tie_word_embeddings}
    text = {**model.config.get_text_config().to_dict(), **tied}
    reader = PictureReader.of(model)
    parts = (reader.tower, *reader.unused) if reader else ()
    return text, sum(p.numel() for part in parts for p in part.parameters())


@lru_cache(maxsize=CACHED)
def _read(path: str) -> PictureInputs:
    return read(Path(path))

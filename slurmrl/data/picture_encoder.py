"""Turn conversations with images into tokens and prepared pictures, with the model's processor.

Torch-free, except for imports of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.chat import MarkedText
from slurmrl.data.image_files import ImageError, ImageValue, base_of, load_image
from slurmrl.data.image_sources import ImageFiles
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.tensors.pictures import PictureInputs, key_of, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROCESSOR_FILES: Final = ("processor_config.json", "preprocessor_config.json")
TEXT_FIELDS: Final = frozenset(
    (
        *("attention_mask", "input_ids", "mm_token_type_ids", "num_crops"),
        *("num_soft_tokens_per_image", "offset_mapping", "text_replacement_offsets"),
        "token_type_ids",
    )
)
"""Outputs of processors that are not arguments about pictures."""


class EncodedPictures(NamedTuple):
    """A conversation with images."""

    tokens: list[int]
    """Token ids, with the placeholders of all images."""
    offsets: Sequence[tuple[int, int]]
    """Place of each token in the string of ``marked``."""
    marked: MarkedText
    """The text with placeholders."""
    key: bytes
    """Content key of the pictures."""


class PictureEncoder:
    """Runs a processor on the conversations of a dataset."""

    def __init__(
        self,
        config: DatasetConfig,
        tokenizer: PreTrainedTokenizerBase,
        directory: Path | None,
        files: ImageFiles,
    ) -> None:
        """``directory`` receives the pictures; None writes no pictures.

        ``files`` records the images that are read.

        Raises UsageError if the tokenizer's folder has no processor.
        """
        self._processor: Any = load_processor(tokenizer)
        self._base, self._directory = base_of(config), directory
        self._files = files
        limits = (config.max_tokens, config.max_prompt_tokens if config.kind == "prompt" else None)
        self._most = min((limit for limit in limits if limit is not None), default=None)

    def encode(self, marked: MarkedText, images: Sequence[ImageValue]) -> EncodedPictures | str:
        """Return the tokens of a conversation with images, or the reason why it has no tokens.

        Raises EnvironmentFailure if pictures cannot be written, and UnreadableInputError if images
        cannot be read for now.
        """
        try:
            loaded = [load_image(self._base, image, self._files) for image in images]
        except ImageError as error:
            return f"an image {error}"
        try:
            made = self._processor(
                images=loaded,
                text=[marked.text],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
            )
        except (ValueError, TypeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return f"the processor rejects its images: {reason}"
        (tokens,), (offsets,) = made["input_ids"], made["offset_mapping"]
        arguments = {name: _array(made[name]) for name in made if name not in TEXT_FIELDS}
        # The first id marks a hidden state of an image. InternVL's other ids only enclose images.
        image, *_ = self._processor.image_token_ids
        places = [each for each, token in zip(offsets, tokens, strict=True) if token == image]
        replaced = made["text_replacement_offsets"][0]
        if (found := _outside(places, replaced)) is not None:
            shown = _expanded(marked, replaced).text[slice(*found)]
            return f"has the text {shown!r}, which stands for an image: remove it"
        pictures = PictureInputs(len(places), arguments)
        left_out = self._most is not None and len(tokens) > self._most
        if self._directory is None or left_out:
            key = key_of(pictures.arrays)
        else:
            key = write(self._directory, pictures)
        return EncodedPictures(list(tokens), offsets, _expanded(marked, replaced), key)


def load_processor(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the processor in the folder of a tokenizer.

    Images are processed by transformers' code for Pillow and NumPy, whether torchvision is
    installed or not, so that the result does not depend on it.

    Raises UsageError if there is none, or transformers cannot make it without other packages.
    """
    import transformers
    from transformers import AutoImageProcessor

    folder = Path(tokenizer.name_or_path)
    name = _processor_class(folder)
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise UsageError(f"{folder}: this version of transformers has no processor {name}")
    try:
        values, _ = kind.get_processor_dict(str(folder), local_files_only=True)
        load: Any = AutoImageProcessor.from_pretrained
        images = load(str(folder), backend="pil", local_files_only=True)
        own = {"image_processor": images, "tokenizer": tokenizer}
        parts = [own.get(part) for part in kind.get_attributes()]
        # The part for videos needs torchvision; it is left out.
        unchecked = {"check_argument_for_proper_class": lambda *_: None}
        made: Any = type(name, (kind,), unchecked)
        return made.from_args_and_dict(parts, values)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"no processor for images in {folder}: {reason}") from error


def _processor_class(folder: Path) -> str:
    present = inputs.list_names(folder)
    found = [inputs.read_json(folder / name) for name in PROCESSOR_FILES if name in present]
    named = [values["processor_class"] for values in found if "processor_class" in values]
    if not named:
        files = " or ".join(PROCESSOR_FILES)
        raise UsageError(
            f"no processor for images in {folder}: none of its files {files} names a "
            "processor_class; copy the files of the model's processor into the tokenizer's folder"
        )
    return str(named[0])


def _array(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _outside(
    places: Sequence[tuple[int, int]], replaced: Sequence[Mapping[str, Any]]
) -> tuple[int, int] | None:
    """Return the place of the first placeholder outside all replacements; None if there is none."""
    spans, more = [], 0
    for each in replaced:
        first, last = each["span"]
        length = len(each["replacement"])
        spans.append((first + more, first + more + length))
        more += length - (last - first)
    inside = (any(first <= at[0] and at[1] <= last for first, last in spans) for at in places)
    return next((at for at, known in zip(places, inside, strict=True) if not known), None)


def _expanded(marked: MarkedText, replaced: Sequence[Mapping[str, Any]]) -> MarkedText:
    """Return a string with placeholders, and the targets at their new places."""
    pieces, at = [], 0
    growth: list[tuple[int, int]] = []
    for each in replaced:
        first, last = each["span"]
        pieces += [marked.text[at:first], each["replacement"]]
        growth.append((last, len(each["replacement"]) - (last - first)))
        at = last
    pieces.append(marked.text[at:])
    ends = [last for last, _ in growth]
    sums = [0, *accumulate(more for _, more in growth)]

    def moved(place: int) -> int:
        return place + sums[sum(end <= place for end in ends)]

    targets = [(moved(first), moved(last)) for first, last in marked.targets]
    return MarkedText("".join(pieces), targets)

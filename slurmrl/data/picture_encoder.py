"""Turn conversations with images and videos into tokens and pictures, with the processor.

Only transformers may import torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.chat import MarkedText
from slurmrl.data.image_files import (
    ImageError,
    ImageValue,
    Video,
    VideoValue,
    base_of,
    load_image,
    load_video,
)
from slurmrl.data.image_sources import ImageFiles
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.tensors.pictures import PictureInputs, key_of, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROCESSOR_FILES: Final = ("processor_config.json", "preprocessor_config.json")
OLDER: Final = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")
"""Processors that resize videos and choose frames differently from Qwen3-VL's processor."""
FPS: Final = 2.0
"""Default number of frames to read per second, as in qwen-vl-utils."""
TEXT_FIELDS: Final = frozenset(
    (
        *("attention_mask", "input_ids", "mm_token_type_ids", "num_crops"),
        *("num_soft_tokens_per_image", "offset_mapping", "text_replacement_offsets"),
        "token_type_ids",
    )
)
"""Names of a processor's outputs that are not data of pictures."""


class EncodedPictures(NamedTuple):
    """A conversation with images and videos."""

    tokens: list[int]
    """Token ids, with the placeholders of all images and videos."""
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
        self._processor: Any = load_processor(tokenizer, config)
        self._base, self._directory = base_of(config), directory
        self._files = files
        limits = (config.max_tokens, config.max_prompt_tokens if config.kind == "prompt" else None)
        self._most = min((limit for limit in limits if limit is not None), default=None)

    def encode(
        self, marked: MarkedText, images: Sequence[ImageValue], videos: Sequence[VideoValue]
    ) -> EncodedPictures | str:
        """Return the tokens of a conversation with images and videos, or why it has no tokens.

        Raises EnvironmentFailure if pictures cannot be written, and UnreadableInputError if files
        cannot be read for now.
        """
        try:
            loaded = [load_image(self._base, image, self._files) for image in images]
        except ImageError as error:
            return f"an image {error}"
        try:
            shown = self._load_videos(videos)
        except (ImageError, ValueError) as error:
            return f"a video {error}"
        try:
            made = self._processor(
                images=loaded or None,
                text=[marked.text],
                **shown,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
            )
        except (ValueError, TypeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return f"the processor rejects its images or videos: {reason}"
        (tokens,), (offsets,) = made["input_ids"], made["offset_mapping"]
        arguments = {name: _array(made[name]) for name in made if name not in TEXT_FIELDS}
        # The first id marks a hidden state of an image. InternVL's other ids only enclose images.
        image, *_ = self._processor.image_token_ids
        video = self._processor.video_token_ids[0] if videos else None
        replaced = made["text_replacement_offsets"][0]
        counts = []
        for token, what in ((image, "an image"), (video, "a video")):
            places = [at for at, each in zip(offsets, tokens, strict=True) if each == token]
            if (found := _outside(places, replaced)) is not None:
                text = _expanded(marked, replaced).text[slice(*found)]
                return f"has the text {text!r}, which stands for {what}: remove it"
            counts.append(len(places))
        pictures = PictureInputs(counts[0], arguments, counts[1])
        left_out = self._most is not None and len(tokens) > self._most
        if self._directory is None or left_out:
            key = key_of(pictures.arrays)
        else:
            key = write(self._directory, pictures)
        return EncodedPictures(list(tokens), offsets, _expanded(marked, replaced), key)

    def _load_videos(self, videos: Sequence[VideoValue]) -> dict[str, Any]:
        """Return the processor's arguments for videos; none without videos.

        Raises ImageError, and ValueError if the processor cannot choose frames.
        """
        if not videos:
            return {}
        processor = self._processor.video_processor
        read = partial(load_video, self._base, choose=processor.choose, files=self._files)
        loaded = [read(video) for video in videos]
        options = {
            "do_sample_frames": False,  # `load_video` has chosen the frames
            "do_convert_rgb": False,
            "input_data_format": "channels_last",
            "video_metadata": [processor.metadata(each) for each in loaded],
        }
        return {"videos": [each.frames for each in loaded], "videos_kwargs": options}


def load_processor(tokenizer: PreTrainedTokenizerBase, config: DatasetConfig) -> Any:
    """Return the processor in the folder of a tokenizer, for the rows of a dataset.

    Transformers processes images with Pillow and NumPy, and videos with torch, even if torchvision
    is installed, so that the result does not depend on torchvision.

    Raises UsageError if the folder has no processor, or transformers needs other packages for it.
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
        images = load(folder, backend="pil", local_files_only=True, trust_remote_code=False)
        own = {"image_processor": images, "tokenizer": tokenizer}
        if config.videos_key is not None:
            own["video_processor"] = _video_processor(folder, name, config)
        parts = [own.get(part) for part in kind.get_attributes()]
        unchecked = {"check_argument_for_proper_class": lambda *_: None}
        made: Any = type(name, (kind,), unchecked)
        return made.from_args_and_dict(parts, values)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"no processor for images in {folder}: {reason}") from error


def _video_processor(folder: Path, name: str, config: DatasetConfig) -> Any:
    """Return the processor for videos in a folder; ``name`` is the class of the whole processor."""
    newer, older = _video_processors()
    kind = older if name in OLDER else newer
    values, _ = kind.get_video_processor_dict(str(folder), local_files_only=True)
    most = config.video_frames or values.get("max_frames") or kind.max_frames
    least = min(values.get("min_frames") or kind.min_frames, most)
    rate = config.video_fps or values.get("fps") or FPS
    number = None if config.video_fps else values.get("num_frames")
    values = {**values, "max_frames": most, "min_frames": least, "fps": rate, "num_frames": number}
    size = dict(values.get("size") or kind.size)
    for edge, limit in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if (pixels := values.pop(limit, None)) and kind is older:
            size[edge] = pixels
    return kind(**{**values, "size": size})


@cache
def _video_processors() -> tuple[Any, Any]:
    """Return the classes of video processors for Qwen3-VL and for older families.

    Both classes derive from transformers' class for Qwen3-VL, but resize and normalize with torch
    instead of torchvision. The older families resize videos and choose frames in a different way.
    """
    import torch
    from torch.nn.functional import interpolate
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.image_utils import PILImageResampling, SizeDict
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
        smart_resize,
    )
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    backend: Any = TorchvisionBackend
    newest: Any = Qwen3VLVideoProcessor

    class Torch(backend):  # type: ignore[misc]
        def resize(self, image: Any, size: Any, resample: Any = None, **_: Any) -> Any:
            mode = PILImageResampling(resample).name.lower()
            frames, sides = image.flatten(0, -4), (size.height, size.width)
            made = interpolate(frames, sides, mode=mode, antialias=True, align_corners=False)
            return made.view(*image.shape[:-2], *sides)

        def normalize(self, image: Any, mean: Any, std: Any, **_: Any) -> Any:
            center, scale = (torch.as_tensor(each)[:, None, None] for each in (mean, std))
            return (image - center) / scale

    class Videos(newest, Torch):  # type: ignore[misc]
        def choose(self, total: int, rate: float | None) -> list[int]:
            """Return the indices of the frames to read; ``rate`` is None for a list of images."""
            if rate is None and total <= self.max_frames:
                return list(range(total))
            known = VideoMetadata(total_num_frames=total, fps=rate)
            if rate is None or self.num_frames:
                number = min(total, self.num_frames or total, self.max_frames)
                return [int(each) for each in self.sample_frames(known, num_frames=number)]
            return [int(each) for each in self.sample_frames(known, fps=self.fps)]

        def metadata(self, video: Video) -> Any:
            rate = self.fps if video.rate is None else video.rate
            places: Any = np.array(video.places)
            return VideoMetadata(video.total, fps=rate, frames_indices=places)

    class OlderVideos(Videos):
        image_mean = Qwen2VLImageProcessorPil.image_mean
        image_std = Qwen2VLImageProcessorPil.image_std
        size: ClassVar[Any] = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
        patch_size, max_video_tokens = 14, 128_000

        def sample_frames(
            self, metadata: Any, num_frames: int | None = None, fps: float = FPS, **_: Any
        ) -> Any:
            total, factor = metadata.total_num_frames, self.temporal_patch_size
            most = self.max_frames // factor * factor
            count: float = min(round((num_frames or 0) / factor) * factor, most)
            if num_frames is None:
                count = min(max(total / metadata.fps * fps, self.min_frames), most, total)
                count = math.floor(count / factor) * factor
            return torch.arange(0, total, total / min(count, total)).int()

        def resize(self, videos: Any, size: Any, resample: Any = None, **given: Any) -> Any:  # type: ignore[override]
            least, most, factor = size.shortest_edge, size.longest_edge, given["factor"]
            if given["cap_pixels_per_frame"]:
                budget = int(self.max_video_tokens * factor * factor * 0.9)
                budget *= given["temporal_factor"]
                most = max(min(most, budget // videos.shape[1]), int(least * 1.05))
            height, width = videos.shape[-2:]
            height, width = smart_resize(height, width, factor, min_pixels=least, max_pixels=most)
            return Torch.resize(self, videos, SizeDict(height=height, width=width), resample)

    return Videos, OlderVideos


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
    """Return the place of the first placeholder outside all replacements, or None."""
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

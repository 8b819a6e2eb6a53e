"""The images of a dataset's rows: where they are in a conversation. Torch-free.

A row names its images under ``images_key``, or in parts of its messages:
``{"type": "image", "image": "dots.png"}``. Paths are relative to the data file. `with_images`
converts both forms into one: messages with a part for each image, and the images in the order of
these parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.conversations import Message, is_messages, kind_of, text_of
from slurmrl.data.image_files import ImageError, ImageValue, base_of, check_image, is_content
from slurmrl.data.types import ABSENT, Row, value_at

PART: Final[Mapping[str, str]] = {"type": "image"}
"""Part of a message that stands for an image; the chat template replaces it by a placeholder."""
MARK: Final = "<image>"
"""Text that an image of the row's list replaces."""

UNREAD: Final = ("video", "videos", "audio", "audios")
"""Usual names of columns with videos and sounds. They are rejected, because training would ignore
them."""


class Pictured(NamedTuple):
    """A conversation with images."""

    messages: list[Message]
    images: list[ImageValue]
    """The images in the order of their parts."""


def with_images(config: DatasetConfig, row: Row, messages: Sequence[Message]) -> Pictured | str:
    """Return a row's conversation with its images, or why an image has no place in it."""
    assert config.images_key is not None, "checked by the caller"
    listed = _listed(value_at(row, config.images_key))
    if isinstance(listed, str):
        return f"'{config.images_key}' {listed}"
    left, images = list(listed), list[ImageValue]()
    made: list[Message] = []
    for message in messages:
        parts = list(_parts(message.get("content"), marks=bool(listed)))
        if not any(_is_image(part) for part in parts):
            made.append(message)
            continue
        for part in parts:
            if not _is_image(part):
                continue
            own = part.get("image")
            if own is None and not left:
                return _mismatch(config.images_key, len(listed), "has more image parts")
            images.append(left.pop(0) if own is None else own)
        made.append({**message, "content": [PART if _is_image(p) else p for p in parts]})
    marked = any(MARK in text_of(message) for message in messages)
    if value_at(row, config.images_key) == [] and marked:
        return _mismatch(config.images_key, 0, f"has {MARK}")
    if left and len(left) < len(listed):
        return _mismatch(config.images_key, len(listed), f"has no place for {len(left)} of them")
    if left:
        first = next((n for n, each in enumerate(made) if each["role"] == "user"), None)
        if first is None:
            return _mismatch(config.images_key, len(listed), "has no message of the user")
        text = list(_parts(made[first].get("content"), marks=False))
        made[first] = {**made[first], "content": [*(PART for _ in left), *text]}
        before = sum(_is_image(part) for each in made[:first] for part in _of(each))
        images[before:before] = left
    return Pictured(made, images)


def wrong_images(config: DatasetConfig, row: Row) -> tuple[str, str] | None:
    """Return the problem of a row's images with its key; None if all images can be used.

    Only the beginning of each file is read.

    Raises MissingDependencyError without Pillow.
    """
    parts = _image_parts(config, row)
    if config.images_key is None:
        column = next((key for key, value in row.items() if _holds_content(value)), None)
        if column is not None:
            return column, f"holds images: set images_key to {column}, or drop the column"
        return (_key(config), NO_KEY) if parts else None
    for key in (each for each in UNREAD if row.get(each) and each != config.images_key):
        return key, "is not allowed: slurmrl reads no videos and no sounds; drop the column"
    listed = _listed(value_at(row, config.images_key))
    if isinstance(listed, str):
        return config.images_key, listed
    own = [part["image"] for part in parts if part.get("image") is not None]
    for image in own:
        if reason := _wrong_image(image):
            return _key(config), f"has an image that {reason}"
    for number, image in enumerate([*listed, *own], start=1):
        try:
            check_image(base_of(config), image)
        except ImageError as error:
            key = config.images_key if number <= len(listed) else _key(config)
            return key, f"image {number} {error}"
    return None


def has_images(config: DatasetConfig, row: Row) -> bool:
    """Return whether a row has images under ``images_key`` or in parts of its messages."""
    assert config.images_key is not None, "checked by the caller"
    under_key = value_at(row, config.images_key) not in (ABSENT, None, [])
    return under_key or bool(_image_parts(config, row))


def _image_parts(config: DatasetConfig, row: Row) -> list[Any]:
    """Return the image parts of a row's messages."""
    return [part for message in _messages(config, row) for part in _of(message) if _is_image(part)]


NO_KEY: Final = "has an image: set images_key, for example to images"


def _holds_content(value: Any) -> bool:
    """Return whether a value is an image of a column, or a list of such images."""
    return is_content(value[0] if isinstance(value, list) and value else value)


def _listed(value: Any) -> list[ImageValue] | str:
    """Return the images under a row's key as a list, or the reason why they cannot be used."""
    if value is ABSENT or value is None:
        return []
    images = value if isinstance(value, list) else [value]
    for number, image in enumerate(images, start=1):
        if reason := _wrong_image(image):
            return f"has an image {number} that {reason}"
    return images


def _wrong_image(value: Any) -> str:
    if is_content(value) or (isinstance(value, str) and value.strip()):
        return ""
    return f"must be the path of a file, but is {kind_of(value)}"


def _messages(config: DatasetConfig, row: Row) -> Iterator[Message]:
    """Yield all messages of a row."""
    for key in dict.fromkeys((config.prompt_key, config.answer_key, config.messages_key)):
        value = value_at(row, key)
        if is_messages(value):
            yield from value


def _key(config: DatasetConfig) -> str:
    return config.messages_key if config.kind == "messages" else config.prompt_key


def _of(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _parts(content: Any, *, marks: bool) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content. With ``marks``, each `MARK` in text becomes an image part."""
    given = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in given:
        if _is_image(part) or not marks:
            yield part
            continue
        first, *others = part["text"].split(MARK)
        if first:
            yield {**part, "text": first}
        for text in others:
            yield dict(PART)
            if text:
                yield {**part, "text": text}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _mismatch(key: str, count: int, reason: str) -> str:
    return f"'{key}' has {count} images, but the conversation {reason}"

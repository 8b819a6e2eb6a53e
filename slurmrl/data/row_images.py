"""Find the images and videos of a dataset's rows, and their places in conversations. Torch-free.

A row names its images under ``images_key`` and its videos under ``videos_key``, or both in parts
of its messages: ``{"type": "image", "image": "dots.png"}``. Paths are relative to the data file. A
video can also be a list of images. `with_media` converts all forms into one: messages with a part
for each image or video, and the images and videos in the order of these parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.conversations import MEDIA, Message, is_messages, kind_of, text_of
from slurmrl.data.image_files import (
    ImageError,
    Pictured,
    base_of,
    check_image,
    check_video,
    is_content,
)
from slurmrl.data.types import ABSENT, Row, value_at

UNREAD: Final = ("video", "videos", "audio", "audios", "image", "images")
"""Usual names of columns with media. Such a column is rejected unless its key is set, because
training would ignore it."""
READ: Final = frozenset(("type", "video"))
"""Keys of a part of type video. Other libraries read further keys, such as ``fps``."""
CHECKS: Final = {"image": check_image, "video": check_video}


def with_media(config: DatasetConfig, row: Row, messages: Sequence[Message]) -> Pictured | str:
    """Return a row's conversation with its images and videos, or why one of them has no place."""
    found: dict[str, list[Any]] = {medium: [] for medium in MEDIA}
    made = list(messages)
    for medium, key in reversed(config.media_keys.items()):  # `_placed` prepends parts.
        placed = _placed(medium, value_at(row, key), made)
        if isinstance(placed, str):
            return f"'{key}' {placed}"
        made, found[medium] = placed
    return Pictured(made, found["image"], found["video"])


def _placed(
    medium: str, value: Any, messages: Sequence[Message]
) -> tuple[list[Message], list[Any]] | str:
    """Return the messages with a part for each medium, and the media in order, or the problem."""
    listed = _listed(medium, value)
    if isinstance(listed, str):
        return listed
    left, found, made = list(listed), list[Any](), list[Message]()
    mark, place = f"<{medium}>", {"type": medium}
    for message in messages:
        parts = list(_parts(message.get("content"), medium, marks=bool(listed)))
        if not any(_is(medium, part) for part in parts):
            made.append(message)
            continue
        for part in parts:
            if not _is(medium, part):
                continue
            own = part.get(medium)
            if own is None and not left:
                return _mismatch(medium, len(listed), f"has more {medium} parts")
            found.append(left.pop(0) if own is None else own)
        made.append({**message, "content": [place if _is(medium, p) else p for p in parts]})
    asked = (message for message in messages if message["role"] != "assistant")
    if not (listed or found) and any(mark in text_of(message) for message in asked):
        return _mismatch(medium, 0, f"has {mark}")
    if left and len(left) < len(listed):
        return _mismatch(medium, len(listed), f"has no place for {len(left)} of them")
    if left:
        first = next((n for n, each in enumerate(made) if each["role"] == "user"), None)
        if first is None:
            return _mismatch(medium, len(listed), "has no message of the user")
        text = list(_parts(made[first].get("content"), medium, marks=False))
        made[first] = {**made[first], "content": [*(place for _ in left), *text]}
        before = sum(_is(medium, part) for each in made[:first] for part in _of(each))
        found[before:before] = left
    return made, found


def wrong_media(
    config: DatasetConfig, row: Row, keys: Collection[str] = ()
) -> tuple[str, str] | None:
    """Return the problem of a row's media with its key; None if all can be used.

    ``keys`` are the keys of the row that may have messages. Only the beginning of each file is
    read.

    Raises MissingDependencyError without Pillow, or without PyAV for a video file.
    """
    known = config.media_keys
    for medium in MEDIA:
        if medium not in known and _media_parts(medium, config, row, keys):
            return _key(config), f"has {_a(medium)}: set {medium}s_key, for example to {medium}s"
    if not known:
        column = next((key for key, value in row.items() if _holds_content(value)), None)
        reason = f"holds images: set images_key to {column}, or drop the column"
        return None if column is None else (column, reason)
    unread = [each for each in UNREAD if row.get(each) and each not in known.values()]
    for key in (each for each in unread if each.removesuffix("s") not in known):
        if (medium := key.removesuffix("s")) in MEDIA:
            return key, f"is not read without {medium}s_key: set it to {key}, or drop the column"
        return key, "is not allowed: slurmrl reads no sounds; drop the column"
    for medium, key in known.items():
        listed = _listed(medium, value_at(row, key))
        if isinstance(listed, str):
            return key, listed
        parts = _media_parts(medium, config, row, keys)
        own = [part[medium] for part in parts if part.get(medium) is not None]
        names = {name for part in parts for name in part if part[name] is not None} - READ
        if names and medium == "video":
            reason = f"has a video with '{min(names)}', which slurmrl does not read: "
            return _key(config), f"{reason}set video_fps or video_frames for all rows"
        for each in own:
            if reason := _wrong(medium, each):
                return _key(config), f"has {_a(medium)} that {reason}"
        for number, each in enumerate([*listed, *own], start=1):
            try:
                CHECKS[medium](base_of(config), each)
            except ImageError as error:
                where = key if number <= len(listed) else _key(config)
                return where, f"{medium} {number} {error}"
    return None


def has_media(config: DatasetConfig, row: Row, medium: str) -> bool:
    """Return whether a row has media of a kind, under their key or in parts of its messages."""
    under_key = value_at(row, config.media_keys[medium]) not in (ABSENT, None, [])
    return under_key or bool(_media_parts(medium, config, row))


def _media_parts(
    medium: str, config: DatasetConfig, row: Row, keys: Collection[str] = ()
) -> list[Any]:
    """Return the parts of type ``medium`` in a row's messages."""
    messages = _messages(config, row, keys)
    return [part for message in messages for part in _of(message) if _is(medium, part)]


def _holds_content(value: Any) -> bool:
    """Return whether a value is an image of a column, or a list of such images."""
    return is_content(value[0] if isinstance(value, list) and value else value)


def _listed(medium: str, value: Any) -> list[Any] | str:
    """Return the media under a row's key as a list, or the reason why they cannot be used."""
    if value is ABSENT or value is None:
        return []
    found = value if isinstance(value, list) else [value]
    for number, each in enumerate(found, start=1):
        if reason := _wrong(medium, each):
            return f"has {_a(medium)} {number} that {reason}"
    return found


def _wrong(medium: str, value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return ""
    if medium == "image":
        good, wanted = is_content(value), "the path of a file"
    else:
        good = isinstance(value, list) and all(not _wrong("image", each) for each in value)
        wanted = "the path of a file or a list of images"
    return "" if good else f"must be {wanted}, but is {kind_of(value)}"


def _a(medium: str) -> str:
    return f"an {medium}" if medium == "image" else f"a {medium}"


def _messages(config: DatasetConfig, row: Row, keys: Collection[str]) -> Iterator[Message]:
    """Yield all messages of a row."""
    own = (config.prompt_key, config.answer_key, config.messages_key)
    for key in dict.fromkeys((*own, *keys)):
        value = value_at(row, key)
        if is_messages(value):
            yield from value


def _key(config: DatasetConfig) -> str:
    return config.messages_key if config.kind == "messages" else config.prompt_key


def _of(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _parts(content: Any, medium: str, *, marks: bool) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content. With ``marks``, each mark in text becomes a part."""
    given = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in given:
        if part.get("type") in MEDIA or not marks:
            yield part
            continue
        first, *others = part["text"].split(f"<{medium}>")
        if first:
            yield {**part, "text": first}
        for text in others:
            yield {"type": medium}
            if text:
                yield {**part, "text": text}


def _is(medium: str, part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == medium


def _mismatch(medium: str, count: int, reason: str) -> str:
    return f"has {count} {medium}s, but the conversation {reason}"

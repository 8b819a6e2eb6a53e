"""Check images and videos and read their pixels, from files and Arrow tables. Torch-free.

A column of images has objects with the content of a file and its name, as the library `datasets`
saves them. In a row, the content is base64 text (`as_text`).
"""

from __future__ import annotations

import errno
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.conversations import Message
from slurmrl.data.image_sources import ImageFiles
from slurmrl.errors import MissingDependencyError
from slurmrl.fsio import inputs
from slurmrl.tensors.layout import Array

if TYPE_CHECKING:
    from PIL.Image import Image

ImageValue = str | Mapping[str, Any]
"""An image of a row: the path of a file, or an object of a column of images."""
VideoValue = str | Sequence[ImageValue]
"""A video of a row: the path of a file, or its frames."""
CONTENT, NAME = "bytes", "path"
"""Keys of an object of a column of images."""
URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")
LARGEST_FILE: Final = 64 * 2**20
LARGEST_PIXELS: Final = 64 * 2**20
"""Maximum bytes of an image file, and maximum pixels of an image."""
LARGEST_VIDEO: Final = 2**30
"""Maximum bytes of a video file."""
LEAST_FRAMES: Final = 2
"""Minimum number of frames of a video, because processors join frames in pairs."""
MAY_PASS: Final = frozenset(
    (
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN),
    )
)
"""Error numbers of problems that may be temporary or only on this host; Pillow reports none."""
WIDE: Final = ("I", "F")
"""Pillow's modes of integers and floats with 32 bits, whose range is unknown."""


class Pictured(NamedTuple):
    """A conversation with images and videos."""

    messages: list[Message]
    images: list[ImageValue]
    """The images in the order of their parts."""
    videos: list[VideoValue]
    """The videos in the order of their parts."""


class ImageError(ValueError):
    """Raised for an unusable image; the message follows the words ``image 2``."""


def base_of(config: DatasetConfig) -> Path:
    """Return the folder to which paths of images are relative."""
    path = Path(config.path)
    return path if path.is_dir() else path.parent


def is_content(value: Any) -> bool:
    """Return whether a value is an object of a column of images, in a table or in a row."""
    if not isinstance(value, Mapping) or value.keys() != {CONTENT, NAME}:
        return False
    return isinstance(value[CONTENT], bytes | str)


def as_text(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of a column of images with its content as base64 text, for JSON."""
    return {**value, CONTENT: b64encode(value[CONTENT]).decode()}


def without_pixels(value: Any) -> Any:
    """Return a value of a row without the content of images; the images' names stay."""
    if is_content(value):
        return {NAME: value[NAME]}
    if isinstance(value, Mapping):
        return {key: without_pixels(each) for key, each in value.items()}
    return [without_pixels(each) for each in value] if isinstance(value, list) else value


def check_image(base: Path, image: ImageValue) -> None:
    """Raise ImageError if an image is a URL, missing, broken or too large.

    Raises UnreadableInputError for errors that may pass.
    """
    _opened(base, image).close()


def load_image(base: Path, image: ImageValue, files: ImageFiles | None = None) -> Image:
    """Return an image in RGB, rotated as its EXIF tag says. Raises as `check_image` does.

    ``files`` records the image's file.
    """
    from PIL import ImageOps

    with _opened(base, image, files) as opened:
        try:
            if opened.format == "PNG":
                _check_pixels(opened.fp)
            return _rgb(ImageOps.exif_transpose(opened))
        except ImageError as error:
            raise ImageError(f"('{_shown(image)}') {error}") from error
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise errors without a common base
            _require_lasting(error, base, image)
            raise ImageError(f"('{_shown(image)}') is damaged: {_line(error)}") from error


def _check_pixels(file: Any) -> None:
    """Raise ImageError if a checksum of a PNG file's pixels is wrong.

    Pillow does not compare checksums. Like other viewers, ignore damage after the pixels.
    """
    file.seek(len(b"\x89PNG\r\n\x1a\n"))
    while len(head := file.read(8)) == 8:
        data, checksum = file.read(int.from_bytes(head[:4])), file.read(4)
        wrong = zlib.crc32(head[4:] + data) != int.from_bytes(checksum)
        if head[4:] == b"IDAT" and len(checksum) == 4 and wrong:
            raise ImageError("is damaged: wrong checksum of its pixels")


class Video(NamedTuple):
    """The frames of a video that a model reads."""

    frames: Array
    """[frames, height, width, 3] uint8, in RGB."""
    places: Sequence[int]
    """Index of each frame in the video, from 0."""
    total: int
    """Number of frames of the video."""
    rate: float | None
    """Frames per second of a file; None for a list of images."""


def check_video(base: Path, video: VideoValue) -> None:
    """Raise ImageError if a video is a URL, missing, broken or too large.

    Raises UnreadableInputError for errors that may pass, and MissingDependencyError without PyAV.
    """
    if isinstance(video, str):
        with closing(_container(base, video)):
            return
    if len(video) < LEAST_FRAMES:
        raise ImageError(f"has {len(video)} frames; at least {LEAST_FRAMES} are necessary")
    for number, frame in enumerate(video, start=1):
        with _frame(number):
            check_image(base, frame)


def load_video(
    base: Path,
    video: VideoValue,
    choose: Callable[[int, float | None], Sequence[int]],
    files: ImageFiles,
) -> Video:
    """Return the frames that ``choose`` selects from a video. Raises as `check_video` does.

    ``choose`` maps the number of frames and their rate to indices. ``files`` records the files.
    """
    if isinstance(video, str):
        with closing(_container(base, video, files)) as container:
            try:
                return _decoded(container, _shown(video), choose)
            except (ImageError, MemoryError):
                raise
            except Exception as error:  # PyAV's errors have no common base
                raise ImageError(f"('{_shown(video)}') is damaged: {_line(error)}") from error
    check_video(base, video)
    places = choose(len(video), None)
    frames = []
    for place in places:
        with _frame(place + 1):
            frames.append(load_image(base, video[place], files))
    if len({frame.size for frame in frames}) > 1:
        raise ImageError("has frames of different sizes")
    import numpy as np

    return Video(np.stack([np.asarray(frame) for frame in frames]), places, len(video), None)


def _decoded(
    container: Any, name: str, choose: Callable[[int, float | None], Sequence[int]]
) -> Video:
    """Return the chosen frames of an open file."""
    import numpy as np

    stream = container.streams.video[0]
    if total := stream.frames:  # A video that was cut without re-encoding has hidden packets.
        total -= sum(packet.is_discard for packet in container.demux(stream))
    else:  # Some formats do not store the number of frames.
        total = sum(1 for _ in container.decode(video=0))
    container.seek(0)
    rate = stream.average_rate or stream.guessed_rate
    if total < LEAST_FRAMES or not rate:
        raise ImageError(f"('{name}') has {total} frames at rate {rate}: list its frames as images")
    places = choose(total, float(rate))
    wanted, found = set(places), dict[int, Array]()
    for place, frame in enumerate(container.decode(video=0)):
        if frame.is_corrupt:  # The decoder has filled in missing pixels.
            raise ImageError(f"('{name}') is damaged at frame {place}")
        if place in wanted:
            found[place] = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
        if place >= max(wanted):
            break
    if missing := sorted(wanted - found.keys()):
        reason = "it is damaged, or its header is wrong"
        raise ImageError(f"('{name}') has no frame {missing[0] + 1} of {total}: {reason}")
    return Video(np.stack([found[place] for place in places]), places, total, float(rate))


@contextmanager
def _frame(number: int) -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise ImageError(f"frame {number} {error}") from error


def _container(base: Path, video: str, files: ImageFiles | None = None) -> Any:
    """Return PyAV's container of a video file."""
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError(
            "video files need the package av: pip install av; lists of images do not need it"
        ) from error
    path, name = _path(base, video), _shown(video)
    try:
        if (size := path.stat().st_size) > LARGEST_VIDEO:
            limit = f"at most {LARGEST_VIDEO >> 20} MiB are allowed"
            raise ImageError(f"('{name}') has {size / 2**20:.0f} MiB; {limit}")
        content = None if files is None else BytesIO(files.read(base, video))
        container = av.open(str(path) if content is None else content)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # PyAV's errors have no common base
        _require_lasting(error, base, video)
        raise ImageError(f"('{name}') is not a video that PyAV can read") from error
    if container.streams.video:
        return container
    container.close()
    raise ImageError(f"('{name}') has no video stream")


def _require_lasting(error: BaseException | None, base: Path, image: ImageValue) -> None:
    """Raise UnreadableInputError if an operating-system error may be temporary."""
    if isinstance(image, str) and isinstance(error, OSError) and error.errno in MAY_PASS:
        raise inputs.unreadable(error, base / image) from error


def _rgb(image: Image) -> Image:
    """Return an image in RGB. Scale values of 16 bits, which Pillow would clip at 255."""
    if image.mode in WIDE:
        raise ImageError("has 32 bits per value in Pillow: save it with 8 bits")
    if image.mode.startswith("I;16"):
        import numpy as np
        from PIL.Image import fromarray

        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _opened(base: Path, image: ImageValue, files: ImageFiles | None = None) -> Any:
    pillow, name = _pillow(), _shown(image)
    path = _path(base, image) if isinstance(image, str) else None
    try:
        content = b"" if isinstance(image, str) else b64decode(image[CONTENT], validate=True)
    except ValueError as error:
        raise ImageError(f"('{name}') has a value of '{CONTENT}' that is not base64") from error
    most = f"at most {LARGEST_PIXELS} are allowed"
    try:
        if (size := len(content) if path is None else path.stat().st_size) > LARGEST_FILE:
            limit = f"at most {LARGEST_FILE >> 20} MiB are allowed"
            raise ImageError(f"('{name}') has {size / 2**20:.0f} MiB; {limit}")
        if isinstance(image, str) and files is not None:
            content, path = files.read(base, image), None
        opened: Image = pillow.open(BytesIO(content) if path is None else path)
    except (ImageError, MemoryError):
        raise
    except pillow.DecompressionBombError as error:  # Pillow raises this before the check below.
        raise ImageError(f"('{name}') has too many pixels; {most}") from error
    except Exception as error:  # Pillow's decoders raise errors without a common base
        _require_lasting(error, base, image)
        raise ImageError(f"('{name}') is not an image that Pillow can read") from error
    width, height = opened.size
    if width * height > LARGEST_PIXELS:
        opened.close()
        raise ImageError(f"('{name}') has {width} x {height} pixels; {most}")
    return opened


def _path(base: Path, image: str) -> Path:
    if URL.match(image):
        raise ImageError(f"('{_shown(image)}') is a URL; download it, and name the file's path")
    path = base / image
    try:
        inputs.check_file(path)
    except ValueError as error:  # a UsageError or an invalid path
        _require_lasting(error.__cause__, base, image)
        raise ImageError(f"('{_shown(image)}') cannot be read: {error}") from error
    return path


def _shown(image: ImageValue) -> str:
    """Return the name of an image for messages."""
    name = str(image if isinstance(image, str) else image[NAME] or "without a name")[:80]
    return name.encode(errors="backslashreplace").decode()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        message = "images need the package pillow: pip install pillow"
        raise MissingDependencyError(message) from error
    return Image


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

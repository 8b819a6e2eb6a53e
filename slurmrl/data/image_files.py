"""Files of images: checks, and their pixels. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.errors import MissingDependencyError, UnreadableInputError
from slurmrl.fsio import inputs

if TYPE_CHECKING:
    from PIL.Image import Image

URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
LARGEST_FILE: Final = 64 * 2**20
LARGEST_PIXELS: Final = 64 * 2**20
"""Limits of an image: bytes of its file, and pixels."""


class ImageError(ValueError):
    """An image cannot be used; the message completes ``image 2 …``."""


def base_of(config: DatasetConfig) -> Path:
    """Return the folder to which paths of images are relative."""
    path = Path(config.path)
    return path if path.is_dir() else path.parent


def check_image(base: Path, image: str) -> None:
    """Raise ImageError if an image is a URL, missing, broken or too large."""
    with _opened(base, image):
        pass


def load_image(base: Path, image: str) -> Image:
    """Return an image with its pixels, in RGB. Raises ImageError."""
    with _opened(base, image) as opened:
        try:
            return opened.convert("RGB")
        except Exception as error:  # Pillow's decoders raise errors without a common base
            raise ImageError(f"('{image}') is damaged: {_line(error)}") from error


def _opened(base: Path, image: str) -> Image:
    from_file = _pillow()
    if URL.match(image):
        raise ImageError(f"('{image[:80]}') is a URL; download it, and name the file's path")
    path = base / image
    try:
        inputs.check_file(path)
    except UnreadableInputError as error:
        raise ImageError(f"('{image}') cannot be read: {error}") from error
    if (size := path.stat().st_size) > LARGEST_FILE:
        most = f"the largest file may have {LARGEST_FILE >> 20} MiB"
        raise ImageError(f"('{image}') has {size / 2**20:.0f} MiB; {most}")
    try:
        opened: Image = from_file(path)
    except Exception as error:  # the same as above
        raise ImageError(f"('{image}') is not an image that Pillow can read") from error
    width, height = opened.size
    if width * height > LARGEST_PIXELS:
        opened.close()
        most = f"the most are {LARGEST_PIXELS}"
        raise ImageError(f"('{image}') has {width} x {height} pixels; {most}")
    return opened


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        message = "images need the package pillow: pip install pillow"
        raise MissingDependencyError(message) from error
    return Image.open


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

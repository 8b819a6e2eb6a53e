"""Files of rows that are not UTF-8 text: what they look like, and what to do. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from slurmrl.data.sources.base import unreadable

_COMPRESSED: Final = "is compressed with {0}; decompress it first ({0} -d)"
_UTF: Final = "is {0} text; convert it to UTF-8 (iconv -f {0} -t UTF-8)"
BEGINNINGS: Final = {
    b"\x1f\x8b": _COMPRESSED.format("gzip"),
    b"\x28\xb5\x2f\xfd": _COMPRESSED.format("zstd"),
    b"\xfd7zXZ\x00": _COMPRESSED.format("xz"),
    b"BZh": _COMPRESSED.format("bzip2"),
    b"PK\x03\x04": "is a ZIP archive, or a workbook; unpack it first, or save it as CSV",
    b"PAR1": "is a Parquet file; rename it to *.parquet",
    b"ARROW1": "is an Arrow file; save it as Parquet",
    b"SQLite format 3": "is a database of SQLite; export its rows as JSONL",
    b"\xff\xfe\x00\x00": _UTF.format("UTF-32"),
    b"\x00\x00\xfe\xff": _UTF.format("UTF-32"),
    b"\xff\xfe": _UTF.format("UTF-16"),
    b"\xfe\xff": _UTF.format("UTF-16"),
    b'{\x00"\x00': _UTF.format("UTF-16LE"),
    b'\x00{\x00"': _UTF.format("UTF-16BE"),
}
"""What is wrong with a file, by its first bytes."""


def wrong_beginning(path: Path) -> str:
    """Why the first bytes of a file are not text; "" if they may be. Raises EnvironmentFailure."""
    try:
        with path.open("rb") as file:
            start = file.read(max(map(len, BEGINNINGS)))
    except OSError as error:
        raise unreadable(path, error) from error
    return next((what for first, what in BEGINNINGS.items() if start.startswith(first)), "")


def not_utf_8(error: UnicodeDecodeError, where: str = "") -> str:
    """What is wrong with text that cannot be decoded."""
    byte = error.object[error.start]
    return (
        f"not UTF-8 text{where} (byte 0x{byte:02x}: {error.reason}); convert the file to UTF-8, "
        "for example with iconv -f LATIN1 -t UTF-8"
    )

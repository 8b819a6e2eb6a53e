"""Standard output and error that never fail: what cannot be written is dropped."""

from __future__ import annotations

import io
import sys

from typing_extensions import Buffer


class Forgiving(io.FileIO):
    """Drops what the file does not take (full disk, unreachable server), and writes a note about it
    as soon as the file takes something again."""

    _dropped = 0
    _why = ""

    def write(self, data: Buffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            if self._dropped:
                super().write(
                    f"\n--- slurmrl: {self._dropped} bytes of output were dropped: {self._why} "
                    "---\n".encode()
                )
                self._dropped = 0
            return super().write(data)
        except OSError as error:
            self._dropped += size
            self._why = error.strerror or str(error)
            return size


def forgive() -> None:
    """Replace sys.stdout and sys.stderr of this process: printing raises no OSError any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = _writer(1, line_buffering=False)
    sys.stderr = _writer(2, line_buffering=True)


def _writer(descriptor: int, *, line_buffering: bool) -> io.TextIOWrapper:
    raw = Forgiving(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=line_buffering
    )

"""Copies of this package in trials.

A copy has few files, since a shared directory takes milliseconds for each: ``__init__.py``, an
archive with all modules and data, and the programs that run by their path. The archive also has the
modules' bytecode, so no process of a job compiles them. Another version of Python ignores it and
compiles the sources. The user's cache keeps the newest archives.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from slurmrl import env
from slurmrl.desk import copying
from slurmrl.errors import SlurmrlError
from slurmrl.fsio import atomic, ownership
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import write_new
from slurmrl.package import ARCHIVE, FOLDER, PROGRAMS

NO_CODE: Final = ("examples",)
"""Folders of the package that no run needs."""
FIRST: Final = "__init__.py"
"""The file that tells Python where the other modules are."""
PLACE: Final = f"""

# The other modules are in {ARCHIVE}: unzip -l {ARCHIVE}
__path__ = [__file__.removesuffix("{FIRST}") + "{ARCHIVE}"]
""".encode()
UNCHECKED: Final = (1).to_bytes(4, "little")
"""Flags of bytecode that Python uses without a look at the source."""
KEPT: Final = 4
"""Archives in the cache."""


def copy(target: Path) -> None:
    """Copy this package into a new folder, durably. Raises EnvironmentFailure."""
    if (FOLDER / ARCHIVE).exists():  # this process runs the copy of a trial
        copying.copy(FOLDER, target)
        return
    contents = _contents(FOLDER)
    plain = {name: contents[name] for name in PROGRAMS}
    plain |= {FIRST: contents[FIRST] + PLACE, ARCHIVE: _archive(contents)}
    for name, content in plain.items():
        path = target / name
        atomic.make_private_directory(path.parent)
        try:
            write_new(path, content, True, REAL)
        except OSError as error:
            raise explain(error, "write", path) from error


def is_equal(folder: Path) -> bool:
    """Return whether a copy, or a package, has the same files as this one byte for byte."""
    if folder.samefile(FOLDER):
        return True
    try:
        return _contents(folder) == _contents(FOLDER)
    except (BadZipFile, zlib.error):
        return False


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a package by name, without bytecode.

    A plain file counts before the same one in the archive.

    Raises EnvironmentFailure, and BadZipFile or zlib.error for a damaged archive.
    """
    found = dict[str, bytes]()
    try:
        for name, path in copying.files(folder, NO_CODE):
            found[str(name)] = path.read_bytes()
    except OSError as error:
        raise explain(error, "read", folder) from error
    archive = found.pop(ARCHIVE, None)
    if archive is None:
        return found
    found[FIRST] = found.get(FIRST, b"").removesuffix(PLACE)
    with ZipFile(io.BytesIO(archive)) as file:
        packed = {name: file.read(name) for name in file.namelist()}
    return {name: text for name, text in packed.items() if not name.endswith(".pyc")} | found


def _archive(contents: Mapping[str, bytes]) -> bytes:
    """Return the archive of the package, from the cache if it has that."""
    digest = hashlib.sha256(f"{sys.version} {sys.flags.optimize}".encode() + MAGIC_NUMBER)
    for name, content in contents.items():
        digest.update(f"\n{name} {len(content)}\n".encode() + content)
    path = env.cache_folder("code") / f"{digest.hexdigest()}.zip"
    with suppress(OSError, SlurmrlError, BadZipFile, zlib.error):
        ownership.check(path.parent)
        kept = path.read_bytes()
        with ZipFile(io.BytesIO(kept)) as file:
            damaged = file.testzip()
        if damaged is None:
            return kept
    made = _packed(contents)
    with suppress(OSError, SlurmrlError):  # a full or read-only home directory
        atomic.make_private_directory(path.parent)
        ownership.check(path.parent)
        atomic.replace(path, made)
        for old in sorted(path.parent.glob("*.zip"), key=lambda one: one.stat().st_mtime)[:-KEPT]:
            old.unlink()
    return made


def _packed(contents: Mapping[str, bytes]) -> bytes:
    """Return the archive, the same bytes for the same contents and Python."""
    output = io.BytesIO()
    with ZipFile(output, "w", ZIP_DEFLATED, compresslevel=1) as file:
        for name, content in contents.items():
            entries = {name: content}
            if name.endswith(".py"):
                with suppress(SyntaxError):  # a process that imports it says so
                    entries[f"{name}c"] = _bytecode(name, content)
            for entry, data in entries.items():
                file.writestr(ZipInfo(entry), data, ZIP_DEFLATED, compresslevel=1)
    return output.getvalue()


def _bytecode(name: str, source: bytes) -> bytes:
    """Compile a module.

    Its name in tracebacks is that of no file, so that they show its own source and not that of the
    package that was copied.
    """
    code = compile(source, f"{FOLDER.name}/{ARCHIVE}/{name}", "exec", dont_inherit=True)
    return MAGIC_NUMBER + UNCHECKED + source_hash(source) + marshal.dumps(code)

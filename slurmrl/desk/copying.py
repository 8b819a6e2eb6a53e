"""Private copies of code, without files that are never imported.

A copy of this package has few files, because a shared directory takes milliseconds for each file.
These files are ``__init__.py``, an archive with all modules and data, and the programs that run by
their path. The archive also has bytecode, so that no process of a job compiles the modules. Another
version of Python ignores the bytecode. The user's cache keeps the newest archives.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import os
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path, PurePath
from typing import Final
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from slurmrl import env
from slurmrl.errors import EnvironmentFailure, SlurmrlError, UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, explain, write_new
from slurmrl.package import ARCHIVE, FOLDER, PROGRAMS

LARGEST_BYTES = 64 * 2**20
MOST_FILES = 10_000
"""A folder with more files is data rather than code."""
NO_CODE: Final = ("examples", "docs", "CHANGELOG.md")
"""Entries of the package that no run needs."""
FIRST: Final = "__init__.py"
"""The package's own module, which tells Python where the other modules are."""
PLACE: Final = f"""

# The other modules are in {ARCHIVE}: unzip -l {ARCHIVE}
__path__ = [__file__.removesuffix("{FIRST}") + "{ARCHIVE}"]
""".encode()
UNCHECKED: Final = (1).to_bytes(4, "little")
"""Flags of bytecode that Python uses without checking the source file."""
CACHED_ARCHIVES: Final = 4
"""Maximum number of archives in the cache."""


def check_size(source: Path) -> None:
    """Raise UsageError for a folder that is too large to be code."""
    count, size = 0, 0
    for _, path in files(source):
        count, size = count + 1, size + path.stat().st_size
        if count > MOST_FILES or size > LARGEST_BYTES:
            raise UsageError(
                f"'{source}' has more than {MOST_FILES} files or {LARGEST_BYTES >> 20} MiB: name "
                "only the code that the run imports, and keep data out of its folder"
            )


def copy(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy a file or a folder durably.

    Follow symbolic links. Omit modes, hidden, compiled and special files, and the direct entries of
    the folder that ``without`` names.

    Raises EnvironmentFailure, which names the file that could not be read or written.
    """
    if source.is_dir():
        atomic.make_private_directory(target)
    for relative, path in files(source, without):
        copied = target / relative
        atomic.make_private_directory(copied.parent)
        try:
            write_new(copied, path.read_bytes(), True, REAL)
        except EnvironmentFailure:
            raise
        except OSError as error:
            raise explain(error, "copy", path) from error


def stamps(sources: Mapping[Path, Collection[str]]) -> dict[Path, tuple[int, ...]]:
    """Return size, inode and times of each file to copy, so that a change can be detected.

    ``sources`` maps each file or folder to the names of its omitted entries.
    """
    found: dict[Path, tuple[int, ...]] = {}
    for source, without in sources.items():
        for _, path in files(source, without):
            with suppress(FileNotFoundError):
                status = path.stat()
                times = (status.st_mtime_ns, status.st_ctime_ns)
                found[path] = (status.st_size, status.st_ino, *times)
    return found


def files(source: Path, without: Collection[str] = ()) -> Iterator[tuple[PurePath, Path]]:
    """Yield the files to copy (see `copy`), with their names in the copy.

    A single file has an empty name. Raises EnvironmentFailure for a folder that cannot be listed.
    """
    if not source.is_dir():
        yield PurePath(), source
        return
    yield from _below(source, PurePath(), frozenset(), without)


def _below(
    folder: Path, relative: PurePath, above: frozenset[str], without: Collection[str] = ()
) -> Iterator[tuple[PurePath, Path]]:
    """Yield the files below a folder.

    ``above`` are the real paths of its parent folders. Links back to them are not followed.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise explain(error, "list", folder) from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__pycache__" or entry.suffix == ".pyc":
            continue
        if entry.name in without:
            continue
        if entry.is_dir():
            yield from _below(entry, relative / entry.name, above | {real})
        elif entry.is_file():
            yield relative / entry.name, entry


def copy_package(target: Path) -> None:
    """Copy this package into a new folder, durably. Raises EnvironmentFailure."""
    if (FOLDER / ARCHIVE).exists():  # This process runs a trial's copy.
        copy(FOLDER, target)
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


def is_this_package(folder: Path) -> bool:
    """Return whether a folder has the files of this package, byte for byte."""
    if folder.samefile(FOLDER):
        return True
    try:
        return _contents(folder) == _contents(FOLDER)
    except (BadZipFile, zlib.error):
        return False


def _contents(folder: Path) -> dict[str, bytes]:
    """Return a mapping from names to the files of a package, without bytecode.

    A plain file replaces the file with the same name in the archive.

    Raises EnvironmentFailure, and BadZipFile or zlib.error for a damaged archive.
    """
    found = dict[str, bytes]()
    try:
        for name, path in files(folder, NO_CODE):
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
    """Return the archive of the package, from the cache if possible."""
    digest = hashlib.sha256(f"{sys.version} {sys.flags.optimize}".encode() + MAGIC_NUMBER)
    for name, content in contents.items():
        digest.update(f"\n{name} {len(content)}\n".encode() + content)
    path = env.cache_folder("code") / f"{digest.hexdigest()}.zip"
    with suppress(OSError, SlurmrlError, BadZipFile, zlib.error):
        atomic.check_ownership(path.parent)
        kept = path.read_bytes()
        with ZipFile(io.BytesIO(kept)) as file:
            damaged = file.testzip()
        if damaged is None:
            return kept
    made = _packed(contents)
    with suppress(OSError, SlurmrlError):  # the home directory may be full or read-only
        atomic.make_private_directory(path.parent)
        atomic.check_ownership(path.parent)
        atomic.replace(path, made)
        for old in sorted(path.parent.glob("*.zip"), key=lambda one: one.stat().st_mtime)[
            :-CACHED_ARCHIVES
        ]:
            old.unlink()
    return made


def _packed(contents: Mapping[str, bytes]) -> bytes:
    """Return the archive. Its bytes depend only on the contents and the version of Python."""
    output = io.BytesIO()
    with ZipFile(output, "w", ZIP_DEFLATED, compresslevel=1) as file:
        for name, content in contents.items():
            entries = {name: content}
            if name.endswith(".py"):
                with suppress(SyntaxError):  # the import will report the error
                    entries[f"{name}c"] = _bytecode(name, content)
            for entry, data in entries.items():
                file.writestr(ZipInfo(entry), data, ZIP_DEFLATED, compresslevel=1)
    return output.getvalue()


def _bytecode(name: str, source: bytes) -> bytes:
    """Compile a module.

    The file that the bytecode names does not exist. Tracebacks therefore show the source in the
    archive, not the source of the copied package.
    """
    code = compile(source, f"{FOLDER.name}/{ARCHIVE}/{name}", "exec", dont_inherit=True)
    return MAGIC_NUMBER + UNCHECKED + source_hash(source) + marshal.dumps(code)

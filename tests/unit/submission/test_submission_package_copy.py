from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slurmrl import package
from slurmrl.desk import copying
from slurmrl.package import ARCHIVE, FOLDER, PROGRAMS

IMPORTS = """\
import sys
compiled = []
sys.addaudithook(lambda event, arguments: event == "compile" and compiled.append(arguments[1]))
import slurmrl.workers.supervisor.__main__, slurmrl.registry
from slurmrl.package import read
print(slurmrl.registry.__file__, "modules.zip" in str(compiled), len(read("scheduler/leave.sh")))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that the tests share. Only the first test makes the archive."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "slurmrl" / "code"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "code" / "slurmrl"
    copying.copy_package(folder)
    return folder


def run(copied: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *options, "-c", program],
        env={**os.environ, "PYTHONPATH": str(copied.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=copied.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def rewrite(archive: Path, entry: str, content: bytes) -> None:
    """Replace one entry."""
    with zipfile.ZipFile(archive) as file:
        contents = {name: file.read(name) for name in file.namelist()} | {entry: content}
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in contents.items():
            file.writestr(name, data)


def test_copy_has_few_private_files_and_is_imported_without_compiling(copied: Path) -> None:
    files = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert files == {"__init__.py", ARCHIVE, *PROGRAMS}
    assert {path.stat().st_mode & 0o077 for path in copied.rglob("*")} == {0}
    done = run(copied, IMPORTS)
    script = (FOLDER / "scheduler/leave.sh").stat().st_size
    assert done.stdout.split() == [f"{copied}/{ARCHIVE}/registry.pyc", "False", str(script)], done


def test_copy_compiles_its_sources_under_another_python(copied: Path) -> None:
    """Bytecode of another Python version has another magic number."""
    with zipfile.ZipFile(copied / ARCHIVE) as file:
        other = b"\0\0\r\n" + file.read("run/keys.pyc")[4:]
    rewrite(copied / ARCHIVE, "run/keys.pyc", other)
    done = run(copied, "import slurmrl.run.keys as k; print(k.__file__, k.failure(3))")
    assert done.stdout.split()[0] == f"{copied}/{ARCHIVE}/run/keys.py", done.stderr


def test_traceback_shows_sources_of_the_copy(copied: Path) -> None:
    program = "import traceback; from slurmrl import registry\ntry: registry.resolve('x.y:z')\n"
    done = run(copied, program + "except ImportError: traceback.print_exc()")
    line = "return getattr(importlib.import_module(module), attribute)"
    assert f'File "slurmrl/{ARCHIVE}/registry.py", line ' in done.stderr
    assert line in done.stderr


def test_traceback_of_custom_code_names_the_custom_file(copied: Path) -> None:
    (copied.parent / "mine.py").write_text("\nNOTHING\n")
    program = "from slurmrl.registry import import_own; import_own('reward', 'mine:R')"
    assert "(mine.py:2)" in run(copied, program).stderr


def test_copy_of_a_copy_is_equal_to_the_package(copied: Path, tmp_path: Path) -> None:
    again = tmp_path / "again" / "slurmrl"
    program = (
        "from pathlib import Path; from slurmrl.desk import copying as c;"
        f"c.copy_package(Path({str(again)!r})); print(c.is_this_package(Path({str(FOLDER)!r})))"
    )
    assert run(copied, program).stdout == "True\n"
    assert copying.is_this_package(again)
    assert (again / ARCHIVE).read_bytes() == (copied / ARCHIVE).read_bytes()


def test_changed_package_copy_is_not_equal(copied: Path) -> None:
    assert copying.is_this_package(copied)
    archive = (copied / ARCHIVE).read_bytes()
    rewrite(copied / ARCHIVE, "run/keys.py", b"OTHER = 1\n")
    assert not copying.is_this_package(copied)
    (copied / ARCHIVE).write_bytes(archive[:-40])
    assert not copying.is_this_package(copied)
    (copied / ARCHIVE).write_bytes(archive)
    (copied / "__init__.py").write_bytes((FOLDER / "__init__.py").read_bytes() + b"\n")
    assert not copying.is_this_package(copied)
    (copied / "__init__.py").unlink()
    assert not copying.is_this_package(copied)


def test_package_copy_as_plain_files_is_equal(tmp_path: Path) -> None:
    """Releases up to 0.1 made copies in this way."""
    copying.copy(FOLDER, tmp_path / "slurmrl", copying.NO_CODE)
    assert copying.is_this_package(tmp_path / "slurmrl")
    (tmp_path / "slurmrl" / "log.py").write_text("OTHER = 1\n")
    assert not copying.is_this_package(tmp_path / "slurmrl")


def test_cache_keeps_the_newest_archives(
    copied: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == (copied / ARCHIVE).read_bytes()
    contents = {"__init__.py": b"", **dict.fromkeys(PROGRAMS, b"")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(6):
        monkeypatch.setattr(copying, "_contents", lambda _, n=number: contents | {f"{n}": b""})
        copying.copy_package(tmp_path / str(number))
    assert len(list((tmp_path / "slurmrl" / "code").iterdir())) == copying.CACHED_ARCHIVES


def test_damaged_archive_in_cache_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    contents = {"__init__.py": b"", "a.py": b"A = 1\n" * 500, **dict.fromkeys(PROGRAMS, b"")}
    monkeypatch.setattr(copying, "_contents", lambda folder: contents)
    copying.copy_package(tmp_path / "first")
    (kept,) = (tmp_path / "slurmrl" / "code").iterdir()
    whole = kept.read_bytes()
    middle = len(whole) // 2
    for number, damaged in enumerate(
        (whole[:-30], whole[: middle - 32] + bytes(64) + whole[middle + 32 :], b"")
    ):
        kept.write_bytes(damaged)
        copying.copy_package(tmp_path / str(number))
        assert (tmp_path / str(number) / ARCHIVE).read_bytes() == whole
        assert kept.read_bytes() == whole


@pytest.mark.parametrize("fault", ["a file", "writable by others"])
def test_unusable_cache_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(copying, "_packed", lambda contents: b"made")
    if fault == "a file":
        (tmp_path / "slurmrl").touch()
    else:
        (tmp_path / "slurmrl" / "code").mkdir(parents=True)
        (tmp_path / "slurmrl" / "code").chmod(0o777)
    copying.copy_package(tmp_path / "copy")
    assert (tmp_path / "copy" / ARCHIVE).read_bytes() == b"made"
    assert not list(tmp_path.glob("slurmrl/code/*"))


def test_module_that_does_not_compile_is_copied_unchanged() -> None:
    with zipfile.ZipFile(io.BytesIO(copying._packed({"broken.py": b"def\n"}))) as file:
        assert file.namelist() == ["broken.py"]


def test_sandboxed_programs_import_nothing_of_the_package() -> None:
    for name in PROGRAMS:
        assert b"import slurmrl" not in package.read(name)
        assert b"from slurmrl" not in package.read(name)

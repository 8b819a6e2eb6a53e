"""Every command on run directories with damaged files of every kind. ``scripts/soak fuzz`` tests
more examples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from slurmrl.run.paths import RunPaths
from tests.support import hostile


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPaths]:
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield hostile.build(folder)


def test_intact_run_directory_is_read_without_errors(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in hostile.COMMANDS[:-1]:
        arguments = [str(tmp_path / word) if word == "exported" else word for word in words]
        assert hostile.main([*arguments, "--root", str(paths.run.parents[2])]) == 0
        assert not capsys.readouterr().err
    for read in hostile.READERS.values():
        read(paths)


@pytest.mark.parametrize("mutation", ["fifo", "directory", "loop"])
def test_fifos_and_devices_in_place_of_files_do_not_hang_commands(
    paths: RunPaths, mutation: str
) -> None:
    """Covers one file of each kind, most of which ``status`` reads."""
    for path in hostile.files(paths):
        with hostile.mutated(paths, path, mutation, random.Random(0)):
            hostile.command(paths, ("status", "add/1"))
        for reader in hostile.READERS:
            with hostile.mutated(paths, path, mutation, random.Random(0)):
                hostile.reader(paths, reader)


UNCHECKED = ("resume", "add/1", "--dry-run", "--no-check")
"""The checks run in a process of their own, for a second each, and read no file of the run
directory; the soak runs them."""
COMMANDS = [UNCHECKED if words[0] == "resume" else words for words in hostile.COMMANDS]
FILES = dict.fromkeys(hostile.MUTATIONS, 2) | {"value": 10}
"""In how many files each command and each reader meets a kind of damage."""


@pytest.mark.parametrize("mutation", hostile.MUTATIONS)
def test_damaged_file_gives_one_message(paths: RunPaths, mutation: str) -> None:
    """Each command and each reader is tested with each kind of damage, in randomly chosen files."""
    chance = random.Random(mutation)
    uses = [partial(hostile.command, paths, words) for words in COMMANDS]
    uses += [partial(hostile.reader, paths, name) for name in hostile.READERS]
    files = hostile.files(paths)
    for use in uses:
        for path in chance.sample(files, FILES[mutation]):
            seed = chance.randrange(2**32)
            with hostile.mutated(paths, path, mutation, random.Random(seed)):
                try:
                    use()
                except Exception as error:
                    error.add_note(f"{path.relative_to(paths.run)} {mutation} seed {seed}")
                    raise

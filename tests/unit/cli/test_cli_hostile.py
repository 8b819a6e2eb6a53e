"""Every file of a run directory damaged in every way, and every command on it (at length:
``scripts/soak fuzz``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmrl.paths import RunPaths
from tests.support import hostile


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPaths]:
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield hostile.build(folder)


def test_what_is_whole_is_read_without_a_complaint(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in hostile.COMMANDS[:-1]:
        arguments = [str(tmp_path / word) if word == "exported" else word for word in words]
        assert hostile.main([*arguments, "--root", str(paths.run.parents[2])]) == 0
        assert not capsys.readouterr().err
    for read in hostile.READERS.values():
        read(paths)


@pytest.mark.parametrize("mutation", ["fifo", "directory", "loop", "zeros", "deep"])
def test_what_is_no_file_of_ours_hangs_nothing(paths: RunPaths, mutation: str) -> None:
    """One file of each kind; status reads most of them."""
    for path in hostile.files(paths):
        with hostile.mutated(paths, path, mutation, hostile.random.Random(0)):
            hostile.command(paths, ("status", "add/1"))
        for reader in hostile.READERS:
            with hostile.mutated(paths, path, mutation, hostile.random.Random(0)):
                hostile.reader(paths, reader)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_damage_ends_with_one_message(paths: RunPaths, data: st.DataObject, seed: int) -> None:
    path = data.draw(st.sampled_from(hostile.files(paths)), "file")
    mutation = data.draw(st.sampled_from([*hostile.MUTATIONS, *["value"] * 8]), "mutation")
    hostile.attempt(paths, path, mutation, seed)

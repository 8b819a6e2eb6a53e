"""Tokenized rows in the run directory are made once, reused, and never read if damaged."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Dataset
from slurmrl.data import preparation, prepared
from slurmrl.data.prepared import PreparedRows
from slurmrl.errors import ConfigError, CorruptFileError, EnvironmentFailure, UsageError
from slurmrl.fsio.calls import REAL, SystemCalls
from tests.support.chaos.preparations import Characters
from tests.support.faulty import Faulty

ROWS = [{"id": f"r{number}", "prompt": f"{number}+{number}=", "n": number} for number in range(40)]


class Site:
    """A data file, a tokenizer's folder, and the data directory of a trial."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.tokenizer = Characters(folder / "tokenizer")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text("{}")
        self.file = folder / "rows.jsonl"
        self.write(ROWS)
        self.texts = 0
        """Number of texts that were tokenized."""
        self.progress: list[str] = []

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prepare(self, incarnation: int = 1, *, calls: SystemCalls = REAL, **settings: Any) -> Path:
        config = Dataset(**{"type": "prompt", "path": str(self.file), **settings})
        site = self

        class Counting(Characters):
            def __call__(self, texts: str | list[str], **options: Any) -> Any:
                site.texts += len(texts)
                return super().__call__(texts, **options)

        tokenizer: Any = Counting(Path(self.tokenizer.name_or_path))
        directory = preparation.prepare(
            self.data, incarnation, config, tokenizer, self.progress.append, calls=calls
        )
        preparation.sweep(self.data, incarnation, [directory])
        return directory

    def names(self) -> list[str]:
        return sorted(path.name for path in self.data.iterdir())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def read(directory: Path, *indices: int) -> list[tuple[str, str, dict[str, Any]]]:
    with closing(PreparedRows(directory)) as rows:
        found = [rows.read(index) for index in indices]
    return [(row.name, bytes(row.tokens.tolist()).decode(), row.row) for row in found]


def test_new_incarnation_reads_prepared_files_without_tokenizing(site: Site) -> None:
    first = site.prepare(1)
    tokenized, content = site.texts, (first / prepared.ROWS).read_bytes()
    assert tokenized >= len(ROWS)  # A text is read twice to find the begin tokens.
    assert site.prepare(2) == site.prepare(7) == first
    assert site.texts == tokenized
    assert (first / prepared.ROWS).read_bytes() == content
    assert read(first, 39, 0) == [("r39", "39+39=", ROWS[39]), ("r0", "0+0=", ROWS[0])]


def test_files_and_directories_are_private(site: Site) -> None:
    directory = site.prepare()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == dict.fromkeys((prepared.ROWS, prepared.INDEX, prepared.MANIFEST), 0o600)
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE(site.data.stat().st_mode) == 0o700


@pytest.mark.parametrize("change", ["rows", "tokenizer", "settings", "same size", "tools"])
def test_settings_that_change_tokens_lead_to_other_files(site: Site, change: str) -> None:
    first = site.prepare(1)
    before = json.loads((first / prepared.MANIFEST).read_bytes())["tokens"]
    settings: dict[str, Any] = {}
    if change == "rows":
        site.write(ROWS[:-1])
    elif change == "same size":
        site.write([{**ROWS[0], "prompt": "0-0="}, *ROWS[1:]])
    elif change == "tools":
        settings["tools"] = [{"function": {"name": "search"}}]
    elif change == "tokenizer":
        (Path(site.tokenizer.name_or_path) / "tokenizer.json").write_text("{ }")
    else:
        settings["prompt_template"] = "{prompt}?"
    second = site.prepare(2, **settings)
    assert second != first
    assert site.names() == [second.name], "the old files are removed"
    after = json.loads((second / prepared.MANIFEST).read_bytes())["tokens"]
    assert (after == before) == (change in ("tokenizer", "tools")), "neither changes these tokens"


def test_edit_of_generation_config_keeps_the_files(site: Site) -> None:
    """Rollout tasks find the rows of the trainers by the files of the tokenizer."""
    tokenizer: Any = site.tokenizer
    config = Dataset(type="prompt", path=str(site.file))
    first = preparation.prepare(site.data, 1, config, tokenizer, site.progress.append)
    folder = Path(tokenizer.name_or_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    assert preparation.find(site.data, config, tokenizer) == first
    (folder / "tokenizer.json").write_text("{ }")
    causes = r"present tokenizer, chat template and code .* versions of tokenizers and transformers"
    with pytest.raises(EnvironmentFailure, match=causes):
        preparation.find(site.data, config, tokenizer)


def test_touched_file_or_new_shuffle_seed_does_not_tokenize_again(site: Site) -> None:
    first = site.prepare(1)
    tokenized = site.texts
    os.utime(site.file)
    assert site.prepare(2, shuffle=False) == first
    assert site.texts == tokenized
    assert any(text.startswith("comparing rows.jsonl") for text in site.progress)


def test_training_and_evaluation_data_have_their_own_files(site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "x", "prompt": "1"}\n')
    first = site.prepare()
    config = Dataset(type="prompt", path=str(other))
    tokenizer: Any = site.tokenizer
    second = preparation.prepare(site.data, 1, config, tokenizer, str)
    assert read(first, 0)[0][0] == "r0"
    assert read(second, 0)[0][0] == "x"
    preparation.sweep(site.data, 1, [first, second])
    assert len(site.names()) == 2


def test_files_of_a_newer_incarnation_are_kept(site: Site) -> None:
    """A rank that was paused must not remove what its successors use."""
    new = site.prepare(5)
    assert site.prepare(1, prompt_template="{prompt}?") != new
    assert read(new, 0)[0][0] == "r0"


def test_unfinished_data_of_older_incarnations_is_removed_first(site: Site) -> None:
    """Jobs that end while they prepare images must not fill the disk."""
    finished = site.prepare(1)
    newer = site.data / f"{'0' * 32}.4"
    for directory in (newer, site.data / f"{'0' * 32}.2"):
        (directory / "pictures").mkdir(parents=True)
    with pytest.raises(ConfigError):
        site.prepare(3, prompt_template="{unknown}")
    assert site.names() == sorted([finished.name, newer.name])


@pytest.mark.parametrize("limit", [0, 1, 200])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_one_error_and_leaves_no_files(
    site: Site, number: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(SystemCalls):
        left = limit

        def write(self, descriptor: int, data: bytes | memoryview) -> int:
            if self.left <= 0:
                raise OSError(number, os.strerror(number))
            written = os.write(descriptor, data[: self.left])
            self.left -= written
            return written

    monkeypatch.setattr(prepared, "BUFFER_BYTES", 64)
    with pytest.raises(
        UsageError, match=r"cannot write .*\.bin: .*free space, then slurmrl resume"
    ):
        site.prepare(calls=Full())
    assert site.names() == []
    assert read(site.prepare(2), 0)[0][0] == "r0"


def test_error_at_any_operation_leaves_no_wrong_data(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation on the run directory fails in turn, with and without effect."""
    monkeypatch.setattr(prepared, "BUFFER_BYTES", 512)
    sound = Faulty()
    site.prepare(1, calls=sound)
    failed = 0
    for at in range(sound.count):
        for done in (False, True):
            preparation.sweep(site.data, 1, [])
            try:
                site.prepare(1, calls=Faulty(at, errno.EIO, done=done))
            except EnvironmentFailure:
                failed += 1
            directory = site.prepare(1)
            assert [row[0] for row in read(directory, *range(40))] == [row["id"] for row in ROWS]
    assert failed > sound.count / 2


@pytest.mark.parametrize("name", [prepared.ROWS, prepared.INDEX])
@pytest.mark.parametrize("damage", ["missing", "short", "long", "another byte"])
def test_damaged_data_is_one_error_and_prepared_again_next_time(
    site: Site, name: str, damage: str
) -> None:
    directory = site.prepare(1)
    path = directory / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "another byte":
        at = len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    else:
        path.write_bytes(content[:-1] if damage == "short" else content + b"\0")
    with pytest.raises(CorruptFileError, match=rf"{name} (is|has) .*makes it again"):
        read(directory, *range(40))
    again = site.prepare(2)
    assert again != directory
    assert [row[0] for row in read(again, *range(40))] == [row["id"] for row in ROWS]


@pytest.mark.parametrize(
    "change",
    [
        *("", "{}", '{"version": 3, "rows": "x"}', '{"version": 3, "rows": -1}', "[" * 9999),
        *({"token_bytes": 3}, {"token_bytes": 2.0}, {"rows": 10**15}, {"version": 1}),
    ],
    ids=lambda change: str(change)[:40],
)
def test_data_is_prepared_again_if_manifest_is_wrong(
    site: Site, change: str | dict[str, Any]
) -> None:
    path = site.prepare(1) / prepared.MANIFEST
    if isinstance(change, dict):
        change = json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(change)
    again = site.prepare(2)
    assert again.name.endswith(".2")
    assert read(again, 3)[0][0] == "r3"


def test_large_vocabularies_use_wider_integers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    small = json.loads((site.prepare(1) / prepared.MANIFEST).read_text())
    monkeypatch.setattr(preparation, "SMALL_VOCABULARY", 100)
    directory = site.prepare(2, prompt_template="{prompt}?")
    large = json.loads((directory / prepared.MANIFEST).read_text())
    assert (small["token_bytes"], large["token_bytes"]) == (2, 4)
    assert read(directory, 5)[0][1] == "5+5=?"


def test_memory_does_not_grow_with_the_file_size(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are tokenized in chunks, with a report after each."""
    monkeypatch.setattr("slurmrl.data.preparation.CHUNK_ROWS", 8)
    site.prepare()
    shares = [text.partition(", ")[2] for text in site.progress]
    assert shares[-1] == "100% (40 rows)"
    assert len(shares) == 5


def test_all_problems_of_a_file_are_reported_and_no_data_is_left(site: Site) -> None:
    """Rows of later chunks are also checked. Problems of ids come before problems of texts."""
    site.write([{**row, "prompt": 5} if row["n"] in (3, 33) else row for row in ROWS])
    with pytest.raises(ConfigError) as caught:
        site.prepare()
    assert [problem.where for problem in caught.value.problems] == [
        f"{site.file}:4",
        f"{site.file}:34",
    ]
    assert site.names() == []
    assert site.progress[-1] == "tokenizing rows.jsonl, 100% (40 rows)", "the start may take longer"
    site.write([*ROWS, {**ROWS[0], "prompt": 5}])
    with pytest.raises(ConfigError, match="'r0' is already the id of line 1"):
        site.prepare()


def test_state_of_a_file_is_recorded_only_after_it_settled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of a file that was read right after a change do not count."""
    first = site.prepare(1)
    assert json.loads((first / prepared.MANIFEST).read_text())["source_state"] == ""
    monkeypatch.setattr("slurmrl.data.source_files.SETTLED_NS", 0)
    second = site.prepare(2, prompt_template="{prompt}?")
    state = json.loads((second / prepared.MANIFEST).read_text())["source_state"]
    assert state.split()[0] == str(site.file.stat().st_size)
    site.progress.clear()
    assert site.prepare(3, prompt_template="{prompt}?") == second
    assert site.progress == [], "its size and times are the same: it is not even read"

"""Repositories of the hub: each commit is downloaded once, and failures are explained."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from slurmrl.config.hub import HubCache, HubKind, damage, is_plain, list_file, of_folder, parse
from slurmrl.data.records import read_records
from slurmrl.errors import UnreachableHubError, UsageError
from tests.support.hub import Hub

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
SUBSETS = (
    "---\nconfigs:\n- config_name: easy\n  data_files: [{split: train, path: easy/*.jsonl}]\n"
    "- config_name: hard\n  data_files: [{split: train, path: hard.csv}]\n---\nSums\n"
)
TOKEN = "hf_secret"


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    return HubCache(tmp_path / "runs")


def test_commit_is_downloaded_once_and_then_found_offline(
    hub: Hub,
    cache: HubCache,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each use asks the hub for the commit of a branch, but not for a commit. Only the owner can
    read the files, and torch is not imported.
    """
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    first = hub.commit("datasets/org/sums", {"train.jsonl": LINES, "test.jsonl": LINES})
    reference = parse("hf://datasets/org/sums", HubKind.DATASET)
    folder = cache.fetch(reference)
    imported = capfd.readouterr().err
    assert "huggingface_hub" in imported
    assert not re.search(r"\| +torch\b", imported)
    monkeypatch.delenv("PYTHONPROFILEIMPORTTIME")
    assert folder.name == first
    assert read_records(folder, "id", "train").rows == tuple(ROWS)
    modes = {path.stat().st_mode & 0o077 for path in cache.folder.rglob("*")}
    assert modes == {0}
    downloads = len(hub.downloads)
    assert cache.fetch(reference) == folder
    assert len(hub.downloads) == downloads
    left = sorted(path.name for path in folder.parent.iterdir())
    assert left == [first, f"{first}.json", "lock", "revisions"]
    second = hub.commit("datasets/org/sums", {"train.jsonl": LINES * 2})
    assert cache.fetch(reference).name == second
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capfd.readouterr()
    assert cache.fetch(reference).name == second
    asked = len(hub.requests)
    assert cache.fetch(parse(f"hf://org/sums@{first}", HubKind.DATASET)) == folder
    assert len(hub.requests) == asked
    pinned = cache.pinned(reference, str(folder))
    assert pinned == parse(f"hf://org/sums@{first}", HubKind.DATASET), "main has been this commit"
    other = parse("hf://org/sums@v2", HubKind.DATASET)
    assert cache.pinned(other, str(folder)) == other
    with pytest.raises(UnreachableHubError, match=r"org/other cannot be reached from here"):
        cache.fetch(parse("hf://org/other", HubKind.DATASET))


def test_two_revisions_are_fetched_at_once(
    hub: Hub, cache: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each child process waits for the other, because both download into one folder."""
    files = {"config.json": "{}", **{f"{n}.safetensors": f"{n}" for n in range(6)}}
    commits = [
        hub.commit("models/org/m", files),
        hub.commit("models/org/m", {**files, "config.json": "[]"}, branch="v2"),
    ]
    hub.pause_s = 0.2
    references = [parse(name, HubKind.MODEL) for name in ("hf://org/m", "hf://org/m@v2")]
    with ThreadPoolExecutor() as pool:
        folders = list(pool.map(cache.fetch, references))
    assert [folder.name for folder in folders] == commits


def test_wait_for_another_download_is_printed(
    hub: Hub, cache: HubCache, capfd: pytest.CaptureFixture[str]
) -> None:
    commit = hub.commit("models/org/m", {"config.json": "{}", "a.safetensors": "1"})
    reference = parse("hf://org/m", HubKind.MODEL)
    home = reference.home(cache.folder)
    home.mkdir(parents=True)
    said = ""
    with ThreadPoolExecutor() as pool:
        with filelock.FileLock(home / "lock"):
            fetched = pool.submit(cache.fetch, reference)
            for _ in range(1200):
                said += capfd.readouterr().err
                if "waiting for" in said or fetched.done():
                    break
                time.sleep(0.1)
        assert fetched.result().name == commit
    assert re.search("waiting for another process that downloads http.*/org/m\n", said)


def test_repository_problems_are_explained(
    hub: Hub, cache: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also covers a token, which is written nowhere below the root."""
    hub.commit(
        "datasets/org/sums", {"README.md": SUBSETS, "easy/a.jsonl": LINES, "hard.csv": "a\n1"}
    )
    hub.commit("models/org/pickled", {"config.json": "{}", "pytorch_model.bin": "?"})
    hub.commit("models/org/gated", {"config.json": "{}", "model.safetensors": "w"})
    hub.repositories["models/org/gated"].token = TOKEN
    cases = {
        (
            "org/none",
            HubKind.MODEL,
            None,
        ): "org/none does not exist, or is a private model: set HF_",
        ("org/gated", HubKind.MODEL, None): "org/gated is gated: accept its conditions there, then",
        ("org/sums@v9", HubKind.DATASET, None): "org/sums has no branch, tag or commit 'v9'",
        (
            "org/sums",
            HubKind.DATASET,
            None,
        ): "has the subsets easy, hard: set dataset.subset to one",
        ("org/sums", HubKind.DATASET, "harder"): "has no subset 'harder'; it has easy, hard",
        ("org/pickled", HubKind.MODEL, None): "org/pickled has no *.safetensors",
    }
    for (name, kind, subset), message in cases.items():
        with pytest.raises(UsageError) as caught:
            cache.fetch(parse(f"hf://{name}", kind, subset))
        assert message in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = cache.fetch(parse("hf://org/gated", HubKind.MODEL))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    hub = [path.read_bytes() for path in cache.folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in hub)
    folder = cache.fetch(parse("hf://org/sums", HubKind.DATASET, "easy"))
    assert read_records(folder, "id").rows == tuple(ROWS)


def test_interrupted_download_is_not_used_and_is_resumed(hub: Hub, cache: HubCache) -> None:
    files = {f"model-{part}.safetensors": f"weights {part}" for part in range(4)}
    hub.commit("models/org/model", {"config.json": "{}", **files})
    reference = parse("hf://org/model", HubKind.MODEL)
    hub.breaks_after = 2
    with pytest.raises(UsageError):
        cache.fetch(reference)
    assert cache.newest(reference) is None
    hub.breaks_after = None
    arrived = len(list(cache.folder.rglob("blobs/*")))
    hub.requests.clear()
    folder = cache.fetch(reference)
    assert len(hub.downloads) <= 5 - arrived + 1
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "config.json": "{}",
        **files,
    }


def test_cached_commit_with_lost_files_is_downloaded_again(
    hub: Hub, cache: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch may have moved. Without a network, the next call retries."""
    commit = hub.commit("datasets/org/sums", {"train.jsonl": LINES * 50, "test.jsonl": LINES})
    folder = cache.fetch(parse("hf://datasets/org/sums", HubKind.DATASET))
    hub.commit("datasets/org/sums", {"train.jsonl": LINES})
    before = {path: path.read_bytes() for path in folder.rglob("*.arrow")}
    arrow = sorted(before)[0]
    reference = parse(f"hf://org/sums@{commit}", HubKind.DATASET)
    for lose in (
        lambda: shutil.rmtree(folder),
        arrow.unlink,
        lambda: os.truncate(arrow, arrow.stat().st_size - 1),
        list_file(folder).unlink,
    ):
        lose()
        assert damage(folder)
        assert of_folder(folder, cache.folder) == reference
        assert cache.newest(reference) is None
        if not folder.exists():
            with monkeypatch.context() as offline:
                offline.setenv("HF_HUB_OFFLINE", "1")
                with pytest.raises(UnreachableHubError, match="cannot be reached from here"):
                    cache.fetch(reference)
            assert cache.newest(reference) is None
        assert cache.fetch(reference) == folder
        assert {path: path.read_bytes() for path in folder.rglob("*.arrow")} == before
        assert damage(folder) == ""
        left = sorted(path.name for path in folder.parent.iterdir())
        assert left == [commit, f"{commit}.json", "lock", "revisions"]


@pytest.mark.parametrize(
    ("home", "subset", "repository"),
    [
        ("org--name", None, "org/name"),
        ("name", None, "name"),
        ("org--name--main", "main", "org/name"),
        ("name--a%2Fb", "a/b", "name"),
        ("org--name--main", None, None),
        ("a--b--c", "main", None),
        ("..", None, None),
    ],
)
def test_cache_directory_gives_back_its_repository_reference(
    tmp_path: Path, home: str, subset: str | None, repository: str | None
) -> None:
    commit = "0" * 40
    folder = tmp_path / "datasets" / home / commit
    found = of_folder(folder, tmp_path, subset)
    assert (found and found.repository) == repository
    if found is not None:
        assert found.folder(tmp_path, commit) == folder
    assert of_folder(folder / "train", tmp_path, subset) is None
    assert of_folder(tmp_path / "elsewhere", tmp_path / "runs") is None


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("openai/gsm8k", True),
        ("Qwen/Qwen2.5-0.5B@main", True),
        ("here/anything", False),
        ("data/train.jsonl", False),
        ("./org/name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("name", False),
    ],
)
def test_plain_name_is_a_repository_only_if_it_cannot_be_a_path(
    tmp_path: Path, text: str, plain: bool
) -> None:
    (tmp_path / "here").mkdir()
    assert is_plain(text, tmp_path / text) is plain


@pytest.mark.parametrize(
    "text", ["hf://", "hf://a/b/c", "hf://org/../x", "hf://org/name@", "hf://t:x@host/o/n"]
)
def test_invalid_references_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected hf://org/name\[@revision\]"):
        parse(text, HubKind.MODEL)

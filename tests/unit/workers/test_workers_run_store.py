"""The store of a process group in the run directory."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from slurmrl.errors import EnvironmentFailure
from slurmrl.workers import distributed
from slurmrl.workers.distributed import RunStore

LONG, SHORT = timedelta(seconds=60), timedelta(milliseconds=50)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "meeting", 2, LONG)


def of_rank(folder: Path, rank: int) -> int:
    """Form a group of three with two names, as torch does; return the sum over the ranks."""
    own = RunStore(folder, 3, LONG)
    store = PrefixStore("outer//0", PrefixStore("a" * 300, own))
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroupGloo(store, rank, 3, options)
    total = torch.tensor(2.0**rank)
    group.allreduce([total]).wait()
    return int(total)


def test_ranks_form_a_group_through_a_directory(tmp_path: Path) -> None:
    meeting = tmp_path / "control" / "meeting"
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(partial(of_rank, meeting), range(3))) == [7, 7, 7]
    assert meeting.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in meeting.iterdir()} == {0o600}


@pytest.mark.parametrize("key", ["k", "a//b/../c", ".hidden", "x" * 1000, "Schlüssel\n", ""])
@pytest.mark.parametrize("value", [b"", b"\x00\xff/", b"v" * 100_000])
def test_run_store_accepts_any_key_and_value(store: RunStore, key: str, value: bytes) -> None:
    assert not store.check([key])
    store.set(key, b"old")
    store.set(key, value)
    assert store.check([key])
    assert store.get(key) == value
    assert not store.check([key, f"{key}."])


def test_store_returns_a_value_that_another_rank_sets_later(
    store: RunStore, tmp_path: Path
) -> None:
    other = RunStore(tmp_path / "meeting", 2, LONG)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late")
        other.set("late", "now")
        assert waiting.result(60) == b"now"


def test_wait_names_the_missing_keys_after_its_timeout(store: RunStore) -> None:
    store.set("one", b"")
    with pytest.raises(dist.DistStoreError, match=r"timed out waiting 0 s for one, two in .*ing"):
        store.wait(["one", "two"], SHORT)


def test_store_fails_without_its_directory(
    store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "READ_S", 0.0)
    shutil.rmtree(tmp_path / "meeting")
    for use in (lambda: store.get("k"), lambda: store.set("k", b"")):
        with pytest.raises(EnvironmentFailure, match="meeting"):
            use()


def test_clone_of_prefixed_store_shares_its_keys(store: RunStore) -> None:
    """torch's NCCL monitor clones the store of its group."""
    clone = PrefixStore("group", store).clone()
    clone.set("key", b"value")
    assert PrefixStore("group", store).get("key") == b"value"
    assert clone.check(["key"])

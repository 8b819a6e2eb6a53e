"""Rank 0 prepares the datasets of an incarnation, and names the directories that the other ranks
read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmrl.config.schema import Dataset
from slurmrl.data import preparation
from slurmrl.errors import UsageError
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers.distributed import RunStore
from slurmrl.workers.messages import Preparing
from slurmrl.workers.worker.setup import Datasets
from tests.support.chaos.preparations import Characters

TIMEOUT = timedelta(seconds=60)


class Site:
    """The ranks of one incarnation after another, in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tokenizer").mkdir()
        sections = {}
        for name, rows in (("train", 9), ("held_out", 3)):
            path = folder / f"{name}.jsonl"
            texts = [json.dumps({"id": f"{name}{i}", "prompt": f"{i}="}) for i in range(rows)]
            path.write_text("\n".join(texts))
            sections[name] = Dataset(type="prompt", path=str(path))
        self.config: Any = SimpleNamespace(
            datasets=lambda: sections,
            cluster=SimpleNamespace(start_timeout_s=600.0),
        )
        self.tokenizer: Any = Characters(folder / "tokenizer")
        self.said: list[Preparing] = []
        self.store: Any = None
        self.activity = Activity()

    def start(self, incarnation: int) -> Callable[[int], Any]:
        """Return the function that a rank of the next incarnation runs."""
        self.store = RunStore(self.folder / f"meeting.{incarnation}", 8, TIMEOUT)

        def provide(rank: int) -> Any:
            made = Datasets(
                self.folder / "data", incarnation, self.config, self.store, self.activity
            )
            return made.provide(self.tokenizer, rank, self.said.append)

        return provide


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_all_ranks_open_the_data_prepared_by_rank_0(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide = site.start(1)
    own = provide(0)
    monkeypatch.setattr(preparation, "prepare", None)  # the other ranks do not read the files
    for opened in (own, provide(1), provide(7)):
        train, held_out = opened
        assert (train.size, held_out.size) == (9, 3)
        assert train.sample([(2, 4)]).ids == ("train4@2",)
        assert held_out.meta([(0, 1)]).ids == ("held_out1@0",)
    assert site.said == []


def test_ranks_wait_for_rank_0_without_time_limit(site: Site) -> None:
    """The wait may exceed the store's timeout. The activity names the rank for which it waits."""
    provide = site.start(1)
    waits, opened = threading.Event(), []
    real = site.store.wait

    def wait(keys: list[str], timeout: timedelta) -> None:
        assert timeout > timedelta(days=1000)
        waits.set()
        real(keys, timeout)

    site.store = SimpleNamespace(wait=wait, get=site.store.get, set=site.store.set)
    thread = threading.Thread(target=lambda: opened.append(provide(3)), daemon=True)
    thread.start()
    assert waits.wait(60), "rank 3 did not wait within 60 s"
    assert site.activity.current()[0].phase == "waiting for rank 0 to tokenize the dataset"
    provide(0)
    thread.join(60)
    assert opened, "rank 3 did not see within 60 s that rank 0 was done"


def test_long_preparations_are_reported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports go to the master, which then waits longer, and into the heartbeat."""
    monkeypatch.setattr("slurmrl.data.preparation.CHUNK_ROWS", 2)
    monkeypatch.setattr("slurmrl.data.source_files.SETTLED_NS", 0)
    site.config.cluster.start_timeout_s = 1e-9
    site.start(1)(0)
    assert site.said == [Preparing(rank=0)] * 7
    site.said.clear()
    site.start(2)(0)
    assert site.said == [], "nothing is tokenized again"


def test_unusable_rows_end_rank_0_with_their_line(site: Site) -> None:
    (site.folder / "held_out.jsonl").write_text('{"prompt": "1"}\n{"prompt": 2}\n')
    with pytest.raises(UsageError, match=r"held_out\.jsonl:2: prompt: must be a string"):
        site.start(1)(0)

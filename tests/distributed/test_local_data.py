"""A trial tokenizes its data once, even if the tokenizing process is killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run.paths import RunPaths
from tests.support.held import NO_LIMIT, Hold
from tests.support.trials import Site, kill_one, processes, sft_config, wait_until

ROWS = 40_000
"""Enough that rank 0 is seen while it tokenizes."""


def large(path: Path) -> Path:
    rows = ({"prompt": f"{n % 100}+{n // 1000}=", "answer": str(n)} for n in range(ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def unfinished(paths: RunPaths) -> list[Path]:
    """Directories whose rows are being written."""
    return [
        found.parent
        for found in paths.data.glob("*/rows.bin")
        if found.stat().st_size and not (found.parent / "manifest.json").exists()
    ]


def log_lines(run: Path, text: str) -> list[str]:
    logs = (path.read_text() for path in sorted((run / "logs").rglob("*.log")))
    return [line for log in logs for line in log.splitlines() if text in line]


@pytest.mark.long
def test_killed_rank_0_is_replaced_and_data_is_tokenized_once(tmp_path: Path) -> None:
    """Rank 0 is killed during tokenization and after it. Then the prepared data are damaged."""
    site, trial = Site(tmp_path), "sft/1"
    data = large(tmp_path / "large.jsonl")
    hold = Hold(site)
    hold.allow(3)
    config: dict[str, Any] = hold.sft(sft_config())
    config["dataset"] |= {"path": str(data), "max_tokens": 60}
    file = site.write("config.yaml", config)
    site.slurmrl("submit", str(file), "--scheduler", "local", "--detach")
    paths = site.paths(trial)
    wait_until("rank 0 to tokenize", lambda: unfinished(paths) or None)
    kill_one(paths.run, "worker", 0)
    site.wait_for_step(trial, 3)
    (directory,) = paths.data.iterdir()
    assert not unfinished(paths)
    before = processes(paths.run)["worker"]
    kill_one(paths.run, "worker", 1)
    wait_until(
        "the next workers", lambda: set(processes(paths.run)["worker"]).isdisjoint(before) or None
    )
    hold.allow(NO_LIMIT)
    site.wait_for_end(trial)
    assert list(paths.data.iterdir()) == [directory]
    assert len(log_lines(paths.run, f"tokenized {ROWS} rows")) == 1
    shutil.rmtree(directory)
    site.slurmrl("resume", trial, "total_steps=10", "--wait")
    assert site.status(trial)["step"] == 10
    assert len(log_lines(paths.run, f"tokenized {ROWS} rows")) == 2

"""Removal of directories below a running trial."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from tests.support.trials import Site, processes, sft_config, wait_until


@pytest.mark.long
def test_removed_directories_are_recreated_and_a_removed_run_ends(tmp_path: Path) -> None:
    site = Site(tmp_path)
    config = sft_config(total_steps=1_000_000, checkpoint={"every_steps": 20})
    site.slurmrl("submit", str(site.write("c.yaml", config)), "--scheduler", "local", "--detach")
    run = site.paths("sft/1")
    history = History(run.history)
    try:
        for incarnation, lost in ((1, run.control), (2, run.leases), (3, None)):
            wait_until(
                f"a commit of incarnation {incarnation}",
                lambda wanted=incarnation: [
                    one for one in fold(history.read()).commits if one.incarnation == wanted
                ],
            )
            if lost is not None:
                shutil.rmtree(lost)
        told = [row["how"] for row in site.status("sft/1")["incarnations"]]
        assert "control/ in" in told[0], told
        assert "leases/ in" in told[1], told
        run.run.rename(
            tmp_path / "gone"
        )  # at once: files that are removed one by one are written again
        wait_until("the end of all processes", lambda: not any(processes(run.run).values()), 200)
    finally:
        for chain in processes(run.run)["chain"]:
            os.kill(chain, signal.SIGKILL)  # its children end with it

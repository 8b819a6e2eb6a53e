"""The current code continues a trial of the release 0.1.0."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slurmrl.run import metrics
from tests.support.trials import Site, is_timing

TRIAL = Path(__file__).with_name("trial-0.1.0.tar.gz")
"""Two steps of GRPO by 0.1.0, without its code and logs; steps 3 and 4 of 0.1.0 as ``expected``."""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return a site with the trial ``old/1`` of the release."""
    with tarfile.open(TRIAL) as archive:
        archive.extractall(tmp_path, filter="tar")
    site = Site(tmp_path)
    run = site.paths("old/1").run
    run.parent.mkdir(mode=0o700, parents=True)
    (tmp_path / "trial").rename(run)
    for path in run.rglob("*"):
        if path.is_file() and b"@FOLDER@" in (content := path.read_bytes()):
            path.write_bytes(content.replace(b"@FOLDER@", bytes(tmp_path)))
    return site


@pytest.mark.long
def test_resume_trains_as_0_1_0_would_have(site: Site) -> None:
    before = site.status("old/1")
    assert (before["state"], before["step"]) == ("COMPLETED", 2)

    site.slurmrl("resume", "old/1", "total_steps=4", "--update-code", "--wait")

    assert site.status("old/1")["step"] == 4
    for line, wanted in zip(
        site.metrics("old/1")[-2:], metrics.read(site.folder / "expected.jsonl"), strict=True
    ):
        names = [name for name in wanted if not is_timing(name)]
        assert {name: line[name] for name in names} == pytest.approx(
            {name: wanted[name] for name in names}, rel=1e-4, abs=1e-5
        )
    trained = load_file(site.paths("old/1").exports / "step-00000004" / "model.safetensors")
    for name, tensor in load_file(site.folder / "expected.safetensors").items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-6)

"""Tests of the functions of torch.distributed that the collectives call."""

from __future__ import annotations

import importlib.util

import pytest
import torch.distributed as dist

from slurmrl.tensors.ops import collectives

NEW_NAMES = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}


def test_torch_2_11_uses_the_older_collective_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather_into_tensor() -> None: ...
    def reduce_scatter_tensor() -> None: ...

    for name in NEW_NAMES:
        monkeypatch.delattr(dist, name, raising=False)
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather_into_tensor)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter_tensor)
    assert collectives.__spec__ is not None
    assert collectives.__spec__.loader is not None
    under_211 = importlib.util.module_from_spec(collectives.__spec__)
    collectives.__spec__.loader.exec_module(under_211)
    assert under_211.all_gather is all_gather_into_tensor
    assert under_211.reduce_scatter is reduce_scatter_tensor


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch before 2.13")
def test_later_torch_releases_use_the_newer_collective_names() -> None:
    for name, ours in NEW_NAMES.items():
        assert getattr(collectives, ours) is getattr(dist, name)

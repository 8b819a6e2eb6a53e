"""Every example with servers runs in a short form, with one real server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_examples import SERVED, ShortForms
from tests.support.held_examples import engine_of
from tests.support.servers import servers
from tests.support.trials import Site

pytestmark = pytest.mark.soak  # whole trials with servers of each kind run more often


class WithServer(ShortForms):
    """The server is on the only worker of the trainers, and sleeps while that trains."""

    def overrides(self, config: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in super().overrides(config, values):
            if key == "rollout.backend":
                engine = engine_of(config)
                yield key, f"{engine}:d1"
                yield "rollout.gpus", "'0'"
                yield "rollout.python", os.environ[f"{engine.upper()}_PYTHON"]
            elif key.endswith("hidden_size"):
                yield key, 64  # heads of 32, for vLLM
            else:
                yield key, value


@pytest.mark.parametrize("config", SERVED)
def test_an_example_runs_to_its_end(config: str, tmp_path: Path) -> None:
    if f"{engine_of(config).upper()}_PYTHON" not in os.environ:
        pytest.skip(f"no {engine_of(config)}: run scripts/test-engines")
    forms = WithServer(Site(tmp_path))
    ended = forms.run(config)
    assert ended["state"] == "COMPLETED"
    lines = forms.site.metrics(ended["trial"])
    steps = [line for line in lines if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    assert max(abs(line["mismatch/kl"]) for line in steps) < 1e-5
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 2]
    assert servers(forms.site.paths(ended["trial"]).run) == []

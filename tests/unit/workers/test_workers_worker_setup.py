"""What a rank needs on its host before it joins the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.plan.settings import Settings
from slurmrl.workers.worker.setup import require_inputs


@pytest.mark.parametrize("missing", ["model", "tokenizer", "rows.jsonl", "heldout.jsonl"])
def test_what_is_missing_on_a_host_is_the_hosts_failure(tmp_path: Path, missing: str) -> None:
    places = [tmp_path / name for name in ("model", "tokenizer", "rows.jsonl", "heldout.jsonl")]
    for place in places:
        place.touch()
    model, tokenizer, rows, heldout = map(str, places)
    config = SimpleNamespace(
        actor=SimpleNamespace(path=model, tokenizer=tokenizer),
        dataset=SimpleNamespace(path=rows),
        evaluation=SimpleNamespace(dataset=SimpleNamespace(path=heldout)),
    )
    algorithm = SimpleNamespace(roles=lambda: [SimpleNamespace(role="actor")])
    settings = cast(Settings, SimpleNamespace(config=config, algorithm=algorithm))
    require_inputs(settings)
    (tmp_path / missing).unlink()
    with pytest.raises(EnvironmentFailure, match=f"{missing} is not on .*mounted there"):
        require_inputs(settings)

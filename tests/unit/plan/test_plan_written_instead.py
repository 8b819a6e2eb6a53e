"""Settings that a plan recommends in place of an older allocation string."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from slurmrl.errors import AllocationError
from slurmrl.plan.inherited_settings import explain
from tests.unit.plan.conftest import EXPERTS, Load

GENERATION = ("", "sglang.d2", "vllm.d2t2p1", "sglang.d2p2", "actor_gen:d4", "actor_gen:d2m2p1")
TRAINING = (
    *("", "d4", "d2m2p2", "d4e2", "*:d2m2p1", "actor_train:d4,*:d2t2", "attn:d4|ffn:d2e2"),
    *("actor:n1:d8,ref:n1:0,1:d2", "actor:n1:0,1:d2,critic:n1:2,3:t2", "critic:d2,actor:d4"),
)
FORMS = ("{0}+{1}", "{1}+{0}", "{0}|{1}", "{0}+{1}+eval", "{0}+eval+{1}")


def older_strings() -> Iterator[str]:
    """Yield each legacy string of these parts that a plan explains, once."""
    made = (form.format(*parts) for parts in product(GENERATION, TRAINING) for form in FORMS)
    for text in dict.fromkeys(re.sub(r"[+|]+(?=[+|]|$)|^[+|]+", "", one) for one in made):
        try:
            if "write_instead" in explain(text):
                yield text
        except AllocationError:
            continue


def test_settings_that_a_plan_recommends_are_accepted(
    plan_ppo: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem names another setting, which is then accepted."""
    monkeypatch.chdir(folder)
    texts = [*older_strings()]
    assert len(texts) > 150
    refused = []
    for text in texts:
        lines = [line.replace(": ", "=", 1) for line in explain(text)["write_instead"]]
        assert lines, text
        serves = any(re.match("rollout.backend=(sglang|vllm)", line) for line in lines)
        lines += ["rollout.python=/bin/sh"] if serves else []
        found = plan_ppo(*lines, architecture=EXPERTS).missing
        if remedy := re.search(r"set (rollout.backend), for example to ([\w:]+)", str(found)):
            lines.append(f"{remedy[1]}={remedy[2]}")
            found = plan_ppo(*lines, architecture=EXPERTS).missing
        refused += [(text, lines, found)] if found else []
    assert refused == []


@pytest.mark.parametrize("text", ["eval", "sglang.d2|eval", "d2|d2", "sglang.d2|critic:d2"])
def test_string_without_a_layout_is_rejected(text: str) -> None:
    with pytest.raises(AllocationError):
        explain(text)

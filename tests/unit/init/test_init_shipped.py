from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.desk.init import shipped
from slurmrl.errors import EnvironmentFailure, UsageError


def test_every_example_says_what_it_is() -> None:
    found = dict(shipped.examples())
    assert {"sft.yaml", "grpo.yaml", "custom/reward.yaml"} <= set(found)
    assert all(10 < len(text) < 120 for text in found.values()), found
    assert found["grpo.yaml"] == "GRPO on the problems of ppo.yaml, from the model of sft.yaml"


def test_a_copy_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "examples"

    def killed(source: Path, made: Path, without: tuple[str, ...]) -> None:
        made.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shipped.copying, "copy", killed)
        with pytest.raises(KeyboardInterrupt):
            shipped.copy(target)
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    shipped.copy(target)  # an empty folder may be there
    assert {path.name for path in tmp_path.iterdir()} == {"examples"}
    names = {path.name for path in target.iterdir()}
    assert {"addition", "custom", "tools", "sft.yaml"} <= names
    assert "data" not in names
    (target / "sft.yaml").write_text("mine")
    with pytest.raises(UsageError, match="exists: --output names another"):
        shipped.copy(target)
    assert (target / "sft.yaml").read_text() == "mine"


def test_a_slurmrl_without_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the copy in a run directory is."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "examples")
    with pytest.raises(EnvironmentFailure, match="without its examples"):
        shipped.copy(tmp_path / "copy")

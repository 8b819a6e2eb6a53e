from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.desk import initial_files
from slurmrl.errors import EnvironmentFailure, UsageError


def test_every_example_has_a_description() -> None:
    found = dict(initial_files.examples())
    assert {"sft.yaml", "grpo.yaml", "custom/reward.yaml"} <= set(found)
    assert all(10 < len(text) < 120 for text in found.values()), found
    assert found["grpo.yaml"] == "GRPO on two-digit sums, from the model of sft.yaml"


def test_copied_example_appears_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "examples"

    def killed(source: Path, made: Path, without: tuple[str, ...]) -> None:
        made.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(initial_files.copying, "copy", killed)
        with pytest.raises(KeyboardInterrupt):
            initial_files.copy_examples(target)
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    initial_files.copy_examples(target)  # an empty folder may be there
    assert {path.name for path in tmp_path.iterdir()} == {"examples"}
    names = {path.name for path in target.iterdir()}
    assert {"addition", "custom", "tools", "sft.yaml"} <= names
    assert "data" not in names
    (target / "sft.yaml").write_text("mine")
    with pytest.raises(UsageError, match="exists: choose another folder"):
        initial_files.copy_examples(target)
    assert (target / "sft.yaml").read_text() == "mine"


def test_missing_examples_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy in a run directory has no examples."""
    monkeypatch.setattr(initial_files, "EXAMPLES", tmp_path / "examples")
    with pytest.raises(EnvironmentFailure, match="without its examples"):
        initial_files.copy_examples(tmp_path / "copy")
